"""`fsdplab plan validate`: predicted beside published, row by row, with the median and the worst error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdplab.cli.errors import refuse
from fsdplab.cli.plan.targets import Targets, grid
from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import three_digits
from fsdplab.planning.published import PublishedError
from fsdplab.planning.validate import FITTED, HELD_OUT, NOT_FITTED, Row, Validation, validate

_TABLE = shared_folder("data") / "published.csv"
_UNITS = {"memory": ("GiB", 2.0**30), "memory (arithmetic)": ("GiB", 2.0**30), "tokens/s": ("", 1.0)}


def show_validation(file: Path | None, json_file: str | None, figure: Path | None) -> None:
    """Predict every usable row of a file of published measurements, and print how far off the predictions are."""
    if file is None and not _TABLE.exists():
        refuse(f"{_TABLE} is not there; give a file of measurements: fsdplab plan validate FILE.csv")
    targets = Targets(json_file, figure).check()
    try:
        found = validate(file or _TABLE)
    except PublishedError as error:
        refuse(str(error))
    console = targets.console()
    console.print(_table(found))
    _print_summary(console, found)
    targets.write(found.as_dict(), lambda: _figure(found))


def _figure(found: Validation) -> Any:
    from fsdplab.cli.plan.figures import validation_figure

    return validation_figure([_point(row) for row in found.rows], _finding(found))


def _finding(found: Validation) -> str:
    """The figure's title: the two medians, of throughput over rows that the fit has not seen."""
    named = {"memory": found.errors("memory"), "tokens/s": found.errors("tokens/s", HELD_OUT, NOT_FITTED)}
    shown = [f"{name} {median:.1%}" for name, (count, median, _) in named.items() if count]
    return f"Predicted against published: median error {', '.join(shown)}"


def _point(row: Row) -> tuple[str, str, float, float]:
    """A row for the figure, in the unit that it is printed in; ZeRO's own arithmetic is drawn with memory."""
    unit, scale = _UNITS[row.quantity]
    quantity = f"memory ({unit})" if unit else row.quantity
    return (quantity, row.source, row.published / scale, row.predicted / scale)


def _table(found: Validation) -> Table:
    columns = ("row", "quantity", "predicted", "published", "ratio", "efficiency")
    return grid(columns, map(_row, found.rows), words=("row", "quantity", "efficiency"))


def _row(row: Row) -> Sequence[str]:
    unit, scale = _UNITS[row.quantity]
    shown = [f"{three_digits(value / scale)} {unit}".strip() for value in (row.predicted, row.published)]
    part = row.part if row.part != NOT_FITTED else ""
    return escape(row.id), row.quantity, *shown, f"{row.ratio:.2f}", part


def _print_summary(console: Console, found: Validation) -> None:
    for name, quantity, parts in (
        ("memory", "memory", ()),
        ("memory by a source's own arithmetic", "memory (arithmetic)", ()),
        ("tokens/s, rows that the fit has not seen", "tokens/s", (HELD_OUT, NOT_FITTED)),
        ("tokens/s, rows of the fit", "tokens/s", (FITTED,)),
    ):
        count, median, worst = found.errors(quantity, *parts)
        if count:
            console.print(f"[bold]{name}[/]: {count} figures, median error {median:.1%}, worst {worst:.1%}")
    fitted = ", ".join(f"{name} {value:.3f}" for name, value in found.efficiencies.items())
    console.print(
        f"one fitted number a GPU type, the part of its FLOP/s that products reach: {fitted or 'none'}", markup=False
    )
    fits = found.ran - len(found.too_large)
    large = f"; predicted not to fit: {', '.join(found.too_large)}" if found.too_large else ""
    console.print(f"of {found.ran} runs that took place, {fits} are predicted to fit{large}", markup=False)
    for name, reason in found.left_out:
        console.print(f"left out: {escape(name)}: {escape(reason)}", highlight=False)
