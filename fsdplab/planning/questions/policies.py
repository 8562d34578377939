"""Questions about activation checkpointing: which policy, how selective ones compare, and several in one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdplab.planning.fit import largest_that_fits
from fsdplab.planning.memory import Variant, memory_of
from fsdplab.planning.plan_spec import CHECKPOINTINGS, POLICIES, PlanSpec
from fsdplab.planning.simulation import StepWork, simulate_work, work_of

from . import facts
from .answer import Cells, Column, Panel, Question, Row
from .facts import ACTIVATIONS, FITS, PEAK, SPEED, STEP

_COLUMNS = (PEAK, ACTIVATIONS, STEP, SPEED, FITS)
_RECOMPUTED = "blocks recomputed"
_OTHERS = (
    "products and attention are for PyTorch's create_selective_checkpoint_contexts; this engine has the other three"
)


def _under(names: Sequence[str], column: str) -> Callable[[PlanSpec], list[Row]]:
    return lambda spec: [facts.row(replace(spec, checkpointing=name), **{column: name}) for name in names]


def _saved_and_paid(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    none, full = rows[0], rows[-1]
    choice = f"the fastest that fits is --checkpoint {facts.fastest(rows)['checkpointing']}"
    return (
        f"Full checkpointing lowers the peak from {none[PEAK]} to {full[PEAK]} and lengthens the step from"
        f" {none[STEP]} to {full[STEP]}; {choice if any(row.fits for row in rows) else 'none of them fits'}"
    )


def _compared(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    none, products, every_other, attention, _ = rows
    best = facts.fastest(rows)
    return (
        f"Keeping all matrix products peaks at {products[PEAK]} and takes {products[STEP]} a step, every other one"
        f" {every_other[PEAK]} and {every_other[STEP]}, attention alone {attention[PEAK]} and {attention[STEP]},"
        f" against {none[PEAK]} and {none[STEP]} without checkpointing; {facts.near_the_fastest(best)} --checkpoint"
        f" {best['policy']} needs least memory"
    )


CHECKPOINTING = Question(
    asked="Which activation checkpointing policy should be used?",
    columns=facts.columns(Column("checkpointing"), *_COLUMNS),
    rows=_under(CHECKPOINTINGS, "checkpointing"),
    sentence=_saved_and_paid,
    beside=(Panel((SPEED,)),),
)
# what a block keeps of its matrix products: all, every other one, none; beside keeping everything and nothing
SELECTIVE = Question(
    asked="How do selective checkpointing policies compare?",
    columns=facts.columns(Column("policy"), *_COLUMNS),
    rows=_under(POLICIES, "policy"),
    sentence=_compared,
    base=lambda spec: (spec, _OTHERS),
    beside=(Panel((STEP,)),),
)


# ---- several policies in one model


def _recomputing(spec: PlanSpec) -> tuple[PlanSpec, str]:
    policy = "full" if spec.checkpointing == "none" else spec.checkpointing
    return replace(spec, checkpointing=policy), f"a block that is recomputed has --checkpoint {policy}"


def _first_blocks(spec: PlanSpec) -> list[Row]:
    """The first k blocks recomputed and the others not, around the fewest that fit."""
    layers = spec.model.layers
    least = layers - largest_that_fits(lambda count: _memory_fits(spec, layers - count), layers)
    counts = {0, layers // 4, layers // 2, 3 * layers // 4, layers, least, max(0, least - 1)}
    works = work_of(replace(spec, checkpointing="none")), work_of(spec)
    return [_mixed(spec, count, *works) for count in sorted(counts)]


def _mixed(spec: PlanSpec, count: int, without: StepWork, recomputing: StepWork) -> Row:
    work = replace(without, blocks=(*recomputing.blocks[:count], *without.blocks[count:]))
    step_s = simulate_work(work).step_s
    memory = memory_of(spec, variant=Variant(recomputed_blocks=count))
    speed = spec.step_tokens / step_s / spec.gpus
    return {_RECOMPUTED: count, STEP: step_s, SPEED: speed, **facts.of_memory(memory, spec)}


def _memory_fits(spec: PlanSpec, recomputed: int) -> bool:
    peak = memory_of(spec, variant=Variant(recomputed_blocks=recomputed)).peak
    return peak.total <= spec.gpu.memory_bytes


def _fewest_blocks(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    none, every = rows[0], rows[-1]
    beside = f"{every[PEAK]} and {every[STEP]} with all {every[_RECOMPUTED]}"
    if not every.fits:
        return f"Even with all {every[_RECOMPUTED]} blocks recomputed it does not fit: {every[PEAK]} at the peak"
    least = next(row for row in rows if row.fits)
    if least is none:
        return (
            f"No block needs to be recomputed: without, the peak is {none[PEAK]} and a step takes {none[STEP]}, against"
            f" {beside}"
        )
    return (
        f"Recomputing the first {least[_RECOMPUTED]} blocks is the least that fits: {least[PEAK]} at the peak and"
        f" {least[STEP]} a step, against {beside} and {none[PEAK]} with none"
    )


MIXED = Question(
    asked="What do different checkpointing policies on different units do?",
    columns=facts.columns(Column(_RECOMPUTED, "count"), *_COLUMNS),
    rows=_first_blocks,
    sentence=_fewest_blocks,
    base=_recomputing,
    beside=(Panel((STEP,)),),
    simulated=(STEP, SPEED),
)
