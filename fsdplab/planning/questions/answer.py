"""What an answer is: one sentence, the table that its numbers are from, and what of the table a figure draws.

A number is written the same way in the sentence, in the table and beside the figure: by its column's kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.plan_spec import PlanSpec

Value: TypeAlias = "float | int | bool | str | None"
Row: TypeAlias = Mapping[str, Value]


def share(value: float) -> str:
    """A part of a whole, in percent with three digits: `share(0.0123) == "1.23%"`, `share(0) == "0%"`."""
    return f"{three_digits(100 * value)}%" if value else "0%"


def rate(value: float) -> str:
    """Bytes a second: `rate(50e9) == "50.0 GB/s"`."""
    return f"{size(value)}/s"


_WRITTEN = {
    "bytes": size, "rate": rate, "seconds": seconds, "share": share, "number": three_digits, "count": "{:,}".format,
    "words": str, "verdict": lambda fits: "fits" if fits else "too large",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column's heading, and how its values are written: bytes, rate, seconds, share, number, count, words, verdict.

    >>> Column("peak", "bytes").text(59_400_000_000)
    '59.4 GB'
    """

    name: str
    kind: str = "words"

    def text(self, value: Value) -> str:
        """A cell; a dash for what is not known."""
        return MISSING if value is None else str(_WRITTEN[self.kind](value))  # type: ignore[operator]


@dataclass(frozen=True)
class Panel:
    """A part of the figure: these columns over the first one, as bars or lines, under a limit with its name; `title`:
    of several columns together.
    """

    columns: tuple[str, ...]
    kind: str = "bars"
    limit: tuple[float, str] | None = None
    title: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to `asked` about `spec`: every number of the sentence is in the table or in the spec.

    `panels` are what the figure draws; `simulated`: columns whose values are of a simulated step, all others are
    predicted in closed form; `note`: what the figures leave out.
    """

    question: str
    asked: str
    spec: PlanSpec
    sentence: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    panels: tuple[Panel, ...]
    simulated: tuple[str, ...] = ()
    note: str = ""

    def column(self, name: str) -> tuple[Value, ...]:
        """The values of a column, in the order of the rows."""
        place = [each.name for each in self.columns].index(name)
        return tuple(row[place] for row in self.rows)

    def texts(self) -> list[list[str]]:
        """The cells, written."""
        return [[column.text(value) for column, value in zip(self.columns, row)] for row in self.rows]

    @property
    def provenance(self) -> str:
        """Where the numbers are from."""
        some = f", but simulated: {', '.join(self.simulated)}" if self.simulated else ""
        return f"predicted in closed form{some}"

    def as_dict(self) -> dict[str, object]:
        """For `--json`: bytes, seconds and shares."""
        return {
            "question": self.question,
            "asked": self.asked,
            "sentence": self.sentence,
            "rows": [dict(zip((column.name for column in self.columns), row)) for row in self.rows],
            "provenance": self.provenance,
            "note": self.note,
        }
