"""`fsdplab plan validate`: predicted beside published, split by source into what was fitted and what was held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdplab.cli.answer import Answer, Line, Table
from fsdplab.cli.errors import refuse
from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import three_digits
from fsdplab.common.words import MISSING, plural
from fsdplab.figures.plots.plans import page_of, validation_figure
from fsdplab.planning.validate import (
    ARITHMETIC,
    AT_REST,
    FIT,
    HELD_OUT,
    MEMORY,
    SPEED,
    Errors,
    Row,
    Validation,
    validate,
)

_TABLE = shared_folder("data") / "published.csv"
_GIB = 2.0**30
_MOST_ROWS = 40  # of a file whose rows are printed one by one; of a longer one, those that are furthest off
_ERRORS = ("figures", "median", "90% within", "worst", "bias")


def validation_answer(file: Path | None) -> Answer:
    """Predictions for every usable row of a file of published measurements, and how far off they are."""
    if file is None and not _TABLE.exists():
        refuse(f"{_TABLE} is not there; give a file of measurements: fsdplab plan validate FILE.csv")
    found = validate(file or _TABLE)
    parts = (*_rows(found), _sources(found), _parts(found), _ranges(found), *_notes(found))
    points = [_point(row) for row in found.rows]
    return Answer(parts, found.as_dict(), lambda: page_of(validation_figure(points, _finding(found))))


def _finding(found: Validation) -> str:
    """The figure's title: the two medians of the held-out sources."""
    named = {quantity: found.errors(quantity, HELD_OUT) for quantity in (MEMORY, SPEED)}
    shown = [f"{name} {errors.median:.1%}" for name, errors in named.items() if errors.figures]
    return f"Predicted against published: median error of held-out sources {', '.join(shown) or 'not known'}"


def _point(row: Row) -> tuple[str, str, float, float]:
    """A row for the figure, in the unit that it is printed in; all kinds of memory are drawn together."""
    scale = 1.0 if row.quantity == SPEED else _GIB
    return (SPEED if row.quantity == SPEED else "memory (GiB)", row.part, row.published / scale, row.predicted / scale)


def _rows(found: Validation) -> Iterator[Line | Table]:
    """All rows of a short file, else those that are furthest off."""
    shown: Sequence[Row] = found.rows
    if len(shown) > _MOST_ROWS:
        shown = sorted(found.rows, key=lambda row: -row.error)[: _MOST_ROWS // 2]
        yield Line(f"the {len(shown)} of {len(found.rows)} figures that are furthest off; --json has all of them")
    columns = ("row", "quantity", "predicted", "published", "ratio", "source is")
    yield Table(columns, [_row(row) for row in shown], words=("row", "quantity", "source is"))


def _row(row: Row) -> Sequence[str]:
    unit, scale = ("", 1.0) if row.quantity == SPEED else (" GiB", _GIB)
    shown = [f"{three_digits(value / scale)}{unit}" for value in (row.predicted, row.published)]
    return row.id, row.quantity, *shown, f"{row.ratio:.2f}", row.part


def _sources(found: Validation) -> Table:
    rows = [
        (source, quantity, part, *_cells(errors))
        for quantity in (MEMORY, SPEED)
        for source, part, errors in found.by_source(quantity)
    ]
    words = ("source", "quantity", "part")
    return Table((*words, *_ERRORS), rows, words=words)


def _cells(errors: Errors) -> Sequence[str]:
    if not errors.figures:
        return ("0", *[MISSING] * 4)
    return str(errors.figures), *(f"{value:.1%}" for value in errors[1:4]), f"{errors.bias:.2f}"


def _parts(found: Validation) -> Table:
    """Fitted and held out, side by side."""
    columns = [column for part in (FIT, HELD_OUT) for column in (part, *_ERRORS[1:])]
    rows = []
    for quantity in (MEMORY, AT_REST, SPEED, ARITHMETIC):
        errors = [found.errors(quantity, part) for part in (FIT, HELD_OUT)]
        if any(each.figures for each in errors):
            rows.append((quantity, *(cell for each in errors for cell in _cells(each))))
    return Table(("all sources", *columns), rows, words=("all sources",))


def _ranges(found: Validation) -> Table:
    """The bias of throughput in ranges, fitted and held out side by side."""
    rows = [
        (name, words, *(cell for errors in both for cell in _bias(errors)))
        for name, words, both in found.by_range(SPEED)
    ]
    columns = [column for part in (FIT, HELD_OUT) for column in (part, "bias", "worst")]
    return Table(("tokens/s by", "range", *columns), rows, words=("tokens/s by", "range"))


def _bias(errors: Errors) -> Sequence[str]:
    told = f"{errors.bias:.2f}", f"{errors.worst:.1%}"
    return str(errors.figures), *(told if errors.figures else [MISSING] * 2)


def _notes(found: Validation) -> Iterator[Line]:
    yield Line(
        "nothing is fitted to this file: rates are fitted to MosaicML's runs and PR #165's (efficiency.py), and memory"
        " was written with the rows of its fit sources in view; the terms of the model, not its constants, were chosen"
        " with the held-out errors in view",
        "constants",
    )
    large = f"; predicted not to fit: {', '.join(found.too_large)}" if found.too_large else ""
    yield Line(f"of {found.ran} runs that took place, {found.ran - len(found.too_large)} are predicted to fit{large}")
    if found.ran_out:
        right = sum(not_fits for _, not_fits in found.ran_out)
        yield Line(f"of {plural(len(found.ran_out), 'run')} that ended out of memory, {right} are predicted not to fit")
    reasons = Counter((each.source, each.reason) for each in found.left_out)
    yield Line(f"{len(found.left_out)} rows or figures are not predicted", "left out")
    for (source, reason), count in reasons.most_common():
        names = ", ".join(each.id for each in found.left_out if (each.source, each.reason) == (source, reason))
        yield Line(f"{source}, {count}: {reason} ({names})", "left out")
