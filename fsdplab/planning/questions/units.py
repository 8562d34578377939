"""What the size of a unit changes: its bytes are held whole while it computes, and every unit is a few collectives.

Memory is the closed form's, with units of so many blocks; the step is simulated with the engine's own schedule. A part
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
from .answer import Answer, Column, Panel, Row

_WAITING = "exposed time"
_NOTE = (
    "a linear layer is taken as 1/{} of a block; the host's time to launch collectives is left out, so that small units"
    " look better than they are"
)


def wrapping(spec: PlanSpec) -> Answer:
    """Units from a linear layer to the whole stack of blocks."""
    layers, parts = spec.model.layers, sum(each.is_matrix for each in spec.model.block)
    counts = [1 / parts, *(count for count in (1, 2, 4, 8) if layers % count == 0 and count < layers), layers]
    rows = [_row(spec, count, _named(count, layers)) for count in counts]
    columns, table = facts.tabled(
        Column("a unit"), rows,
        (Column("units", "count"), Column("gathered at once", "bytes"), facts.PEAK, Column(facts.STEP, "seconds"),
         Column(_WAITING, "seconds"), facts.FITS),
    )  # fmt: skip
    block, whole = rows[1] if len(rows) > 2 else rows[-1], rows[-1]
    best = _best(rows)
    sentence = (
        f"Units of {block['a unit']} peak at {facts.peak(block)} and take {facts.step(block)} a"
        f" step; all blocks in one unit peak at {facts.peak(whole)} and take {facts.step(whole)};"
        f" {'of those that fit,' if best[facts.FITS] else 'none fits, and'} within a percent of the fastest, units of"
        f" {best['a unit']} need least memory"
    )
    panels = (facts.memory_panel(spec), Panel((facts.STEP,)))
    return Answer(
        "wrapping",
        "",
        spec,
        sentence,
        columns,
        table,
        panels,
        simulated=(facts.STEP, _WAITING),
        note=_NOTE.format(parts),
    )


def _best(rows: Sequence[Row]) -> Row:
    """Within a percent of the shortest step, the units with least memory; of equals, the largest."""
    found = [row for row in rows if row[facts.FITS]] or rows
    shortest = min(facts.number(row, facts.STEP) for row in found)
    alike = [row for row in found if facts.ALIKE * facts.number(row, facts.STEP) <= shortest]
    return min(reversed(alike), key=lambda row: facts.number(row, facts.PEAK))


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
        "a unit": name, "units": len(work.blocks), "gathered at once": held, facts.STEP: step_s,
        _WAITING: step_s - computed, **facts.of_memory(memory, spec),
    }  # fmt: skip


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
