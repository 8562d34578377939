"""What an answer is: one sentence, the table that its numbers are from, and what of the table a figure draws.

A number is written the same way in the sentence, in the table and beside the figure: by its column's kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.memory import Memory
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan

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


# ---- columns that many answers have

PEAK, SPEED, STEP, SENT, EXPOSED, FITS = "peak", "tokens/s a GPU", "step", "sent", "exposed", "fits"
ALIKE = 0.99  # less than a percent is no difference in speed
ACTIVATIONS, GATHERED = "most activations", "most gathered"
_KINDS = {
    PEAK: "bytes", ACTIVATIONS: "bytes", GATHERED: "bytes", SENT: "bytes", STEP: "seconds", EXPOSED: "share",
    SPEED: "number", FITS: "verdict",
}  # fmt: skip


def memory_facts(memory: Memory, spec: PlanSpec) -> dict[str, Value]:
    """The bytes of a rank at the peak, and whether the card holds them; activations and gathered parameters when they
    take most.
    """
    every = [moment.by_category for moment in memory.moments]
    return {
        PEAK: memory.peak.total,
        ACTIVATIONS: max(each["activations"] for each in every),
        GATHERED: max(each["gathered_parameters"] for each in every),
        FITS: memory.peak.total <= spec.gpu.memory_bytes,
    }


def facts(found: Plan) -> dict[str, Value]:
    """What a plan comes to, by the names of columns; None for times of a GPU whose FLOP/s are not known."""
    time = found.time
    return memory_facts(found.memory, found.spec) | {
        SENT: sum(row.step_bytes for row in found.traffic),
        STEP: time.step_s if time else None,
        EXPOSED: max(0.0, time.exposed_s) / time.step_s if time else None,
        SPEED: found.tokens_per_s_per_gpu,
    }


def tabled(first: Column, rows: Sequence[Row], columns: Sequence[str | Column]) -> tuple[tuple[Column, ...], tuple]:
    """Columns and rows of a table: `first`, then the named ones, of rows that know more."""
    every = (first, *(each if isinstance(each, Column) else Column(each, _KINDS[each]) for each in columns))
    return every, tuple(tuple(row[column.name] for column in every) for row in rows)


def card_line(spec: PlanSpec) -> tuple[float, str]:
    """The limit that a panel of memory has."""
    return float(spec.gpu.memory_bytes), f"card {size(spec.gpu.memory_bytes)}"


def memory_panel(spec: PlanSpec, *columns: str) -> Panel:
    """Bars of memory under the line of the card."""
    return Panel(columns or (PEAK,), limit=card_line(spec))


def number(row: Row, name: str) -> float:
    """A row's value as a number; 0 for what is not known."""
    return float(row[name] or 0)


def fastest(rows: Sequence[Row]) -> Row:
    """Of the rows that fit, or of all, those within a percent of the most tokens/s; of these the one with least
    memory.
    """
    found = [row for row in rows if row[FITS]] or rows
    most = max(number(row, SPEED) for row in found)
    return min((row for row in found if number(row, SPEED) >= ALIKE * most), key=lambda row: number(row, PEAK))


def joined(words: Sequence[str]) -> str:
    """`joined(["a", "b", "c"]) == "a, b and c"`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
