"""Lesson 09 in the notebook's process: one step's memory, its peak, and the units that are whole at that instant.

A job of a few seconds, and tables over its record's `memory`, `life` and `ledger`. Instants are ns since the memory
step began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdplab.figures import memory_by_category
from fsdplab.figures.plotly_go import go
from fsdplab.figures.view import view
from fsdplab.records import CATEGORIES, RunRecord
from fsdplab.teaching.core.display import Note, Table, table

MB = MS = 1e6
Row = dict[str, Any]


# ---- the peak


def peak_row(record: RunRecord) -> Row:
    """Return the row of the memory table at the peak of the worst rank."""
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


def peak_table(record: RunRecord) -> Table:
    """Return the peak split by category, the largest first."""
    row = peak_row(record)
    whole = total(row)
    by_size = sorted(by_category(record).items(), key=lambda part: (part[1], part[0]), reverse=True)
    rows = []
    for name, nbytes in by_size:
        if nbytes:
            rows.append([name.replace("_", " "), f"{nbytes / MB:.1f}", f"{nbytes / whole:.0%}"])
    when = f"{row['time_ns'] / MS:.0f} ms into the step, {place_of(record, row['time_ns'])}"
    return table(["at the peak", "MB", "share"], rows, f"Measured: {whole / MB:.1f} MB on rank {row['rank']}, {when}.")


def seen(record: RunRecord) -> Note:
    """Return the numbers of the memory timeline."""
    peak = peak_row(record)
    rank = peak["rank"]
    least = min(total(row) for row in record.table("memory") if row["rank"] == rank)
    holds = f"holds {least / MB:.0f} MB when it holds least and {total(peak) / MB:.0f} MB at its peak"
    unsharded = f"{peak['unsharded_parameters'] / MB:.1f} MB of the peak are unsharded parameters"
    return Note((f"Rank {rank} {holds}, {place_of(record, peak['time_ns'])}; {unsharded}.",))


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


def state_at(life: Sequence[Row], at: int) -> dict[str, str]:
    """Return every unit's newest state at an instant."""
    states = {}
    for row in sorted(life, key=lambda row: row["time_ns"]):
        if row["time_ns"] <= at:
            states[row["unit"]] = row["state"]
    return states


def unit_bytes(record: RunRecord) -> dict[str, int]:
    """Return the bytes of each unit's whole parameters, as all-gathers carried them."""
    nbytes = {}
    for row in record.table("ledger"):
        if row["kind"] == "all_gather":
            nbytes[row["unit"] or "root"] = row["logical_bytes"]
    return nbytes


def gathered_table(record: RunRecord, holding: Callable[[list[Row], int], Any]) -> Table:
    """Return the units that hold memory at the peak, by the learner's function, and their bytes.

    The caption has the bytes of the memory table, which should be the same.
    """
    row, nbytes = peak_row(record), unit_bytes(record)
    life, at = life_of(record, row["rank"]), row["time_ns"]
    states = state_at(life, at)
    rows, together = [], 0
    for name in sorted(holding(life, at)):
        rows.append([name, states.get(name, "-"), f"{nbytes[name] / MB:.2f}"])
        together += nbytes[name]
    rows.append(["together", "", f"{together / MB:.2f}"])
    whole = f"{row['unsharded_parameters'] / MB:.2f} MB of unsharded parameters at that instant"
    caption = f"Measured on rank {row['rank']}; the memory table has {whole}."
    return table(["unit", "state at the peak", "MB"], rows, caption)


# ---- several runs


def memory_figure(runs: Mapping[str, RunRecord]) -> go.Figure:
    """Draw the peaks of several runs by category, each under its name."""
    views = [replace(view(run), strategy=name, note="") for name, run in runs.items()]
    return memory_by_category(views)


def compared(runs: Mapping[str, RunRecord]) -> Table:
    """Return peak, unsharded bytes and phase of each run, and how many MB it differs from the first."""
    first = total(peak_row(next(iter(runs.values()))))
    rows = []
    for name, run in runs.items():
        peak = peak_row(run)
        at = peak["time_ns"]
        states = state_at(life_of(run, peak["rank"]), at)
        units_unsharded = sum(state != "sharded" for state in states.values())
        rows.append(
            [
                name,
                f"{total(peak) / MB:.1f}",
                f"{(total(peak) - first) / MB:+.1f}",
                f"{peak['unsharded_parameters'] / MB:.1f}",
                str(units_unsharded),
                place_of(run, at),
            ]
        )
    header = ["run", "peak, MB", "against the first", "unsharded, MB", "units unsharded", "the peak is"]
    return table(header, rows, "Measured on the worst rank, at its peak.")


def more_sequences(run: RunRecord) -> float:
    """Return from how many sequences on activations at the peak exceed the optimizer's state, in proportion."""
    nbytes = by_category(run)
    activations_a_sequence = nbytes["activations"] / run.spec["batch_size"]
    return nbytes["optimizer_state"] / activations_a_sequence
