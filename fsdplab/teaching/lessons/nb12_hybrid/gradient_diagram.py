"""A unit's gradient on a mesh as a picture: summed inside each shard group first, then across the replicas."""

from __future__ import annotations

from collections.abc import Iterator

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, COLLECTIVE_COLOURS
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time

MOST_ROWS = 16  # of a picture that a screen holds
MOMENTS = ("backward", "reduce-scatter in each row", "all-reduce in each column")
_WHOLE, _IN_GROUP, _OF_ALL = "a rank's own gradient", "sum over its shard group", "sum over all ranks"
_KINDS = {
    _WHOLE: CATEGORY_COLOURS["whole_gradients"],
    _IN_GROUP: COLLECTIVE_COLOURS["reduce_scatter"],
    _OF_ALL: COLLECTIVE_COLOURS["all_reduce"],
}


def gradient_cells(replicas: int, shard_group: int) -> Iterator[HeldCell]:
    """What each rank of a mesh of `replicas` rows and `shard_group` columns holds of a gradient, moment by moment.

    In `gradient_cells(2, 2)` rank 3 holds both parts of its own gradient, then part 1 summed over ranks 2 and 3, then
    part 1 summed over ranks 0 to 3.
    """
    for rank in range(replicas * shard_group):
        first = rank // shard_group * shard_group
        for part in range(shard_group):
            yield HeldCell(_row(rank, part), 0, _WHOLE, f"of rank {rank}")
        kept = _row(rank, rank - first)
        yield HeldCell(kept, 1, _IN_GROUP, f"sum over ranks {first} to {first + shard_group - 1}")
        yield HeldCell(kept, 2, _OF_ALL, f"sum over ranks 0 to {replicas * shard_group - 1}")


def _row(rank: int, part: int) -> str:
    return f"rank {rank}: part {part}"


def gradient_diagram(replicas: int = 2, shard_group: int = 2) -> go.Figure:
    """The three moments of a unit's gradient under hybrid sharding, with a play button.

    ValueError unless both axes have at least two ranks, and the parts of all ranks fit a screen.
    """
    ranks = replicas * shard_group
    if min(replicas, shard_group) < 2 or ranks * shard_group > MOST_ROWS:
        raise ValueError(
            f"a diagram of {replicas} replicas x shard groups of {shard_group} cannot be drawn; expected at least 2 of"
            f" each (one alone has nothing to reduce), and at most {MOST_ROWS} rows, one for each part on each rank:"
            " gradient_diagram(2, 2)"
        )
    rows = [_row(rank, part) for rank in range(ranks) for part in range(shard_group)]
    groups = [list(range(first, first + shard_group)) for first in range(0, ranks, shard_group)]
    columns = [list(range(first, ranks, shard_group)) for first in range(shard_group)]
    return cells_in_time(
        list(gradient_cells(replicas, shard_group)), rows, MOMENTS, _KINDS,
        "Hybrid sharding sums a gradient inside each row first, then across the rows",
        f"Drawn from the rule, nothing was run: {replicas} rows (shard groups) of {shard_group} ranks, a gradient in"
        f" {shard_group} parts",
        f"Which parts of a gradient each of {ranks} ranks holds. After backward each has all parts of its own gradient."
        f" A reduce-scatter in each row ({_listed(groups)}) leaves a rank one part, summed over its row. An all-reduce"
        f" in each column ({_listed(columns)}) sums that part over all ranks. Divided by {ranks} that sum is the"
        " slice of the mean gradient that the optimizer takes.",
    )  # fmt: skip


def _listed(groups: list[list[int]]) -> str:
    return "; ".join("ranks " + ", ".join(map(str, group)) for group in groups)
