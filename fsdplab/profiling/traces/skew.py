"""The same collective on several ranks: who meets whom, how fast it was, and who waited for a peer.

On one rank a slow network and a late peer look the same: a long collective. All ranks together show the difference: the
last rank to arrive did not wait, so the shortest time of any rank is the link's. Clocks of the ranks must agree: those
of one machine do.

Pure: rows go in (the record's `ledger`, or `TraceAnalysis.rows("collectives")`), values come out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fsdplab.profiling.traces.overlap import StepAnalysis, TraceAnalysis

Row = dict[str, Any]
Key = tuple[int, str, str, str, int]
_MAY_BE_A_PEER = ("nothing_to_hide_behind", "late_start", "unknown")


def bus_factor(kind: str, ranks: int) -> float:
    """From bytes/t to the bandwidth of the busiest link: `bus_factor("all_gather", 4)` is 0.75, all_reduce 1.5."""
    share = (ranks - 1) / ranks
    return {"all_gather": share, "reduce_scatter": share, "all_to_all": share, "all_reduce": 2 * share}.get(kind, 1.0)


def sent_per_step(collectives: Sequence[Row], ranks_of_job: int) -> tuple[int | None, int | None]:
    """(bytes that one rank sends in a step, its collectives), of the last profiled step of the rank that sends most;
    bytes are None where the trace does not say them of each collective.

    8 MB gathered over 2 ranks: 4 MB sent, in one collective.
    """
    last = max((row["step"] for row in collectives), default=None)
    of_rank: dict[int, list[float]] = defaultdict(list)
    for row in collectives:
        if row["step"] == last:
            factor = bus_factor(row["kind"], row["group_size"] or ranks_of_job)
            of_rank[row["rank"]].append((row["logical_bytes"] or 0) * factor)
    known = all(row["logical_bytes"] is not None for row in collectives)
    most = max(map(sum, of_rank.values()), default=None)
    return round(most) if known and most is not None else None, max(map(len, of_rank.values()), default=None)


def bandwidths(kind: str, nbytes: int | None, ns: int, ranks: int) -> tuple[float | None, float | None]:
    """(algbw, busbw) in bytes/s, None if unknown: 8 MB all-gathered over 2 ranks in 1 ms are 8e9 and 4e9."""
    if not nbytes or ns <= 0:
        return None, None
    algbw = nbytes / (ns * 1e-9)
    return algbw, algbw * bus_factor(kind, ranks)


def matched(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """Rows of the same collective: same step, unit, phase, kind and occurrence (from 0); one a rank.

    The n-th of a unit, phase and kind on one rank meets the n-th on the others.
    """
    counts: dict[tuple, int] = defaultdict(int)
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["start_ns"]):
        name = (row["step"], row["unit"], row["phase"], row["kind"])
        own = (row["rank"], *name)
        key = (*name, counts[own])
        counts[own] += 1
        groups[key].append(row)
    return groups


def with_peers(analyses: Sequence[TraceAnalysis]) -> list[TraceAnalysis]:
    """The same analyses with `waiting_for_peer` where the other ranks tell: a peer came later by at least half of what
    was exposed.

    What a transport spent before its last rank came is waiting for a peer, and no longer on the link. All analyses of
    one run; ranks on clocks of their own (several machines) cannot be compared and must not be given together.
    """
    came = "start_ns" if any(each.device == "cuda" for each in analyses) else "issue_ns"  # a GPU's host runs ahead
    groups = matched(row for analysis in analyses for step in analysis.steps for row in step.collectives)
    last = {id(row): max(each[came] for each in members) for members in groups.values() for row in members}
    return [
        replace(analysis, steps=tuple(_explained(step, last, came) for step in analysis.steps)) for analysis in analyses
    ]


def _explained(step: StepAnalysis, last: dict[int, int], came: str) -> StepAnalysis:
    collectives = tuple(_told(row, last[id(row)], came) for row in step.collectives)
    worst: dict[tuple, Row] = {}
    waited: dict[tuple, int] = defaultdict(int)
    for row, before in sorted(zip(collectives, step.collectives), key=lambda pair: pair[0]["exposed_ns"]):
        worst[_group(row)] = row
        waited[_group(row)] += row["waiting_ns"] - before["waiting_ns"]
    exposed = tuple(
        _waiting(row | {"cause": worst.get(_group(row), row)["cause"]}, waited[_group(row)]) for row in step.exposed
    )
    breakdown = _waiting(step.breakdown, sum(waited.values()))
    return replace(step, breakdown=breakdown, exposed=exposed, collectives=collectives)


def _told(row: Row, last: int, came: str) -> Row:
    """The row where the last rank came at `last`: what a transport spent before then is waiting (an emulated link
    begins then), and its cause is a peer if that rank came later by at least half of what was exposed.
    """
    before = 0 if row["emulated"] else sum(max(0, min(end, last) - start) for start, end in row["on_link"])
    by_a_peer = 0 < row["exposed_ns"] <= 2 * (last - row[came]) and row["cause"] in _MAY_BE_A_PEER
    return _waiting(row | {"cause": "waiting_for_peer"} if by_a_peer else row, before)


def _waiting(row: Row, waited_ns: int) -> Row:
    """The row with so many ns of its time on the link as waiting for a peer."""
    return row | {"on_link_ns": row["on_link_ns"] - waited_ns, "waiting_ns": row["waiting_ns"] + waited_ns}


def _group(row: Row) -> tuple[str, str, str]:
    return row["unit"], row["phase"], row["kind"]
