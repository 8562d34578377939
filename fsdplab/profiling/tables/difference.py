"""Two traces side by side: which operators and which units took longer.

The differences of all rows sum to the difference of the whole, so nothing is left unexplained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdplab.common.sizes import seconds
from fsdplab.profiling.tables.operators import short, table_of
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import work_of
from fsdplab.profiling.traces.events import read_events

_COLUMNS = (
    Column("kind", "kind"), Column("name", "name"), Column("unit", "unit"), Column("before_ns", "first", "ns"),
    Column("after_ns", "second", "ns"), Column("difference_ns", "difference", "ns"),
    Column("before_count", "calls, first", "count"), Column("after_count", "calls, second", "count"),
)  # fmt: skip


def difference(
    first: str | Path, second: str | Path, *, by_unit: bool = False, comm_patterns: Sequence[str] = ()
) -> Table:
    """Time a step of every operator and kernel in two traces, the largest difference first.

    Both are one rank's; they need not have equally many steps. `aten::mm` 24 ms in the first and 30 in the second:
    `{"difference_ns": 6e6, ...}`. Raises TraceError.
    """
    before, after = (
        {
            (row["kind"], row["name"], row["unit"]): row
            for row in table_of(work_of(read_events(path, comm_patterns)), by_unit).rows
        }
        for path in (first, second)
    )
    rows = [_row(key, before.get(key), after.get(key)) for key in {**before, **after}]
    rows.sort(key=lambda row: -abs(row["difference_ns"]))
    total = sum(row["difference_ns"] for row in rows)
    columns = tuple(column for column in _COLUMNS if by_unit or column.key != "unit")
    return Table("difference", "Difference of two traces", _sentence(rows, total), columns, tuple(rows))


def _row(key: tuple[str, str, str], before: Row | None, after: Row | None) -> Row:
    kind, name, unit = key
    nothing = {"time_ns": 0.0, "count": 0.0}
    before, after = before or nothing, after or nothing
    return {
        "kind": kind, "name": name, "unit": unit, "before_ns": before["time_ns"], "after_ns": after["time_ns"],
        "difference_ns": after["time_ns"] - before["time_ns"],
        "before_count": before["count"], "after_count": after["count"],
    }  # fmt: skip


def _sentence(rows: Sequence[Row], total: float) -> str:
    changed = next((row for row in rows if row["difference_ns"]), None)
    if changed is None:
        return "Both traces spent the same time in every operator and kernel."
    way = "longer" if total > 0 else "shorter"
    more = "more" if changed["difference_ns"] > 0 else "less"
    return (
        f"The second is {seconds(abs(total) / 1e9)} a step {way} in operators and kernels;"
        f" {short(changed['name'])} makes the largest difference, {seconds(abs(changed['difference_ns']) / 1e9)}"
        f" {more}."
    )
