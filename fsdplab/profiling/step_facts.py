"""The numbers that findings are made from: the profiled steps of one record, in seconds of a timed step.

A step under the profiler is longer than one without it, and a finding must not claim what a timed step does not hold.
Where the record has timed steps, exposed time is therefore scaled to what they allow: as long as their ranks were
blocked in collectives (by the ledger), with the packing before them; without a ledger, in proportion to the step.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import itemgetter
from typing import Any

from fsdplab.common.names import IN_GROUPS
from fsdplab.common.rows import grouped
from fsdplab.profiling.late_rank import LateRank, late_rank_of
from fsdplab.profiling.step_summary import (
    ExposedCell,
    OptimizerStep,
    StepSummary,
    exposed_cells,
    optimizer_step,
    step_summary,
)
from fsdplab.profiling.traces.host_reads import NAMES as TRACED
from fsdplab.profiling.vocabulary import words_of
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord
from fsdplab.records.summary import Link
from fsdplab.records.tables import Row

ByRankAndStep = Mapping[tuple[int, int], float]


_ENOUGH = 4  # collectives of a step, of which the quickest tells what latency takes


@dataclass(frozen=True)
class Activity:
    """What a rank did in a step besides training: how often, for how long, with how many bytes, means of all steps;
    `regular`: in which part of the steps.
    """

    rank: int
    count: float
    seconds: float
    nbytes: float
    regular: float

    @classmethod
    def of(cls, rank: int, rows: Sequence[Row], steps: Sequence[int]) -> Activity:
        """The means over these steps of rows of the table `activities`."""
        of_steps = [row for row in rows if row["step"] in set(steps)]
        number = max(1, len(steps))
        # 3 calls in one of 4 steps: `count` is 0.75, `regular` is 0.25
        took_ns = sum(row["took_ns"] for row in of_steps) / number
        return cls(
            rank=rank,
            count=sum(row["count"] for row in of_steps) / number,
            seconds=took_ns / 1e9,
            nbytes=sum(row["nbytes"] for row in of_steps) / number,
            regular=len({row["step"] for row in of_steps}) / number,
        )


@dataclass(frozen=True)
class StepFacts:
    """One record's profiled steps, means of the rank that is exposed longest, in seconds of a step.

    What is by rank and step is as profiled.
    """

    record: RunRecord
    worst: StepSummary
    scale: float  # by how much exposed time was reduced to what timed steps allow
    step_s: float
    cells: Sequence[ExposedCell]  # reduced already
    compute_s: ByRankAndStep
    own_s: ByRankAndStep  # all but exposed communication
    loading: ByRankAndStep  # until the step's data was there

    @property
    def spec(self) -> dict[str, Any]:
        """What was run."""
        return self.record.spec

    @property
    def words(self) -> dict[str, str]:
        """What a change is called in the program that was run."""
        return words_of(self.spec)

    @property
    def observed(self) -> Mapping[str, Any]:
        """How a recorded job is set up (recording/observed.py); empty for other records."""
        observed = self.record.environment.get("observed")
        return observed if isinstance(observed, dict) else {}

    @cached_property
    def activities(self) -> dict[str, Activity]:
        """What the ranks did besides training, by name: of the rank that did it longest."""
        by_name: dict[str, list[Activity]] = defaultdict(list)
        by_name_and_rank = grouped(self.record.table("activities"), itemgetter("name", "rank"))
        for (name, rank), rows in by_name_and_rank.items():
            # what is read off a trace is known of profiled steps only, everything else is counted in each step
            steps = self.steps if name in TRACED else self._steps_of(rank)
            by_name[name].append(Activity.of(rank, rows, steps))
        longest = {}
        for name, activities in by_name.items():
            longest[name] = max(activities, key=lambda activity: activity.seconds)
        return longest

    @cached_property
    def cpu_s(self) -> ByRankAndStep:
        """CPU time of all threads by rank and step, of the timed steps in which nothing was measured."""
        profiled = set(self.steps)
        cpu_s = {}
        for row in self.record.table("steps"):
            # profiling takes CPU time of its own
            is_timed = row["step_time_s"] is not None and row["step"] not in profiled
            if is_timed and row.get("cpu_s") is not None:
                cpu_s[row["rank"], row["step"]] = row["cpu_s"]
        return cpu_s

    def _steps_of(self, rank: int) -> list[int]:
        """The steps of a rank that were noted."""
        return [row["step"] for row in self.record.table("steps") if row["rank"] == rank]

    @property
    def steps(self) -> list[int]:
        """The profiled steps."""
        return sorted({step for _, step in self.compute_s})

    @property
    def exposed_s(self) -> float:
        """What the findings may claim of exposed time."""
        return self.scale * self.worst.exposed_ns / 1e9

    @property
    def communication_s(self) -> float:
        """Time with communication, hidden or exposed."""
        return (self.worst.overlapped_ns + self.scale * self.worst.exposed_ns) / 1e9

    @property
    def other_s(self) -> float:
        """Time with neither computing nor communication."""
        return self._part_of_profiled * self.worst.other_ns / 1e9

    @property
    def _part_of_profiled(self) -> float:
        """A timed step's length as a part of a profiled one's, at most 1."""
        return min(1.0, self.step_s / (self.worst.step_ns / 1e9))

    @property
    def idle_s(self) -> dict[str, float]:
        """The same by cause, by the columns of the table `idle`; {} where the record does not tell."""
        rows = [row for row in self.record.table("idle") if row["rank"] == self.worst.rank]
        if not rows:
            return {}
        # the causes sum to `other_s`, which is of a timed step
        scale = self.other_s / self.worst.other_ns if self.worst.other_ns else 0.0
        causes = {}
        for name in rows[0]:
            if name.endswith("_ns"):
                causes[name] = scale * statistics.fmean(row[name] for row in rows)
        return causes

    @cached_property
    def optimizer(self) -> OptimizerStep | None:
        """The optimizer's step of the rank; None where the trace does not show it."""
        profiled = optimizer_step(self.record.tables, self.worst.rank)
        if profiled is None:
            return None
        part = self._part_of_profiled
        return OptimizerStep(part * profiled.seconds, part * profiled.exchange_s)

    @cached_property
    def late(self) -> LateRank | None:
        """The rank that is late beyond chance."""
        return late_rank_of(self.record)

    @property
    def absent(self) -> str:
        """How many of the job's ranks gave no trace: "7 of the 8 ranks"; "" where none is known to be absent."""
        traces = self.record.summary.traces
        job = self.spec.get("world_size")
        if not traces or not job or traces.ranks >= job:
            return ""
        return f"{job - traces.ranks} of the {job} ranks"

    @cached_property
    def last_step(self) -> list[Row]:
        """The collectives of rank 0's last step in the ledger; without one, those that its trace tells in bytes."""
        rows = [row for row in self.record.table("ledger") if row["rank"] == 0]
        if not rows:
            # an imported trace has no ledger
            traced = self.record.table("collectives")
            rows = [row for row in traced if row["rank"] == 0 and row.get("logical_bytes")]
        last = max((row["step"] for row in rows), default=0)
        return [row for row in rows if row["step"] == last]

    @cached_property
    def computing_of_rank_0(self) -> dict[int, list[Row]]:
        """Rank 0's computing in the timeline, by step, in order of time."""
        computing: dict[int, list[Row]] = defaultdict(list)
        for row in self.record.table("timeline"):
            if row["rank"] == 0 and row["lane"] == "compute":
                computing[row["step"]].append(row)
        for rows in computing.values():
            rows.sort(key=itemgetter("start_ns"))
        return dict(computing)

    @property
    def unit_bytes(self) -> Counter[str]:
        """The bytes of each unit, from the ledger; none without one."""
        # a unit is moved several times a step: the last one counts, since it has the same bytes each time
        nbytes: Counter[str] = Counter()
        for row in self.last_step:
            if row["kind"] in ("all_gather", "reduce_scatter"):
                nbytes[row["unit"]] = row["logical_bytes"]
        return nbytes

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
        on_link = self._carried_s or self.communication_s - copying
        # copies of one unit may last while the link carries another
        return max(0.0, min(on_link, self.communication_s) - waiting)

    @property
    def _carried_s(self) -> float:
        """Seconds for which an emulated link carried the step's bytes; 0 without one."""
        carried_ns = []
        for row in self.last_step:
            if row["emulated"]:
                carried_ns.append(row["end_ns"] - row["start_ns"])
        return sum(carried_ns) / 1e9

    @property
    def excess_s(self) -> float:
        """Time on the link that even a perfect schedule leaves exposed.

        On an emulated link with one queue, gathers and reductions could travel side by side: then the longer of the two
        counts.
        """
        # what computing could hide at best is as long as the computing itself
        moving = self.longer_kind_s if self.one_queue else self.link_s
        return max(0.0, min(moving, self.link_s) - self.busy_s)

    @property
    def one_queue(self) -> bool:
        """Whether an emulated link carries gathers and reductions one after the other."""
        link = self.record.summary.link
        return link is not None and link.queues == 1

    @property
    def longer_kind_s(self) -> float:
        """Seconds a step of all gathers, or of all reductions, whichever is longer."""
        gathers = [cell.communication_ns / 1e9 for cell in self.cells if cell.kind == "all_gather"]
        others = [cell.communication_ns / 1e9 for cell in self.cells if cell.kind != "all_gather"]
        return max(sum(gathers), sum(others))

    @property
    def latency_s(self) -> float:
        """Seconds a step that collectives spend on latency: the emulated link's, or as long as the quickest collective
        of the step took, where there are enough to compare.
        """
        rows = self.last_step
        if not rows:
            return 0.0
        link = self.record.summary.link
        if link and link.bytes_per_s:
            # what remains of the links' time once the bytes have passed at their bandwidths
            passed_s = sum(row["wire_bytes"] / self._bytes_per_s(row, link) for row in rows if row["emulated"])
            return max(0.0, self._carried_s - passed_s)
        # of large messages the bytes take the time; of a few, the quickest may have been quick by chance
        if len(rows) < _ENOUGH or statistics.mean(row["logical_bytes"] for row in rows) >= 100_000:
            return 0.0
        # of small messages the quickest one is all latency, and the others have as much of it
        lengths = [row["end_ns"] - row["start_ns"] for row in self.record.table("collectives")]
        quickest_ns = min(lengths, default=0)
        return quickest_ns / 1e9 * len(rows)

    def _bytes_per_s(self, row: Row, link: Link) -> float:
        """The bandwidth of the emulated link that carried a row of the ledger: between shard groups replicas are
        summed, over a link of its own where there is one.
        """
        across = link.across
        is_across = row["kind"] == "all_reduce" and self.spec.get("strategy") in IN_GROUPS
        if is_across and across is not None and across.bytes_per_s:
            return across.bytes_per_s
        return link.bytes_per_s or inf


def step_facts(record: RunRecord) -> StepFacts:
    """The facts of a profiled record; ValueError when it was not profiled."""
    breakdown = record.table("breakdown")
    worst = step_summary(breakdown)
    if worst is None:
        raise ValueError(
            "findings need a profiled run, and this record has no profiled step; run it again with --profile 2"
        )
    # a record of traces has no other steps than the profiled ones, so there is nothing to scale to
    timed = record.summary.step_time_s.median if record.summary.traces is None else None
    scale = _scale(record, worst, timed)
    exposed = [row for row in record.table("exposed") if row["rank"] == worst.rank]
    compute_s: dict[tuple[int, int], float] = {}
    own_s: dict[tuple[int, int], float] = {}
    for row in breakdown:
        key = row["rank"], row["step"]
        compute_s[key] = row["compute_ns"] / 1e9
        # what a rank spends on itself; exposed time may be spent waiting for others
        own_s[key] = (row["step_ns"] - row["exposed_ns"]) / 1e9
    return StepFacts(
        record=record,
        worst=worst,
        scale=scale,
        step_s=min(worst.step_ns / 1e9, timed or inf),
        cells=[_scaled(cell, scale) for cell in exposed_cells(exposed, worst.steps)],
        compute_s=compute_s,
        own_s=own_s,
        loading=_loading(record, {row["step"] for row in breakdown}),
    )


def _scale(record: RunRecord, worst: StepSummary, timed: float | None) -> float:
    """By how much exposed time is reduced to what the timed steps allow, at most 1."""
    blocked = record.summary.comm.blocked_s
    if timed is None or not worst.exposed_ns:
        return 1.0
    # no ledger: exposed time is taken to shrink as the step does
    if blocked is None:
        return min(1.0, timed * 1e9 / worst.step_ns)
    # the timed steps tell for how long the host was blocked; packing is exposed too, though the host works at it
    packing = sum(row["packing_ns"] for row in record.table("collectives") if row["rank"] == worst.rank)
    # `packing` is of all profiled steps, `blocked` of one step
    exposed_ns = blocked * 1e9 + packing / worst.steps
    return min(1.0, exposed_ns / worst.exposed_ns)


def _scaled(cell: ExposedCell, scale: float) -> ExposedCell:
    """The cell with its exposed time reduced; what was hidden stays."""
    hidden_ns = cell.communication_ns - cell.exposed_ns
    exposed = {name: scale * getattr(cell, name) for name in ("exposed_ns", *PARTS_OF_EXPOSED)}
    return replace(cell, communication_ns=hidden_ns + exposed["exposed_ns"], **exposed)


def _loading(record: RunRecord, steps: set[int]) -> dict[tuple[int, int], float]:
    """Until each step's data was there, by rank and step, where that was noted."""
    loading = {}
    for row in record.table("steps"):
        loading_s = row.get("loading_s")
        if row["step"] in steps and loading_s is not None:
            loading[row["rank"], row["step"]] = loading_s
    return loading


def by_rank(values: ByRankAndStep) -> dict[int, float]:
    """Means over the steps: `by_rank({(0, 7): 1.0, (0, 8): 3.0}) == {0: 2.0}`."""
    means = {}
    for rank, by_step in of_ranks(values).items():
        means[rank] = statistics.fmean(by_step.values())
    return means


def of_ranks(values: ByRankAndStep) -> dict[int, dict[int, float]]:
    """Group values by rank, then by step."""
    by_rank_and_step: dict[int, dict[int, float]] = defaultdict(dict)
    for (rank, step), value in values.items():
        by_rank_and_step[rank][step] = value
    return dict(sorted(by_rank_and_step.items()))


def beside(values: ByRankAndStep, rank: int) -> tuple[float, float]:
    """A rank's mean over the steps, and the median of the other ranks'."""
    means = by_rank(values)
    others = [mean for other, mean in means.items() if other != rank]
    return means[rank], statistics.median(others)


def ahead(values: ByRankAndStep, rank: int, step: int) -> float:
    """By how much a rank's value of one step is above the other ranks' median."""
    others = []
    for (other, at_step), value in values.items():
        if at_step == step and other != rank:
            others.append(value)
    if not others:
        return 0.0
    return values.get((rank, step), 0.0) - statistics.median(others)


# ---- who claims what


@dataclass(frozen=True)
class Claim:
    """Exposed seconds of a step that one finding claims, and the collective of which they are most."""

    seconds: float = 0.0
    cell: ExposedCell | None = None
    of_cell: float = 0.0


class Unclaimed:
    """The exposed seconds of a step that no finding has claimed yet, by part (`PARTS_OF_EXPOSED`) and collective.

    Of two collectives that wait 30 and 10 ms, a claim of at most 20 ms takes 15 and 5, and leaves 15 and 5.
    """

    def __init__(self, cells: Sequence[ExposedCell]) -> None:
        self._cells = cells
        self._left: dict[str, list[float]] = {}  # of each part the seconds of each cell, in their order
        for part in PARTS_OF_EXPOSED:
            self._left[part] = [getattr(cell, part) / 1e9 for cell in cells]

    @property
    def waiting(self) -> float:
        """Seconds of waiting for a peer that are left."""
        return sum(self._left["waiting_ns"])

    def of(self, part: str, which: Callable[[ExposedCell], bool]) -> float:
        """Seconds of one part of some collectives that are left."""
        return sum(left for cell, left in zip(self._cells, self._left[part]) if which(cell))

    def claim(self, part: str, which: Callable[[ExposedCell], bool] = lambda cell: True, at_most: float = inf) -> Claim:
        """Claim at most so many seconds of one part of some collectives, of each the same share."""
        left = self._left[part]  # of each cell, in their order
        claimable = [index for index, cell in enumerate(self._cells) if which(cell) and left[index] > 0]
        total = sum(left[index] for index in claimable)
        if not total:
            return Claim()
        share = min(1.0, max(0.0, at_most) / total)
        if not share:
            return Claim()
        # the finding's sentence names this collective
        most = max(claimable, key=lambda index: left[index])
        claim = Claim(share * total, self._cells[most], share * left[most])
        for index in claimable:
            left[index] *= 1.0 - share
        return claim
