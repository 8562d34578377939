"""The pieces that pages and notebooks share: tables, figures drawn when they are first seen, notes, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeAlias

from markupsafe import Markup

from fsdplab.figures.plotly_go import go
from fsdplab.figures.report.rendering import part
from fsdplab.figures.style import CAMERA, alt_text
from fsdplab.figures.table import COLUMNS, LEGEND, cells
from fsdplab.figures.view import RunView

What = ParamSpec("What")
Attributes: TypeAlias = Mapping[str, str]
Texts: TypeAlias = Sequence[str]


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


def number_table(head: Texts, rows: Iterable[Texts], caption: str = "") -> Markup:
    """A table of texts whose cells are numbers, set flush right, after the first column's."""
    return classed_table(["", *["number"] * (len(head) - 1)], head, rows, caption)


def classed_table(classes: Texts, head: Texts, rows: Iterable[Texts], caption: str = "") -> Markup:
    """A table of texts, each column with its class."""
    looks = [{"class": name} if name else {} for name in classes]
    header, *body = ([Cell(text, look) for text, look in zip(row, looks)] for row in (head, *rows))
    return table(header, body, caption=caption)


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
    """A figure as JSON beside an empty place, drawn when it is first seen; without scripts its words."""
    words = (figure.layout.title.text, figure.layout.title.subtitle.text)
    title, conditions = (Markup((each or "").replace("<br>", " ")).striptags() for each in words)
    height = figure.layout.height or 420
    return part("plot", title=title, conditions=conditions, alt=alt_text(figure), height=height, data=figure.to_json())


def note(text: str) -> Markup:
    """One line in a figure's place."""
    return part("note", text=text)


def picture(figure: go.Figure, alt: str | None = None) -> str:
    """The figure for a saved notebook that is read without a kernel: drawn by plotly from its site where scripts may
    run, and its alternative text (its own by default), which needs neither a script nor a network.
    """
    drawn = figure.to_html(full_html=False, include_plotlyjs="cdn", config=CAMERA)
    return str(part("picture", drawn=Markup(drawn), alt=alt or alt_text(figure)))
