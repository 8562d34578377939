"""What a question and its answer are: one sentence, the table that its numbers are from, and what of the table a figure
draws.

A number is written the same way in the sentence, in the table and beside the figure: by its column's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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


_KINDS = {
    "bytes": "peak, most activations, most gathered, sent, gathered at once, states, all else, saved, crosses a step,"
    " host memory of a rank, largest buffer, sent in reductions, sent by zero1, at the peak",
    "seconds": "step, exposed time, on the host's link, gather of a block, full_shard, hybrid_shard",
    "share": "exposed, more at the peak, of the card",
    "number": "tokens/s a GPU, tokens, forward, backward",
    "rate": "network of a GPU",
    "count": "units, micro-batch, sequence, GPUs, ranks, blocks recomputed, units ahead, micro-batches,"
    " ranks of a group",
    "verdict": "fits",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split(", ")}


@dataclass(frozen=True)
class Column:
    """A column by its heading; `kind` is how its values are written: bytes, rate, seconds, share, number, count, words,
    verdict.

    >>> Column("peak").text(59_400_000_000), Column("policy").kind
    ('59.4 GB', 'words')
    """

    name: str

    @property
    def kind(self) -> str:
        """Words, where the heading is of no number."""
        return _KIND_OF.get(self.name, "words")

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
class Cells:
    """A row of a table: `row["peak"]` is the cell as it is written, `row.number("peak")` its value, 0 where unknown."""

    values: Row
    columns: Mapping[str, Column]

    def __getitem__(self, name: str) -> str:
        return self.columns[name].text(self.values[name])

    def number(self, name: str) -> float:
        """The value of a cell; 0 for what is not known."""
        return float(self.values[name] or 0)

    @property
    def fits(self) -> bool:
        """Whether the card holds it."""
        return bool(self.values["fits"])

    @property
    def verdict(self) -> str:
        """Whether the card holds it, to be read in a sentence."""
        return "it fits" if self.fits else "it does not fit"


class Varied(Protocol):
    """What a row is about."""

    def cells(self, columns: Sequence[str]) -> Row: ...


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question in one line, and how it is answered for a plan's spec: each variant is a row of `columns`, the first
    of which says what is varied. The sentence is made from the rows: by a function, or `rows[0][peak]` in braces stands
    for a cell.

    `base` gives the spec that is answered for, and a remark; it raises PlanError where there is no answer. Under the
    line of the card a figure shows the column `on_card`, and `beside` it other panels, a column by its name.
    `simulated` columns are of a simulated step. A `timed` answer needs the GPU's FLOP/s.
    """

    asked: str
    columns: Sequence[str]
    variants: Callable[[PlanSpec], Sequence[Varied]]
    sentence: str | Callable[[PlanSpec, Sequence[Cells]], str]
    beside: Sequence[Panel | str]
    base: Callable[[PlanSpec], tuple[PlanSpec, str]] = lambda spec: (spec, "")
    on_card: str = "peak"
    simulated: tuple[str, ...] = ()
    timed: bool = True

    def answer(self, name: str, spec: PlanSpec) -> Answer:
        """The answer about `spec`; PlanError where a variant contradicts itself."""
        base, note = self.base(spec)
        rows = [variant.cells(self.columns) for variant in self.variants(base)]
        columns, said = {name: Column(name) for name in self.columns}, self.sentence
        cells, card = [Cells(row, columns) for row in rows], spec.gpu.memory_bytes
        panels = [Panel((self.on_card,), limit=(float(card), f"card {size(card)}"))] if self.on_card else []
        panels += [Panel((each,)) if isinstance(each, str) else each for each in self.beside]
        return Answer(
            question=name,
            asked=self.asked,
            spec=base,
            sentence=said.format(spec=base, rows=cells) if isinstance(said, str) else said(base, cells),
            columns=tuple(columns.values()),
            rows=tuple(tuple(row[each] for each in columns) for row in rows),
            panels=tuple(panels),
            simulated=self.simulated,
            note=note,
        )


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
