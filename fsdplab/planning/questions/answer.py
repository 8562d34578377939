"""What a question and its answer are: one sentence, the table that its numbers are from, and what of the table a figure
draws. Each row of the table is a case: a plan with one choice varied.

A number is written the same way in the sentence, in the table and beside the figure: by its column's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.host import host_crossing, host_link
from fsdplab.planning.memory import Memory, all_units, host_bytes, memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import AxisTraffic, plan_traffic, transfer_of
from fsdplab.planning.program import StepWork
from fsdplab.planning.simulation import simulate_work
from fsdplab.planning.step_time import StepTime, has_known_flops, step_time

Value: TypeAlias = "float | int | bool | str | None"
PEAK, SPEED, STEP, SENT, EXPOSED, FITS = "peak", "tokens/s a GPU", "step", "sent", "exposed", "fits"
ACTIVATIONS, GATHERED = "most activations", "most gathered"
ALIKE = 0.99  # less than a percent is no difference in speed


@dataclass(frozen=True)
class Case:
    """A row of an answer: what is varied, and the plan with that. `work` is that of a step which is simulated; `known`
    are cells that the variant itself gives. `row["peak"]` is the cell as it is written, `row.value("peak")` its value.
    """

    label: Value
    spec: PlanSpec
    work: StepWork | None = None
    known: Mapping[str, Value] = field(default_factory=dict)

    def value(self, name: str) -> Value:
        """The cell of a column; that of the first column is the label."""
        if name in self.known:
            return self.known[name]
        return found(self) if (found := _COLUMNS.get(name, _LABEL)[1]) else self.label

    def number(self, name: str) -> float:
        """The value of a cell; 0 for what is not known."""
        return float(self.value(name) or 0)

    def __getitem__(self, name: str) -> str:
        return Column(name).text(self.value(name))

    @property
    def fits(self) -> bool:
        """Whether the card holds it."""
        return self.memory.peak.total <= self.spec.gpu.memory_bytes

    @property
    def verdict(self) -> str:
        """Whether the card holds it, to be read in a sentence."""
        return "it fits" if self.fits else "it does not fit"

    @cached_property
    def memory(self) -> Memory:
        """Of a rank through the step."""
        return memory_of(self.spec)

    @cached_property
    def traffic(self) -> Sequence[AxisTraffic]:
        """Of a rank in the step."""
        return plan_traffic(self.spec)

    @cached_property
    def time(self) -> StepTime | None:
        """In closed form; None where no FLOP/s are known."""
        return step_time(self.spec) if has_known_flops(self.spec.gpu) else None

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of the step."""
        if self.work:
            return simulate_work(self.work).step_s
        return self.time.step_s if self.time else None

    @property
    def states(self) -> float:
        """Bytes of the model's states at the peak."""
        held = self.memory.peak.by_category
        return held["sharded_parameters"] + held["sharded_gradients"] + held["optimizer_state"]

    def most(self, category: str) -> float:
        """Bytes of a category when it takes most."""
        return max(moment.by_category[category] for moment in self.memory.moments)

    @property
    def crossing(self) -> float:
        """Bytes over the host's link in a step. Of an optimizer there, the gradients of what a rank updates go to the
        CPU, and as many bytes of parameters come back: ZeRO-Offload's 4 bytes a parameter in 16 bits (Ren et al. 2021,
        section 3.2); nothing where there is no state.
        """
        spec = self.spec
        if spec.offload:
            return host_crossing(spec)
        if not spec.optimizer_on_cpu or not spec.optimizer_bytes:
            return 0.0
        return 2 * spec.rest_bytes * all_units(spec).optimizer_state / spec.optimizer_bytes


# ---- columns


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


def _host(case: Case) -> float:
    if not case.spec.optimizer_on_cpu:
        return host_bytes(case.spec)
    return memory_of(replace(case.spec, optimizer_on_cpu=False)).at("optimizer step").by_category["optimizer_state"]


def _exposed_s(case: Case) -> float:
    """Seconds of a simulated step in which nothing is computed."""
    assert case.work is not None and case.step_s is not None, "it is asked of simulated steps"
    return max(0.0, case.step_s - case.work.compute_s)


def _gather_s(case: Case) -> float:
    rows = [row for row in case.traffic if (row.unit, row.axis, row.kind) == ("block", "shard", "all_gather")]
    return sum(transfer_of(case.spec, row).seconds for row in rows)


def _reductions(case: Case) -> float:
    states = [row for row in case.traffic if row.axis in ("shard", "replicate")]
    return sum(row.step_bytes for row in states if row.kind != "all_gather")


# A column by its heading: how its values are written, and how they follow from a plan (None: the cases know them).
_LABEL: tuple[str, Callable[[Case], Value] | None] = ("words", None)
_COLUMNS: dict[str, tuple[str, Callable[[Case], Value] | None]] = {
    PEAK: ("bytes", lambda case: case.memory.peak.total),
    FITS: ("verdict", lambda case: case.fits),
    ACTIVATIONS: ("bytes", lambda case: case.most("activations")),
    GATHERED: ("bytes", lambda case: case.most("unsharded_parameters")),
    "largest buffer": ("bytes", lambda case: case.most("communication_buffers")),
    "gathered at once": (
        "bytes", lambda case: case.memory.at("backward of the last block").by_category["unsharded_parameters"]
    ),
    "states": ("bytes", lambda case: case.states),
    "all else": ("bytes", lambda case: case.memory.peak.total - case.states),
    SENT: ("bytes", lambda case: sum(row.step_bytes for row in case.traffic)),
    "sent in reductions": ("bytes", _reductions),
    STEP: ("seconds", lambda case: case.step_s),
    EXPOSED: ("share", lambda case: max(0.0, case.time.exposed_s) / case.time.step_s if case.time else None),
    "exposed time": ("seconds", _exposed_s),
    SPEED: ("number", lambda case: case.spec.step_tokens / case.step_s / case.spec.gpus if case.step_s else None),
    "units": ("count", lambda case: len(case.work.blocks) if case.work else None),
    "gather of a block": ("seconds", _gather_s),
    "host memory of a rank": ("bytes", _host),
    "crosses a step": ("bytes", lambda case: case.crossing),
    "on the host's link": ("seconds", lambda case: case.crossing / host_link(case.spec).bytes_per_s or None),
    **dict.fromkeys(("saved", "sent by zero1", "at the peak"), ("bytes", None)),
    **dict.fromkeys(("full_shard", "hybrid_shard"), ("seconds", None)),
    **dict.fromkeys(("more at the peak", "of the card"), ("share", None)),
    **dict.fromkeys(("tokens", "forward", "backward"), ("number", None)),
    "network of a GPU": ("rate", None),
    **dict.fromkeys(("micro-batch", "sequence", "GPUs", "ranks", "blocks recomputed", "units ahead"), ("count", None)),
    **dict.fromkeys(("micro-batches", "ranks of a group"), ("count", None)),
}  # fmt: skip


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
        return _COLUMNS.get(self.name, _LABEL)[0]

    def text(self, value: Value) -> str:
        """A cell; a dash for what is not known."""
        return MISSING if value is None else str(_WRITTEN[self.kind](value))  # type: ignore[operator]


# ---- questions


@dataclass(frozen=True)
class Panel:
    """A part of the figure: these columns over the first one, as bars or lines, under a limit with its name; `title`:
    of several columns together.
    """

    columns: tuple[str, ...]
    kind: str = "bars"
    limit: tuple[float, str] | None = None
    title: str = ""


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
    variants: Callable[[PlanSpec], Sequence[Case]]
    sentence: str | Callable[[PlanSpec, Sequence[Case]], str]
    beside: Sequence[Panel | str]
    base: Callable[[PlanSpec], tuple[PlanSpec, str]] = lambda spec: (spec, "")
    on_card: str = "peak"
    simulated: tuple[str, ...] = ()
    timed: bool = True

    def answer(self, name: str, spec: PlanSpec) -> Answer:
        """The answer about `spec`; PlanError where a variant contradicts itself."""
        base, note = self.base(spec)
        cases, said, card = self.variants(base), self.sentence, spec.gpu.memory_bytes
        sentence = said.format(spec=base, rows=cases) if isinstance(said, str) else said(base, cases)
        rows = tuple(tuple(case.value(each) for each in self.columns) for case in cases)
        panels = [Panel((self.on_card,), limit=(float(card), f"card {size(card)}"))] if self.on_card else []
        panels += [Panel((each,)) if isinstance(each, str) else each for each in self.beside]
        columns = tuple(map(Column, self.columns))
        return Answer(name, self.asked, base, sentence, columns, rows, tuple(panels), self.simulated, note)


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
        place = self.columns.index(Column(name))
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
        rows = [dict(zip((column.name for column in self.columns), row)) for row in self.rows]
        return {
            "question": self.question, "asked": self.asked, "sentence": self.sentence, "rows": rows,
            "provenance": self.provenance, "note": self.note,
        }  # fmt: skip


# ---- how to choose between rows


def near_the_fastest(best: Case) -> str:
    """Among which rows the best was chosen, to be read in a sentence."""
    return f"{'of those that fit,' if best.fits else 'none fits, and'} within a percent of the fastest,"


def fastest(rows: Sequence[Case]) -> Case:
    """Of the rows that fit, or of all, those within a percent of the most tokens/s; of these the first one with least
    memory.
    """
    found = [row for row in rows if row.fits] or rows
    most = max(row.number(SPEED) for row in found)
    return min((row for row in found if row.number(SPEED) >= ALIKE * most), key=lambda row: row.number(PEAK))
