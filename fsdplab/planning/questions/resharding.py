"""Questions about what a unit does between its forward and its backward: stay cut over all ranks, over fewer, or whole.

Each function answers for a plan's spec; the sentence is made from the rows of its own table. A strategy that does not
reshard after the forward is answered for full_shard, which does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdplab.common.sizes import seconds
from fsdplab.planning.memory import Variant, memory_of
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.plan_traffic import plan_traffic, seconds_each
from fsdplab.planning.simulation import simulate_work, work_of

from . import facts
from .answer import Answer, Column, Panel, Row, share

_RANKS, _MORE, _GATHER = "ranks", "more at the peak", "gather of a block"
_LITTLE = 0.05  # of the peak: less is not substantial


def smaller_mesh(spec: PlanSpec) -> Answer:
    """Blocks that stay cut over fewer ranks until their backward: what that adds to the peak, and the gather there."""
    base, note = _resharded(spec)
    counts = _meshes(base)
    if len(counts) < 2:
        raise PlanError(
            f"{base.shards} ranks that shard have no smaller mesh of 2 ranks or more; give at least 4 GPUs that shard"
        )
    rows = [_over(base, count) for count in counts]
    columns, table = facts.tabled(
        Column(_RANKS, "count"), rows,
        (facts.PEAK, Column(_MORE, "share"), facts.GATHERED, Column(_GATHER, "seconds"), facts.FITS),
    )  # fmt: skip
    whole, near = rows[0], next(row for row in rows if row[_RANKS] == _near(base, counts))
    sentence = (
        f"With slices over {near[_RANKS]:,} of {whole[_RANKS]:,} ranks from forward to backward the peak goes from"
        f" {facts.peak(whole)} to {facts.peak(near)}, {share(facts.number(near, _MORE))} more ({facts.verdict(near)}),"
        f" and a block is gathered for its backward in {seconds(facts.number(near, _GATHER))} instead of"
        f" {seconds(facts.number(whole, _GATHER))}; {_smallest(rows)}"
    )
    panels = (facts.memory_panel(base), Panel((_GATHER,)))
    return Answer("smaller_mesh", "", base, sentence, columns, table, panels, note=note)


def _over(spec: PlanSpec, ranks: int) -> Row:
    """Over all ranks as planned; over fewer, these are neighbours: their gather is hybrid_shard's in such groups."""
    few = None if ranks == spec.shards else ranks
    memory, planned = memory_of(spec, variant=Variant(ranks_after_forward=few)), memory_of(spec)
    near = replace(spec, strategy="hybrid_shard", shard_size=ranks)
    gathers = [row for row in plan_traffic(near) if (row.unit, row.axis, row.kind) == ("block", "shard", "all_gather")]
    return {
        _RANKS: ranks, **facts.of_memory(memory, spec), _MORE: memory.peak.total / planned.peak.total - 1,
        _GATHER: sum(seconds_each(near, row) for row in gathers),
    }  # fmt: skip


def _meshes(spec: PlanSpec) -> list[int]:
    """All ranks, halves of them down to 2, and a node's."""
    found = [spec.shards]
    while found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    node = _of_a_node(spec)
    return sorted({*found, *([node] if node > 1 and spec.shards % node == 0 else [])}, reverse=True)


def _near(spec: PlanSpec, counts: Sequence[int]) -> int:
    """A node's ranks where they are fewer than all, else the next smaller mesh."""
    node = _of_a_node(spec)
    return node if node in counts[1:] else counts[1]


def _of_a_node(spec: PlanSpec) -> int:
    return max(1, min(spec.gpus, spec.gpus_per_node) // spec.tensor_parallel)


def _smallest(rows: Sequence[Row]) -> str:
    little = [row for row in rows[1:] if facts.number(row, _MORE) < _LITTLE]
    if not little:
        return "every smaller mesh raises it by a twentieth or more"
    return f"the smallest mesh that raises it by less than a twentieth has {little[-1][_RANKS]:,} ranks"


def no_reshard(spec: PlanSpec) -> Answer:
    """Blocks resharded after their forward, and blocks that stay gathered until their backward has ended."""
    base, note = _resharded(spec)
    rows = [_between("resharded", base, True), _between("kept whole", base, False)]
    columns, table = facts.tabled(
        Column("after the forward"), rows, (facts.PEAK, facts.GATHERED, facts.SENT, facts.STEP, facts.FITS)
    )
    dropped, kept = rows
    sentence = (
        f"Without reshard after the forward a rank peaks at {facts.peak(kept)} instead of {facts.peak(dropped)}"
        f" ({facts.verdict(kept)}), with up to {facts.nbytes(kept, facts.GATHERED)} of gathered parameters instead of"
        f" {facts.nbytes(dropped, facts.GATHERED)}; it sends {facts.sent(kept)} instead of"
        f" {facts.sent(dropped)}, and a step takes {facts.step(kept)} instead of"
        f" {facts.step(dropped)}"
    )
    panels = (facts.memory_panel(base), Panel((facts.SENT,)))
    return Answer("no_reshard", "", base, sentence, columns, table, panels, simulated=(facts.STEP,), note=note)


def _between(name: str, spec: PlanSpec, drops: bool) -> Row:
    memory = memory_of(spec, variant=Variant(ranks_after_forward=None if drops else 1))
    traffic = plan_traffic(spec)
    again = sum(row.step_bytes / 2 for row in traffic if (row.unit, row.kind, row.axis) == _BLOCK_GATHERS)
    sent = sum(row.step_bytes for row in traffic) - (0.0 if drops else again)
    step_s = simulate_work(replace(work_of(spec), drops_after_forward=drops)).step_s
    return {"after the forward": name, facts.SENT: sent, facts.STEP: step_s, **facts.of_memory(memory, spec)}


_BLOCK_GATHERS = ("block", "all_gather", "shard")  # two a micro-batch where a block is dropped after its forward


# ---- shared


def _resharded(spec: PlanSpec) -> tuple[PlanSpec, str]:
    """A spec that reshards after the forward, and what was changed for it."""
    if spec.row.reshards_after_forward:
        return spec, ""
    note = f"{spec.strategy} reshards nothing after the forward, so full_shard is planned"
    return spec.under("full_shard"), note
