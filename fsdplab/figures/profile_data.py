"""Shared by the figures of profiled steps: the rows that they read, their order, and the words of provenance.

Without a profile these tables are empty, and every figure raises one line that says what to run.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdplab.common.collectives import LANES_OF_COLLECTIVES
from fsdplab.common.rows import grouped
from fsdplab.common.sizes import seconds, size
from fsdplab.common.words import NO_UNIT, OUTSIDE_UNITS
from fsdplab.figures.view import how_and_where, view, views
from fsdplab.profiling.step_summary import ExposedCell, StepSummary, exposed_cells, step_summary
from fsdplab.records import RunRecord
from fsdplab.records.summary import Link

Row = dict[str, Any]
MS = 1e6  # nanoseconds
_SLOWER = 1.1  # profiled steps over timed ones from which on a figure says so
ROOT = "root"
COLLECTIVES = LANES_OF_COLLECTIVES
_MOST_UNITS = 90  # that fit on a page
_REMEDIES = {
    "memory": "run it again with memory measured (memory=True)",
    "life": "only the lab's engine tells its units' states: run it again with --engines lab --profile 2",
    "ledger": "run it again with the lab's engine on 2 ranks or more",
}


def label(record: RunRecord) -> str:
    """The run's name in titles: `full_shard`, `torch-fsdp2`."""
    return view(record).label


def rows_of(record: RunRecord, table: str) -> list[Row]:
    """The rows of a table; ValueError with the remedy when the record has none, TypeError for anything but a record."""
    if not isinstance(record, RunRecord):
        raise TypeError(
            f"this figure draws a run record, got {type(record).__name__}; pass what run() returned or"
            " RunRecord.load(folder)"
        )
    rows = named_rows(record, table)
    if not rows:
        remedy = _REMEDIES.get(table, "run it again with --profile 2 (RunSpec(profile=2))")
        if table == "exposed" and named_rows(record, "breakdown"):
            remedy = "its profiled steps show no communication"
        elif record.status == "out_of_memory" and record.spec.get("profile"):
            remedy = "the card was full before its profiled steps: give it a larger --card, or a smaller model or batch"
        raise ValueError(f"{label(record)} has no {table} table to draw; {remedy}")
    return rows


def named_rows(record: RunRecord, table: str) -> list[Row]:
    """The rows of a table, with the root under its name: the ledger writes `root`, traces leave it empty."""
    name = unnamed(record)
    return [{**row, "unit": name} if row.get("unit") == "" else row for row in record.table(table)]


def unnamed(record: RunRecord) -> str:
    """What a unit without a name is: in records of before, which left the root nameless, the root."""
    units = {row.get("unit") for name in ("exposed", "timeline") for row in record.table(name)}
    if ROOT in units:
        return OUTSIDE_UNITS
    named = units | {row.get("unit") for name in ("ledger", "life") for row in record.table(name)}
    return ROOT if named - {"", None} else NO_UNIT


def listed(records: RunRecord | Iterable[RunRecord]) -> list[RunRecord]:
    """One record or several, as a list."""
    return [records] if isinstance(records, RunRecord) else list(records)


def profiled(rows: Sequence[Row], record: RunRecord) -> list[Row]:
    """The rows of profiled steps; those of the memory step, which is slow, only if there are no others."""
    slowed = {row["step"] for row in record.table("memory")}
    return [row for row in rows if row["step"] not in slowed] or list(rows)


def timeline_of(record: RunRecord, step: int | None) -> tuple[int, list[Row]]:
    """(step, its timeline rows); by default the profiled step of median length (its slowest rank's), which stands for
    the others. ValueError names the steps there are.
    """
    rows = rows_of(record, "timeline")
    if step is None:
        usual = profiled(rows, record)
        whole = grouped((row for row in usual if row["lane"] == "step"), lambda row: row["step"])
        lengths = {step: max(row["end_ns"] - row["start_ns"] for row in own) for step, own in whole.items()}
        middle = statistics.median_low(lengths.values() or [0])
        step = next((step for step, length in lengths.items() if length == middle), max(row["step"] for row in usual))
    found = [row for row in rows if row["step"] == step]
    if not found:
        steps = sorted({row["step"] for row in rows})
        raise ValueError(
            f"{label(record)} has no timeline of step {step}; expected one of {steps}; run with --profile for more"
        )
    return step, found


def breakdown_of(record: RunRecord) -> StepSummary | None:
    """The mean of the profiled steps of the rank that is exposed longest, in ns; None without the table."""
    return step_summary(profiled(record.table("breakdown"), record))


def worst_cells(record: RunRecord) -> tuple[int, int, list[ExposedCell]]:
    """(the rank exposed longest over the profiled steps, how many these are, its exposed time by unit, phase and kind,
    in ns a step, as the findings count it).
    """
    rows = profiled(rows_of(record, "exposed"), record)
    split = breakdown_of(record)
    own = grouped(rows, lambda row: row["rank"])
    worst = max(own, key=lambda rank: sum(row["exposed_ns"] for row in own[rank]))
    worst = split.rank if split and split.rank in own else worst
    steps = split.steps if split else len({row["step"] for row in own[worst]})
    return worst, steps, exposed_cells(own[worst], steps)


def slower_words(record: RunRecord) -> str:
    """`profiled steps took 1.60 s (mean), timed ones 729 ms (median)`; "" where they differ by less than a tenth."""
    timed = record.summary.step_time_s.median
    split = breakdown_of(record)
    if not timed or split is None or split.step_ns / 1e9 <= _SLOWER * timed or record.spec.get("engine") == "trace":
        return ""
    return f"profiled steps took {duration(split.step_ns)} (mean), timed ones {seconds(timed)} (median)"


def unit_order(record: RunRecord, units: Iterable[str]) -> list[str]:
    """Units in the order in which the forward reaches them; units that it never reaches follow by name."""
    first: dict[str, int] = {}
    for row in named_rows(record, "timeline"):
        if row["phase"] == "forward" and row["lane"] == "compute":
            first[row["unit"]] = min(first.get(row["unit"], row["start_ns"]), row["start_ns"])
    numbers = {unit: [(part.isdigit(), part.zfill(9)) for part in re.split(r"(\d+)", unit)] for unit in units}
    return sorted(numbers, key=lambda unit: (unit != ROOT, first.get(unit, float("inf")), numbers[unit]))


def foremost_units(record: RunRecord, amounts: Mapping[Any, float]) -> tuple[list[str], str]:
    """(the units of the largest amounts in the forward's order, as many as fit on a page; the subtitle's words on those
    left out: "the 90 foremost of 224 units"). `amounts` are by tuples that begin with a unit.
    """
    weights: dict[str, float] = {}
    for (unit, *_), amount in amounts.items():
        weights[unit] = weights.get(unit, 0.0) + abs(amount)
    drawn = sorted(weights, key=lambda unit: -weights[unit])[:_MOST_UNITS]
    few = f"the {len(drawn)} foremost of {len(weights)} units" if len(drawn) < len(weights) else ""
    return unit_order(record, drawn), few


def short_unit(unit: str) -> str:
    """A unit's name for a narrow bar: `short_unit("blocks.3") == "3"`."""
    return unit.rsplit(".", 1)[-1]


def conditions(records: RunRecord | Iterable[RunRecord], *more: str) -> str:
    """The provenance for a subtitle: `Measured on 2 CPU ranks; the link is emulated (25 GbE: 3.12 GB/s), step 11`."""
    runs = listed(records)
    links = " / ".join(dict.fromkeys(_link_words(run.summary.link) for run in runs if run.summary.link))
    communicated = any(run.provenance.get("exposed_s") == "emulated" for run in runs)
    emulated = f"; the link is emulated ({links})" if links else "; communication is emulated" if communicated else ""
    return ", ".join([f"{how_and_where(views(runs))}{emulated}", *filter(None, more)])


def _link_words(link: Link) -> str:
    """The emulated link: `"25 GbE: 3.12 GB/s, 10.0 µs"`."""
    rate = f"{size(link.bytes_per_s)}/s" if link.bytes_per_s else ""
    named = rate.replace(" ", "").lower() == link.name.replace(" ", "").lower()
    numbers = ", ".join(filter(None, [rate if not named else "", seconds(link.latency_s) if link.latency_s else ""]))
    return f"{link.name}{f': {numbers}' if numbers else ''}{f', as {link.as_}' if link.as_ else ''}"


def duration(ns: float) -> str:
    """Nanoseconds as a reader sees them: `duration(2_100_000) == "2.10 ms"`; nothing is `0 ms`."""
    return seconds(ns / 1e9) if ns else "0 ms"


def percent(part: float, whole: float) -> str:
    """`percent(1, 3) == "33 %"`; nothing of nothing is `0 %`."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
