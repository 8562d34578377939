"""What plans come to, as rows of answers: the columns that many of them have, how to choose between rows, and how a
sentence writes a cell.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.planning.memory import Memory
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan, plan_of

from .answer import Column, Panel, Row, Value, share

PEAK, SPEED, STEP, SENT, EXPOSED, FITS = "peak", "tokens/s a GPU", "step", "sent", "exposed", "fits"
ALIKE = 0.99  # less than a percent is no difference in speed
ACTIVATIONS, GATHERED = "most activations", "most gathered"
_KINDS = {
    PEAK: "bytes", ACTIVATIONS: "bytes", GATHERED: "bytes", SENT: "bytes", STEP: "seconds", EXPOSED: "share",
    SPEED: "number", FITS: "verdict",
}  # fmt: skip


def of_memory(memory: Memory, spec: PlanSpec) -> dict[str, Value]:
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


def of_plan(found: Plan) -> dict[str, Value]:
    """What a plan comes to, by the names of columns; None for times of a GPU whose FLOP/s are not known."""
    time = found.time
    return of_memory(found.memory, found.spec) | {
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


def row(spec: PlanSpec, **more: Value) -> dict[str, Value]:
    """The row of a plan: what it comes to, beside what is given."""
    return {**more, **of_plan(plan_of(spec))}


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


# ---- cells that sentences have, written as in the table


def peak(row: Row) -> str:
    """The peak of a row: `59.4 GB`."""
    return size(number(row, PEAK))


def nbytes(row: Row, name: str) -> str:
    """Bytes of another column."""
    return size(number(row, name))


def sent(row: Row) -> str:
    """The bytes that a rank sends in a step: `54.4 GB`."""
    return size(number(row, SENT))


def step(row: Row) -> str:
    """The time of a step: `512 ms`."""
    return seconds(number(row, STEP))


def speed(row: Row) -> str:
    """Tokens a second of a GPU: `7,993`."""
    return three_digits(number(row, SPEED))


def exposed(row: Row) -> str:
    """The exposed part of a step: `3.46%`."""
    return share(number(row, EXPOSED))


def verdict(row: Row) -> str:
    """Whether the card holds it, to be read in a sentence."""
    return "it fits" if row[FITS] else "it does not fit"
