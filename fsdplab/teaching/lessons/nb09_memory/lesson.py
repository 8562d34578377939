"""Lesson 09 in the notebook's process: one step's memory, its peak, and the units that are whole at that instant.

A job of a few seconds, and tables over its record's `memory`, `life` and `ledger`. Instants are ns since the memory
step began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdplab.figures import memory_by_category
from fsdplab.figures.plotly_go import go
from fsdplab.figures.view import view
from fsdplab.records import CATEGORIES, RunRecord

MB = MS = 1e6
Row = dict[str, Any]


# ---- the peak


def peak_row(record: RunRecord) -> Row:
    """Return the row of the memory table at the peak of the worst rank.

    A row has the bytes of each category, and when that was: `rank`, and `time_ns` since the memory step began.
    """
    peaks = [row for row in record.table("memory") if row["is_peak"]]
    return max(peaks, key=total)


def total(row: Row) -> int:
    """Return the bytes of a memory row in all."""
    return sum(row[name] for name in CATEGORIES)


def instant(record: RunRecord) -> int:
    """Return when the worst rank's memory peaks, in ns since its memory step began."""
    return peak_row(record)["time_ns"]


def by_category(record: RunRecord) -> dict[str, int]:
    """Return the bytes by category at the peak of the worst rank."""
    row = peak_row(record)
    return {name: row[name] for name in CATEGORIES}


def unsharded(record: RunRecord) -> float:
    """Return the MB of unsharded parameters at the peak."""
    return peak_row(record)["unsharded_parameters"] / MB


def place_of(record: RunRecord, at: int) -> str:
    """Return the phase and how much of it is over: `in the backward, 3% of the way through it`.

    By the units' states: a backward ends when the last unit is resharded, and a forward where the backward begins, as
    its last unit may have been unsharded long before.
    """
    life = life_of(record, peak_row(record)["rank"])
    forward = [row["time_ns"] for row in life if row["phase"] == "forward"]
    backward = [row["time_ns"] for row in life if row["phase"] == "backward"]
    if not backward:
        return "in the step"
    if at > max(backward):
        return "in the optimizer's step"
    phase, begin, end = "backward", min(backward), max(backward)
    # before the first unit's backward it is still forward, which ends there
    if at < begin:
        phase, begin, end = "forward", min(forward), begin
    part = (at - begin) / max(1, end - begin)
    return f"in the {phase}, {part:.0%} of the way through it"


# ---- who is whole at an instant


def life_of(record: RunRecord, rank: int = 0) -> list[Row]:
    """Return rows `unit`, `state`, `phase`, `time_ns` of one rank's memory step, in order of time.

    Times are in ns since that step began.
    """
    begin = record.summary.memory_start_ns[rank]
    steps = {row["step"] for row in record.table("memory")}
    rows = []
    for row in record.table("life"):
        if row["rank"] != rank or row["step"] not in steps:
            continue
        rows.append(
            {
                "unit": row["unit"] or "root",
                "state": row["state"],
                "phase": row["phase"],
                "time_ns": row["time_ns"] - begin,
            }
        )
    return sorted(rows, key=lambda row: row["time_ns"])


def unit_bytes(record: RunRecord) -> dict[str, int]:
    """Return the bytes of each unit's whole parameters, as all-gathers carried them: `{"root": 164352, ...}`."""
    nbytes = {}
    for row in record.table("ledger"):
        if row["kind"] == "all_gather":
            # a unit is unsharded several times, with the same bytes each time
            nbytes[row["unit"] or "root"] = row["logical_bytes"]
    return nbytes


# ---- several runs


def memory_figure(runs: Mapping[str, RunRecord]) -> go.Figure:
    """Draw the peaks of several runs by category, each under its name."""
    views = [replace(view(run), strategy=name, note="") for name, run in runs.items()]
    return memory_by_category(views)


def more_sequences(run: RunRecord) -> float:
    """Return from how many sequences on activations at the peak exceed the optimizer's state, in proportion."""
    nbytes = by_category(run)
    # activations grow with the batch, and the optimizer's state does not
    activations_a_sequence = nbytes["activations"] / run.spec["batch_size"]
    return nbytes["optimizer_state"] / activations_a_sequence
