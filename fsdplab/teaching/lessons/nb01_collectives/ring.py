"""A ring all-gather as a picture: which block each rank holds after each step, and from whom it came."""

from __future__ import annotations

from fsdplab.figures.plotly_go import go
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time

BLOCK_COLOURS = ("#6cc4f0", "#f09a1a", "#0aa06c", "#cc7fa8", "#f0e442", "#b9a5e0", "#e88a72", "#b8bdc4")
MOST_WITH_ROWS = 4  # ranks whose blocks have a row each


def ring_cells(ranks: int) -> list[HeldCell]:
    """The blocks that every rank holds at the start and after each of the n - 1 steps.

    In step s, rank r receives block r - 1 - s (mod n) from its left neighbour: `ring_cells(3)` has 3 + 6 + 9 cells.
    """
    cells = []
    for rank in range(ranks):
        for moment in range(ranks):
            for step in range(-1, moment):
                block = (rank - 1 - step) % ranks
                fresh = step == moment - 1 and moment > 0
                label = f"from rank {(rank - 1) % ranks}" if fresh else "own" if step < 0 else ""
                cells.append(HeldCell(_row(rank, block), moment, f"block {block}", label))
    return cells


def arriving_cells(ranks: int) -> list[HeldCell]:
    """The newest block of every rank at the start and after each step, for more ranks than rows of blocks fit."""
    return [
        HeldCell(f"rank {rank}", moment, f"block {(rank - moment) % ranks}", str((rank - moment) % ranks))
        for rank in range(ranks)
        for moment in range(ranks)
    ]


def _row(rank: int, block: int) -> str:
    return f"rank {rank}: block {block}"


def ring_figure(ranks: int = 3) -> go.Figure:
    """The ring's steps with a play button: all blocks that a rank holds for up to four ranks, for more the newest one.

    ValueError unless there are two to eight ranks.
    """
    if not 2 <= ranks <= len(BLOCK_COLOURS):
        raise ValueError(
            f"a ring of {ranks} ranks cannot be drawn; expected 2 to {len(BLOCK_COLOURS)}, which a screen holds:"
            " ring_figure(ranks=3)"
        )
    few = ranks <= MOST_WITH_ROWS
    cells = ring_cells(ranks) if few else arriving_cells(ranks)
    rows = [_row(rank, block) for rank in range(ranks) for block in range(ranks)]
    rows = rows if few else [f"rank {rank}" for rank in range(ranks)]
    moments = ["start", *(f"after step {step}" if few else f"step {step}" for step in range(ranks - 1))]
    colours = {f"block {block}": BLOCK_COLOURS[block] for block in range(ranks)}
    steps = "; ".join(
        f"step {step}: "
        + ", ".join(
            f"rank {rank} receives block {(rank - 1 - step) % ranks} from rank {(rank - 1) % ranks}"
            for rank in range(ranks)
        )
        for step in range(ranks - 1)
    )
    return cells_in_time(
        cells, rows, moments, colours,
        f"A ring all-gather on {ranks} ranks: {ranks - 1} steps, one block a rank in each",
        "Drawn from the rule, nothing was run: in each step every rank passes on the block that it received last",
        f"Which blocks each of {ranks} ranks {'holds' if few else 'gets'}. At the start each has its own. {steps}."
        " In the end all ranks hold all blocks.",
    )  # fmt: skip
