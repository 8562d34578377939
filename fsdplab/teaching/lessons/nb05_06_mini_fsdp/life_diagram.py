"""The life of one sharded layer as a picture: which rows of the weight and its gradient each rank holds, moment by
moment.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time

MOMENTS = ("shard", "unshard", "forward", "reshard", "unshard", "backward", "reshard", "reduce")
_GATHERED = (1, 2, 4, 5)  # moments at which the whole weight is there
_GRADIENT = (5, 6)  # moments at which autograd's whole gradient is there
_KINDS = {
    "its own slice": CATEGORY_COLOURS["parameter_slices"],
    "gathered weight": CATEGORY_COLOURS["gathered_parameters"],
    "whole gradient": CATEGORY_COLOURS["whole_gradients"],
    "slice of the mean gradient": CATEGORY_COLOURS["gradient_slices"],
}


def life_cells(rank: int) -> Iterator[HeldCell]:
    """All that one of two ranks holds, moment by moment; its slice is there from the first to the last."""
    other = 1 - rank
    for moment, name in enumerate(MOMENTS):
        yield HeldCell(f"rank {rank}: slice", moment, "its own slice", f"half {rank}")
        if moment in _GATHERED:
            arrives = name == "unshard"
            yield HeldCell(f"rank {rank}: weight, half {rank}", moment, "gathered weight", "own" if arrives else "")
            came = "received" if arrives else ""
            yield HeldCell(f"rank {rank}: weight, half {other}", moment, "gathered weight", came)
        if moment in _GRADIENT:
            yield HeldCell(f"rank {rank}: gradient", moment, "whole gradient", "whole")
    yield HeldCell(f"rank {rank}: gradient", len(MOMENTS) - 1, "slice of the mean gradient", f"half {rank}")


def life_diagram() -> go.Figure:
    """The eight moments of a layer on two ranks, with a play button."""
    things = ("slice", "weight, half 0", "weight, half 1", "gradient")
    rows = [f"rank {rank}: {thing}" for rank in range(2) for thing in things]
    return cells_in_time(
        [*life_cells(0), *life_cells(1)], rows, MOMENTS, _KINDS,
        "A layer on two ranks: whole while it computes, half of it at rest",
        "Drawn from the rule, nothing was run: what is in memory after each call",
        "Cells of memory on two ranks over eight calls. The own slice is always there. After each unshard, and during"
        " forward and backward, both halves of the weight are there, one of them from the other rank; reshard drops"
        " them. Backward leaves a whole gradient, which reduce turns into this rank's half of the mean.",
    )  # fmt: skip
