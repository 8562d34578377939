"""Figures of lesson 12: the mesh, time on both links by run and collective, and the peak of each run."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures import memory_by_category
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, titled
from fsdplab.records import RunRecord
from fsdplab.teaching.core.diagrams import mesh

from .network import ACROSS, WITHIN, by_collective, sent, slow


def link_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """Time that each run's collectives take on the emulated links, stacked, in ms of one rank's step; bytes and link in
    the bars' names.
    """
    split = {record.spec["strategy"]: by_collective(record) for record in runs}
    kinds = [kind for kind in COLLECTIVE_COLOURS if any(kind in found for found in split.values())]
    parts = [
        Part(
            kind.replace("_", "-"), COLLECTIVE_COLOURS[kind],
            [1e3 * found.get(kind, (0, 0.0))[1] for found in split.values()],
        )
        for kind in kinds
    ]  # fmt: skip
    ends = {record.spec["strategy"]: _end(record, split[record.spec["strategy"]]) for record in runs}
    axis = "time on the links in one step (ms)"
    figure = stacked_bars(ends, parts, axis, "%{x:.1f} ms", lambda ms: seconds(ms / 1e3))
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {size(nbytes)} in {seconds(spent)}" for kind, (nbytes, spent) in found.items())
        for name, found in split.items()
    )
    first, last = runs[0].spec["strategy"], runs[-1].spec["strategy"]
    title = (
        f"{first} keeps the links busy for {seconds(_total(split[first]))} a step, {last} for"
        f" {seconds(_total(split[last]))}"
    )
    return titled(
        figure,
        title,
        f"Counted on 4 CPU ranks; both links are emulated ({WITHIN} within a node, {ACROSS} between)",
        f"Stacked bars: {summary}.",
        height=190,
    )


def _total(found: dict[str, tuple[int, float]]) -> float:
    return sum(spent for _, spent in found.values())


def _end(record: RunRecord, found: dict[str, tuple[int, float]]) -> str:
    """The words at a bar's end: the time in all, and the bytes by the pace that they travelled at."""
    s = sent(record)
    words = f"<b>{seconds(_total(found))}</b> · {size(slow(record))} at the slow link's pace"
    return words + (f", {size(s['within'])} at the fast one's" if s["across"] else "")


def memory_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """The peak of each run by category."""
    return memory_by_category(list(runs))


_NODES = ("#9cc3e6", "#f2c38b", "#a8d5a2", "#d7b5e0", "#e8a9a9", "#c9c98f", "#9fd3d0", "#c7c7c7")


def mesh_figure(nodes: int, per_node: int, shard_group: int) -> go.Figure:
    """Ranks as a mesh: a row is a shard group, a column holds the same slice; the colour is the rank's node.

    A row of one colour gathers inside a node. The title says what the two axes send, in parts of the parameters P.
    ValueError where the ranks make no groups of that size.
    """
    ranks, s = nodes * per_node, shard_group
    if min(nodes, per_node, s) < 1 or ranks % s:
        raise ValueError(
            f"{nodes} nodes x {per_node} ranks make no shard groups of {s}; expected positive numbers, and a group size"
            " that divides the number of ranks: mesh_figure(2, 2, 2)"
        )
    rows = [list(range(first, first + s)) for first in range(0, ranks, s)]
    names = [f"slice {index + 1} of {s}" if s <= 8 else str(index + 1) for index in range(s)]
    texts = [[_place(rank, per_node, s) for rank in row] for row in rows]
    owners = [[rank // per_node for rank in row] for row in rows]
    colours = [_NODES[index % len(_NODES)] for index in range(nodes)]
    figure = mesh(names, [f"replica {index}" for index in range(len(rows))], owners, texts, colours)
    figure.update_xaxes(title_text="shard axis: a row holds one model, in slices")
    figure.update_yaxes(title_text="replicate axis")
    inside, r = all(len({rank // per_node for rank in row}) == 1 for row in rows), len(rows)
    within, across = 3 * (s - 1) / s, 2 / s * (r - 1) / r
    pace = "inside a node" if inside else "from node to node"
    title = f"{r} x {s}: rows gather {pace}, {within:.2f} P a rank; columns reduce {across:.2f} P"
    where = (
        "P: bytes of all parameters; a step: two gathers and a reduce-scatter in the row, an all-reduce in the column"
    )
    groups = "; ".join(f"row {index}: ranks {', '.join(map(str, row))}" for index, row in enumerate(rows[:8]))
    alt = f"A mesh of {r} rows and {s} columns. {groups}. {title}."
    return titled(figure, title, where, alt, 66 + max(110, 46 * r))


def _place(rank: int, per_node: int, columns: int) -> str:
    """The rank's name, with its node where the figure is wide enough."""
    if columns > 8:
        return str(rank)
    return f"rank {rank} · node {rank // per_node}" if columns <= 4 else f"rank {rank}"
