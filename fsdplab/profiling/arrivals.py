"""When each rank came to each collective of a record, and who came late beyond chance.

A collective cannot begin before its last rank has come, so a late rank is every other rank's exposed time. On the CPU a
rank comes when it issues a collective. On a GPU its host runs ahead, so it comes when the device begins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from fsdplab.common.words import plural
from fsdplab.profiling.late_rank import Arrivals, LateRank, fewest_steps, late_rank
from fsdplab.profiling.step_summary import step_summary
from fsdplab.profiling.traces.skew import matched
from fsdplab.records import RunRecord
from fsdplab.records.tables import Row

_PAIRED = "send_recv"
_CLOCKS_NS = 1_000_000  # ranks that end the same collectives further apart than this are on different clocks


def arrivals_of(record: RunRecord, steps: Iterable[int]) -> Arrivals:
    """(step, unit, phase, kind, occurrence) -> rank -> when it came, in ns, of these steps; collectives of one rank
    alone are left out.

    The ledger has all steps of the lab's engine, the table `collectives` the profiled ones of every engine.
    """
    wanted = set(steps)
    ledger = [row for row in record.table("ledger") if row["step"] in wanted]
    rows = ledger or [row for row in record.table("collectives") if row["step"] in wanted]
    on_gpu = record.environment.get("device") == "cuda"
    met = {key: members for key, members in matched(_meeting(rows)).items() if len(members) > 1}
    shift = {} if ledger else _clock_shifts(met)
    return {
        key: {row["rank"]: _came(row, on_gpu) - shift.get(row["rank"], 0) for row in members}
        for key, members in met.items()
    }


def late_rank_of(record: RunRecord) -> LateRank | None:
    """The rank that came late beyond chance in the profiled steps and, where the ledger has them, in the timed ones;
    None where nobody did.
    """
    summary = step_summary(record.table("breakdown"))
    if summary is None or not summary.step_ns:
        return None
    arrivals = arrivals_of(record, _steps_of(record))
    if record.provenance.get("step_time_s") == "simulated":  # every step would be the same
        arrivals = {(step, *key[1:]): times for key, times in arrivals.items() for step in range(fewest_steps(2))}
    return late_rank(arrivals, summary.step_ns)


def too_few_steps(record: RunRecord) -> str:
    """What to say where nobody can be named since the record has too few steps; "" where it has enough.

    Of 6 steps between 2 ranks: `6 steps cannot tell (8 can: --steps 8)`.
    """
    if record.provenance.get("step_time_s") == "simulated":
        return ""
    ledger = {row["step"] for row in record.table("ledger")} or {row["step"] for row in record.table("collectives")}
    known, fewest = len(_steps_of(record) & ledger), fewest_steps(max(2, record.spec.get("world_size") or 0))
    return "" if known >= fewest else f"{plural(known, 'step')} cannot tell ({fewest} can: --steps {fewest})"


def _steps_of(record: RunRecord) -> set[int]:
    """The timed steps and the profiled ones."""
    timed = {row["step"] for row in record.table("steps") if row["step_time_s"] is not None}
    return timed | {row["step"] for row in record.table("breakdown")}


def _came(row: Row, on_gpu: bool) -> int:
    issue: int | None = None if on_gpu else row.get("issue_ns")
    return int(row["start_ns"] if issue is None else issue)


def _meeting(rows: Sequence[Row]) -> list[Row]:
    """Of two ranks a send meets a receive, in whichever phase. Of more, sends and receives of a ring meet by their
    number; where one rank has more of them than another, as in a pipeline, the rows do not say who meets whom.
    """
    ranks = {row["rank"] for row in rows}
    if len(ranks) <= 2:
        return [row | {"phase": ""} if row["kind"] == _PAIRED else row for row in rows]
    counts: dict[tuple[Any, ...], Counter[int]] = defaultdict(Counter)
    for row in rows:
        counts[row["step"], row["unit"], row["phase"]][row["rank"]] += row["kind"] == _PAIRED
    uneven = {where for where, each in counts.items() if len(each) < len(ranks) or len(set(each.values())) > 1}
    return [row for row in rows if row["kind"] != _PAIRED or (row["step"], row["unit"], row["phase"]) not in uneven]


def _clock_shifts(met: Mapping[Any, Sequence[Row]]) -> dict[int, int]:
    """How far each rank's clock is ahead of the others': all ranks end a collective together, so ends that are always
    apart are of different clocks.
    """
    apart: dict[int, list[float]] = defaultdict(list)
    for key, members in met.items():
        middle = median(row["end_ns"] for row in members)
        for row in members if key[3] != _PAIRED else ():
            apart[row["rank"]].append(row["end_ns"] - middle)
    shifts = {rank: round(median(each)) for rank, each in apart.items()}
    return {rank: shift for rank, shift in shifts.items() if abs(shift) > _CLOCKS_NS}
