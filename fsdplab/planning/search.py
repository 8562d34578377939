"""The search of `fsdplab plan fit`: every plan of a few axes is planned, and the best ones are the answers.

All plans have one global batch. *Fastest*: the shortest step. *Cheapest*: the fewest GPU-hours for the same tokens, on
the GPUs that were given or on fewer. Both are taken from plans that fit for certain, if there are any. *Safest*: what a
card needs for certain leaves most of it free, among plans that are not much slower than the fastest. *Best single
change*: the plan that was given with one choice changed. Differences that are smaller than a plan can tell decide
nothing: of plans that are as good, the one that changes least is taken.

Pipeline, context and expert degrees and the loss stay as they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.sizes import percent, size
from fsdplab.common.words import did_you_mean

from .as_flags import Changes
from .bands import memory_band, speed_band
from .host import holds_offloaded
from .memory import memory_of, needed_bytes, resting_bytes
from .plan_spec import CHECKPOINTINGS, PlanError, PlanSpec, changed
from .planner import Plan, plan_of
from .remedies import ROWS
from .step_time import has_known_flops, step_time

USUAL_TOKENS = 2**22  # of a step where no batch is given: a usual one of pretraining
EQUAL = 0.02  # of a step's seconds, or of a card: a smaller difference tells nothing
SLOWEST_SAFE = 0.75  # of the fastest plan's speed
NAMES = ("world-size", "strategy", "tp", "checkpoint", "batch-size")
_HALVES = 3  # of the GPUs that were given: these, a half, a quarter, an eighth
_MORE_SINGLES = ("loss", "reduction", "optimizer")  # kinds of remedies that are no axis
_MOST_SEQUENCES = 256  # of a micro-batch


@dataclass(frozen=True)
class Candidate:
    """The spec of a plan, and its bytes at the peak."""

    spec: PlanSpec
    peak: float

    @cached_property
    def expected_s(self) -> float:
        """Seconds of its step in the middle of the band of its kind, so that a kind of plan whose predictions are known
        to be too fast is not preferred for that; bytes of its peak where no times of the GPU are known.
        """
        if not has_known_flops(self.spec.gpu):
            return self.peak
        return step_time(self.spec).step_s / speed_band(self.spec).middle

    @property
    def gpu_seconds(self) -> float:
        """The seconds of all GPUs, for the same tokens."""
        return self.expected_s * self.spec.gpus

    @cached_property
    def plan(self) -> Plan:
        """The plan in full."""
        return plan_of(self.spec)

    @property
    def fits(self) -> bool:
        """Whether the card holds its peak, and the host what is offloaded, as far as its memory is known."""
        return self.peak <= self.spec.gpu.memory_bytes and holds_offloaded(self.spec)

    @property
    def certain(self) -> bool:
        """Whether it fits for certain: `fits` of its plan is yes."""
        return self.needed <= self.spec.gpu.memory_bytes

    @property
    def needed(self) -> float:
        """Bytes that a card must have to hold it for certain."""
        return needed_bytes(self.peak, memory_band(self.spec))


@dataclass(frozen=True)
class SingleChange:
    """The plan that was given with one choice changed."""

    changes: Changes
    candidate: Candidate


@dataclass(frozen=True)
class Fit:
    """The answers, which are None where nothing fits; `own` is the plan that was given, with the global batch."""

    own: Candidate
    sequences: int
    fastest: Candidate | None
    cheapest: Candidate | None
    safest: Candidate | None
    single: SingleChange | None
    planned: int  # plans that do not contradict themselves
    fitting: int
    kept: tuple[str, ...] = ()


def fit(spec: PlanSpec, global_batch: int | None = None, keep: Collection[str] = ()) -> Fit:
    """Search around `spec` at `global_batch` sequences a step; choices named in `keep` stay; raises PlanError.

    Without a global batch it is that of the spec, or some 4 million tokens where the spec has one sequence a rank.
    """
    for name in keep:
        if name not in NAMES:
            raise PlanError(f"--keep has {name!r}{did_you_mean(name, NAMES)}; expected some of {', '.join(NAMES)}")
    spec, sequences = _with_batch(spec, global_batch)
    own = candidate_of(spec)
    planned, fitting = _all_plans(spec, sequences, keep)
    surest = [candidate for candidate in fitting if candidate.certain] or fitting

    fastest = _best(surest, spec, lambda candidate: candidate.expected_s)
    # of plans that cost the same, those on more GPUs end sooner
    most_gpus_first = sorted(surest, key=lambda candidate: -candidate.spec.gpus)
    cheapest = _best(most_gpus_first, spec, lambda candidate: candidate.gpu_seconds, prefer_gpus=True)
    safest = None
    if fastest is not None:
        longest_s = fastest.expected_s / SLOWEST_SAFE
        fast_enough = [candidate for candidate in fitting if candidate.expected_s <= longest_s]
        least = min(candidate.needed for candidate in fast_enough) + EQUAL * spec.gpu.memory_bytes
        emptiest = [candidate for candidate in fast_enough if candidate.needed <= least]
        safest = _best(emptiest, spec, lambda candidate: candidate.expected_s)
    single = _best_single_change(own, sequences, keep)
    return Fit(own, sequences, fastest, cheapest, safest, single, planned, len(fitting), tuple(keep))


def candidate_of(spec: PlanSpec) -> Candidate:
    """Return the candidate of any plan."""
    return Candidate(spec, memory_of(spec).peak.total)


def _with_batch(spec: PlanSpec, sequences: int | None) -> tuple[PlanSpec, int]:
    """Return the plan with so many sequences in a step, those of its groups of ranks spelled out."""
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


# ---- the axes


def axes(spec: PlanSpec) -> dict[str, list[Changes]]:
    """Return the values of each choice, as changes of a plan; the plan's own is among them."""
    tensor_ranks = sorted({1, 2, 4, 8, spec.tensor_parallel})
    policies = dict.fromkeys((*CHECKPOINTINGS, spec.checkpointing))
    return {
        "world-size": _fewer_gpus(spec),
        "strategy": _strategies(spec),
        "tp": [{"tensor_parallel": ranks} for ranks in tensor_ranks],
        "checkpoint": [{"checkpointing": policy} for policy in policies],
    }


def _fewer_gpus(spec: PlanSpec) -> list[Changes]:
    """The GPUs that were given, a half, a quarter and an eighth of them: whole nodes beyond the first."""
    node = spec.gpus_per_node
    counts: list[Changes] = []
    for power in range(_HALVES + 1):
        count, rest = divmod(spec.gpus, 2**power)
        if rest == 0 and (count <= node or count % node == 0):
            counts.append({"gpus": count})
    return counts


def _strategies(spec: PlanSpec) -> list[Changes]:
    """The plan's own strategy, and all that can do it; a group is a node, or half of the ranks in one node."""
    node = spec.gpus_per_node
    group = node if spec.gpus > node else spec.gpus // 2
    strategies: list[Changes] = [{"strategy": spec.strategy, "shard_size": spec.shard_size}]
    for name, row in STRATEGY_ROWS.items():
        if row.can_offload or not spec.offload:
            strategies.append({"strategy": name, "shard_size": group if row.in_groups else None})
    return strategies


def micro_batches(sequences: int, own: int) -> list[int]:
    """Return the powers of two that divide a rank's sequences of a step, and the plan's own micro-batch.

    >>> micro_batches(24, own=3)
    [1, 2, 3, 4, 8]
    """
    powers = {2**power for power in range(_MOST_SEQUENCES.bit_length())}
    return sorted(count for count in powers | {own} if sequences % count == 0)


def _all_plans(spec: PlanSpec, sequences: int, keep: Collection[str]) -> tuple[int, list[Candidate]]:
    """Return how many plans there are on all axes, and those that fit, each once."""
    values = []
    for axis, choices in axes(spec).items():
        if axis in keep:
            choices = [{name: getattr(spec, name) for name in choices[0]}]
        values.append(choices)
    planned = 0
    fitting: dict[PlanSpec, Candidate] = {}
    for combination in product(*values):
        mesh = changed(spec, micro_batch=1, grad_accum=1, **_joined(combination))
        if mesh is None:
            continue
        if mesh.shards * mesh.replicas == 1 and mesh.strategy != spec.strategy:
            continue  # on one rank all strategies are the same
        a_rank, rest = divmod(sequences, mesh.data_ranks)
        counts = [] if rest else micro_batches(a_rank, spec.micro_batch)
        if "batch-size" in keep:
            counts = [count for count in counts if count == spec.micro_batch]
        planned += len(counts)
        if mesh.pipeline_parallel == 1 and resting_bytes(mesh) > mesh.gpu.memory_bytes:
            continue  # what rests is the least that a peak can be
        for count in counts:
            candidate = candidate_of(replace(mesh, micro_batch=count, grad_accum=a_rank // count))
            if not candidate.fits:
                break  # nor does a larger micro-batch
            fitting[candidate.spec] = candidate
    return planned, list(fitting.values())


def _joined(combination: Sequence[Changes]) -> Changes:
    joined: dict[str, Any] = {}
    for changes in combination:
        joined |= changes
    return joined


# ---- the best of them


def _best(
    plans: Sequence[Candidate], given: PlanSpec, cost: Callable[[Candidate], float], prefer_gpus: bool = False
) -> Candidate | None:
    """Return, of the plans whose cost is the least within EQUAL, the one that changes least; then the smallest."""
    if not plans:
        return None
    least = min(map(cost, plans))
    equal = [candidate for candidate in plans if cost(candidate) <= (1 + EQUAL) * least]

    def preference(candidate: Candidate) -> tuple[float, ...]:
        gpus = -candidate.spec.gpus if prefer_gpus else 0
        return gpus, changes_of(candidate.spec, given), candidate.peak

    return min(equal, key=preference)


def changes_of(spec: PlanSpec, given: PlanSpec) -> int:
    """Return how many choices of a plan differ from the given one, beside its batch and its GPUs."""
    names = ("strategy", "tensor_parallel", "checkpointing")
    return sum(getattr(spec, name) != getattr(given, name) for name in names)


def _best_single_change(own: Candidate, sequences: int, keep: Collection[str]) -> SingleChange | None:
    """Return the fastest single change that fits, if it is faster than the given plan or that one does not fit."""
    tried = [*_single_changes(own.spec, sequences, keep)]
    if not own.fits:
        for row in ROWS:
            if row.kind in _MORE_SINGLES:
                tried += row.changes(own.spec)
    fitting = []
    for changes in tried:
        other = changed(own.spec, grad_accum=1, **changes)
        if other is None:
            continue
        passes, rest = divmod(sequences, other.micro_batch * other.data_ranks)
        if passes and not rest:
            candidate = candidate_of(replace(other, grad_accum=passes))
            if candidate.fits:
                fitting.append(SingleChange(changes, candidate))
    if not fitting:
        return None
    best = min(fitting, key=lambda change: change.candidate.expected_s)
    if own.fits and best.candidate.expected_s >= (1 - EQUAL) * own.expected_s:
        return None
    return best


def _single_changes(spec: PlanSpec, sequences: int, keep: Collection[str]) -> Iterator[Changes]:
    for axis, choices in axes(spec).items():
        if axis in ("world-size", *keep):
            continue
        for changes in choices:
            if any(getattr(spec, name) != value for name, value in changes.items()):
                yield changes
    if "batch-size" not in keep:
        for count in micro_batches(sequences // spec.data_ranks, spec.micro_batch):
            if count != spec.micro_batch:
                yield {"micro_batch": count}


# ---- in words


def exposed_part(candidate: Candidate) -> float:
    """Return the part of a step that waits for communication; 0 where no times are known."""
    time = candidate.plan.time
    if time is None:
        return 0.0
    return max(0.0, time.exposed_s / time.step_s)


def why_fastest(answers: Fit, chosen: Candidate) -> str:
    """Return what the step of the fastest plan is made of."""
    if chosen.plan.time is None:
        return "Its times are not known, so it is the plan that needs least memory"
    fits = "certainly fits" if chosen.certain else "is likely to fit"
    waits = percent(exposed_part(chosen))
    return f"No plan that {fits} is more than {percent(EQUAL)} faster: {waits} of a step waits for communication"


def why_cheapest(answers: Fit, chosen: Candidate) -> str:
    """Return what its GPU-hours are beside those of the fastest plan."""
    fast = answers.fastest
    assert fast is not None, "where there is a cheapest plan there is a fastest one"
    if chosen.spec == fast.spec:
        fewer = "fewer GPUs were not tried" if "world-size" in answers.kept else "fewer GPUs do not save GPU time"
        return f"It is the fastest one: {fewer}"
    saved = percent(1 - chosen.gpu_seconds / fast.gpu_seconds)
    longer = chosen.expected_s / fast.expected_s
    waits, waited = percent(exposed_part(chosen)), percent(exposed_part(fast))
    gpus = f"{chosen.spec.gpus} of {fast.spec.gpus} GPUs"
    return (
        f"A token takes {saved} less GPU time than in the fastest plan: {waits} of a step in place of {waited} waits"
        f" for communication; the training takes {longer:.1f} times as long on {gpus}"
    )


def why_safest(answers: Fit, chosen: Candidate) -> str:
    """Return what it leaves free at the upper end of the band, and what that costs."""
    assert answers.fastest is not None, "where there is a safest plan there is a fastest one"
    free = chosen.spec.gpu.memory_bytes - chosen.needed
    speed = percent(answers.fastest.expected_s / chosen.expected_s)
    room = f"leaves {size(free)} of the card free"
    if free < 0:
        room = f"lacks {size(-free)}"
    needs = f"It needs {size(chosen.needed)} with the allocator's reserve and the upper end of the band"
    return f"{needs}, which {room}, at {speed} of the fastest plan's speed"


WHY = {"fastest": why_fastest, "cheapest": why_cheapest, "safest": why_safest}
