"""Why a step was slower than its computing: at most five findings, each with a number and a remedy.

An engineer who opens a trace looks for one of a few causes. Each rule below looks for one and claims the exposed
seconds that it explains. What is claimed is no other finding's: a cause claims before its consequences, and the
seconds of all findings add up to no more than the step's exposed time. A late rank claims waiting for a peer, a rule of
its own the copies, and the rest was on the link: first what no schedule could hide, since the link is slower than the
work, then what a schedule, other units or a second communicator would.

Figures are of the rank that is exposed longest, means over the profiled steps (step_summary.py). Arrivals tell who was
late (arrivals.py).
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.profiling.arrivals import LateRank, late_rank_of
from fsdplab.profiling.idle import idle
from fsdplab.profiling.step_summary import ExposedCell, exposed_cells, step_summary, summaries
from fsdplab.records import RunRecord

MOST = 5
WORTH_SAYING = 0.02  # part of a step below which a cause is not mentioned
BIG_UNIT = 0.6  # part of all parameters in one unit from which on it has nothing to hide behind
SLOW_RANK = 1.15  # computing time over the other ranks' from which on a late rank is slow
LONG_STEP = 1.5  # a step without its exposed time over the rank's other steps, from which on it is a long one
LATENCY_BOUND = 0.4  # part of communication that is latency from which on units are too small
NOISE = 0.25  # waiting over computing up to which ranks that take turns in being late are a busy machine
LOADING = 0.05  # part of a step that all ranks wait for their data from which on the loader is slow
ALIKE = 1.5  # the largest unit over the smallest up to which units are alike
MOST_OF_IT = 0.5

Row = dict[str, Any]
Loading = Mapping[tuple[int, int], float]  # (rank, step) -> seconds until the step's data was there


@dataclass(frozen=True)
class Finding:
    """One cause: `seconds` of a step that it costs (0 for memory), what was seen, what to do.

    `of` says what the seconds are a part of: the step's `exposed` time, the rest of the `step`, or `memory`.
    """

    kind: str
    seconds: float
    title: str
    text: str
    remedy: str
    of: str = "exposed"


@dataclass(frozen=True)
class Claim:
    """Exposed seconds of a step that one finding claims, and the collective of which they are most."""

    seconds: float
    cell: ExposedCell | None = None
    of_cell: float = 0.0


class Unclaimed:
    """The exposed seconds of a step that no finding has claimed yet: on the link and copying by collective, waiting in
    all.
    """

    def __init__(self, cells: Sequence[ExposedCell]) -> None:
        self._cells = cells
        self._on_link = [cell.on_link_ns / 1e9 for cell in cells]
        self._copying = [cell.copying_ns / 1e9 for cell in cells]
        self.waiting = sum(cell.waiting_ns for cell in cells) / 1e9

    def on_link(self, which: Callable[[ExposedCell], bool], at_most: float = inf) -> Claim:
        """Claim at most so many seconds of some collectives' time on the link, the same part of each."""
        return self._claim(self._on_link, which, at_most)

    def copies(self, which: Callable[[ExposedCell], bool]) -> Claim:
        """Claim the copying of some collectives."""
        return self._claim(self._copying, which, inf)

    def wait(self, at_most: float = inf) -> float:
        """Claim at most so many seconds of waiting for a peer."""
        claimed = max(0.0, min(self.waiting, at_most))
        self.waiting -= claimed
        return claimed

    def _claim(self, left: list[float], which: Callable[[ExposedCell], bool], at_most: float) -> Claim:
        mine = [index for index, cell in enumerate(self._cells) if which(cell) and left[index] > 0]
        total = sum(left[index] for index in mine)
        part = min(1.0, max(0.0, at_most) / total) if total else 0.0
        if not part:
            return Claim(0.0)
        worst = max(mine, key=lambda index: left[index])
        claim = Claim(part * total, self._cells[worst], part * left[worst])
        for index in mine:
            left[index] *= 1.0 - part
        return claim


@dataclass(frozen=True)
class Scene:
    """The input of the rules: one record's profiled steps, in seconds a step of the rank that is exposed longest.

    `compute_s` and `own_s` (all but communication) are by rank and step, `loading` too.
    """

    record: RunRecord
    step_s: float
    communication_s: float
    exposed_s: float
    cells: Sequence[ExposedCell]
    compute_s: Mapping[tuple[int, int], float]
    own_s: Mapping[tuple[int, int], float]
    loading: Loading
    late: LateRank | None

    @property
    def steps(self) -> list[int]:
        """The profiled steps."""
        return sorted({step for _, step in self.compute_s})

    @property
    def spec(self) -> dict[str, Any]:
        """What was run."""
        return self.record.spec

    @property
    def of_device_work(self) -> bool:
        """Whether steps are what a GPU did for them, without the time before: so in traces."""
        on_gpu = self.record.environment.get("device") == "cuda"
        return on_gpu and self.spec.get("engine") == "trace" and bool(self.record.table("idle"))

    @property
    def absent(self) -> str:
        """How many of the job's ranks gave no trace: "7 of the 8 ranks"; "" where none is known to be absent."""
        traces, job = self.record.summary.traces, self.spec.get("world_size")
        held = traces.ranks if traces else None
        return f"{job - held} of the {job} ranks" if held and job and held < job else ""

    @property
    def busy_s(self) -> float:
        """Seconds of computing a step: the ranks' median."""
        return statistics.median(by_rank(self.compute_s).values())

    @property
    def link_s(self) -> float:
        """Seconds of a step in which bytes travelled: an emulated link's own; else all communication but for copies on
        the host and waiting for a late rank.
        """
        waiting = sum(cell.waiting_ns for cell in self.cells) / 1e9
        copying = sum(cell.copying_ns for cell in self.cells) / 1e9
        carried = sum(row["end_ns"] - row["start_ns"] for row in _last_step(self.record) if row["emulated"]) / 1e9
        # copies of one unit may last while the link carries another
        return max(0.0, min(carried or self.communication_s - copying, self.communication_s) - waiting)

    @property
    def excess_s(self) -> float:
        """Time on the link that even a perfect schedule leaves exposed.

        On an emulated link with one queue, gathers and reductions could travel side by side: then the longer of the two
        counts.
        """
        link = self.record.summary.link
        moving = max(self.by_kind().values(), default=0.0) if link and link.queues == 1 else self.link_s
        return max(0.0, min(moving, self.link_s) - self.busy_s)

    def by_kind(self) -> dict[str, float]:
        """Seconds a step of gathers, and of reductions."""
        sums: dict[str, float] = defaultdict(float)
        for cell in self.cells:
            sums["gathers" if cell.kind == "all_gather" else "reductions"] += cell.communication_ns / 1e9
        return sums


def findings(record: RunRecord, loading: Loading | None = None) -> list[Finding]:
    """At most five findings on a profiled run, costliest first; ValueError when the run was not profiled.

    A link that is slower than the work comes before what a schedule could hide on it. `loading`: seconds by (rank,
    step) until the step's data was there, by default the record's own. A full_shard run with prefetch=0 on a slow link
    gives first `Finding("no_prefetch", 0.21, "gathers set out too late: ...", ...)`.
    """
    scene = _scene(record, loading)
    left = Unclaimed(scene.cells)
    found = [finding for rule in _RULES if (finding := rule(scene, left)) is not None]
    _check_sums(scene, found)
    found += _idle(record, found)
    found = [finding for finding in found if finding.seconds >= WORTH_SAYING * scene.step_s]
    found = _in_order(found)[: MOST - 1]
    peak = _peak(record)
    return found + ([peak] if peak else [])


def _idle(record: RunRecord, found: Sequence[Finding]) -> list[Finding]:
    """Idle time, where it is large and no finding on a loader has told of it."""
    cause = idle(record)
    if cause is None or cause[0] == "data_loading" and any(each.kind.endswith("loading") for each in found):
        return []
    return [Finding(*cause, of="step")]


def _in_order(found: Sequence[Finding]) -> list[Finding]:
    """Costliest first, but a slow link before what a schedule could hide on it: with work enough, less would show."""
    by_cost = sorted(found, key=lambda finding: -finding.seconds)
    slow = [finding for finding in by_cost if finding.kind == "slow_link"]
    others = [finding for finding in by_cost if finding.kind != "slow_link"]
    place = next((index for index, each in enumerate(others) if each.kind in _OF_THE_SCHEDULE), len(others))
    before = sum(slow[0].seconds <= each.seconds for each in others[:place]) if slow else 0
    return [*others[:before], *slow, *others[before:]]


def _check_sums(scene: Scene, found: Sequence[Finding]) -> None:
    """What findings claim is a part of what there is."""
    slack = 1e-6
    exposed = sum(each.seconds for each in found if each.of == "exposed")
    assert exposed <= scene.exposed_s + slack, (exposed, scene.exposed_s)


def _scene(record: RunRecord, loading: Loading | None) -> Scene:
    breakdown = record.table("breakdown")
    worst = step_summary(breakdown)
    if worst is None:
        raise ValueError(
            "findings need a profiled run, and this record has no profiled step; run it again with --profile 2"
        )
    steps = {row["step"] for row in breakdown}
    return Scene(
        record,
        step_s=worst.step_ns / 1e9,
        communication_s=worst.communication_ns / 1e9,
        exposed_s=worst.exposed_ns / 1e9,
        cells=exposed_cells(
            _with_root([row for row in record.table("exposed") if row["rank"] == worst.rank]), worst.steps
        ),
        compute_s={(row["rank"], row["step"]): row["compute_ns"] / 1e9 for row in breakdown},
        own_s={(row["rank"], row["step"]): (row["step_ns"] - row["exposed_ns"]) / 1e9 for row in breakdown},
        loading=loading_of(record, steps) if loading is None else loading,
        late=late_rank_of(record, steps) if len(summaries(breakdown)) > 1 else None,
    )


def _with_root(rows: Sequence[Row]) -> Sequence[Row]:
    """Where other units have names, the one without is the root; where none has, there are no units."""
    return [row | {"unit": row["unit"] or "root"} for row in rows] if any(row["unit"] for row in rows) else rows


def loading_of(record: RunRecord, steps: set[int]) -> dict[tuple[int, int], float]:
    """Seconds until the data of each of these steps was there, by (rank, step); {} where the run did not measure it."""
    return {
        (row["rank"], row["step"]): seconds
        for row in record.table("steps")
        if row["step"] in steps and (seconds := row.get("loading_s")) is not None
    }


# ---- waiting for a peer: the loader, one long step, a slow rank


def _slow_loading(scene: Scene, left: Unclaimed) -> Finding | None:
    """One rank waits for its data, and the others for it."""
    means = by_rank(scene.loading)
    if len(means) < 2:
        return None
    rank = max(means, key=means.__getitem__)
    others = statistics.median(seconds for other, seconds in means.items() if other != rank)
    worth = WORTH_SAYING * scene.step_s
    so = [_ahead(scene.loading, rank, step) >= worth for step in {step for _, step in scene.loading}]
    if means[rank] - others < worth or sum(so) <= MOST_OF_IT * len(so):
        return None
    seconds = left.wait(means[rank] - others)
    title = f"rank {rank} waits {_ms(means[rank])} a step for its data, the others {_ms(others)}"
    text = f"At the next collective the others wait for it: {_ms(seconds)} a step."
    return Finding("slow_loading", seconds, title, text, f"Look at rank {rank}'s loader. {_LOADER}")


def _ahead(values: Mapping[tuple[int, int], float], rank: int, step: int) -> float:
    """By how much a rank's value of one step is above the other ranks' median."""
    others = [value for (other, at), value in values.items() if at == step and other != rank]
    return values.get((rank, step), 0.0) - statistics.median(others) if others else 0.0


def _loading_everywhere(scene: Scene, left: Unclaimed) -> Finding | None:
    """All ranks wait for their data: no exposed time, but a part of every step."""
    means = by_rank(scene.loading)
    seconds = min(means.values(), default=0.0)
    usual = min((statistics.median(each.values()) for each in _of_ranks(scene.loading).values()), default=0.0)
    if usual < LOADING * scene.step_s:
        return None
    who = "Every rank" if len(means) > 1 else "The rank"
    title = f"loading data takes {_ms(seconds)} of a step of {_ms(scene.step_s)}"
    text = f"{who} waits for its data before it computes, in most of the steps."
    if scene.of_device_work:
        rank = min(means, key=means.__getitem__)
        inside = statistics.fmean([row["data_loading_ns"] for row in scene.record.table("idle") if row["rank"] == rank])
        title = (
            f"the device does nothing for {_ms(seconds)} a step while data is loaded; a step takes {_ms(scene.step_s)}"
        )
        text += f" Of that {_ms(inside / 1e9)} lies inside the step, the rest before its first work on the device."
    return Finding("slow_loading", seconds, title, text, f"Load while the step computes. {_LOADER}", of="step")


_LOADER = (
    "More workers that stay and load ahead (DataLoader: num_workers, persistent_workers, prefetch_factor), pinned"
    " memory, samples that are decoded beforehand, a faster storage."
)


def _long_step(scene: Scene, left: Unclaimed) -> Finding | None:
    """One step was much longer than the others of the same rank, by work or by idling and not by communication."""
    if len(scene.steps) < 3:
        return None
    usual = {rank: statistics.median(each.values()) for rank, each in _of_ranks(scene.own_s).items()}
    over = {key: own - usual[key[0]] for key, own in scene.own_s.items() if own >= LONG_STEP * usual[key[0]]}
    if not over:
        return None
    rank, step = max(over, key=over.__getitem__)
    own, steps = scene.own_s[rank, step], len(scene.steps)
    on_all = all((other, step) in over for other in usual)
    who = "on every rank" if on_all and len(usual) > 1 else f"on rank {rank}"
    # on all ranks it is no waiting, but a part of the step
    seconds = min(over[other, step] for other in usual) / steps if on_all else left.wait(over[rank, step] / steps)
    title = f"step {step} is a long one {who}: {_ms(own)} without communication, usually {_ms(usual[rank])}"
    text = f"Spread over the {steps} profiled steps that is {_ms(seconds)} a step. The other steps are as usual."
    remedy = (
        f"Look at what else happened in step {step}: a checkpoint, an evaluation, garbage collection, new shapes"
        " (compilation, cudnn benchmarks). Profile more steps before you judge the rank."
    )
    return Finding("long_step", seconds, title, text, remedy, of="step" if on_all else "exposed")


def _slow_rank(scene: Scene, left: Unclaimed) -> Finding | None:
    """A rank that comes late again and again; slow if its computing takes longer, too."""
    late = scene.late
    if late is None:
        return None
    means = by_rank(scene.compute_s)
    others = statistics.median(seconds for rank, seconds in means.items() if rank != late.rank)
    more = means[late.rank] - others
    slow = more >= (SLOW_RANK - 1) * others and all(
        _ahead(scene.compute_s, late.rank, step) > 0 for step in scene.steps
    )
    seconds = left.wait(late.a_step_ns / 1e9)
    where = f" in {late.phase}" if late.phase else ""
    often = f"comes last to {late.last} of {late.of} collectives{where}, {_ms(late.by_ns / 1e9)} after the others"
    text = f"At every collective the others wait for the last, {_ms(seconds)} a step in all."
    if slow:
        title = (
            f"rank {late.rank} is slow: it computes for {_ms(means[late.rank])} a step, the others for {_ms(others)}"
        )
        text = f"It {often}. {text}"
        remedy = (
            f"Look at rank {late.rank}'s machine (another job, a hot or throttled card, fewer cores) and at its data"
            " (longer sequences than the others')."
        )
        return Finding("slow_rank", seconds, title, text, remedy)
    title = f"rank {late.rank} {often}"
    text = f"It computes for {_ms(means[late.rank])} a step, the others for {_ms(others)}, so its device is not slow."
    text += f" The others wait for it, {_ms(seconds)} a step in all."
    remedy = (
        f"Look at what rank {late.rank} does between its collectives besides computing: its host's other work, loading,"
        " logging, synchronisation, or more of the model's work than the others have."
    )
    return Finding("late_rank", seconds, title, text, remedy)


def _skew(scene: Scene, left: Unclaimed) -> Finding | None:
    """No rank is late again and again, but ranks wait for each other for longer than a busy machine makes them."""
    worst = max(scene.cells, key=lambda cell: cell.waiting_ns, default=None)
    if worst is None or left.waiting < NOISE * scene.busy_s:
        return None
    seconds = left.wait()
    title = f"ranks wait for each other: {_ms(seconds)} a step, most at {_cell(worst)}"
    text = "No rank is late on the whole; each is now and then, and at a collective all wait for the last."
    remedy = "Balance the lengths of sequences over the ranks, and give each rank cores of its own."
    return Finding("skew", seconds, title, text, remedy)


# ---- copies


def _copies(scene: Scene, left: Unclaimed) -> Finding | None:
    claim = left.copies(lambda cell: True)
    if claim.cell is None:
        return None
    title = f"copying takes {_ms(claim.seconds)} a step beside computing, {_alone(claim)}"
    text = "The rank packs what it sends and unpacks what it gets; meanwhile it computes nothing."
    ways = _fewer_bytes(scene)
    remedy = f"Copy less: {', or '.join([*ways, 'more tokens a step, which the same copies serve'])}."
    return Finding("copies", claim.seconds, title, text, remedy)


def _fewer_bytes(scene: Scene) -> list[str]:
    """Ways to send less that the run does not follow already."""
    ways = {
        "bf16": scene.spec.get("precision") == "bf16",
        "shard_grad_op instead of full_shard": scene.spec.get("strategy") != "full_shard",
    }
    return [way for way, followed in ways.items() if not followed]


# ---- on the link


def _slow_link(scene: Scene, left: Unclaimed) -> Finding | None:
    seconds = scene.excess_s - _latency_s(scene)
    if seconds <= 0 or not scene.busy_s:  # nothing was computed: no schedule would hide anything
        return None
    claim = left.on_link(lambda cell: True, seconds)
    title = (
        f"the link is too slow for this work: {_ms(scene.link_s)} of communication beside {_ms(scene.busy_s)}"
        " of computing"
    )
    link = scene.record.summary.link
    apart = ", gathers and reductions side by side," if link and link.queues == 1 else ""
    text = f"Even a perfect schedule{apart} would leave {_ms(claim.seconds)} a step exposed ({_link(scene.record)})."
    batch = "a larger batch" + (
        ", or more micro-batches" if scene.spec.get("strategy") in ("no_shard", "zero1") else ""
    )
    less = _fewer_bytes(scene)
    if scene.spec.get("strategy") != "hybrid_shard":
        less.append("hybrid_shard with the shard group on a fast axis")
    remedy = f"About {scene.link_s / scene.busy_s:.1f} times the tokens a rank and step would hide it ({batch})"
    if scene.absent:
        title = f"communication takes longer than the work: {title.partition(': ')[2]}"
        text += f" Waiting for {scene.absent}, whose traces were not given, is in it: the link may be faster than this."
        remedy = f"Give the other ranks' traces too, which tell waiting from sending. {remedy}"
    return Finding(
        "slow_link", claim.seconds, title, text, remedy + (f"; or send less: {', '.join(less)}." * bool(less))
    )


def _tiny_units(scene: Scene, left: Unclaimed) -> Finding | None:
    latency = _latency_s(scene)
    if not scene.communication_s or latency < LATENCY_BOUND * scene.communication_s:
        return None
    rows = _last_step(scene.record)
    size = statistics.mean(row["logical_bytes"] for row in rows)
    title = (
        f"units are too small: {len(rows)} collectives a step of {size / 1e3:.3g} kB each spend {_ms(latency)} on"
        " latency"
    )
    text = f"Latency is {latency / scene.communication_s:.0%} of all communication; it does not shrink with the bytes."
    claim = left.on_link(lambda cell: True, latency * min(1.0, scene.exposed_s / scene.communication_s))
    remedy = "Make several blocks one unit: fewer, larger collectives."
    if scene.spec.get("units", "auto") not in ("auto", "block"):
        remedy = 'Make whole blocks units (units="auto"), or several blocks one unit: fewer, larger collectives.'
    return Finding("tiny_units", claim.seconds, title, text, remedy)


def _one_big_unit(scene: Scene, left: Unclaimed) -> Finding | None:
    held = _sizes(scene.record)
    total = sum(held.values())
    if not total or (biggest := held.most_common(1)[0])[1] < BIG_UNIT * total:
        return None
    name, share = _named(biggest[0]), biggest[1] / total
    mine = lambda cell: _named(cell.unit) == name  # noqa: E731
    seconds = left.on_link(mine).seconds + left.copies(mine).seconds
    title = f"one unit holds {share:.0%} of the parameters: {name} costs {_ms(seconds)} a step"
    text = (
        "Its gather has nothing to hide behind before it, its reduction nothing after it, and all of it is in memory at"
        " once."
    )
    remedy = "Cut it: make parts of it units of their own, so that a unit travels while its neighbour computes."
    if scene.spec.get("units", "auto") not in ("auto", "block"):
        remedy = 'Cut it: make each block a unit (units="auto"), so that a unit travels while its neighbour computes.'
    return Finding("one_big_unit", seconds, title, text, remedy)


def _no_prefetch(scene: Scene, left: Unclaimed) -> Finding | None:
    claim = left.on_link(lambda cell: cell.cause == "late_start" and cell.kind == "all_gather")
    if claim.cell is None:
        return None
    depth = scene.spec.get("prefetch") if scene.spec.get("engine") == "lab" else None
    title = f"gathers set out too late: {_ms(claim.seconds)} a step exposed, {_alone(claim)}"
    text = "They are issued when their unit is needed, so nothing runs while they travel"
    text += "." if depth is None else f" (prefetch={depth})."
    remedy = (
        "Gather a unit ahead: prefetch=1 (or set_modules_to_forward_prefetch and set_modules_to_backward_prefetch)."
    )
    if depth:
        remedy = (
            "The run gathers ahead already, but not these: name them with set_modules_to_forward_prefetch and"
            f" set_modules_to_backward_prefetch, or try prefetch={depth + 1}."
        )
    return Finding("no_prefetch", claim.seconds, title, text, remedy)


def _one_communicator(scene: Scene, left: Unclaimed) -> Finding | None:
    link = scene.record.summary.link
    if link and link.queues == 2:
        return None
    # side by side, the shorter of the two kinds is all that can be saved
    saved = scene.communication_s - max(scene.by_kind().values(), default=0.0)
    claim = left.on_link(lambda cell: cell.cause == "link_busy", saved)
    if claim.cell is None:
        return None
    title = f"gathers and reductions queue behind each other: {_ms(claim.seconds)} a step exposed, {_alone(claim)}"
    text = (
        "The link was carrying another unit's collective when this one was issued: one communicator runs them one after"
        " the other."
    )
    remedy = (
        "Give reductions a communicator of their own (set_separate_reduce_scatter_group, --link-queues 2)"
        f"{_deeper(scene, 'or')}."
    )
    return Finding("one_communicator", claim.seconds, title, text, remedy)


def _busy_link(scene: Scene, left: Unclaimed) -> Finding | None:
    """What gathers and reductions side by side would not save: collectives that queue behind their own kind."""
    claim = left.on_link(lambda cell: cell.cause == "link_busy")
    if claim.cell is None:
        return None
    title = f"collectives queue behind others of their kind: {_ms(claim.seconds)} a step exposed, {_alone(claim)}"
    text = "The link was still carrying earlier ones when they were issued: for a while it cannot keep up."
    deeper = _deeper(scene, "or") if scene.spec.get("engine") == "lab" else ""
    remedy = f"Give the step more work beside them (a larger batch){deeper}."
    return Finding("busy_link", claim.seconds, title, text, remedy)


def _deeper(scene: Scene, word: str) -> str:
    """The remedy of gathering further ahead, where the run does not do so."""
    return "" if (scene.spec.get("prefetch") or 0) >= 2 else f", {word} gather two units ahead (prefetch=2)"


def _nothing_beside(scene: Scene, left: Unclaimed) -> Finding | None:
    claim = left.on_link(lambda cell: cell.cause == "nothing_to_hide_behind")
    if claim.cell is None:
        return None
    title = f"communication with nothing to hide behind: {_ms(claim.seconds)} a step, {_alone(claim)}"
    text = "Too little computing was left beside it: the first gathers of a step and the last reductions have none"
    ways = []
    blocks, root = _blocks_and_root(scene.record)
    if blocks and max(blocks) > ALIKE * min(blocks):
        text += ", and a large unit outlasts its small neighbour"
        ways.append("make units alike in size")
    if blocks and root is not None and root > ALIKE * statistics.median(blocks):
        ways.append("keep the root small (embedding and head in units of their own)")
    ways.append("give each step more work (a larger batch)")
    if not blocks:  # a trace does not say how large units are
        ways.append("if units or buckets differ in size, make them alike")
    remedy = ", or ".join(ways)
    return Finding("nothing_to_hide_behind", claim.seconds, title, f"{text}.", f"{remedy[0].upper()}{remedy[1:]}.")


# a rank that others wait for, the link, copies; a cause before its consequences
_RULES: Sequence[Callable[[Scene, Unclaimed], Finding | None]] = (
    _slow_loading, _long_step, _slow_rank, _skew,
    _slow_link, _tiny_units, _one_big_unit, _no_prefetch, _one_communicator, _busy_link, _nothing_beside, _copies,
    _loading_everywhere,
)  # fmt: skip
_OF_THE_SCHEDULE = (
    "tiny_units", "one_big_unit", "no_prefetch", "one_communicator", "busy_link", "nothing_to_hide_behind",
)  # fmt: skip


# ---- memory


def _peak(record: RunRecord) -> Finding | None:
    """The largest category at the memory's peak."""
    measured = record.summary.peak_memory_bytes.split
    split = {name: nbytes for name, nbytes in measured.items() if name in CATEGORY_ROWS}
    total = sum(split.values())
    if not total:
        return None
    name = max(split, key=split.__getitem__)
    words = CATEGORY_ROWS[name].words
    title = f"memory peaks at {total / 1e6:.0f} MB, {split[name] / total:.0%} of it {words}"
    text = f"At the peak's instant: {split[name] / 1e6:.0f} MB of {words}."
    return Finding("peak", 0.0, title, text, f"To lower it: {_smaller(record.spec, name)}.", of="memory")


def _smaller(spec: Mapping[str, Any], category: str) -> str:
    """Ways to make a category smaller that the run does not follow already."""
    whole = spec.get("strategy") == "full_shard"
    offloads = spec.get("offload", "none") != "none"
    ways = {
        "activations": {
            'recompute them (checkpoint="full" or "selective")': spec.get("checkpoint") not in (None, "none"),
            "take a smaller micro-batch": spec.get("batch_size") == 1,
            "take shorter sequences": False,
        },
        "optimizer_state": {"cut it over more ranks": False, "offload it": offloads},
        "whole_gradients": {"shard them: zero2, shard_grad_op or full_shard": False},
        "gathered_parameters": {
            "drop units after their forward (full_shard)": whole,
            "make units smaller": False,
            "gather fewer ahead": not spec.get("prefetch"),
        },
        "parameter_slices": {
            "cut them over more ranks" + ("" if whole else " (full_shard)"): False,
            "offload them": offloads,
        },
        "gradient_slices": {"cut them over more ranks": False, "reduce in bf16": False},
        "communication_buffers": {"make units smaller": False, "allow fewer reductions in flight": False},
        "other": {"look at the memory timeline: the optimizer's temporaries are the usual reason": False},
    }[category]
    return ", or ".join(way for way, followed in ways.items() if not followed)


# ---- shared by the rules


def by_rank(values: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Means over the steps: `by_rank({(0, 7): 1.0, (0, 8): 3.0}) == {0: 2.0}`."""
    return {rank: statistics.fmean(each.values()) for rank, each in _of_ranks(values).items()}


def _of_ranks(values: Mapping[tuple[int, int], float]) -> dict[int, dict[int, float]]:
    """By rank, then by step."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for (rank, step), value in values.items():
        found[rank][step] = value
    return dict(sorted(found.items()))


def _last_step(record: RunRecord) -> list[Row]:
    """The collectives of rank 0's last step in the ledger."""
    rows = [row for row in record.table("ledger") if row["rank"] == 0]
    last = max((row["step"] for row in rows), default=0)
    return [row for row in rows if row["step"] == last]


def _sizes(record: RunRecord) -> Counter[str]:
    """The bytes of each unit, from the ledger; none without one."""
    return Counter(
        {
            row["unit"]: row["logical_bytes"]
            for row in _last_step(record)
            if row["kind"] in ("all_gather", "reduce_scatter")
        }
    )


def _blocks_and_root(record: RunRecord) -> tuple[list[int], int | None]:
    """(the bytes of the units but for the root, the root's), where the ledger tells."""
    sizes = {_named(unit): nbytes for unit, nbytes in _sizes(record).items() if nbytes}
    root = sizes.pop(_named(""), None)
    return list(sizes.values()), root


def _latency_s(scene: Scene) -> float:
    """Seconds a step that collectives spend on latency: the emulated link's, or as long as the quickest collective of
    the step took.
    """
    rows, link = _last_step(scene.record), scene.record.summary.link
    if not rows:
        return 0.0
    if link and link.bytes_per_s:
        return sum(
            (row["end_ns"] - row["start_ns"]) / 1e9 - row["wire_bytes"] / link.bytes_per_s
            for row in rows
            if row["emulated"]
        )
    timed = [
        row for row in scene.record.table("timeline") if row["lane"] in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    quickest = min((row["end_ns"] - row["start_ns"] for row in timed), default=0) / 1e9
    return quickest * len(rows) if statistics.mean(row["logical_bytes"] for row in rows) < 100_000 else 0.0


def _alone(claim: Claim) -> str:
    """The collective of which most was claimed; with its exposed time where the claim has all of that, as figures show
    it.
    """
    assert claim.cell is not None
    whole = claim.cell.exposed_ns / 1e9
    return f"{_cell(claim.cell)} alone {_ms(whole)}" if claim.of_cell > 0.99 * whole else f"most at {_cell(claim.cell)}"


def _cell(cell: ExposedCell) -> str:
    """The collective's name; without its unit where no unit has a name."""
    of = f" of {_named(cell.unit)}" if cell.unit else ""
    return f"{cell.kind}{of} in {cell.phase or 'the step'}"


def _link(record: RunRecord) -> str:
    link = record.summary.link
    if not link or not link.bytes_per_s:
        simulated = record.provenance.get("step_time_s") == "simulated"
        return "the data sheet's link, simulated" if simulated else "the machine's own transport, measured"
    return f"{link.name}: {link.bytes_per_s / 1e6:,.0f} MB/s, {record.provenance.get('link', 'emulated')}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _named(unit: str) -> str:
    return "the root" if unit in ("", "root") else unit
