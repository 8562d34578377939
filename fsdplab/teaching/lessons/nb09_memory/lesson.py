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
    """The row of the memory table at the peak of the worst rank."""
    return max((row for row in record.table("memory") if row["is_peak"]), key=total)


def total(row: Row) -> int:
    """Bytes of a memory row in all."""
    return sum(row[name] for name in CATEGORIES)


def instant(record: RunRecord) -> int:
    """When the worst rank's memory peaks, in ns since its memory step began."""
    return peak_row(record)["time_ns"]


def by_category(record: RunRecord) -> dict[str, int]:
    """Bytes by category at the peak of the worst rank."""
    row = peak_row(record)
    return {name: row[name] for name in CATEGORIES}


def unsharded(record: RunRecord) -> float:
    """MB of unsharded parameters at the peak."""
    return peak_row(record)["unsharded_parameters"] / MB


def peak_table(record: RunRecord) -> Table:
    """The peak split by category, the largest first."""
    held = sorted(((nbytes, name) for name, nbytes in by_category(record).items() if nbytes), reverse=True)
    whole = sum(nbytes for nbytes, _ in held)
    rows = [[name.replace("_", " "), f"{nbytes / MB:.1f}", f"{nbytes / whole:.0%}"] for nbytes, name in held]
    row = peak_row(record)
    when = f"{row['time_ns'] / MS:.0f} ms into the step, {place_of(record, row['time_ns'])}"
    return table(["at the peak", "MB", "share"], rows, f"Measured: {whole / MB:.1f} MB on rank {row['rank']}, {when}.")


def seen(record: RunRecord) -> Note:
    """The numbers of the memory timeline."""
    row, rows = peak_row(record), record.table("memory")
    rest = min(total(each) for each in rows if each["rank"] == row["rank"])
    holds = f"holds {rest / MB:.0f} MB when it holds least and {total(row) / MB:.0f} MB at its peak"
    unsharded = f"{row['unsharded_parameters'] / MB:.1f} MB of the peak are unsharded parameters"
    return Note((f"Rank {row['rank']} {holds}, {place_of(record, row['time_ns'])}; {unsharded}.",))


def place_of(record: RunRecord, at: int) -> str:
    """The phase and how much of it is over: `in the backward, 3% of the way through it`.

    By the units' states: a backward ends when the last unit is resharded, and a forward where the backward begins, as
    its last unit may have been unsharded long before.
    """
    life = life_of(record, peak_row(record)["rank"])
    forward, backward = ([row["time_ns"] for row in life if row["phase"] == each] for each in ("forward", "backward"))
    if not backward:
        return "in the step"
    if at > max(backward):
        return "in the optimizer's step"
    phase, begin, end = "backward", min(backward), max(backward)
    if at < begin:
        phase, begin, end = "forward", min(forward), begin
    return f"in the {phase}, {(at - begin) / max(1, end - begin):.0%} of the way through it"


# ---- who is whole at an instant


def life_of(record: RunRecord, rank: int = 0) -> list[Row]:
    """Rows `unit`, `state`, `phase`, `time_ns` of one rank's memory step, in order of time, in ns since that step
    began.
    """
    begin = record.summary.memory_start_ns[rank]
    steps = {row["step"] for row in record.table("memory")}
    named = [
        {"unit": row["unit"] or "root", "state": row["state"], "phase": row["phase"], "time_ns": row["time_ns"] - begin}
        for row in record.table("life")
        if row["rank"] == rank and row["step"] in steps
    ]
    return sorted(named, key=lambda row: row["time_ns"])


def state_at(life: Sequence[Row], at: int) -> dict[str, str]:
    """Every unit's newest state at an instant."""
    return {row["unit"]: row["state"] for row in sorted(life, key=lambda row: row["time_ns"]) if row["time_ns"] <= at}


def unit_bytes(record: RunRecord) -> dict[str, int]:
    """Bytes of each unit's whole parameters, as all-gathers carried them."""
    return {
        row["unit"] or "root": row["logical_bytes"] for row in record.table("ledger") if row["kind"] == "all_gather"
    }


def gathered_table(record: RunRecord, holding: Callable[[list[Row], int], Any]) -> Table:
    """The units that hold memory at the peak, by the learner's function, and whether their bytes are those of the
    memory table.
    """
    row, sizes = peak_row(record), unit_bytes(record)
    life, at = life_of(record, row["rank"]), row["time_ns"]
    names = sorted(holding(life, at))
    rows = [[name, state_at(life, at).get(name, "-"), f"{sizes[name] / MB:.2f}"] for name in names]
    rows.append(["together", "", f"{sum(sizes[name] for name in names) / MB:.2f}"])
    whole = f"{row['unsharded_parameters'] / MB:.2f} MB of unsharded parameters at that instant"
    caption = f"Measured on rank {row['rank']}; the memory table has {whole}."
    return table(["unit", "state at the peak", "MB"], rows, caption)


# ---- several runs


def memory_figure(runs: Mapping[str, RunRecord]) -> go.Figure:
    """The peaks of several runs by category, each under its name."""
    return memory_by_category([replace(view(run), strategy=name, note="") for name, run in runs.items()])


def compared(runs: Mapping[str, RunRecord]) -> Table:
    """Peak, unsharded bytes and phase of each run, and how many MB it differs from the first."""
    first = total(peak_row(next(iter(runs.values()))))
    rows = []
    for name, run in runs.items():
        row = peak_row(run)
        whole = sum(state != "sharded" for state in state_at(life_of(run, row["rank"]), row["time_ns"]).values())
        sizes = [f"{total(row) / MB:.1f}", f"{(total(row) - first) / MB:+.1f}"]
        held = [f"{row['unsharded_parameters'] / MB:.1f}", str(whole)]
        rows.append([name, *sizes, *held, place_of(run, row["time_ns"])])
    header = ["run", "peak, MB", "against the first", "unsharded, MB", "units unsharded", "the peak is"]
    return table(header, rows, "Measured on the worst rank, at its peak.")


def more_sequences(run: RunRecord) -> float:
    """From how many sequences on activations at the peak exceed the optimizer's state, if they grow in proportion."""
    held = by_category(run)
    return held["optimizer_state"] / (held["activations"] / run.spec["batch_size"])
