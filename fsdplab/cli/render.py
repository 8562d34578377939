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

from fsdplab.cli.answer import Part, Table
from fsdplab.common.words import harmless
from fsdplab.figures.table import mood

WIDTH = 161  # columns without a terminal: no table of a comparison wraps
_STYLES = {"good": "bold green", "bad": "bold red", "bold": "bold", "dim": "dim", "": ""}


class SafeConsole(Console):
    """A rich console whose texts are `harmless`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of a text, table or figure; what rich itself sends to steer the terminal is no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def console_of(stderr: bool) -> SafeConsole:
    """stdout, or stderr where stdout carries the JSON; `WIDTH` columns where it is no terminal."""
    beside = SafeConsole(stderr=stderr)
    return beside if beside.is_terminal else SafeConsole(stderr=stderr, width=WIDTH)


def show(console: Console, parts: Iterable[Part]) -> None:
    """Print tables and lines in their order."""
    for part in parts:
        if isinstance(part, Table):
            console.print(drawn(part))
        else:
            label = Text(f"{part.label}: ", _STYLES[part.mood or "bold"]) if part.label else Text()
            text = Text(part.text, "" if part.label else _STYLES[part.mood])
            console.print(Text.assemble(label, text), highlight=False, soft_wrap=part.whole)


def drawn(table: Table) -> Grid:
    """A table as rich draws it, also in a live display."""
    grid = Grid(
        box=SIMPLE_HEAD if table.ruled else None,
        pad_edge=not table.ruled,
        header_style="bold",
        padding=(0, 1, 0, 0) if table.ruled else (0, 1),
        show_header=table.header,
    )
    for name in table.columns:
        heading = name.replace(", ", "\n") if table.ruled else name
        side: JustifyMethod = "left" if name in table.words else "right"
        grid.add_column(heading, justify=side, no_wrap=name not in table.folds, overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(text, _STYLES[mood(text)] if table.ruled else "") for text in row))
    return grid
