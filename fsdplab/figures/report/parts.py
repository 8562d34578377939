"""The pieces that pages and notebooks share: tables, figures drawn when they are first seen, notes, pictures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeAlias

from markupsafe import Markup

from fsdplab.figures.plotly_go import go
from fsdplab.figures.report.rendering import part
from fsdplab.figures.static.svg import svg
from fsdplab.figures.style import alt_text
from fsdplab.figures.table import COLUMNS, LEGEND, cells
from fsdplab.figures.view import RunView

What = ParamSpec("What")
Attributes: TypeAlias = Mapping[str, str]
_MOST_STATIC = 400  # marks above which a reader without scripts gets the words instead of the picture


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, and the attributes of its tag."""

    text: str
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What the tags of a comparison table carry: classes where there is a style sheet, styles where there is none.

    `heading` takes a column's name, `cell` a column's name and the text.
    """

    table: Attributes
    heading: Callable[[str], Attributes]
    cell: Callable[[str, str], Attributes]


def table(
    head: Sequence[Cell], rows: Iterable[Sequence[Cell]], attributes: Attributes | None = None, caption: str = ""
) -> Markup:
    """An HTML table: `table([Cell("rank")], [[Cell("0")], [Cell("1")]])`."""
    return part("table", head=head, rows=rows, attributes=attributes or {}, caption=caption)


def comparison_table(runs: Sequence[RunView], look: Look, caption: str = f"{LEGEND}.") -> Markup:
    """The table of a comparison, one row a run, in the columns that the terminal prints too."""
    head = [Cell(name, look.heading(name)) for name in COLUMNS]
    rows = [[Cell(text, look.cell(name, text)) for name, text in zip(COLUMNS, cells(run))] for run in runs]
    return table(head, rows, look.table, caption)


def drawn(draw: Callable[What, go.Figure], *what: What.args, **how: What.kwargs) -> Markup:
    """A figure for the page, or the one line that says why there is none and what to do."""
    try:
        return plot(draw(*what, **how))
    except ValueError as reason:
        return note(str(reason))


def plot(figure: go.Figure) -> Markup:
    """A figure as JSON beside an empty place, drawn when it is first seen; without scripts its picture, or its words if
    it has many marks.
    """
    marks = sum(
        sum(map(len, trace.z)) if isinstance(trace, go.Heatmap) else len(trace.x or ()) for trace in figure.data
    )
    still = Markup(svg(figure)) if marks <= _MOST_STATIC else ""
    height = figure.layout.height or 420
    return part("plot", alt=alt_text(figure), height=height, data=figure.to_json(), still=still)


def note(text: str) -> Markup:
    """One line in a figure's place."""
    return part("note", text=text)


def picture(figure: go.Figure, alt: str | None = None) -> str:
    """The figure as an `<img>` of its SVG with alternative text (its own by default), for pages without scripts."""
    encoded = base64.b64encode(svg(figure).encode()).decode()
    return str(part("picture", encoded=encoded, alt=alt or alt_text(figure)))
