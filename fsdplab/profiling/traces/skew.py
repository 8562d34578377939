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
from fsdplab.profiling.intervals import Intervals
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
    of_rank: dict[int, list[float]] = defaultdict(list)  # bytes that each of its collectives sends
    for row in collectives:
        if row["step"] == last:
            # of 8 MB gathered over 4 ranks each sends three quarters
            factor = bus_factor(row["kind"], row["group_size"] or ranks_of_job)
            nbytes = row["logical_bytes"] or 0
            of_rank[row["rank"]].append(nbytes * factor)
    most_bytes = max(map(sum, of_rank.values()), default=None)
    most_collectives = max(map(len, of_rank.values()), default=None)
    is_known = any(row["logical_bytes"] is not None for row in collectives)
    if not is_known or most_bytes is None:
        return None, most_collectives
    return round(most_bytes), most_collectives


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
    # a GPU's host runs ahead, so there a rank comes when its kernel starts
    is_on_gpus = any(analysis.device == "cuda" for analysis in analyses)
    came = "start_ns" if is_on_gpus else "issue_ns"
    last_came: dict[int, int] = {}  # by the identity of a row: when the last rank came to its collective
    for members in matched(_collectives(on_one_clock)).values():
        last = max(row[came] for row in members)
        for row in members:
            last_came[id(row)] = last
    explained = []
    for analysis in on_one_clock:
        steps = tuple(_explained(step, last_came, came) for step in analysis.steps)
        explained.append(replace(analysis, steps=steps))
    return explained


def _collectives(analyses: Sequence[TraceAnalysis]) -> list[Row]:
    """The rows of all collectives of all ranks."""
    rows: list[Row] = []
    for analysis in analyses:
        for step in analysis.steps:
            rows += step.collectives
    return rows


def clocks_explain(analyses: Sequence[TraceAnalysis]) -> bool:
    """Whether one shift a rank makes many collectives end together to within some microseconds: no two runs do so."""
    meetings = list(matched(_collectives(analyses)).values())
    shared = [members for members in meetings if len(members) > 1]
    clocks = clocks_of(meetings)
    is_sharp = all(clock.error_ns <= _SHARP_NS for clock in clocks.values())
    has_all = all(analysis.rank in clocks for analysis in analyses)
    return len(shared) >= _MANY and is_sharp and has_all


def _on_one_clock(analyses: Sequence[TraceAnalysis]) -> list[TraceAnalysis]:
    """The analyses with each rank's shift taken from all of its times. CPU ranks of one host share its clock, and
    their threads end a collective less sharply than kernels do: their clocks are believed unless they cannot be right.
    """
    # an emulated link ends a collective on each rank by itself: only real ones end together
    real = [row for row in _collectives(analyses) if not row["emulated"]]
    meetings = list(matched(real).values())
    hosts = {analysis.origin.host for analysis in analyses}
    is_one_host = len(hosts) == 1 and "" not in hosts
    on_cpus = all(analysis.device == "cpu" for analysis in analyses)
    if is_one_host and on_cpus and not contradict(meetings):
        return list(analyses)
    clocks = clocks_of(meetings)
    return [shifted(analysis, clocks.get(analysis.rank, Clock())) for analysis in analyses]


def on_axes(analysis: TraceAnalysis, spec: Mapping[str, Any]) -> TraceAnalysis:
    """The analysis with the process group of each collective of a run of the lab: that of the mesh's axis."""

    def with_group(row: Row) -> Row:
        # what the trace tells is left; of a message the axis does not say between which two ranks it goes
        if row["members"] not in ("", ONE_OF_SEVERAL) or row["kind"] == PAIRED:
            return row
        group = of_axis(spec, analysis.rank, row["kind"])
        return row | {"group": group.name, "group_size": group.size, "members": group.members}

    steps = []
    for step in analysis.steps:
        collectives = tuple(map(with_group, step.collectives))
        steps.append(replace(step, collectives=collectives))
    return replace(analysis, steps=tuple(steps))


def shifted(analysis: TraceAnalysis, clock: Clock) -> TraceAnalysis:
    """The analysis with all its times set back by what its clock is ahead."""
    if not clock.ahead_ns:
        return replace(analysis, clock=clock)
    ahead = clock.ahead_ns

    def earlier(row: Row) -> Row:
        times: Row = {}  # a row of the timeline has no issue
        for name in ("issue_ns", "start_ns", "end_ns"):
            if name in row:
                times[name] = row[name] - ahead
        if "on_link" in row:
            times["on_link"] = [[start - ahead, end - ahead] for start, end in row["on_link"]]
        return row | times

    steps = []
    for step in analysis.steps:
        timeline = tuple(map(earlier, step.timeline))
        collectives = tuple(map(earlier, step.collectives))
        computing: Intervals = step.computing - ahead
        steps.append(replace(step, timeline=timeline, collectives=collectives, computing=computing))
    return replace(analysis, steps=tuple(steps), clock=clock)


def _explained(step: StepAnalysis, last_came: dict[int, int], came: str) -> StepAnalysis:
    """The step with what its ranks waited for their peers, in all of its tables."""
    collectives = tuple(_with_peer(row, last_came[id(row)], came) for row in step.collectives)
    # of each unit, phase and kind, which is a row of `exposed`
    cause: dict[tuple, str] = {}
    waited_ns: dict[tuple, int] = defaultdict(int)
    both = zip(collectives, step.collectives)
    by_exposed_time = sorted(both, key=lambda rows: rows[0]["exposed_ns"])
    for row, before in by_exposed_time:
        label = _label(row)
        cause[label] = row["cause"]  # the most exposed one comes last, and its cause stays
        waited_ns[label] += row["waiting_ns"] - before["waiting_ns"]

    # the same ns leave the link and become waiting in the sums over collectives
    exposed = []
    for row in step.exposed:
        label = _label(row)
        row = row | {"cause": cause.get(label, row["cause"])}
        exposed.append(_waiting(row, waited_ns[label]))
    breakdown = _waiting(step.breakdown, sum(waited_ns.values()))
    return replace(step, breakdown=breakdown, exposed=tuple(exposed), collectives=collectives)


def _with_peer(row: Row, last: int, came: str) -> Row:
    """The row where the last rank came at `last`: what a transport spent before then is waiting (an emulated link
    begins then), and its cause is a peer if that rank came later by at least half of what was exposed.

    On the link from 100 to 400, and the last rank came at 250: 150 ns of waiting, 150 on the link.
    """
    waited_ns = 0
    if not row["emulated"]:
        for start, end in row["on_link"]:
            waited_ns += max(0, min(end, last) - start)
    is_half_of_it = 0 < row["exposed_ns"] <= 2 * (last - row[came])
    if is_half_of_it and row["cause"] in _MAY_BE_A_PEER:
        row = row | {"cause": "waiting_for_peer"}
    return _waiting(row, waited_ns)


def _waiting(row: Row, waited_ns: int) -> Row:
    """The row with so many ns of its time on the link as waiting for a peer."""
    on_link_ns = row["on_link_ns"] - waited_ns
    waiting_ns = row["waiting_ns"] + waited_ns
    return row | {"on_link_ns": on_link_ns, "waiting_ns": waiting_ns}


def _label(row: Row) -> tuple[str, str, str]:
    """What a row of `exposed` sums up: all collectives of a unit, phase and kind."""
    return row["unit"], row["phase"], row["kind"]
