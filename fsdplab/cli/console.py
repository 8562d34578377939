"""The console that every command prints to: stdout, or stderr where stdout carries JSON.

Records, traces and file names come from other people, and the name of a kernel or a unit may hold what steers a
terminal: escape sequences that clear the screen or set its title, and signs that turn the order of letters round. So
text loses such characters here, where everything passes that is printed; rich's own colours and its live table stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fsdplab.common.words import harmless


class SafeConsole(Console):
    """A rich console whose texts are `harmless`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of a text, table or figure; what rich itself sends to steer the terminal is no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def console_beside(json_file: str | None, width: int | None = None) -> Console:
    """stdout, or stderr where stdout carries the JSON (`-`); `width` columns where that is no terminal."""
    console = SafeConsole(stderr=json_file == "-")
    return console if console.is_terminal else SafeConsole(stderr=json_file == "-", width=width)
