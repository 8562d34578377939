"""Bytes a rank sends in one step, unit by unit, from shapes alone.

Per unit: gathers x P_param (n-1)/n + reductions x P_wire (n-1)/n, each in its own dtype, padding included and named. An
all-reduce is a reduce-scatter and an all-gather, so it counts twice (Rajbhandari et al. 2020, section 7). The counts
below are the textbook's, written down independently of the engine: its ledger must equal them, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.layout import Layout

# strategy -> (gathers of a unit, gathers of the root), each per micro-batch; zero1 and zero2 gather once a step
_GATHERS = {"no_shard": (0, 0), "zero1": (1, 1), "zero2": (1, 1), "shard_grad_op": (1, 1), "full_shard": (2, 1)}
_GATHERS_ONCE_A_STEP = ("zero1", "zero2")
_REDUCES_ONCE_A_STEP = ("no_shard", "zero1")


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
) -> list[Traffic]:
    """The collectives of one step under `strategy`, and their bytes.

    Example: one unit of 1,000 float32 parameters on 2 ranks: full_shard sends 2 x 2,000 bytes in gathers and 2,000 in
    its reduction, 6,000 in all; no_shard sends 4,000. On one rank nothing travels. Raises `ValueError` for an unknown
    strategy.
    """
    if strategy not in _GATHERS:
        raise ValueError(f"no traffic formula for strategy {strategy!r}; expected one of {', '.join(_GATHERS)}")
    if ranks == 1:
        return []
    rows: list[Traffic] = []
    for unit in units:
        gathers = _GATHERS[strategy][unit.name == "root"]
        gathers *= 1 if strategy in _GATHERS_ONCE_A_STEP else micro_batches
        reductions = 1 if strategy in _REDUCES_ONCE_A_STEP else micro_batches
        if gathers:
            rows.append(_traffic(unit, "all_gather", gathers, ranks, param_itemsize))
        kind = "all_reduce" if strategy == "no_shard" else "reduce_scatter"
        rows.append(_traffic(unit, kind, reductions, ranks, reduce_itemsize))
    return rows


def _traffic(unit: UnitShapes, kind: str, count: int, ranks: int, itemsize: int) -> Traffic:
    cut = 1 if kind == "all_reduce" else ranks  # an all-reduce works on whole parameters: no padding
    layout = Layout.of([(name, shape, itemsize) for name, shape in unit.parameters], cut)
    rounds = 2 if kind == "all_reduce" else 1
    wire = rounds * layout.total_bytes * (ranks - 1) // ranks
    return Traffic(unit.name, kind, count, layout.total_bytes, wire, layout.padding_bytes)
