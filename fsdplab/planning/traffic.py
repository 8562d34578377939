"""Bytes a rank sends in one step, unit by unit, from shapes alone.

Per unit: gathers x P_param (n-1)/n + reductions x P_wire (n-1)/n, each in its own dtype, padding included and named. An
all-reduce is a reduce-scatter and an all-gather, so it counts twice (Rajbhandari et al. 2020, section 7). The counts
follow from the states that a strategy shards, independently of the engine: its ledger must equal them, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdplab.common.names import IN_GROUPS, STRATEGIES, STRATEGY_ROWS, StrategyRow
from fsdplab.engine.core.layout import Layout


@dataclass(frozen=True)
class UnitShapes:
    """A unit's name and the (name, shape) of its parameters; the root unit is called "root"."""

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind that one unit causes in a step; bytes are per collective."""

    unit: str
    kind: str
    count: int
    logical_bytes: int
    wire_bytes: int
    padding_bytes: int

    @property
    def step_bytes(self) -> int:
        """Bytes that one rank sends for them in a step."""
        return self.count * self.wire_bytes


def step_traffic(
    units: Sequence[UnitShapes],
    strategy: str,
    ranks: int,
    *,
    param_itemsize: int = 4,
    reduce_itemsize: int = 4,
    micro_batches: int = 1,
    replicas: int = 1,
) -> list[Traffic]:
    """List the collectives of one step under `strategy`, and their bytes.

    Example: one unit of 1,000 float32 parameters on 2 ranks: full_shard sends 2 x 2,000 bytes in gathers and 2,000 in
    its reduction, 6,000 in all; no_shard sends 4,000. On one rank nothing travels. `hybrid_shard` cuts slices over
    ranks / replicas and all-reduces one slice over the replicas. Raises `ValueError` for an unknown strategy, and for
    replicas that do not divide the ranks.
    """
    row = STRATEGY_ROWS.get(strategy)
    if row is None:
        raise ValueError(f"no traffic formula for strategy {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    if ranks % replicas or replicas > 1 and not row.in_groups:
        raise ValueError(
            f"{replicas} replicas of {strategy} on {ranks} ranks: only {' and '.join(IN_GROUPS)} replicates, over a"
            " divisor of the ranks"
        )
    if ranks == 1:
        return []
    shards = ranks // replicas
    rows: list[Traffic] = []
    for unit in units:
        gathers, reductions = counts(row, micro_batches, is_root=unit.name == "root")
        if not row.cuts:
            rows.append(_traffic(unit, "all_reduce", reductions, 1, ranks, reduce_itemsize))
            continue
        if shards > 1:
            rows.append(_traffic(unit, "all_gather", gathers, shards, shards, param_itemsize))
            rows.append(_traffic(unit, "reduce_scatter", reductions, shards, shards, reduce_itemsize))
        if replicas > 1:
            rows.append(_traffic(unit, "all_reduce", reductions, shards, replicas, reduce_itemsize))
    return rows


def counts(row: StrategyRow, micro_batches: int, is_root: bool) -> tuple[int, int]:
    """Count the gathers and the reductions of a unit in a step.

    A unit that is resharded is gathered again for its backward; the root never is.
    """
    gathers = reductions = micro_batches
    if row.reshards_after_forward and not is_root:
        gathers = 2 * micro_batches
    if row.gathers_once:
        gathers = 1
    if row.reduces_once:
        reductions = 1
    return gathers, reductions


@lru_cache(maxsize=4096)  # of a unit, whatever its tokens, its link and its other settings are
def _traffic(unit: UnitShapes, kind: str, count: int, shards: int, ranks: int, itemsize: int) -> Traffic:
    """One collective over `ranks`. An all-reduce is of one shard, of whole parameters where there is one; the padding
    of shards differs from rank to rank, and that of rank 0, which has least, is named.
    """
    layout = Layout.of([(name, shape, itemsize) for name, shape in unit.parameters], shards)
    rounds, logical, padding = 1, layout.total_bytes, layout.padding_bytes
    if kind == "all_reduce":  # a reduce-scatter and an all-gather
        rounds, logical = 2, layout.shard_bytes
        padding = layout.shard_bytes - first_rank_bytes(layout)
    wire = rounds * logical * (ranks - 1) // ranks
    return Traffic(unit.name, kind, count, logical, wire, padding)


def first_rank_bytes(layout: Layout) -> int:
    """Return the bytes of a layout that rank 0 holds, without padding; it has least of that."""
    held = 0
    for slot in layout.slots:
        first_row, end = slot.span(0)
        held += (end - first_row) * slot.row_bytes
    return held
