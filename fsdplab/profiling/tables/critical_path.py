"""The critical path of a step across ranks: whose computing and which collectives its length is made of.

It is walked backwards from the instant at which the last rank ends. Where that rank computed, the path goes through its
computing; where it waited in a collective, through the collective back to the start of the rank that arrived last, and
goes on there; where it did neither, through the gap. A collective of which nothing was exposed on the link delayed the
rank only by its exposed copies and waits: the path goes through those, and then on. Where it reaches a rank that began
later than the first one, the time until then is "before its step". The parts are one after the other, so they sum to
the step from the first rank's first work to the last rank's end. Computing is what the breakdown counts as computing,
not the timeline's joined rows.

HTA builds a graph of operators, launches and synchronisations of one rank; here the granularity is coarser and the path
crosses ranks, since what a sharded step waits for is usually another rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import seconds
from fsdplab.common.words import OFF_LINK
from fsdplab.profiling.intervals import within
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.meeting import matched
from fsdplab.profiling.traces.overlap import StepAnalysis, TraceAnalysis

COMPUTE, IDLE, BEFORE = "compute", "idle", "before its step"
_OF = ("rank", "what", "unit", "phase")  # what neighbours are joined by
_OF_PART = (Column("rank", "rank", "count"), Column("what", "what"), Column("unit", "unit"), Column("phase", "phase"))
_LASTS = (Column("ns", "lasts", "ns"), Column("share", "of the step", "share"))
_SHARES = (*_OF_PART, Column("parts", "parts", "count"), *_LASTS)
_PARTS = (Column("order", "part", "count"), *_OF_PART, Column("start_ns", "begins", "ns"), *_LASTS)
_CLOCKS_AGREE_NS = 1_000_000  # by how much two ranks may differ and still be of one clock
_WAITS_FOR_ALL = ("all_gather", "reduce_scatter", "all_reduce", "barrier")  # ends nowhere before all have begun


class _Part(NamedTuple):
    """A stretch of the path on one rank: computing, a collective, or neither."""

    rank: int
    what: str  # COMPUTE, IDLE, BEFORE or the kind of a collective
    unit: str
    phase: str
    start: int  # of the trace's clock, in ns, as `end`
    end: int


class _Lane:
    """Rows of one rank, computing or collectives, that can be asked for those around an instant.

    >>> lane = _Lane([{"start_ns": 0, "end_ns": 40}, {"start_ns": 50, "end_ns": 90}])
    >>> lane.before(60, since=0), lane.before(45, since=0)
    (([{'start_ns': 50, 'end_ns': 90}], 40), ([], 40))
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = sorted(rows, key=itemgetter("start_ns", "end_ns"))
        self._starts = [row["start_ns"] for row in self.rows]
        ends = [row["end_ns"] for row in self.rows]
        self._latest = list(accumulate(ends, max))  # of each row and all before it

    def before(self, now: int, since: int) -> tuple[list[Row], int]:
        """What began before `now` and had not ended; and where there is nothing, when the last row ended, or `since`
        if that is later.
        """
        running = []
        # From the last row that began before `now` backwards. Of rows 0-90, 10-20 and 30-40, all of them end by 90,
        # though the last one ends at 40: at 60 the walk goes on to the first, which still runs.
        place = bisect_left(self._starts, now) - 1
        while place >= 0 and self._latest[place] >= now:
            if self.rows[place]["end_ns"] >= now:
                running.append(self.rows[place])
            place -= 1
        if place < 0:
            return running, since
        return running, max(since, self._latest[place])


class _Rank(NamedTuple):
    """One rank in the step: its window, its computing, its exposed time and its collectives."""

    start: int
    end: int
    computing: _Lane
    exposed: _Lane  # where a collective held the rank up, joined as the timeline shows it
    collectives: _Lane  # each from its start to its end, also where it was hidden


def critical_path(analyses: Sequence[TraceAnalysis], step: int | None = None, *, in_order: bool = False) -> Table:
    """What one step's critical path is made of, the longest first, or every part of it `in_order` of time; `step` is
    the slowest one unless given.

    `analyses` are of one run's ranks on one clock; raises TraceError where their clocks disagree, or none has the step.
    Two ranks that compute for 80 and 100 ms and then reduce for 10: 100 ms of the second rank's computing, then the
    collective.
    """
    # which step: each is as long as that of its slowest rank
    lengths: dict[int, int] = {}
    for analysis in analyses:
        for row in analysis.rows("breakdown"):
            lengths[row["step"]] = max(row["step_ns"], lengths.get(row["step"], 0))
    if step is None and lengths:
        step = max(lengths, key=lengths.__getitem__)

    # what each rank did in it
    ranks: dict[int, _Rank] = {}
    for analysis in analyses:
        for of_rank in analysis.steps:
            if of_rank.step == step:
                ranks[analysis.rank] = _rank(of_rank)
    if step is None or not ranks:
        known = ", ".join(map(str, sorted(lengths))) or "none"
        raise TraceError(f"no trace has step {step}; expected one of {known}.")

    # the path, and how it is told
    collectives: list[Row] = []
    for rank in ranks.values():
        collectives += rank.collectives.rows
    backwards = _walked(ranks, _arrivals(collectives))
    path = _joined(backwards)
    rows = _rows(path)
    sentence = _sentence(step, rows, len(ranks) > 1)
    title = f"Critical path of step {step}"
    if in_order:
        return Table("critical_path", title, sentence, _PARTS, rows)
    return Table("critical_path", title, sentence, _SHARES, _shares(rows))


def _rows(parts: Sequence[_Part]) -> tuple[Row, ...]:
    """Parts in order of time as rows, each with its share of the path."""
    begun = parts[0].start
    whole_ns = parts[-1].end - begun
    rows = []
    for order, part in enumerate(parts, start=1):
        part_ns = part.end - part.start
        rows.append(
            {
                "order": order,
                "rank": part.rank,
                "what": part.what,
                "unit": part.unit,
                "phase": part.phase,
                "start_ns": part.start - begun,
                "ns": part_ns,
                "share": part_ns / whole_ns,
            }
        )
    return tuple(rows)


def _rank(step: StepAnalysis) -> _Rank:
    """One rank's step as lanes. Of the timeline's joined rows of computing, the parts in which the rank did compute."""
    whole = next(row for row in step.timeline if row["lane"] == "step")
    computing: list[Row] = []
    exposed: list[Row] = []
    for row in step.timeline:
        if row["lane"] == COMPUTE:
            # a joined row from 0 to 90 of which the rank computed 0-40 and 50-90: two rows
            for start, end in within(step.computing, row["start_ns"], row["end_ns"]).tolist():
                computing.append(row | {"start_ns": start, "end_ns": end})
        if row["lane"] == "exposed":
            # with or without bytes on the link, it is the same collective that holds the rank up
            kind = row["name"].removesuffix(OFF_LINK)
            exposed.append(row | {"name": kind})
    return _Rank(whole["start_ns"], whole["end_ns"], _Lane(computing), _Lane(exposed), _Lane(step.collectives))


def _arrivals(rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """For each row of a collective, by identity: the rank that began last, and when.

    Rank 0 begins a gather at 10 and rank 1 at 35: (1, 35) for both of its rows.
    """
    arrivals: dict[int, tuple[int, int]] = {}
    has_units = any(row["unit"] for row in rows)
    for key, members in matched(rows).items():
        # of several that begin at once the lowest rank, so that the path is the same whatever order the traces have
        last = max(members, key=lambda row: (row["start_ns"], -row["rank"]))
        first_end = min(row["end_ns"] for row in members)
        apart_ns = last["start_ns"] - first_end
        if key.kind in _WAITS_FOR_ALL and apart_ns > _CLOCKS_AGREE_NS:
            # nobody can have ended it before all had begun it, so the two times are of two clocks
            of_unit = f" of {key.unit or 'the root'}" if has_units else ""
            raise TraceError(
                f"the ranks' clocks disagree: {key.kind}{of_unit} ended on one rank"
                f" {seconds(apart_ns / 1e9)} before rank {last['rank']} began it; a path across"
                " ranks needs traces of one machine, or of machines whose clocks are synchronised."
            )
        for row in members:
            arrivals[id(row)] = last["rank"], last["start_ns"]
    return arrivals


def _walked(ranks: dict[int, _Rank], arrivals: dict[int, tuple[int, int]]) -> list[_Part]:
    """Walk the path backwards: the parts, the last first."""
    rank = max(ranks, key=lambda rank: (ranks[rank].end, -rank))  # the one that ends last
    now = ranks[rank].end
    parts = []
    while now > ranks[rank].start:
        part, rank = _part(rank, ranks[rank], now, arrivals)
        parts.append(part)
        now = part.start  # what ends here is the next part, on the rank that was waited for
    first = min(of_rank.start for of_rank in ranks.values())
    if first < now:
        parts.append(_Part(rank, BEFORE, "", "", first, now))
    return parts


def _part(rank: int, here: _Rank, now: int, arrivals: dict[int, tuple[int, int]]) -> tuple[_Part, int]:
    """What ends at `now` on this rank, and the rank that the path goes on with before it."""
    # Computing wins over a collective that runs beside it: that was hidden, and held nobody up.
    computing, since = here.computing.before(now, here.start)
    if computing:
        row = max(computing, key=itemgetter("end_ns"))
        begun = max(row["start_ns"], here.start)
        return _Part(rank, COMPUTE, row["unit"], row["phase"], begun, now), rank
    exposed, since = here.exposed.before(now, since)
    if exposed:
        return _exposed(rank, here, exposed, now, arrivals)
    # neither: back to where the last of both has ended
    return _Part(rank, IDLE, "", "", since, now), rank


def _exposed(
    rank: int,
    here: _Rank,
    exposed: Sequence[Row],  # the exposed stretches that hold `now`
    now: int,
    arrivals: dict[int, tuple[int, int]],  # of each collective: the rank that began last, and when
) -> tuple[_Part, int]:
    """The collective that is exposed at `now`, and the rank that it waited for.

    Rank 0 waits in a gather from 10 to 40, and rank 1 begins it at 35: the part lasts from 35 to 40, and the path goes
    on with what rank 1 did before 35.
    """
    row = max(exposed, key=itemgetter("start_ns"))
    unit, phase, kind = row["unit"], row["phase"], row["name"]
    # which collective the stretch is of: a row of the timeline says its label only
    under_way, _ = here.collectives.before(now, here.start)
    alike = []
    for other in under_way:
        if (other["unit"], other["phase"], other["kind"]) == (unit, phase, kind):
            alike.append(other)

    # where nothing tells it, the stretch is its own, and nobody was waited for
    last, began = rank, row["start_ns"]
    if alike:
        collective = min(alike, key=lambda other: (other["end_ns"], -other["start_ns"]))
        # one of which nothing was exposed on the link delayed only by its own copies and waits
        earliest = collective["start_ns"] if collective["on_link_ns"] else began
        last, began = arrivals[id(collective)]
        # a rank that came before anything was exposed here, or only now, delayed nothing
        if not earliest <= began < now:
            last, began = rank, earliest
    return _Part(rank, kind, unit, phase, max(began, here.start), now), last


def _joined(backwards: Sequence[_Part]) -> list[_Part]:
    """Put the parts in order of time, neighbours of one kind as one part; AccountingError for a gap between them."""
    forwards = backwards[::-1]
    for before, part in pairwise(forwards):
        if before.end != part.start:
            raise AccountingError(f"the critical path has a gap before {part}; report this with the traces")
    joined = []
    for _, alike in groupby(forwards, lambda part: (part.rank, part.what, part.unit, part.phase)):
        neighbours = list(alike)
        first, last = neighbours[0], neighbours[-1]
        joined.append(first._replace(end=last.end))
    return joined


def _shares(parts: Sequence[Row]) -> tuple[Row, ...]:
    """The parts of one rank, unit, phase and kind as one row, the longest first."""
    rows = []
    for label, alike in grouped(parts, itemgetter(*_OF)).items():
        row: Row = dict(zip(_OF, label))
        row["parts"] = len(alike)
        row["ns"] = sum(part["ns"] for part in alike)
        row["share"] = sum(part["share"] for part in alike)
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row["ns"]))


def _sentence(step: int, rows: Sequence[Row], several: bool) -> str:
    """What the path consists of, and its largest part."""
    by_what: Counter[str] = Counter()
    for row in rows:
        by_what[row["what"]] += row["ns"]
    listed = []
    for what, ns in by_what.most_common():
        listed.append(f"{seconds(ns / 1e9)} {what}")
    whole = seconds(sum(by_what.values()) / 1e9)
    across = " from the first rank's start to the last rank's end" if several else ""

    longest = _shares(rows)[0]
    unit = f" of {longest['unit']}" if longest["unit"] else ""
    lasts = seconds(longest["ns"] / 1e9)
    return (
        f"Step {step} lasts {whole}{across}: {', '.join(listed)}."
        f" The largest part is {longest['what']}{unit} on rank {longest['rank']}, {lasts}."
    )
