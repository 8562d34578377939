"""What the size of a unit changes: its bytes are held whole while it computes, and every unit is a few collectives.

Memory is the plan's, with units of so many blocks; the step is simulated with the engine's own schedule. A part
of a block stands for a linear layer: equal parts, where real layers differ in size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.simulation import StepWork, Transfer, UnitWork, simulate_work, work_of

from . import facts
from .answer import Cells, Column, Panel, Question, Row
from .facts import FITS, PEAK, STEP

_WAITING = "exposed time"
_NOTE = (
    "a linear layer is taken as 1/{} of a block; the host's time to launch collectives is left out, so that small units"
    " look better than they are"
)


def _wrapped(spec: PlanSpec) -> list[Row]:
    """Units from a linear layer to the whole stack of blocks."""
    layers = spec.model.layers
    blocks = [count for count in (1, 2, 4, 8) if layers % count == 0 and count < layers]
    counts = [1 / _parts_of_a_block(spec), *blocks, layers]
    return [_row(spec, count, _named(count, layers)) for count in counts]


def _parts_of_a_block(spec: PlanSpec) -> int:
    return sum(each.is_matrix for each in spec.model.block)


def _named(count: float, layers: int) -> str:
    if count < 1:
        return "a linear layer"
    return "all blocks" if count == layers else "a block" if count == 1 else f"{count:.0f} blocks"


def _row(spec: PlanSpec, count: float, name: str) -> Row:
    memory, work = memory_of(spec, count), rewrapped(work_of(spec), count)
    found = simulate_work(work)
    step_s = found.step_s
    computed = sum(span.end - span.start for span in found.logs[0].computed)
    held = memory.at("backward of the last block").by_category["gathered_parameters"]
    return {
        "a unit": name, "units": len(work.blocks), "gathered at once": held, STEP: step_s,
        _WAITING: step_s - computed, **facts.of_memory(memory, spec),
    }  # fmt: skip


def _by_block_and_whole(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    block, whole, best = rows[1] if len(rows) > 2 else rows[-1], rows[-1], _best(rows)
    return (
        f"Units of {block['a unit']} peak at {block[PEAK]} and take {block[STEP]} a step; all blocks in one unit peak"
        f" at {whole[PEAK]} and take {whole[STEP]}; {facts.near_the_fastest(best)} units of {best['a unit']} need least"
        " memory"
    )


def _best(rows: Sequence[Cells]) -> Cells:
    """Within a percent of the shortest step, the units with least memory; of equals, the largest."""
    found = [row for row in rows if row.fits] or rows
    shortest = min(row.number(STEP) for row in found)
    alike = [row for row in found if facts.ALIKE * row.number(STEP) <= shortest]
    return min(reversed(alike), key=lambda row: row.number(PEAK))


WRAPPING = Question(
    asked="What does another wrapping do to the peak memory?",
    columns=facts.columns(
        Column("a unit"), Column("units", "count"), Column("gathered at once", "bytes"), PEAK, STEP,
        Column(_WAITING, "seconds"), FITS,
    ),
    rows=_wrapped,
    sentence=_by_block_and_whole,
    base=lambda spec: (spec, _NOTE.format(_parts_of_a_block(spec))),
    beside=(Panel((STEP,)),),
    simulated=(STEP, _WAITING),
)  # fmt: skip


def rewrapped(work: StepWork, blocks_per_unit: float) -> StepWork:
    """The same step in other units: several blocks in one, or a block in equal parts; the root stays as it is.

    Bytes and compute are the same, the latency is a collective's each: half as many units wait half as often.
    """
    if blocks_per_unit >= 1:
        size_ = round(blocks_per_unit)
        groups = [work.blocks[first : first + size_] for first in range(0, len(work.blocks), size_)]
        return replace(work, blocks=tuple(map(_joined, groups)))
    return replace(
        work, blocks=tuple(chain.from_iterable(_parts(each, round(1 / blocks_per_unit)) for each in work.blocks))
    )


def _joined(blocks: Sequence[UnitWork]) -> UnitWork:
    first, count = blocks[0], len(blocks)
    return replace(
        first,
        forward_s=sum(each.forward_s for each in blocks),
        backward_s=sum(each.backward_s for each in blocks),
        gather=_scaled(first.gather, count),
        reduce=_scaled(first.reduce, count),
        across=_scaled(first.across, count),
        inline_forward=tuple(chain.from_iterable(each.inline_forward for each in blocks)),
        inline_backward=tuple(chain.from_iterable(each.inline_backward for each in blocks)),
    )


def _parts(block: UnitWork, count: int) -> Iterator[UnitWork]:
    """What stands between a block's products stays with its first part."""
    for place in range(count):
        part = replace(
            block,
            name=f"{block.name}.{place}",
            forward_s=block.forward_s / count,
            backward_s=block.backward_s / count,
            gather=_scaled(block.gather, 1 / count),
            reduce=_scaled(block.reduce, 1 / count),
            across=_scaled(block.across, 1 / count),
        )
        yield part if place == 0 else replace(part, inline_forward=(), inline_backward=())


def _scaled(transfer: Transfer | None, factor: float) -> Transfer | None:
    return transfer and replace(transfer, wire_bytes=factor * transfer.wire_bytes)
