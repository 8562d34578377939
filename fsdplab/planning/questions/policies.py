"""Questions about activation checkpointing: which policy, how selective ones compare, and several in one model.

Each function answers for a plan's spec; the sentence is made from the rows of its own table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdplab.planning.fit import largest_that_fits
from fsdplab.planning.memory import Variant, memory_of
from fsdplab.planning.plan_spec import CHECKPOINTINGS, POLICIES, PlanSpec
from fsdplab.planning.simulation import StepWork, simulate_work, work_of

from . import facts
from .answer import Answer, Column, Panel, Row, Value

_COLUMNS = (facts.PEAK, facts.ACTIVATIONS, facts.STEP, facts.SPEED, facts.FITS)


def checkpointing(spec: PlanSpec) -> Answer:
    """None, selective and full recomputation: what each saves and what it costs."""
    rows = _of_policies(spec, CHECKPOINTINGS, "checkpointing")
    columns, table = facts.tabled(Column("checkpointing"), rows, _COLUMNS)
    none, full = rows[0], rows[-1]
    fitting = [row for row in rows if row[facts.FITS]]
    choice = (
        f"the fastest that fits is --checkpointing {facts.fastest(rows)['checkpointing']}"
        if fitting
        else "none of them fits"
    )
    sentence = (
        f"Full checkpointing lowers the peak from {facts.peak(none)} to {facts.peak(full)} and lengthens the step from"
        f" {facts.step(none)} to {facts.step(full)}; {choice}"
    )
    return Answer(
        "checkpointing", "", spec, sentence, columns, table, (facts.memory_panel(spec), Panel((facts.SPEED,)))
    )


def policies(spec: PlanSpec) -> Answer:
    """What a block keeps of its matrix products: all, every other one, none; beside keeping everything and nothing."""
    rows = _of_policies(spec, POLICIES, "policy")
    columns, table = facts.tabled(Column("policy"), rows, _COLUMNS)
    none, products, every_other, attention, _ = rows
    best = facts.fastest(rows)
    sentence = (
        f"Keeping all matrix products peaks at {facts.peak(products)} and takes {facts.step(products)} a step, every"
        f" other one {facts.peak(every_other)} and {facts.step(every_other)}, attention alone {facts.peak(attention)}"
        f" and {facts.step(attention)}, against {facts.peak(none)} and {facts.step(none)} without checkpointing;"
        f" {'of those that fit,' if best[facts.FITS] else 'none fits, and'} within a percent of the fastest,"
        f" --checkpointing {best['policy']} needs least memory"
    )
    note = (
        "products and attention are for PyTorch's create_selective_checkpoint_contexts; this engine has the other three"
    )
    panels = (facts.memory_panel(spec), Panel((facts.STEP,)))
    return Answer("policies", "", spec, sentence, columns, table, panels, note=note)


def mixed_policies(spec: PlanSpec) -> Answer:
    """The first k blocks checkpointed and the others not: the fewest that fit."""
    policy = "full" if spec.checkpointing == "none" else spec.checkpointing
    some, layers = replace(spec, checkpointing=policy), spec.model.layers
    kept = largest_that_fits(lambda count: _memory_fits(some, layers - count), layers)
    least = layers - kept
    counts = {0, layers // 4, layers // 2, 3 * layers // 4, layers, least, max(0, least - 1)}
    works = work_of(replace(spec, checkpointing="none")), work_of(some)
    rows = [_mixed(some, count, *works) for count in sorted(counts)]
    columns, table = facts.tabled(Column(_RECOMPUTED, "count"), rows, _COLUMNS)
    sentence = _mixed_sentence(rows, next(row for row in rows if row[_RECOMPUTED] == least))
    note = f"a block that is recomputed has --checkpointing {policy}"
    panels = (facts.memory_panel(spec), Panel((facts.STEP,)))
    return Answer(
        "mixed_policies", "", some, sentence, columns, table, panels, simulated=(facts.STEP, facts.SPEED), note=note
    )


_RECOMPUTED = "blocks recomputed"


def _mixed_sentence(rows: Sequence[Row], least: Row) -> str:
    none, every = rows[0], rows[-1]
    beside = f"{facts.peak(every)} and {facts.step(every)} with all {every[_RECOMPUTED]:,}"
    if not every[facts.FITS]:
        return (
            f"Even with all {every[_RECOMPUTED]:,} blocks recomputed it does not fit: {facts.peak(every)} at the peak"
        )
    if least is none:
        return (
            f"No block needs to be recomputed: without, the peak is {facts.peak(none)} and a step takes"
            f" {facts.step(none)}, against {beside}"
        )
    return (
        f"Recomputing the first {least[_RECOMPUTED]:,} blocks is the least that fits: {facts.peak(least)} at the peak"
        f" and {facts.step(least)} a step, against {beside} and {facts.peak(none)} with none"
    )


def _mixed(spec: PlanSpec, count: int, without: StepWork, recomputing: StepWork) -> Row:
    work = replace(without, blocks=(*recomputing.blocks[:count], *without.blocks[count:]))
    step_s = simulate_work(work).step_s
    memory = memory_of(spec, variant=Variant(recomputed_blocks=count))
    speed = spec.step_tokens / step_s / spec.gpus
    return {_RECOMPUTED: count, facts.STEP: step_s, facts.SPEED: speed, **facts.of_memory(memory, spec)}


def _memory_fits(spec: PlanSpec, recomputed: int) -> bool:
    peak = memory_of(spec, variant=Variant(recomputed_blocks=recomputed)).peak
    return peak.total <= spec.gpu.memory_bytes


# ---- shared


def _of_policies(spec: PlanSpec, names: Sequence[str], column: str) -> list[dict[str, Value]]:
    return [facts.row(replace(spec, checkpointing=name), **{column: name}) for name in names]
