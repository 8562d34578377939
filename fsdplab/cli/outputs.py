"""The renderer of every command: an answer in the terminal, as JSON and as a page.

Records, traces and file names come from other people, and the name of a kernel or a unit may hold what steers a
terminal: escape sequences that clear the screen or set its title, and signs that turn the order of letters round. So
text loses such characters here, where everything passes that is printed; rich's own colours and its live table stay.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from fsdplab.cli.answer import Answer, Part, Table
from fsdplab.cli.errors import refuse
from fsdplab.common.files import try_folder, try_output, write_output
from fsdplab.common.places import how_to_install
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


class Detail(Enum):
    """How much is printed: the result (-q); also progress, legend and findings; or also every step and the ranks'
    output (-v).
    """

    QUIET, NORMAL, VERBOSE = range(3)

    @classmethod
    def of(cls, quiet: bool, verbose: bool) -> Detail:
        """The level of the two flags; both together are an error."""
        if quiet and verbose:
            refuse("--quiet and --verbose were given; expected one of them, or none")
        return cls.QUIET if quiet else cls.VERBOSE if verbose else cls.NORMAL


@dataclass(frozen=True)
class Outputs:
    """Where an answer goes beside the terminal: JSON (a file, or `-` for stdout), and a page or figure as HTML.

    `page_flag` is the flag that named the page; `keep` is a folder for records, which are replaced only by `force`.
    """

    json_file: str | None = None
    page_file: Path | None = None
    page_flag: str = "--html"
    keep: Path | None = None
    detail: Detail = Detail.NORMAL
    force: bool = False

    def check(self) -> Outputs:
        """Refuse a target that cannot be written, and a page without plotly, before anything runs."""
        if self.page_flag == "--figure" and self.page_file and self.page_file.suffix != ".html":
            shown = repr(str(self.page_file))
            refuse(f"--figure is {shown}; expected a file name that ends in .html: its camera button saves an SVG")
        if self.page_file and importlib.util.find_spec("plotly") is None:
            refuse(f"{self.page_flag} needs plotly; run: {how_to_install('lab')}")
        for flag, path in (("--json", self.json_file), (self.page_flag, self.page_file)):
            if path and str(path) != "-":
                check_file(flag, Path(path))
        if self.keep:
            check_folder("--keep", self.keep)
        return self

    def console(self) -> Console:
        """stdout, or stderr where stdout carries the JSON; `WIDTH` columns where it is no terminal."""
        beside = SafeConsole(stderr=self.json_file == "-")
        return beside if beside.is_terminal else SafeConsole(stderr=beside.stderr, width=WIDTH)

    def give(self, answer: Answer) -> None:
        """Print an answer, and write the files that were asked for."""
        show(self.console(), answer.parts)
        text = json.dumps(answer.data, indent=1) + "\n" if self.json_file else ""
        if self.json_file == "-":
            sys.stdout.write(text)
        elif self.json_file:
            write_output(Path(self.json_file), text)
        if self.page_file and answer.page:
            write_output(self.page_file, answer.page())


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
        box=SIMPLE_HEAD if table.ruled else None, pad_edge=not table.ruled, header_style="bold",
        padding=(0, 1, 0, 0) if table.ruled else (0, 1), show_header=table.header,
    )  # fmt: skip
    for name in table.columns:
        heading = name.replace(", ", "\n") if table.ruled else name
        side: JustifyMethod = "left" if name in table.words else "right"
        grid.add_column(heading, justify=side, no_wrap=name not in table.folds, overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(text, _STYLES[mood(text)] if table.ruled else "") for text in row))
    return grid


def check_file(flag: str, path: Path) -> None:
    """Refuse a file that is not writable, before a command takes its time."""
    _check(flag, path, try_output, "expected a file name in an existing folder that is writable")


def check_folder(flag: str, path: Path) -> None:
    """Refuse a folder in which no file can be made."""
    if path.exists() and not path.is_dir():
        refuse(f"{flag} {path} is a file; expected a folder")
    _check(flag, path, try_folder, "expected a folder, or a name for one, where there is free space")


def _check(flag: str, path: Path, attempt: Callable[[Path], None], expected: str) -> None:
    try:
        attempt(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        refuse(f"{flag} {path} cannot be written ({getattr(error, 'strerror', None) or error}); {expected}")
