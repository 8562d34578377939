"""What all ranks' traces together tell of a collective: how fast it was, and who waited for a peer.

On one rank a slow network and a late peer look the same: a long collective. All ranks together show the difference: the
last rank to arrive did not wait, so the shortest time of any rank is the link's. Who meets whom is `meeting`'s; the
ranks' clocks are set alike first (`clocks`), so that all that reads these rows has one clock.

Pure: rows go in (the record's `ledger`, or `TraceAnalysis.rows("collectives")`), values come out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdplab.common.collectives import PAIRED, bus_factor
from fsdplab.profiling.traces.clocks import Clock, clocks_of, contradict
from fsdplab.profiling.traces.groups import ONE_OF_SEVERAL, of_axis
from fsdplab.profiling.traces.meeting import matched
from fsdplab.profiling.traces.overlap import StepAnalysis, TraceAnalysis

Row = dict[str, Any]
_MANY, _SHARP_NS = 5, 20_000
_MAY_BE_A_PEER = ("nothing_to_hide_behind", "late_start", "unknown")


def sent_per_step(collectives: Sequence[Row], ranks_of_job: int) -> tuple[int | None, int | None]:
    """(bytes that one rank sends in a step, its collectives), of the last profiled step of the rank that sends most;
    bytes are None where the trace does not say them of any collective. A collective whose bytes it does not say counts
    for none.

    8 MB gathered over 2 ranks: 4 MB sent, in one collective.
    """
    last = max((row["step"] for row in collectives), default=None)
    of_rank: dict[int, list[float]] = defaultdict(list)
    for row in collectives:
        if row["step"] == last:
            factor = bus_factor(row["kind"], row["group_size"] or ranks_of_job)
            of_rank[row["rank"]].append((row["logical_bytes"] or 0) * factor)
    known = any(row["logical_bytes"] is not None for row in collectives)
    most = max(map(sum, of_rank.values()), default=None)
    return round(most) if known and most is not None else None, max(map(len, of_rank.values()), default=None)


def bandwidths(kind: str, nbytes: int | None, ns: int, ranks: int) -> tuple[float | None, float | None]:
    """(algbw, busbw) in bytes/s, None if unknown: 8 MB all-gathered over 2 ranks in 1 ms are 8e9 and 4e9."""
    if not nbytes or ns <= 0:
        return None, None
    algbw = nbytes / (ns * 1e-9)
    return algbw, algbw * bus_factor(kind, ranks)


def with_peers(analyses: Sequence[TraceAnalysis]) -> list[TraceAnalysis]:
    """The same analyses on one clock, and with `waiting_for_peer` where the other ranks tell: a peer came later by at
    least half of what was exposed.

    What a transport spent before its last rank came is waiting for a peer, and no longer on the link. All analyses are
    of one run.
    """
    on_one_clock = _on_one_clock(analyses)
    came = "start_ns" if any(each.device == "cuda" for each in analyses) else "issue_ns"  # a GPU's host runs ahead
    groups = matched(row for analysis in on_one_clock for step in analysis.steps for row in step.collectives)
    last = {id(row): max(each[came] for each in members) for members in groups.values() for row in members}
    return [
        replace(analysis, steps=tuple(_explained(step, last, came) for step in analysis.steps))
        for analysis in on_one_clock
    ]


def clocks_explain(analyses: Sequence[TraceAnalysis]) -> bool:
    """Whether one shift a rank makes many collectives end together to within some microseconds: no two runs do so."""
    meetings = list(matched(row for each in analyses for step in each.steps for row in step.collectives).values())
    clocks = clocks_of(meetings)
    shared = [members for members in meetings if len(members) > 1]
    sharp = len(shared) >= _MANY and all(clock.error_ns <= _SHARP_NS for clock in clocks.values())
    return sharp and all(each.rank in clocks for each in analyses)


def _on_one_clock(analyses: Sequence[TraceAnalysis]) -> list[TraceAnalysis]:
    """The analyses with each rank's shift taken from all of its times. CPU ranks of one host share its clock, and
    their threads end a collective less sharply than kernels do: their clocks are believed unless they cannot be right.
    """
    meetings = list(
        matched(
            row for each in analyses for step in each.steps for row in step.collectives if not row["emulated"]
        ).values()
    )
    hosts = {each.origin.host for each in analyses}
    one_host = all(each.device == "cpu" for each in analyses) and len(hosts) == 1 and "" not in hosts
    if one_host and not contradict(meetings):
        return list(analyses)
    clocks = clocks_of(meetings)
    return [shifted(each, clocks.get(each.rank, Clock())) for each in analyses]


def on_axes(analysis: TraceAnalysis, spec: Mapping[str, Any]) -> TraceAnalysis:
    """The analysis with the process group of each collective of a run of the lab: that of the mesh's axis."""

    def grouped(row: Row) -> Row:
        group = of_axis(spec, analysis.rank, row["kind"])
        known = row["members"] not in ("", ONE_OF_SEVERAL) or row["kind"] == PAIRED
        return row if known else row | {"group": group.name, "group_size": group.size, "members": group.members}

    steps = (replace(step, collectives=tuple(map(grouped, step.collectives))) for step in analysis.steps)
    return replace(analysis, steps=tuple(steps))


def shifted(analysis: TraceAnalysis, clock: Clock) -> TraceAnalysis:
    """The analysis with all its times set back by what its clock is ahead."""
    if not clock.ahead_ns:
        return replace(analysis, clock=clock)
    ahead = clock.ahead_ns

    def earlier(row: Row) -> Row:
        times: Row = {name: row[name] - ahead for name in ("issue_ns", "start_ns", "end_ns") if name in row}
        if "on_link" in row:
            times["on_link"] = [[start - ahead, end - ahead] for start, end in row["on_link"]]
        return row | times

    steps = (
        replace(
            step, timeline=tuple(map(earlier, step.timeline)), collectives=tuple(map(earlier, step.collectives)),
            computing=step.computing - ahead,
        )
        for step in analysis.steps
    )  # fmt: skip
    return replace(analysis, steps=tuple(steps), clock=clock)


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
