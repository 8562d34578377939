"""The tables of traces as text cells: the terminal and the page print the same rows."""

from __future__ import annotations

from typing import Any

from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING, NO_UNIT, OUTSIDE_UNITS
from fsdplab.profiling.tables import Column, Table
from fsdplab.profiling.tables.critical_path import BEFORE, IDLE
from fsdplab.profiling.tables.table import Row

MOST = 12  # rows of a table that are shown; a function's frame has all
_LONGEST = 64  # characters of a kernel's name


def headings(table: Table) -> list[str]:
    """The headings of the columns."""
    return [column.heading for column in table.columns]


def cells(table: Table, most: int = MOST) -> list[list[str]]:
    """The first rows as text: times, bytes and shares in their units, a dash where the trace does not say."""
    nameless = OUTSIDE_UNITS if any(row.get("unit") for row in table.rows) else NO_UNIT
    return [[_shown(column, row, nameless) for column in table.columns] for row in table.rows[:most]]


def is_number(column: Column) -> bool:
    """Whether a column is set flush right."""
    return bool(column.unit)


def left_out(table: Table, most: int = MOST) -> str:
    """How many rows are not shown: "and 30 more"; "" where all are."""
    return f"and {len(table.rows) - most} more" if len(table.rows) > most else ""


def _shown(column: Column, row: Row, nameless: str) -> str:
    value: Any = row[column.key]
    if value is None:
        return MISSING
    if column.unit == "ns":
        return f"-{seconds(-value / 1e9)}" if value < 0 else seconds(value / 1e9)
    if column.unit == "bytes":
        return size(value)
    if column.unit == "bytes/s":
        return f"{size(value)}/s"
    if column.unit in ("GFLOP", "GFLOP/s"):
        return f"{three_digits(value / 1e9)} {column.unit}"
    if column.unit == "share":
        return f"{value:.1%}"
    if column.unit == "count":
        return str(value) if isinstance(value, int) else three_digits(value).removesuffix(".00")
    if column.key == "unit":
        return value or (MISSING if row.get("what") in (IDLE, BEFORE) else nameless)  # idle time is of no unit
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
