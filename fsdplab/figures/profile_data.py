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
    """Return the run's name in titles: `full_shard`, `torch-fsdp2`."""
    return view(record).label


def rows_of(record: RunRecord, table: str) -> list[Row]:
    """Return the rows of a table; ValueError with the remedy when the record has none, TypeError for anything but a
    record.
    """
    if not isinstance(record, RunRecord):
        raise TypeError(
            f"this figure draws a run record, got {type(record).__name__}; pass what run() returned or"
            " RunRecord.load(folder)"
        )
    rows = named_rows(record, table)
    if not rows:
        raise ValueError(f"{label(record)} has no {table} table to draw; {_remedy(record, table)}")
    return rows


def _remedy(record: RunRecord, table: str) -> str:
    if table == "exposed" and named_rows(record, "breakdown"):
        return "its profiled steps show no communication"
    if record.status == "out_of_memory" and record.spec.get("profile"):
        return "the card was full before its profiled steps: give it a larger --card, or a smaller model or batch"
    return _REMEDIES.get(table, "run it again with --profile 2 (RunSpec(profile=2))")


def where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows that have these values: `where(rows, rank=0, lane="compute")`."""
    wanted = values.items()
    # items compare as sets: every wanted pair is among the row's
    return [row for row in rows if wanted <= row.items()]


def distinct(rows: Iterable[Row], column: str) -> set[Any]:
    """Return the values of a column: `distinct(rows, "rank") == {0, 1}`."""
    return {row[column] for row in rows}


def named_rows(record: RunRecord, table: str) -> list[Row]:
    """Return the rows of a table, with the root under its name: the ledger writes `root`, traces leave it empty."""
    name = unnamed(record)
    rows = []
    for row in record.table(table):
        if row.get("unit") == "":
            row = {**row, "unit": name}
        rows.append(row)
    return rows


def unnamed(record: RunRecord) -> str:
    """Return what a unit without a name is: in records of before, which left the root nameless, the root."""
    in_steps = _units_of(record, "exposed", "timeline")
    # the root has a name there, so a row without a unit is outside of all units
    if ROOT in in_steps:
        return OUTSIDE_UNITS
    # other units have names, so the nameless one is the root; without any names nothing is told by unit
    named = in_steps | _units_of(record, "ledger", "life")
    return ROOT if named - {"", None} else NO_UNIT


def _units_of(record: RunRecord, *tables: str) -> set[str | None]:
    units = set()
    for table in tables:
        units |= {row.get("unit") for row in record.table(table)}
    return units


def listed(records: RunRecord | Iterable[RunRecord]) -> list[RunRecord]:
    """Return one record or several as a list."""
    return [records] if isinstance(records, RunRecord) else list(records)


def profiled(rows: Sequence[Row], record: RunRecord) -> list[Row]:
    """Return the rows of profiled steps; those of the memory step, which is slow, only if there are no others."""
    # steps in which memory was recorded
    slowed = distinct(record.table("memory"), "step")
    return [row for row in rows if row["step"] not in slowed] or list(rows)


def timeline_of(record: RunRecord, step: int | None) -> tuple[int, list[Row]]:
    """Return (step, its timeline rows); by default the profiled step of median length, which stands for the others.

    ValueError names the steps there are.
    """
    rows = rows_of(record, "timeline")
    if step is None:
        step = _median_step(profiled(rows, record))
    of_step = where(rows, step=step)
    if not of_step:
        steps = sorted(distinct(rows, "step"))
        raise ValueError(
            f"{label(record)} has no timeline of step {step}; expected one of {steps}; run with --profile for more"
        )
    return step, of_step


def _median_step(rows: Sequence[Row]) -> int:
    """Return the step whose length, which is its slowest rank's, is the median; the last one where no row has it."""
    # step -> ns of its slowest rank
    lengths: dict[int, int] = {}
    for row in where(rows, lane="step"):
        length = row["end_ns"] - row["start_ns"]
        lengths[row["step"]] = max(lengths.get(row["step"], length), length)
    if not lengths:
        return max(distinct(rows, "step"))
    # the lower of two middle ones, so that it is the length of a step
    median = statistics.median_low(lengths.values())
    return next(step for step, length in lengths.items() if length == median)


def breakdown_of(record: RunRecord) -> StepSummary | None:
    """Return the mean of the profiled steps of the rank that is exposed longest, in ns; None without the table."""
    return step_summary(profiled(record.table("breakdown"), record))


def worst_cells(record: RunRecord) -> tuple[int, int, list[ExposedCell]]:
    """Return (the rank exposed longest over the profiled steps, how many these are, its exposed time by unit, phase and
    kind, in ns a step, as the findings count it).
    """
    rows = profiled(rows_of(record, "exposed"), record)
    split = breakdown_of(record)
    by_rank = grouped(rows, lambda row: row["rank"])
    # the rank of the breakdown, so that all figures and findings are about one
    if split and split.rank in by_rank:
        worst = split.rank
    else:
        # a record without that table: the most exposed of these rows
        exposed = {rank: sum(row["exposed_ns"] for row in of_rank) for rank, of_rank in by_rank.items()}
        worst = max(exposed, key=lambda rank: exposed[rank])
    steps = split.steps if split else len(distinct(by_rank[worst], "step"))
    return worst, steps, exposed_cells(by_rank[worst], steps)


def slower_words(record: RunRecord) -> str:
    """Return `profiled steps took 1.60 s (mean), timed ones 729 ms (median)`; "" where they differ by less than a
    tenth.
    """
    timed = record.summary.step_time_s.median
    split = breakdown_of(record)
    if not timed or split is None or split.step_ns / 1e9 <= _SLOWER * timed:
        return ""
    if record.spec.get("engine") == "trace":  # whose timed steps are the profiled ones
        return ""
    return f"profiled steps took {duration(split.step_ns)} (mean), timed ones {seconds(timed)} (median)"


# ---- units


def unit_order(record: RunRecord, units: Iterable[str]) -> list[str]:
    """Return units in the order in which the forward reaches them; units that it never reaches follow by name."""
    # unit -> ns at which a forward reaches it at the earliest
    first: dict[str, int] = {}
    for row in where(named_rows(record, "timeline"), phase="forward", lane="compute"):
        unit, start = row["unit"], row["start_ns"]
        first[unit] = min(first.get(unit, start), start)

    def place(unit: str) -> tuple[bool, float, list[tuple[bool, str]]]:
        # the root first; then by time, which is infinite for units without a forward; then by name
        return unit != ROOT, first.get(unit, float("inf")), _in_numbers(unit)

    return sorted(dict.fromkeys(units), key=place)


def _in_numbers(unit: str) -> list[tuple[bool, str]]:
    """Return a name's parts such that `blocks.10` comes after `blocks.9`."""
    return [(part.isdigit(), part.zfill(9)) for part in re.split(r"(\d+)", unit)]


def foremost_units(record: RunRecord, amounts: Mapping[Any, float]) -> tuple[list[str], str]:
    """Return (the units of the largest amounts in the forward's order, as many as fit on a page; the subtitle's words
    on those left out: "the 90 foremost of 224 units"). `amounts` are by tuples that begin with a unit.
    """
    weights: dict[str, float] = {}
    # over phases and kinds; without signs, so that gains and losses do not cancel out
    for (unit, *_), amount in amounts.items():
        weights[unit] = weights.get(unit, 0.0) + abs(amount)
    heaviest_first = sorted(weights, key=lambda unit: -weights[unit])
    drawn = heaviest_first[:_MOST_UNITS]
    few = ""
    if len(drawn) < len(weights):
        few = f"the {len(drawn)} foremost of {len(weights)} units"
    return unit_order(record, drawn), few


def short_unit(unit: str) -> str:
    """Return a unit's name for a narrow bar: `short_unit("blocks.3") == "3"`."""
    return unit.rsplit(".", 1)[-1]


# ---- words


def conditions(records: RunRecord | Iterable[RunRecord], *more: str) -> str:
    """Return the provenance for a subtitle.

    `Measured on 2 CPU ranks; the link is emulated (25 GbE: 3.12 GB/s), step 11`.
    """
    runs = listed(records)
    where = how_and_where(views(runs))
    links: dict[str, bool] = {}  # in order of first appearance
    for run in runs:
        if run.summary.link:
            links[_link_words(run.summary.link)] = True
    if links:
        where += f"; the link is emulated ({' / '.join(links)})"
    elif any(run.provenance.get("exposed_s") == "emulated" for run in runs):
        where += "; communication is emulated"
    return ", ".join([where, *filter(None, more)])


def _link_words(link: Link) -> str:
    """Return the emulated link: `"25 GbE: 3.12 GB/s, 10.0 µs"`."""
    numbers = []
    if link.bytes_per_s:
        rate = f"{size(link.bytes_per_s)}/s"
        # a link that was given as a rate, `150MB/s`, is named once
        is_its_name = rate.replace(" ", "").lower() == link.name.replace(" ", "").lower()
        if not is_its_name:
            numbers.append(rate)
    if link.latency_s:
        numbers.append(seconds(link.latency_s))
    words = link.name
    if numbers:
        words += f": {', '.join(numbers)}"
    if link.as_:
        words += f", as {link.as_}"
    return words


def duration(ns: float) -> str:
    """Write nanoseconds as a reader sees them: `duration(2_100_000) == "2.10 ms"`; nothing is `0 ms`."""
    return seconds(ns / 1e9) if ns else "0 ms"


def percent(part: float, whole: float) -> str:
    """Write a part of a whole: `percent(1, 3) == "33 %"`; nothing of nothing is `0 %`."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
