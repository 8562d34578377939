"""The rows of a simulated step in the tables of a run record, a rank of each class.

`emulated` is False in every row: nothing waited for an emulated link. That all of it is simulated stands in the
record's provenance, which every figure shows.
"""

from __future__ import annotations

from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.records import LANES
from fsdplab.records.tables import IDLE_PARTS

from .accounting import Account, Passage, account, cause_of, nanoseconds
from .ranks import RankLog

Row = dict[str, Any]
STEP = 0  # the number of the one step


def tables_of(logs: list[RankLog], inner: int, dtypes: dict[str, str]) -> dict[str, list[Row]]:
    """The tables of all classes' logs; `inner` GPUs share one log's rank (tensor parallelism); the dtype of each kind
    of collective.
    """
    tables: dict[str, list[Row]] = {name: [] for name in ("ledger", "timeline", "breakdown", "exposed", "life", "idle")}
    for index, log in enumerate(logs):
        found, key = account(log, index), {"rank": log.rank.first * inner, "step": STEP}
        tables["ledger"] += [{**key, **row} for row in _ledger(found, dtypes)]
        tables["timeline"] += [{**key, **row, "emulated": False} for row in _timeline(log, found)]
        tables["breakdown"].append({**key, **_breakdown(found)})
        tables["exposed"] += [{**key, **row} for row in _exposed(log, found)]
        tables["life"] += [
            {**key, "unit": unit, "state": state, "phase": phase, "time_ns": nanoseconds(time)}
            for unit, state, phase, time in log.life
        ]
        tables["idle"].append({**key, **dict.fromkeys(IDLE_PARTS, 0), "rest_ns": found.other_ns})
    return tables


def _ledger(found: Account, dtypes: dict[str, str]) -> list[Row]:
    """`logical_bytes` are those sent, too: the simulation knows what travels, not what it is cut from."""
    return [
        {
            "unit": each.collective.unit, "phase": each.collective.phase, "kind": each.collective.transfer.kind,
            "logical_bytes": round(each.collective.transfer.wire_bytes),
            "wire_bytes": round(each.collective.transfer.wire_bytes), "padding_bytes": 0,
            "dtype": dtypes.get(each.collective.transfer.kind, ""), "start_ns": each.start, "end_ns": each.end,
            "emulated": False, "waited_ns": each.exposed_ns,
        }
        for each in found.passages
    ]  # fmt: skip


def _timeline(log: RankLog, found: Account) -> list[Row]:
    def row(lane: str, unit: str, phase: str, name: str, start: int, end: int) -> Row:
        return {"lane": lane, "unit": unit, "phase": phase, "name": name, "start_ns": start, "end_ns": end}

    rows = [row("step", "", "", f"step {STEP}", 0, found.step_ns)]
    for spans, lane in ((log.computed, "compute"), (log.waited, "waiting")):
        for span in spans:
            name = span.kind or f"{span.unit} {span.phase}".strip()
            rows.append(row(lane, span.unit, span.phase, name, nanoseconds(span.start), nanoseconds(span.end)))
    for each in found.passages:
        kind = each.collective.transfer.kind
        lane = kind if kind in LANES else "other_communication"
        rows.append(row(lane, each.collective.unit, each.collective.phase, kind, each.start, each.end))
    for start, end, owner in found.exposed:
        whose = owner.collective
        rows.append(row("exposed", whose.unit, whose.phase, whose.transfer.kind, start, end))
    return rows


def _breakdown(found: Account) -> Row:
    return {
        "step_ns": found.step_ns, "compute_ns": found.compute_only_ns + found.overlapped_ns,
        "compute_only_ns": found.compute_only_ns, "overlapped_ns": found.overlapped_ns,
        "exposed_ns": found.exposed_ns, "other_ns": found.other_ns,
        "on_link_ns": sum(each.on_link_ns for each in found.passages), "copying_ns": 0, "no_core_ns": 0,
        "waiting_ns": sum(each.waiting_ns for each in found.passages),
    }  # fmt: skip


def _exposed(log: RankLog, found: Account) -> list[Row]:
    """One row a unit, phase and kind; of several collectives the most exposed one gives the cause."""
    rows = []
    for (unit, phase, kind), members in grouped(found.passages, _cell_of).items():
        worst = max(members, key=lambda each: each.exposed_ns)
        rows.append(
            {
                "unit": unit, "phase": phase, "kind": kind,
                "communication_ns": sum(each.end - each.start for each in members),
                "exposed_ns": sum(each.exposed_ns for each in members), "cause": cause_of(worst, log.computed),
                "on_link_ns": sum(each.on_link_ns for each in members), "copying_ns": 0, "no_core_ns": 0,
                "waiting_ns": sum(each.waiting_ns for each in members),
            }
        )  # fmt: skip
    return rows


def _cell_of(passage: Passage) -> tuple[str, str, str]:
    return passage.collective.unit, passage.collective.phase, passage.collective.transfer.kind
