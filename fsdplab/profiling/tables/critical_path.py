"""The critical path of a step across ranks: whose computing and which collectives its length is made of.

It is walked backwards from the instant at which the last rank ends. Where that rank computed, the path goes through its
computing; where it waited in a collective, through the collective back to the start of the rank that arrived last, and
goes on there; where it did neither, through the gap. Where it reaches a rank that began later than the first one, the
time until then is "before its step". The parts are one after the other, so they sum to the step from the first rank's
first work to the last rank's end. Computing is what the breakdown counts as computing, not the timeline's joined rows.

HTA builds a graph of operators, launches and synchronisations of one rank; here the granularity is coarser and the path
crosses ranks, since what a sharded step waits for is usually another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdplab.common.sizes import seconds
from fsdplab.profiling.intervals import Intervals
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.overlap import TraceAnalysis
from fsdplab.profiling.traces.skew import matched

COMPUTE, IDLE, BEFORE = "compute", "idle", "before its step"
_SHARES = (
    Column("rank", "rank", "count"), Column("what", "what"), Column("unit", "unit"), Column("phase", "phase"),
    Column("parts", "parts", "count"), Column("ns", "lasts", "ns"), Column("share", "of the step", "share"),
)  # fmt: skip
_PARTS = (
    Column("order", "part", "count"), Column("rank", "rank", "count"), Column("what", "what"), Column("unit", "unit"),
    Column("phase", "phase"), Column("start_ns", "begins", "ns"), Column("ns", "lasts", "ns"),
    Column("share", "of the step", "share"),
)  # fmt: skip
_CLOCKS_AGREE_NS = 1_000_000  # by how much two ranks may differ and still be of one clock
_WAITS_FOR_ALL = ("all_gather", "reduce_scatter", "all_reduce", "barrier")  # ends nowhere before all have begun


@dataclass(frozen=True)
class _Part:
    rank: int
    what: str
    unit: str
    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class _Rank:
    """One rank in the step: its window, and its computing and collectives in order of their ends."""

    start: int
    end: int
    computing: list[Row]
    collectives: list[Row]


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
    arrivals = _arrivals([row for rank in ranks.values() for row in rank.collectives])
    parts = _joined(_walked(ranks, arrivals))
    begun = parts[0].start
    rows = tuple(
        {
            "order": order, "rank": part.rank, "what": part.what, "unit": part.unit, "phase": part.phase,
            "start_ns": part.start - begun, "ns": part.end - part.start,
            "share": (part.end - part.start) / (parts[-1].end - begun),
        }
        for order, part in enumerate(parts, start=1)
    )  # fmt: skip
    columns, shown = (_PARTS, rows) if in_order else (_SHARES, _shares(rows))
    return Table(
        "critical_path", f"Critical path of step {step}", _sentence(step, rows, len(ranks) > 1), columns, shown
    )


def _rank(analysis: TraceAnalysis, step: int | None) -> _Rank:
    found = next(each for each in analysis.steps if each.step == step)
    whole = next(row for row in found.timeline if row["lane"] == "step")
    computing = _exactly([row for row in found.timeline if row["lane"] == COMPUTE], found.computing)
    return _Rank(
        whole["start_ns"],
        whole["end_ns"],
        sorted(computing, key=lambda row: row["end_ns"]),
        sorted(found.collectives, key=lambda row: row["end_ns"]),
    )


def _exactly(rows: Sequence[Row], computing: Intervals) -> list[Row]:
    """Of the timeline's joined rows the parts in which the rank did compute."""
    pieces = []
    for row in rows:
        first = np.searchsorted(computing[:, 1], row["start_ns"], side="right")
        last = np.searchsorted(computing[:, 0], row["end_ns"], side="left")
        spans = np.clip(computing[first:last], row["start_ns"], row["end_ns"]).tolist()
        pieces += [row | {"start_ns": start, "end_ns": end} for start, end in spans]
    return pieces


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
    left = {each: (len(one.computing), len(one.collectives)) for each, one in ranks.items()}
    while now > ranks[rank].start:
        here = ranks[rank]
        left[rank] = _before(here, now, *left[rank])
        part, follow = _part(rank, here, now, left[rank], arrivals)
        parts.append(part)
        now, rank = part.start, follow
    first = min(each.start for each in ranks.values())
    return [*parts, _Part(rank, BEFORE, "", "", first, now)] if first < now else parts


def _before(rank: _Rank, now: int, computing: int, collectives: int) -> tuple[int, int]:
    """How many of the rank's rows may reach to `now`: those behind began at or after it. Rows are in order of their
    ends, and of one lane nearly disjoint, so that few are looked at again.
    """
    while computing and rank.computing[computing - 1]["start_ns"] >= now:
        computing -= 1
    while collectives and rank.collectives[collectives - 1]["start_ns"] >= now:
        collectives -= 1
    return computing, collectives


def _part(
    rank: int, here: _Rank, now: int, left: tuple[int, int], arrivals: dict[int, tuple[int, int]]
) -> tuple[_Part, int]:
    """What ends at `now` on this rank, and the rank that the path goes on with before it."""
    row = here.computing[left[0] - 1] if left[0] else None
    if row is not None and row["end_ns"] >= now:
        return _Part(rank, COMPUTE, row["unit"], row["phase"], max(row["start_ns"], here.start), now), rank
    under_way, ended = _lately(here.collectives, left[1], now)
    if under_way:
        each = min(under_way, key=lambda one: (one["end_ns"], -one["start_ns"]))
        last, began = arrivals[id(each)]
        if not each["start_ns"] <= began < now:
            last, began = rank, each["start_ns"]
        return _Part(rank, each["kind"], each["unit"], each["phase"], max(began, here.start), now), last
    ends = [here.start]
    ends += [row["end_ns"]] if row is not None else []
    ends += [] if ended is None else [ended]
    return _Part(rank, IDLE, "", "", max(each for each in ends if each < now), now), rank


def _lately(collectives: Sequence[Row], count: int, now: int) -> tuple[list[Row], int | None]:
    """Of the first `count`, in order of their ends: those under way at `now`, and when the last one before ended."""
    under_way: list[Row] = []
    for at in range(count - 1, -1, -1):
        each = collectives[at]
        if each["end_ns"] < now:
            return under_way, each["end_ns"]
        if each["start_ns"] < now:
            under_way.append(each)
    return under_way, None


def _joined(backwards: Sequence[_Part]) -> list[_Part]:
    """In order of time, neighbours of one kind as one part."""
    parts: list[_Part] = []
    for part in reversed(backwards):
        before = parts[-1] if parts else None
        if before is not None and before.end != part.start:
            raise AccountingError(f"the critical path has a gap before {part}; report this with the traces")
        if before is not None and _kind(before) == _kind(part):
            parts[-1] = _Part(part.rank, part.what, part.unit, part.phase, before.start, part.end)
        else:
            parts.append(part)
    return parts


def _kind(part: _Part) -> tuple[int, str, str, str]:
    return part.rank, part.what, part.unit, part.phase


def _shares(parts: Sequence[Row]) -> tuple[Row, ...]:
    """The parts of one rank, unit, phase and kind as one row, the longest first."""
    groups: dict[tuple[int, str, str, str], list[Row]] = {}
    for row in parts:
        groups.setdefault((row["rank"], row["what"], row["unit"], row["phase"]), []).append(row)
    rows = [
        {
            "rank": rank, "what": what, "unit": unit, "phase": phase, "parts": len(members),
            "ns": sum(row["ns"] for row in members), "share": sum(row["share"] for row in members),
        }
        for (rank, what, unit, phase), members in groups.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row["ns"]))


def _sentence(step: int, rows: Sequence[Row], several: bool) -> str:
    by_what: dict[str, int] = {}
    for row in rows:
        by_what[row["what"]] = by_what.get(row["what"], 0) + row["ns"]
    shares = ", ".join(f"{seconds(ns / 1e9)} {what}" for what, ns in sorted(by_what.items(), key=lambda each: -each[1]))
    longest = _shares(rows)[0]
    unit = f" of {longest['unit']}" if longest["unit"] else ""
    across = " from the first rank's start to the last rank's end" if several else ""
    return (
        f"Step {step} lasts {seconds(sum(by_what.values()) / 1e9)}{across}: {shares}. Most of it is"
        f" {longest['what']}{unit} on rank {longest['rank']}, {seconds(longest['ns'] / 1e9)}."
    )
