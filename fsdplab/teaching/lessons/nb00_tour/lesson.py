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
    """Resting bytes on one rank, fp32 with Adam: (parameters, gradients, optimizer state).

    `state_bytes(STRATEGIES["full_shard"], 1_000_000, 4) == (1e6, 1e6, 2e6)`.
    """
    sharded = (strategy.shard_parameters, strategy.shard_gradients, strategy.shard_optimizer)
    weights, gradients, moments = (
        each * parameters / (ranks if cut else 1) for each, cut in zip((FLOAT, FLOAT, ADAM), sharded, strict=True)
    )
    return weights, gradients, moments


def state_figure(million_parameters: float, ranks: int) -> go.Figure:
    """A stack of the three states for every strategy, computed; whole states in the colours of whole things."""
    count = int(million_parameters * 1e6)
    # the shards of others are of a group, not of all ranks: notebook 12
    held = {name: state_bytes(STRATEGIES[name], count, ranks) for name in OVER_ALL_RANKS}
    totals = {name: sum(states) for name, states in held.items()}
    unit, name_of_unit = (1e9, "GB") if max(totals.values()) >= 1e9 else (1e6, "MB")
    parts = [
        Part(name, colour, [states[index] / unit for states in held.values()])
        for index, (name, colour) in enumerate(_STATES.items())
    ]
    ends = {name: f"<b>{size(total)}</b>" for name, total in totals.items()}
    figure = stacked_bars(ends, parts, f"model states on one rank ({name_of_unit})", f"%{{x:,.4g}} {name_of_unit}")
    words = "; ".join(f"{name} {size(total)}" for name, total in totals.items())
    title = f"{million_parameters:,g} million parameters on {plural(ranks, 'rank')}: {words.split('; ')[0]}"
    title += f", full_shard {size(totals['full_shard'])} on each"
    subtitle = "Computed: fp32 with Adam, nothing but parameters, gradients and the optimizer's state"
    return titled(figure, title, subtitle, f"Stacked bars of model states on one rank: {words}.")
