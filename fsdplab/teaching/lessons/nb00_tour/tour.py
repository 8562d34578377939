"""Lesson 00: the arithmetic of model states, before anything is measured.

Three states (parameters, gradients, Adam's two moments), each whole on every rank or cut into n slices: the strategy's
row in the engine's own table says which.
"""

from __future__ import annotations

from fsdplab.engine import STRATEGIES, Strategy
from fsdplab.teaching.core.display import Table, table

FLOAT = 4  # bytes
ADAM = 2 * FLOAT  # its two moments, a parameter


def state_bytes(strategy: Strategy, parameters: int, ranks: int) -> tuple[float, float, float]:
    """Resting bytes on one rank, fp32 with Adam: (parameters, gradients, optimizer state).

    `state_bytes(STRATEGIES["full_shard"], 1_000_000, 4) == (1e6, 1e6, 2e6)`.
    """
    sharded = (strategy.shard_parameters, strategy.shard_gradients, strategy.shard_optimizer)
    weights, gradients, moments = (
        each * parameters / (ranks if cut else 1) for each, cut in zip((FLOAT, FLOAT, ADAM), sharded, strict=True)
    )
    return weights, gradients, moments


def state_table(million_parameters: float, ranks: int) -> Table:
    """MB of model state on one rank under every strategy, computed."""
    rows = []
    for name, strategy in STRATEGIES.items():
        if name == "hybrid_shard":  # its slices are of a group, not of all ranks: notebook 12
            continue
        states = [nbytes / 1e6 for nbytes in state_bytes(strategy, int(million_parameters * 1e6), ranks)]
        rows.append([name, *(f"{state:,.0f}" for state in states), f"{sum(states):,.0f}"])
    caption = (
        f"Computed, in MB on each of {ranks} ranks: {million_parameters:g} million parameters, fp32, Adam. Gathered"
        " units and activations come on top."
    )
    return table(["strategy", "parameters", "gradients", "optimizer state", "sum"], rows, caption)
