"""Holds the result of a command: what a terminal shows in order, what `--json` holds, and the page or figure.

`outputs.Outputs` is the one renderer of all three.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Table:
    """Columns and their rows of text. Columns named in `words` are aligned left, all others right.

    Columns named in `folds` may take several lines; a `ruled` table has a rule below its header, and colours verdicts.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    folds: Collection[str] = ()
    header: bool = True
    ruled: bool = False


@dataclass(frozen=True)
class Line:
    """A sentence, after an optional label: `Line("all figures are predicted", "provenance")`.

    `mood` is "good", "bad", "bold" or "dim"; it applies to the label where there is one. A `whole` line is not wrapped.
    """

    text: str
    label: str = ""
    mood: str = ""
    whole: bool = False


Part: TypeAlias = "Table | Line"


@dataclass(frozen=True)
class Answer:
    """What a command found: tables and lines in the order in which they are shown, and the content of `--json`.

    `page` returns the HTML of the page or figure; it is called only where one was asked for. `code` is the exit code.
    """

    parts: Sequence[Part]
    data: Mapping[str, Any]
    page: Callable[[], str] | None = None
    code: int = 0
