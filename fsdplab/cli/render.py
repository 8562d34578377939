"""Draws answers in a terminal. Apart from `outputs`, because rich takes its time to import.

Records, traces and file names come from other people, and the name of a kernel or a unit may hold what steers a
terminal: escape sequences that clear the screen or set its title, and signs that turn the order of letters round. So
text loses such characters here, where everything passes that is printed; rich's own colours and its live table stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from fsdplab.cli.answer import Line, Part, Table
from fsdplab.common.words import harmless
from fsdplab.figures.table import mood

WIDTH = 161  # columns without a terminal: no table of a comparison wraps
_STYLES = {"good": "bold green", "bad": "bold red", "bold": "bold", "dim": "dim", "": ""}


class SafeConsole(Console):
    """A rich console whose texts are `harmless`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of a text, table or figure; what rich itself sends to steer the terminal is no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def console_of(stderr: bool) -> SafeConsole:
    """Return a console on stdout, or on stderr where stdout carries the JSON; `WIDTH` columns without a terminal."""
    console = SafeConsole(stderr=stderr)
    if console.is_terminal:
        return console
    return SafeConsole(stderr=stderr, width=WIDTH)


def show(console: Console, parts: Iterable[Part]) -> None:
    """Print tables and lines in their order."""
    for part in parts:
        if isinstance(part, Table):
            grid = drawn(part)
            if _least_width(grid, console) > console.width:
                for column in grid.columns:  # rich would cut off the ends of figures
                    column.no_wrap = False
            console.print(grid)
        else:
            # a whole line is left to the terminal to wrap, so that a command in it can be copied
            console.print(_text(part), highlight=False, soft_wrap=part.whole)


def _least_width(grid: Grid, console: Console) -> int:
    """Return the columns of a terminal that a table takes where only those of its columns fold that may."""
    width = 0
    for column in grid.columns:
        least = 0
        for cell in (column.header, *column.cells):
            measured = console.measure(cell)
            least = max(least, measured.maximum if column.no_wrap else measured.minimum)
        width += least + 2  # with the blanks beside it
    return width


def _text(line: Line) -> Text:
    """Style the label of a line by its mood, or the whole line where it has no label."""
    if line.label:
        label = Text(f"{line.label}: ", _STYLES[line.mood or "bold"])
        return Text.assemble(label, Text(line.text))
    return Text.assemble(Text(line.text, _STYLES[line.mood]))


def drawn(table: Table) -> Grid:
    """Return a table as rich draws it, also in a live display."""
    if table.ruled:
        grid = Grid(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    else:
        grid = Grid(box=None, pad_edge=True, padding=(0, 1))
    grid.header_style = "bold"
    grid.show_header = table.header
    for name in table.columns:
        heading = name
        if table.ruled:  # its columns are narrow
            heading = name.replace(", ", "\n")
        side: JustifyMethod = "left" if name in table.words else "right"
        grid.add_column(heading, justify=side, no_wrap=name not in table.folds, overflow="fold")
    for row in table.rows:
        if table.ruled:
            grid.add_row(*(Text(text, _STYLES[mood(text)]) for text in row))
        else:
            grid.add_row(*map(Text, row))
    return grid
