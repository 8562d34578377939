"""`fsdplab plan validate`: predicted beside published, row by row, with the median and the worst error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdplab.cli.answer import Answer, Line, Table
from fsdplab.cli.errors import refuse
from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import three_digits
from fsdplab.planning.validate import FITTED, HELD_OUT, NOT_FITTED, Row, Validation, validate

_TABLE = shared_folder("data") / "published.csv"
_UNITS = {"memory": ("GiB", 2.0**30), "memory (arithmetic)": ("GiB", 2.0**30), "tokens/s": ("", 1.0)}


def validation_answer(file: Path | None) -> Answer:
    """Predictions for every usable row of a file of published measurements, and how far off they are."""
    if file is None and not _TABLE.exists():
        refuse(f"{_TABLE} is not there; give a file of measurements: fsdplab plan validate FILE.csv")
    found = validate(file or _TABLE)
    columns = ("row", "quantity", "predicted", "published", "ratio", "efficiency")
    table = Table(columns, [_row(row) for row in found.rows], words=("row", "quantity", "efficiency"))

    def page() -> str:
        from fsdplab.figures.plots.plans import page_of, validation_figure

        return page_of(validation_figure([_point(row) for row in found.rows], _finding(found)))

    return Answer((table, *_errors(found), *_notes(found)), found.as_dict(), page)


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


def _row(row: Row) -> Sequence[str]:
    unit, scale = _UNITS[row.quantity]
    shown = [f"{three_digits(value / scale)} {unit}".strip() for value in (row.predicted, row.published)]
    part = row.part if row.part != NOT_FITTED else ""
    return row.id, row.quantity, *shown, f"{row.ratio:.2f}", part


def _errors(found: Validation) -> Iterator[Line]:
    for name, quantity, parts in (
        ("memory", "memory", ()),
        ("memory by a source's own arithmetic", "memory (arithmetic)", ()),
        ("tokens/s, rows that the fit has not seen", "tokens/s", (HELD_OUT, NOT_FITTED)),
        ("tokens/s, rows of the fit", "tokens/s", (FITTED,)),
    ):
        count, median, worst = found.errors(quantity, *parts)
        if count:
            yield Line(f"{count} figures, median error {median:.1%}, worst {worst:.1%}", name)


def _notes(found: Validation) -> Iterator[Line]:
    fitted = ", ".join(f"{name} {value:.3f}" for name, value in found.efficiencies.items())
    yield Line(f"one fitted number a GPU type, the part of its FLOP/s that products reach: {fitted or 'none'}")
    large = f"; predicted not to fit: {', '.join(found.too_large)}" if found.too_large else ""
    fits = found.ran - len(found.too_large)
    yield Line(f"of {found.ran} runs that took place, {fits} are predicted to fit{large}")
    for name, reason in found.left_out:
        yield Line(f"{name}: {reason}", "left out")
