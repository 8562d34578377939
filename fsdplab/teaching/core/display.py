"""Output of cells: tables, figures that also show without scripts, and widgets.

A figure is shown in two forms at once: plotly's own (interactive in JupyterLab and VS Code) and its alternative text
(terminals, screen readers). The reader's page picks.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdplab.common.rows import aligned
from fsdplab.figures import alt_text
from fsdplab.figures.plotly_go import go
from fsdplab.figures.report.parts import table as html_table

from .course_state import running_shell
from .verdicts import with_code

if TYPE_CHECKING:
    import ipywidgets

    from .figure_below import FigureBelow


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` in a notebook; None everywhere else, also where IPython is not installed."""
    if running_shell() is None:
        return None
    from IPython.display import display

    return display


def present(thing: object) -> None:
    """Show an object with a `_repr_html_` in a notebook, as text everywhere else."""
    (notebook_display() or print)(thing)


def present_live(thing: object, below: FigureBelow | None = None) -> Callable[[object], None]:
    """Show an object as `present` does, and return a function that replaces the output later.

    The output is an ordinary one that stays in the saved notebook, where a widget is not saved. Another figure is on
    the screen sooner when `below` draws it.
    """
    display = notebook_display()
    # Voila runs a notebook once and shows it as a page without cells
    if display and os.environ.get("SERVER_SOFTWARE", "").startswith("voila"):
        return _in_a_widget(thing, display)
    handle = display(thing, display_id=True) if display else print(thing)
    # printed text cannot be replaced
    if handle is None:
        return lambda other: None

    def replace(other: object) -> None:
        # the page did not redraw the figure by itself, so the output is emptied first
        if isinstance(other, Shown) and not (below and below.draw(other.figure)):
            handle.update(_Between())
        handle.update(other)

    return replace


def _in_a_widget(thing: object, display: Callable[..., Any]) -> Callable[[object], None]:
    """Show the output as a widget: Voila shows a cell's output once, and changes widgets alone."""
    import ipywidgets
    from IPython.core.interactiveshell import InteractiveShell

    place = ipywidgets.Output()
    display(place)

    def replace(other: object) -> None:
        data, metadata = InteractiveShell.instance().display_formatter.format(other)
        place.outputs = ({"output_type": "display_data", "data": data, "metadata": metadata},)

    replace(thing)
    return replace


@dataclass(frozen=True)
class _Between:
    """What stands in an output for the instant between two figures.

    JupyterLab keeps an output's renderer while its form stays the same, and plotly's renderer ignores a second figure.
    A form of another kind makes JupyterLab begin anew.
    """

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": "<div style='height:450px'></div>", "text/plain": ""}


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of cells under a header, with a caption on what was measured, emulated or simulated."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def __str__(self) -> str:
        # under each heading a line as wide as the column's longest cell
        rules = ["-" * max(map(len, cells)) for cells in zip(self.header, *self.rows, strict=True)]
        lines = aligned([self.header, rules, *self.rows])
        if self.caption:
            lines = [*lines, self.caption]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        looks = []
        for column in range(len(self.header)):
            side = "right" if self._is_numeric(column) else "left"
            looks.append({"style": f"text-align:{side};padding:2px 14px 2px 0"})
        text = str(html_table(self.header, self.rows, lambda place, text: looks[place]))
        if not self.caption:
            return text
        return f"{text}<div style='font-size:90%;opacity:.75'>{html.escape(self.caption)}</div>"

    def _is_numeric(self, column: int) -> bool:
        """Return whether every cell of a column begins like a number; such columns are set flush right."""
        cells = [row[column] for row in self.rows if row[column]]
        # "12.5", "-3" and "+4 %" begin so; empty cells say nothing
        return bool(self.rows) and all(cell[0].isdigit() or cell[0] in "-+" for cell in cells)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> Table:
    """Return a table of anything: `table(["rank", "bytes"], [[0, 36], [1, 36]])`; every cell becomes a text."""
    texts = tuple(tuple(map(str, row)) for row in rows)
    return Table(tuple(header), texts, caption)


class HasTable:
    """Results that show as their `table()`."""

    def table(self) -> Table:
        """Return the results in rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@dataclass(frozen=True, repr=False)
class Text:
    """A text, and the same as HTML."""

    text: str
    html: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.html


@dataclass(frozen=True, repr=False)
class Note:
    """A few lines of text beside a coloured bar: hints, predictions."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{with_code(line)}</div>" for line in self.lines)
        return f"<div style='border-left:4px solid #4c78a8;padding:4px 12px'>{lines}</div>"


@dataclass(frozen=True, repr=False)
class Shown:
    """A figure on its way to the page, in the two forms."""

    figure: go.Figure
    alt: str

    def __str__(self) -> str:
        return f"[figure] {self.alt}"

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from fsdplab.figures.notebook_figure import bundle

        return bundle(self.figure, self.alt)


def show(figure: go.Figure, alt: str | None = None) -> None:
    """Show a plotly figure and leave it with alternative text (the figure's own by default) in the saved notebook."""
    present(shown(figure, alt))


def shown(thing: Any, alt: str | None = None) -> Any:
    """Return a plotly figure in its two forms; anything else as it is.

    ValueError for a figure without alternative text.
    """
    # a table or a note shows itself
    if not hasattr(thing, "to_plotly_json"):
        return thing
    words = alt or alt_text(thing)
    if not words:
        raise ValueError("a figure needs alternative text: show(figure, alt='what a reader should see in it')")
    return Shown(thing, words)


@dataclass(frozen=True)
class WidgetView:
    """A widget without its text form on static pages (`FloatText(value=200.0, ...)`); they show `instead`."""

    widget: ipywidgets.Widget
    instead: Any = None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = {**self.widget._repr_mimebundle_(), "text/plain": ""}
        if self.instead is not None:
            bundle["text/html"] = self.instead._repr_html_()
        return bundle


def present_widget(make: Callable[[], ipywidgets.Widget], instead: Any = None) -> FigureBelow | None:
    """Make a widget and show it in a notebook, and on its static page `instead`.

    Outside a notebook only `instead` is shown. What is returned redraws the figure that the cell shows next.
    """
    display = notebook_display()
    if display:
        import ipywidgets

        from .figure_below import FigureBelow

        # beside the controls, so that a slider can redraw the cell's figure
        below = FigureBelow()
        display(WidgetView(ipywidgets.VBox([make(), below]), instead))
        return below
    if instead is not None:
        print(instead)
    return None
