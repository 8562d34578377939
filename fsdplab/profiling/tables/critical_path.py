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
from fsdplab.profiling.traces.overlap import TraceAnalysis

COMPUTE, IDLE, BEFORE = "compute", "idle", "before its step"
_OF = ("rank", "what", "unit", "phase")  # what neighbours are joined by
_OF_PART = (Column("rank", "rank", "count"), Column("what", "what"), Column("unit", "unit"), Column("phase", "phase"))
_LASTS = (Column("ns", "lasts", "ns"), Column("share", "of the step", "share"))
_SHARES = (*_OF_PART, Column("parts", "parts", "count"), *_LASTS)
_PARTS = (Column("order", "part", "count"), *_OF_PART, Column("start_ns", "begins", "ns"), *_LASTS)
_CLOCKS_AGREE_NS = 1_000_000  # by how much two ranks may differ and still be of one clock
_WAITS_FOR_ALL = ("all_gather", "reduce_scatter", "all_reduce", "barrier")  # ends nowhere before all have begun


class _Part(NamedTuple):
    rank: int
    what: str
    unit: str
    phase: str
    start: int
    end: int


class _Lane:
    """Rows of one rank, computing or collectives, that can be asked for those around an instant."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = sorted(rows, key=itemgetter("start_ns", "end_ns"))
        self._starts = [row["start_ns"] for row in self.rows]
        self._latest = list(accumulate((row["end_ns"] for row in self.rows), max))

    def before(self, now: int, since: int) -> tuple[list[Row], int]:
        """What began before `now` and had not ended; and where there is nothing, when the last row ended, or `since`
        if that is later.
        """
        at, found = bisect_left(self._starts, now) - 1, []
        while at >= 0 and self._latest[at] >= now:
            found += [self.rows[at]] if self.rows[at]["end_ns"] >= now else []
            at -= 1
        return found, max(since, self._latest[at]) if at >= 0 else since


class _Rank(NamedTuple):
    """One rank in the step: its window, its computing, its exposed time and its collectives."""

    start: int
    end: int
    computing: _Lane
    exposed: _Lane
    collectives: _Lane


def critical_path(analyses: Sequence[TraceAnalysis], step: int | None = None, *, in_order: bool = False) -> Table:
    """What one step's critical path is made of, the longest first, or every part of it `in_order` of time; `step` is
    the slowest one unless given.

    `analyses` are of one run's ranks on one clock; raises TraceError where their clocks disagree, or none has the step.
    Two ranks that compute for 80 and 100 ms and then reduce for 10: 100 ms of the second rank's computing, then the
    collective.
    """
    steps = {row["step"]: row["step_ns"] for each in analyses for row in each.rows("breakdown")}
    if step is None and steps:
        step = max(steps, key=steps.__getitem__)
    ranks = {each.rank: _rank(each, step) for each in analyses if any(one.step == step for one in each.steps)}
    if step is None or not ranks:
        raise TraceError(f"no trace has step {step}; expected one of {', '.join(map(str, sorted(steps))) or 'none'}.")
    arrivals = _arrivals([row for rank in ranks.values() for row in rank.collectives.rows])
    parts = _joined(_walked(ranks, arrivals))
    begun, whole = parts[0].start, parts[-1].end - parts[0].start
    rows = tuple(
        {"order": order, **dict(zip(_OF, of)), "start_ns": start - begun, "ns": end - start}
        | {"share": (end - start) / whole}
        for order, (*of, start, end) in enumerate(parts, start=1)
    )
    columns, shown = (_PARTS, rows) if in_order else (_SHARES, _shares(rows))
    return Table(
        "critical_path", f"Critical path of step {step}", _sentence(step, rows, len(ranks) > 1), columns, shown
    )


def _rank(analysis: TraceAnalysis, step: int | None) -> _Rank:
    found = next(each for each in analysis.steps if each.step == step)
    whole = next(row for row in found.timeline if row["lane"] == "step")
    # of the timeline's joined rows the parts in which the rank did compute
    computing = [
        row | {"start_ns": start, "end_ns": end}
        for row in found.timeline
        if row["lane"] == COMPUTE
        for start, end in within(found.computing, row["start_ns"], row["end_ns"]).tolist()
    ]
    exposed = [row | {"name": row["name"].removesuffix(OFF_LINK)} for row in found.timeline if row["lane"] == "exposed"]
    return _Rank(whole["start_ns"], whole["end_ns"], _Lane(computing), _Lane(exposed), _Lane(found.collectives))


def _arrivals(rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """For each row of a collective, by identity: the rank that began last, and when."""
    found, named = {}, any(row["unit"] for row in rows)
    for key, members in matched(rows).items():
        last = max(members, key=lambda row: (row["start_ns"], -row["rank"]))
        first_end = min(row["end_ns"] for row in members)
        if key[3] in _WAITS_FOR_ALL and last["start_ns"] - first_end > _CLOCKS_AGREE_NS:
            of = f" of {key[1] or 'the root'}" if named else ""
            raise TraceError(
                f"the ranks' clocks disagree: {key[3]}{of} ended on one rank"
                f" {seconds((last['start_ns'] - first_end) / 1e9)} before rank {last['rank']} began it; a path across"
                " ranks needs traces of one machine, or of machines whose clocks are synchronised."
            )
        for row in members:
            found[id(row)] = last["rank"], last["start_ns"]
    return found


def _walked(ranks: dict[int, _Rank], arrivals: dict[int, tuple[int, int]]) -> list[_Part]:
    """The parts, the last first."""
    rank = max(ranks, key=lambda each: (ranks[each].end, -each))
    now, parts = ranks[rank].end, []
    while now > ranks[rank].start:
        part, rank = _part(rank, ranks[rank], now, arrivals)
        parts.append(part)
        now = part.start
    first = min(each.start for each in ranks.values())
    return [*parts, _Part(rank, BEFORE, "", "", first, now)] if first < now else parts


def _part(rank: int, here: _Rank, now: int, arrivals: dict[int, tuple[int, int]]) -> tuple[_Part, int]:
    """What ends at `now` on this rank, and the rank that the path goes on with before it."""
    computing, since = here.computing.before(now, here.start)
    if computing:
        row = max(computing, key=itemgetter("end_ns"))
        return _Part(rank, COMPUTE, row["unit"], row["phase"], max(row["start_ns"], here.start), now), rank
    exposed, since = here.exposed.before(now, since)
    return _exposed(rank, here, exposed, now, arrivals) if exposed else (_Part(rank, IDLE, "", "", since, now), rank)


def _exposed(
    rank: int, here: _Rank, exposed: Sequence[Row], now: int, arrivals: dict[int, tuple[int, int]]
) -> tuple[_Part, int]:
    """The collective that is exposed at `now`, and the rank that it waited for."""
    row = max(exposed, key=itemgetter("start_ns"))
    of = row["unit"], row["phase"], row["name"]
    under_way, _ = here.collectives.before(now, here.start)
    mine = [each for each in under_way if (each["unit"], each["phase"], each["kind"]) == of]
    last, began = rank, row["start_ns"]
    if mine:
        each = min(mine, key=lambda one: (one["end_ns"], -one["start_ns"]))
        earliest = each["start_ns"] if each["on_link_ns"] else began
        last, began = arrivals[id(each)]
        if not earliest <= began < now:
            last, began = rank, earliest
    return _Part(rank, of[2], *of[:2], max(began, here.start), now), last


def _joined(backwards: Sequence[_Part]) -> list[_Part]:
    """In order of time, neighbours of one kind as one part."""
    forwards, parts = backwards[::-1], []
    for before, part in pairwise(forwards):
        if before.end != part.start:
            raise AccountingError(f"the critical path has a gap before {part}; report this with the traces")
    for _, group in groupby(forwards, lambda part: part[: len(_OF)]):
        first, *others = group
        parts.append(first._replace(end=others[-1].end) if others else first)
    return parts


def _shares(parts: Sequence[Row]) -> tuple[Row, ...]:
    """The parts of one rank, unit, phase and kind as one row, the longest first."""
    rows = [
        {**dict(zip(_OF, of)), "parts": len(own), **{name: sum(row[name] for row in own) for name in ("ns", "share")}}
        for of, own in grouped(parts, itemgetter(*_OF)).items()
    ]
    return tuple(sorted(rows, key=lambda row: -row["ns"]))


def _sentence(step: int, rows: Sequence[Row], several: bool) -> str:
    by_what: Counter[str] = Counter()
    for row in rows:
        by_what[row["what"]] += row["ns"]
    shares = ", ".join(f"{seconds(ns / 1e9)} {what}" for what, ns in by_what.most_common())
    longest = _shares(rows)[0]
    unit = f" of {longest['unit']}" if longest["unit"] else ""
    across = " from the first rank's start to the last rank's end" if several else ""
    return (
        f"Step {step} lasts {seconds(sum(by_what.values()) / 1e9)}{across}: {shares}. The largest part is"
        f" {longest['what']}{unit} on rank {longest['rank']}, {seconds(longest['ns'] / 1e9)}."
    )
