"""What plans come to, as rows of answers: the columns that many of them have, and how to choose between rows."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.planning.memory import Memory
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import plan_of

from .answer import Cells, Column, Value

PEAK, SPEED, STEP, SENT, EXPOSED, FITS = "peak", "tokens/s a GPU", "step", "sent", "exposed", "fits"
ALIKE = 0.99  # less than a percent is no difference in speed
ACTIVATIONS, GATHERED = "most activations", "most gathered"
_KINDS = {
    PEAK: "bytes", ACTIVATIONS: "bytes", GATHERED: "bytes", SENT: "bytes", STEP: "seconds", EXPOSED: "share",
    SPEED: "number", FITS: "verdict",
}  # fmt: skip


def columns(first: Column, *others: str | Column) -> tuple[Column, ...]:
    """The columns of a table: what is varied, then others, by name where they are those of a plan."""
    return (first, *(each if isinstance(each, Column) else Column(each, _KINDS[each]) for each in others))


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


def row(spec: PlanSpec, **more: Value) -> dict[str, Value]:
    """What a plan comes to, beside what is given; None for times of a GPU whose FLOP/s are not known."""
    found = plan_of(spec)
    time = found.time
    return more | of_memory(found.memory, spec) | {
        SENT: sum(each.step_bytes for each in found.traffic),
        STEP: time.step_s if time else None,
        EXPOSED: max(0.0, time.exposed_s) / time.step_s if time else None,
        SPEED: found.tokens_per_s_per_gpu,
    }  # fmt: skip


def near_the_fastest(best: Cells) -> str:
    """Among which rows the best was chosen, to be read in a sentence."""
    return f"{'of those that fit,' if best.fits else 'none fits, and'} within a percent of the fastest,"


def fastest(rows: Sequence[Cells]) -> Cells:
    """Of the rows that fit, or of all, those within a percent of the most tokens/s; of these the one with least
    memory.
    """
    found = [row for row in rows if row.fits] or rows
    most = max(row.number(SPEED) for row in found)
    return min((row for row in found if row.number(SPEED) >= ALIKE * most), key=lambda row: row.number(PEAK))


def joined(words: Sequence[str]) -> str:
    """`joined(["a", "b", "c"]) == "a, b and c"`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
