"""Questions about what a unit does between its forward and its backward: stay cut over all ranks, over fewer, or whole.

A strategy that does not reshard after the forward is answered for full_shard, which does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdplab.planning.memory import Variant, memory_of
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.plan_traffic import plan_traffic, transfer_of
from fsdplab.planning.simulation import simulate_work, work_of

from . import facts
from .answer import Cells, Column, Panel, Question, Row
from .facts import FITS, GATHERED, PEAK, SENT, STEP

_RANKS, _MORE, _GATHER = "ranks", "more at the peak", "gather of a block"
_LITTLE = 0.05  # of the peak: less is not substantial
_BLOCK_GATHERS = ("block", "all_gather", "shard")  # two a micro-batch where a block is dropped after its forward


def _resharded(spec: PlanSpec) -> tuple[PlanSpec, str]:
    """A spec that reshards after the forward, and what was changed for it."""
    if spec.row.reshards_after_forward:
        return spec, ""
    note = f"{spec.strategy} reshards nothing after the forward, so full_shard is planned"
    return spec.under("full_shard"), note


# ---- a smaller mesh


def _with_smaller_meshes(spec: PlanSpec) -> tuple[PlanSpec, str]:
    base, note = _resharded(spec)
    if len(_meshes(base)) < 2:
        raise PlanError(
            f"{base.shards} ranks that shard have no smaller mesh of 2 ranks or more; give at least 4 GPUs that shard"
        )
    return base, note


def _over(spec: PlanSpec, ranks: int) -> Row:
    """Over all ranks as planned; over fewer, these are neighbours: their gather is hybrid_shard's in such groups."""
    few = None if ranks == spec.shards else ranks
    memory, planned = memory_of(spec, variant=Variant(ranks_after_forward=few)), memory_of(spec)
    near = replace(spec, strategy="hybrid_shard", shard_size=ranks)
    gathers = [row for row in plan_traffic(near) if (row.unit, row.axis, row.kind) == ("block", "shard", "all_gather")]
    return {
        _RANKS: ranks, **facts.of_memory(memory, spec), _MORE: memory.peak.total / planned.peak.total - 1,
        _GATHER: sum(transfer_of(near, row).seconds for row in gathers),
    }  # fmt: skip


def _meshes(spec: PlanSpec) -> list[int]:
    """All ranks, halves of them down to 2, and a node's."""
    found = [spec.shards]
    while found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    node = _of_a_node(spec)
    return sorted({*found, *([node] if node > 1 and spec.shards % node == 0 else [])}, reverse=True)


def _of_a_node(spec: PlanSpec) -> int:
    return max(1, min(spec.gpus, spec.gpus_per_node) // spec.tensor_parallel)


def _over_fewer(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    """Over a node's ranks where they are fewer than all, else over the next smaller mesh."""
    whole, *smaller = rows
    near = next((row for row in smaller if row.number(_RANKS) == _of_a_node(spec)), smaller[0])
    little = [row for row in smaller if row.number(_MORE) < _LITTLE]
    smallest = (
        f"the smallest mesh that raises it by less than a twentieth has {little[-1][_RANKS]} ranks"
        if little
        else "every smaller mesh raises it by a twentieth or more"
    )
    return (
        f"With slices over {near[_RANKS]} of {whole[_RANKS]} ranks from forward to backward the peak goes from"
        f" {whole[PEAK]} to {near[PEAK]}, {near[_MORE]} more ({near.verdict}), and a block is gathered for its"
        f" backward in {near[_GATHER]} instead of {whole[_GATHER]}; {smallest}"
    )


SMALLER_MESH = Question(
    asked="Can units be resharded to a smaller mesh without a much higher peak?",
    columns=facts.columns(
        Column(_RANKS, "count"), PEAK, Column(_MORE, "share"), GATHERED, Column(_GATHER, "seconds"), FITS
    ),
    rows=lambda spec: [_over(spec, count) for count in _meshes(spec)],
    sentence=_over_fewer,
    base=_with_smaller_meshes,
    beside=(Panel((_GATHER,)),),
    timed=False,
)


# ---- no reshard


def _between(name: str, spec: PlanSpec, drops: bool) -> Row:
    variant = Variant(ranks_after_forward=None if drops else 1)
    traffic = plan_traffic(spec)
    again = sum(row.step_bytes / 2 for row in traffic if (row.unit, row.kind, row.axis) == _BLOCK_GATHERS)
    sent = sum(row.step_bytes for row in traffic) - (0.0 if drops else again)
    step_s = simulate_work(replace(work_of(spec), sharing=variant.sharing(spec))).step_s
    memory = facts.of_memory(memory_of(spec, variant=variant), spec)
    return {"after the forward": name, SENT: sent, STEP: step_s, **memory}


NO_RESHARD = Question(
    asked="Can the reshard after the forward be disabled without running out of memory?",
    columns=facts.columns(Column("after the forward"), PEAK, GATHERED, SENT, STEP, FITS),
    rows=lambda spec: [_between("resharded", spec, True), _between("kept whole", spec, False)],
    sentence=(
        "Without reshard after the forward a rank peaks at {rows[1][peak]} instead of {rows[0][peak]}"
        " ({rows[1].verdict}), with up to {rows[1][most gathered]} of gathered parameters instead of {rows[0][most"
        " gathered]}; it sends {rows[1][sent]} instead of {rows[0][sent]}, and a step takes {rows[1][step]} instead"
        " of {rows[0][step]}"
    ),
    base=_resharded,
    beside=(Panel((SENT,)),),
    simulated=(STEP,),
)
