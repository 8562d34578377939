"""Lesson 00: the arithmetic of model states, before anything is measured.

Three states (parameters, gradients, Adam's two moments), each whole on every rank or cut into n shards: the strategy's
row in the engine's own table says which.
"""

from __future__ import annotations

from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.engine import STRATEGIES, Strategy
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, titled

FLOAT = 4  # bytes
ADAM = 2 * FLOAT  # its two moments, a parameter
_STATES = {
    "parameters": CATEGORY_COLOURS["sharded_parameters"],
    "gradients": CATEGORY_COLOURS["unsharded_gradients"],
    "optimizer state": CATEGORY_COLOURS["optimizer_state"],
}


def state_bytes(strategy: Strategy, parameters: int, ranks: int) -> tuple[float, float, float]:
    """Return the resting bytes on one rank, fp32 with Adam: (parameters, gradients, optimizer state).

    `state_bytes(STRATEGIES["full_shard"], 1_000_000, 4) == (1e6, 1e6, 2e6)`.
    """

    def on_a_rank(bytes_each: int, is_sharded: bool) -> float:
        return bytes_each * parameters / (ranks if is_sharded else 1)

    return (
        on_a_rank(FLOAT, strategy.shard_parameters),
        on_a_rank(FLOAT, strategy.shard_gradients),
        on_a_rank(ADAM, strategy.shard_optimizer),
    )


def state_figure(million_parameters: float, ranks: int) -> go.Figure:
    """Draw a stack of the three states for every strategy, computed."""
    count = int(million_parameters * 1e6)
    # the shards of others are of a group, not of all ranks: notebook 12
    states = {name: state_bytes(STRATEGIES[name], count, ranks) for name in OVER_ALL_RANKS}
    totals = {name: size(sum(nbytes)) for name, nbytes in states.items()}
    largest = max(sum(nbytes) for nbytes in states.values())
    scale, unit = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    parts = []
    for index, (name, colour) in enumerate(_STATES.items()):
        parts.append(Part(name, colour, [nbytes[index] / scale for nbytes in states.values()]))
    ends = {name: f"<b>{total}</b>" for name, total in totals.items()}
    figure = stacked_bars(ends, parts, f"model states on one rank ({unit})", f"%{{x:,.4g}} {unit}")
    bars = [f"{name} {total}" for name, total in totals.items()]
    job = f"{million_parameters:,g} million parameters on {plural(ranks, 'rank')}"
    title = f"{job}: {bars[0]}, full_shard {totals['full_shard']} on each"
    subtitle = "Computed: fp32 with Adam, nothing but parameters, gradients and the optimizer's state"
    return titled(figure, title, subtitle, f"Stacked bars of model states on one rank: {'; '.join(bars)}.")
