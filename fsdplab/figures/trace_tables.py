"""The tables of traces as text cells: the terminal and the page print the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.common.sizes import flops, flops_per_s, seconds, size, three_digits
from fsdplab.common.words import MISSING, NO_UNIT, OUTSIDE_UNITS
from fsdplab.profiling.tables import Column, Table
from fsdplab.profiling.tables.critical_path import BEFORE, IDLE
from fsdplab.profiling.tables.table import Row

MOST = 12  # rows of a table that are shown; a function's frame has all
_LONGEST = 64  # characters of a kernel's name


def _duration(ns: float) -> str:
    return f"-{seconds(-ns / 1e9)}" if ns < 0 else seconds(ns / 1e9)


def _count(count: float) -> str:
    """Write how many; a mean over steps has digits after the point only where it is no whole number."""
    return str(count) if isinstance(count, int) else three_digits(count).removesuffix(".00")


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


# a value in each unit of a column
_WRITTEN: dict[str, Callable[[Any], str]] = {
    "ns": _duration,
    "bytes": size,
    "bytes/s": lambda rate: f"{size(rate)}/s",
    "FLOP": flops,
    "FLOP/s": flops_per_s,
    "share": "{:.1%}".format,
    "count": _count,
    "": _cut,
}


def cells(table: Table, most: int = MOST) -> list[list[str]]:
    """Return the first rows as text: times, bytes and shares in their units, a dash where the trace does not say."""
    # where other rows have units, one without is outside of them; else the trace names none
    nameless = OUTSIDE_UNITS if any(row.get("unit") for row in table.rows) else NO_UNIT
    return [[_shown(column, row, nameless) for column in table.columns] for row in table.rows[:most]]


def left_out(table: Table, most: int = MOST) -> str:
    """Say how many rows are not shown: "and 30 more"; "" where all are."""
    return f"and {len(table.rows) - most} more" if len(table.rows) > most else ""


def _shown(column: Column, row: Row, nameless: str) -> str:
    value: Any = row[column.key]
    if value is None:
        return MISSING
    if column.key == "unit" and not column.unit:
        is_idle = row.get("what") in (IDLE, BEFORE)  # which is of no unit
        # idle time belongs to no unit, so it is not called outside of them
        return value or (MISSING if is_idle else nameless)
    return _WRITTEN[column.unit](value)
