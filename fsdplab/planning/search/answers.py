"""What a search answers: the fastest, the cheapest and the safest plan, what comes next, and the best single change.

All plans have one global batch. *Fastest*: the shortest step. *Cheapest*: fewest GPU-hours for the same tokens, on the
GPUs that were given or on fewer. Both are taken from plans that fit for certain, if there are any; a faster plan that
is only likely to fit is named beside them. *Safest*: what a card needs for certain, with the band and the allocator's
reserve, leaves most of it free, among plans that are not much slower than the fastest. Differences that are smaller
than a plan can tell decide nothing: of plans that are as good, the one that changes least is taken.

At the end are the answers in words: a plan in short and as flags, and one sentence on why it was chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, count
from typing import Any

from fsdplab.common.sizes import percent, size
from fsdplab.planning.plan_spec import CHECKPOINTINGS, PlanError, PlanSpec, changed, flag_of

from .axes import BATCH, DEGREES, IN_A_STEP, MESH, OTHERS, Changes, Other, check_kept, micro_batches
from .candidates import Candidate, Grid, Tried, candidate_of

USUAL_TOKENS = 2**22  # of a step where no batch is given: a usual one of pretraining
EQUAL = 0.02  # of a step's seconds: a smaller difference tells nothing
SLOWEST_SAFE = 0.75  # of the fastest plan's speed
_EQUALLY_FREE = 0.02  # of a card


@dataclass(frozen=True)
class Pick:
    """An answer and the next best plan of another kind, None where there is none."""

    chosen: Candidate
    runner_up: Candidate | None


@dataclass(frozen=True)
class SingleChange:
    """The plan that was given with one choice changed."""

    changes: Changes
    candidate: Candidate


@dataclass(frozen=True)
class OtherChoice:
    """What changes the arithmetic, and the fastest plan with it, None where none fits; `plans`: how many were tried."""

    other: Other
    best: Candidate | None
    plans: int


@dataclass(frozen=True)
class Fit:
    """The answers, which are None where nothing fits.

    `own` is the plan that was given, with the search's global batch; `instead` are the choices of other arithmetic that
    the answers come from where nothing fits with the arithmetic as given. `bolder` is faster than the fastest, and only
    likely to fit. `timed`: plans whose step was timed.
    """

    own: Candidate
    sequences: int
    fastest: Pick | None
    cheapest: Pick | None
    safest: Pick | None
    bolder: Candidate | None
    fewest: Candidate | None
    singles: tuple[SingleChange, ...]
    others: tuple[OtherChoice, ...]
    instead: tuple[str, ...]
    tried: Tried
    timed: int
    kept: tuple[str, ...] = ()

    @property
    def single(self) -> SingleChange | None:
        """The best single change: the fastest that fits, if it is faster than the plan that was given or that does not
        fit.
        """
        found = next(iter(self.singles), None)
        if found is None or not found.candidate.fits:
            return None
        slower = found.candidate.expected_s >= (1 - EQUAL) * self.own.expected_s
        return None if self.own.fits and slower else found


def fit(spec: PlanSpec, global_batch: int | None = None, keep: Collection[str] = ()) -> Fit:
    """Search around `spec` at `global_batch` sequences a step; choices named in `keep` stay; raises PlanError.

    Without a global batch it is that of the spec, or some 4 million tokens where the spec has one sequence a rank.
    """
    check_kept(keep)
    spec, sequences = _with_batch(spec, global_batch)
    grid = Grid(spec, sequences, keep)
    order = _Order(spec)
    others = _others(spec, sequences, keep, order.best(_surest(grid.fitting), by_gpus=False))
    fitting, instead = _fitting(grid, others)
    fastest, cheapest = (order.best(_surest(fitting), by_gpus=each) for each in (False, True))
    return Fit(
        own=candidate_of(spec), sequences=sequences, fastest=fastest, cheapest=cheapest,
        safest=_safest(fitting, fastest, order), bolder=_bolder(fitting, fastest, order),
        fewest=_fewest(grid, order), singles=_singles(spec, sequences, keep), others=_other_choices(others, order),
        instead=instead, tried=grid.tried, timed=order.timed, kept=tuple(keep),
    )  # fmt: skip


def _surest(fitting: list[Candidate]) -> list[Candidate]:
    """What fits for certain; where nothing does, what is likely to fit."""
    return [each for each in fitting if each.certain] or fitting


def _with_batch(spec: PlanSpec, sequences: int | None) -> tuple[PlanSpec, int]:
    """The plan with so many sequences in a step, those of its groups of ranks spelled out."""
    if spec.row.in_groups and spec.shard_size is None:
        spec = replace(spec, shard_size=spec.shards)
    if sequences is None and spec.micro_batch * spec.grad_accum > 1:
        return spec, spec.micro_batch * spec.grad_accum * spec.data_ranks
    if sequences is None:
        sequences = spec.gpus * max(1, round(USUAL_TOKENS / spec.seq / spec.gpus))
    if not isinstance(sequences, int) or isinstance(sequences, bool) or not 1 <= sequences <= 10**6:
        raise PlanError(f"--global-batch is {str(sequences)[:30]}; expected a whole number of sequences from 1 to 1e6")
    passes, rest = divmod(sequences, spec.micro_batch * spec.data_ranks)
    if rest or not passes:
        raise PlanError(
            f"--global-batch {sequences} is not divisible by {spec.data_ranks} data-parallel ranks x --batch-size"
            f" {spec.micro_batch}; give a multiple of {spec.micro_batch * spec.data_ranks}"
        )
    return replace(spec, grad_accum=passes), sequences


# ---- the best first


class _Order:
    """Orders plans by seconds, and times no more of them than that takes."""

    def __init__(self, own: PlanSpec) -> None:
        self._own, self._timed = own, set[int]()

    @property
    def timed(self) -> int:
        """How many plans were timed."""
        return len(self._timed)

    def by_cost(self, plans: Sequence[Candidate], by_gpus: bool) -> Iterator[tuple[float, Candidate]]:
        """The plans with their costs, seconds or GPU-seconds of a step, the cheapest first.

        A plan waits at its least cost; only when no other one has less is it timed, and waits at its own.
        """
        number, waiting = count(), list[tuple[float, int, bool, Candidate]]()
        waiting = [(self._weight(each, by_gpus) * each.least_s, next(number), False, each) for each in plans]
        heapq.heapify(waiting)
        while waiting:
            cost, _, exact, each = heapq.heappop(waiting)
            if exact:
                yield cost, each
            else:
                self._timed.add(id(each))
                cost = self._weight(each, by_gpus) * each.expected_s
                heapq.heappush(waiting, (cost, next(number), True, each))

    def _weight(self, each: Candidate, by_gpus: bool) -> int:
        return each.spec.gpus if by_gpus else 1

    def best(self, plans: Sequence[Candidate], by_gpus: bool) -> Pick | None:
        """The best plan and the next one of another kind."""
        ordered = self.by_cost(plans, by_gpus)
        if (first := next(ordered, None)) is None:
            return None
        equal, behind = [first[1]], list[Candidate]()
        for cost, each in ordered:
            if cost > (1 + EQUAL) * first[0]:
                behind.append(each)
                break
            equal.append(each)
        chosen = min(equal, key=lambda each: self._preference(each, by_gpus))
        rest = chain(equal, behind, (each for _, each in ordered))
        return Pick(chosen, next((each for each in rest if each.family != chosen.family), None))

    def _preference(self, each: Candidate, by_gpus: bool) -> tuple[float, ...]:
        """Of plans that are as good: more GPUs if they cost no more, since they end sooner; what changes least; then
        what needs least memory.
        """
        return (-each.spec.gpus if by_gpus else 0, changes_of(each.spec, self._own), each.peak)


def changes_of(spec: PlanSpec, own: PlanSpec) -> int:
    """How many choices of a plan differ from the given one, beside its batch and its GPUs."""
    names = ("strategy", *DEGREES, "checkpointing", "loss")
    return sum(getattr(spec, name) != getattr(own, name) for name in names)


def _bolder(fitting: Sequence[Candidate], fastest: Pick | None, order: _Order) -> Candidate | None:
    """The fastest plan that is only likely to fit, if it is faster than the fastest answer."""
    found = order.best([each for each in fitting if not each.certain], by_gpus=False)
    if found is None or fastest is None or not fastest.chosen.certain:
        return None
    return found.chosen if found.chosen.expected_s < (1 - EQUAL) * fastest.chosen.expected_s else None


def _safest(fitting: Sequence[Candidate], fastest: Pick | None, order: _Order) -> Pick | None:
    """Of plans that are fast enough: what needs least, and among equally free ones the fastest."""
    if fastest is None:
        return None
    longest_s = fastest.chosen.expected_s / SLOWEST_SAFE
    enough = [each for each in fitting if each.least_s <= longest_s]
    least = next((each for each in sorted(enough, key=lambda each: each.needed) if each.expected_s <= longest_s), None)
    if least is None:
        return None
    most = least.needed + _EQUALLY_FREE * least.spec.gpu.memory_bytes
    return order.best([each for each in enough if each.needed <= most], by_gpus=False)


def _fewest(grid: Grid, order: _Order) -> Candidate | None:
    """The fastest plan on the fewest GPUs of the search."""
    least = min((each.spec.gpus for each in grid.fitting), default=0)
    found = order.best([each for each in grid.fitting if each.spec.gpus == least], by_gpus=False)
    return found.chosen if found else None


# ---- one choice changed


def _singles(spec: PlanSpec, sequences: int, keep: Collection[str]) -> tuple[SingleChange, ...]:
    """Every choice of the given plan changed alone: what fits first, the fastest of it first."""
    found = []
    for changes in _single_changes(spec, sequences, keep):
        other = changed(spec, grad_accum=1, **{"micro_batch": spec.micro_batch} | changes)
        passes, rest = divmod(sequences, other.micro_batch * other.data_ranks) if other else (0, 0)
        if other and passes and not rest:
            found.append(SingleChange(changes, candidate_of(replace(other, grad_accum=passes))))
    fits = [(each, each.candidate.fits) for each in found]
    return tuple(each for each, _ in sorted(fits, key=lambda row: (not row[1], row[1] and row[0].candidate.expected_s)))


def _single_changes(spec: PlanSpec, sequences: int, keep: Collection[str]) -> Iterator[Changes]:
    for axis in (*MESH, *IN_A_STEP):
        if axis.name not in ("world-size", *keep):
            yield from axis.of(spec)[1:]
    if BATCH not in keep:
        yield from ({"micro_batch": each} for each in micro_batches(sequences) if each != spec.micro_batch)


# ---- other arithmetic


def _others(
    spec: PlanSpec, sequences: int, keep: Collection[str], fastest: Pick | None
) -> list[tuple[Other, Grid]]:  # fmt: skip
    """What each choice of other arithmetic makes of the search, on all GPUs.

    Where plans fit without them, adapters and offload are no answer, and the others are tried with the GPUs and the
    degrees of parallelism of the fastest plan.
    """
    kept, around = {*keep, "world-size"}, spec
    if fastest is not None:
        kept |= {"tp", "cp", "pp", "ep"}
        around = replace(fastest.chosen.spec, micro_batch=spec.micro_batch, grad_accum=1)
    tried = [(other, other.of(around)) for other in OTHERS if fastest is None or not other.last]
    return [(other, Grid(asked, sequences, kept)) for other, asked in tried if asked is not None]


def _fitting(grid: Grid, others: Sequence[tuple[Other, Grid]]) -> tuple[list[Candidate], tuple[str, ...]]:
    """The plans that answers come from, and in words what had to change for them."""
    if grid.fitting:
        return grid.fitting, ()
    for frozen in (False, True):
        fitting = [(other, each.fitting) for other, each in others if other.frozen == frozen and each.fitting]
        if fitting:
            return [each for _, plans in fitting for each in plans], tuple(other.words for other, _ in fitting)
    return [], ()


def _other_choices(others: Sequence[tuple[Other, Grid]], order: _Order) -> tuple[OtherChoice, ...]:
    picks = [(other, order.best(_surest(grid.fitting), by_gpus=False), grid.tried.total) for other, grid in others]
    return tuple(OtherChoice(other, pick.chosen if pick else None, plans) for other, pick, plans in picks)


# ---- in words


NOT_TRIED = (
    "interleaved and zero-bubble schedules",
    "pipelines beside context parallelism",
    "optimizers beside AdamW in 8 bits",
    "other prefetch depths",
    "no_sync",
    "other sequence lengths",
    "other GPUs and links",
)
# of two plans with one number of GPUs, the exposed share explains a difference where it differs by this much
_TELLING = 0.01
_ALWAYS = ("gpus", "strategy", "micro_batch", "grad_accum", "checkpointing", "loss")
_BOOLEANS = {"compile": "--compile blocks", "offload": "--offload cpu", "flash": "--no-flash"}


def in_short(spec: PlanSpec, own: PlanSpec) -> str:
    """`full_shard, checkpoint full, fused loss, 2 x 4 sequences, tp 2`, and what changes the arithmetic of `own`."""
    groups = f" in groups of {spec.shards}" if spec.row.in_groups else ""
    words = [f"{spec.strategy}{groups}", f"checkpoint {spec.checkpointing}", f"{spec.loss} loss"]
    words.append(f"{spec.micro_batch} x {spec.grad_accum} sequences")
    degrees = {
        "tp": spec.tensor_parallel, "cp": spec.context_parallel, "pp": spec.pipeline_parallel,
        "ep": spec.expert_parallel,
    }  # fmt: skip
    words += [f"{name} {count}" for name, count in degrees.items() if count > 1]
    return ", ".join((*words, *_other_arithmetic(spec, own)))


def _other_arithmetic(spec: PlanSpec, own: PlanSpec) -> Iterator[str]:
    """The names of the choices of other arithmetic that a plan has and the given one has not; the most telling one."""
    has = [
        each for each in OTHERS if all(getattr(spec, name) == value for name, value in each.changes.items())
        and any(getattr(own, name) != value for name, value in each.changes.items())
    ]  # fmt: skip
    yield from [max(has, key=lambda each: len(each.changes)).words] if has else []


def flags(spec: PlanSpec) -> str:
    """The choices of a plan as flags of `fsdplab plan`: what a search varies, and what is not as it is by default."""
    flagged = [each for each in fields(spec) if "help" in each.metadata and each.name != "seq"]
    values = {each.name: getattr(spec, each.name) for each in flagged}
    shown = [each.name for each in flagged if each.name in _ALWAYS or values[each.name] != each.default]
    return " ".join(flag(name, values[name]) for name in shown)


def flag(name: str, value: Any) -> str:
    """One choice: `--batch-size 2`."""
    if isinstance(value, bool):
        return _BOOLEANS.get(name, flag_of(name))
    return f"{flag_of(name)} {value}"


def changes_in_words(changes: Changes) -> str:
    """A single change as flags."""
    return " ".join(flag(name, value) for name, value in changes.items() if value is not None)


# ---- why


def why_fastest(found: Fit, pick: Pick) -> str:
    """What the step of the fastest plan is made of, and what keeps it from being faster."""
    best = pick.chosen
    facts = "; ".join(filter(None, (_recomputed(best.spec), _waits(best), _limit(best.spec))))
    fits = "certainly fits" if best.certain else "is likely to fit"
    return f"No plan that {fits} is more than {percent(EQUAL)} faster: {facts}"


def _recomputed(spec: PlanSpec) -> str:
    if spec.checkpointing == "none":
        return ""
    return f"{'all' if spec.checkpointing == 'full' else 'some'} activations are computed twice"


def _waits(found: Candidate) -> str:
    if found.plan.time is None:
        return "its times are not known, so it is the one that needs least memory"
    return f"{percent(_exposed(found))} of a step waits for communication"


def _exposed(found: Candidate) -> float:
    time = found.plan.time
    return max(0.0, time.exposed_s / time.step_s) if time else 0.0


def _limit(spec: PlanSpec) -> str:
    """The next choice that would save compute or collectives, if memory forbids it: `needs 96 GB of 85.9 GB`."""
    card = spec.gpu.memory_bytes
    for words, other in _bolder_choices(spec):
        candidate = candidate_of(other)
        if not candidate.certain:
            return f"with {words} it would need up to {size(candidate.needed)} of {size(card)}"
    return ""


def _bolder_choices(spec: PlanSpec) -> Iterator[tuple[str, PlanSpec]]:
    place = CHECKPOINTINGS.index(spec.checkpointing) if spec.checkpointing in CHECKPOINTINGS else 0
    if place:
        less = CHECKPOINTINGS[place - 1]
        yield f"--checkpoint {less}", replace(spec, checkpointing=less)
    if spec.grad_accum % 2 == 0:
        twice = 2 * spec.micro_batch
        yield f"--batch-size {twice}", replace(spec, micro_batch=twice, grad_accum=spec.grad_accum // 2)


def why_cheapest(found: Fit, pick: Pick) -> str:
    """What its GPU-hours are beside those of the fastest plan."""
    assert found.fastest is not None, "where there is a cheapest plan there is a fastest one"
    fast, cheap = found.fastest.chosen, pick.chosen
    if cheap.spec == fast.spec and "world-size" in found.kept:
        return "It is the fastest one: fewer GPUs were not tried"
    if cheap.spec == fast.spec:
        return "It is the fastest one: on no fewer GPUs does a token take less GPU time, within what a plan can tell"
    saved = 1 - cheap.expected_s * cheap.spec.gpus / (fast.expected_s * fast.spec.gpus)
    longer = cheap.expected_s / fast.expected_s
    waits, waited = _exposed(cheap), _exposed(fast)
    because = ""
    if waited - waits > _TELLING:
        because = f", since {percent(waits)} of a step in place of {percent(waited)} waits for communication"
    return (
        f"A token takes {percent(saved)} less GPU time than in the fastest plan{because}; the training takes"
        f" {longer:.1f} times as long on {cheap.spec.gpus} of {fast.spec.gpus} GPUs"
    )


def why_safest(found: Fit, pick: Pick) -> str:
    """What it leaves free at the upper end of the band, and what that costs."""
    assert found.fastest is not None, "where there is a safest plan there is a fastest one"
    chosen = pick.chosen
    free = chosen.spec.gpu.memory_bytes - chosen.needed
    speed = found.fastest.chosen.expected_s / chosen.expected_s
    room = f"leaves {size(free)} of the card free" if free >= 0 else f"lacks {size(-free)}"
    return (
        f"It needs {size(chosen.needed)} with the allocator's reserve and the upper end of the band, which {room}, at"
        f" {percent(speed)} of the fastest plan's speed"
    )


WHY = {"fastest": why_fastest, "cheapest": why_cheapest, "safest": why_safest}


def runner_up(pick: Pick, own: PlanSpec, by_gpus: bool = False) -> str:
    """The next best plan of another kind, and by how much it is worse."""
    if pick.runner_up is None:
        return "none of another kind"
    times = [each.expected_s * (each.spec.gpus if by_gpus else 1) for each in (pick.runner_up, pick.chosen)]
    worse = times[0] / times[1] - 1
    how = f"{percent(worse)} {'more GPU time' if by_gpus else 'slower'}" if worse >= 0.005 else "as good"
    gpus = f"{pick.runner_up.spec.gpus} GPUs, " if pick.runner_up.spec.gpus != pick.chosen.spec.gpus else ""
    return f"{gpus}{in_short(pick.runner_up.spec, own)} ({how})"
