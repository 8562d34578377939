"""Lesson 12 in the notebook's process: four ranks on two emulated nodes, and what travels within a shard group and
between the groups.

P are the bytes of all parameters, s the ranks of a shard group, r the groups that hold the same shards: r s = n ranks.
Every rank has its own end of each link. A ring over both nodes goes at the pace of the network, of which both ranks of
a node carry a part: the planner's rule (`ring_over_nodes` in `planning/hardware.py`). Bytes and memory are
those of real runs; what is said about time comes from the steady card, whose times are the same on every machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures import alt_text
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, COLLECTIVE_COLOURS, titled
from fsdplab.planning.links import parse_link
from fsdplab.records import RunRecord
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time, mesh
from fsdplab.teaching.core.display import Note, Shown, Table, table

from .on_ranks import expected_ms, on_one_node  # noqa: F401 (the notebook calls it)

WITHIN, ACROSS, PER_NODE = "4GB/s", "400MB/s", 2
RING = f"{PER_NODE * parse_link(ACROSS).bytes_per_s / 1e6:g}MB/s"  # of a ring over all ranks, both nodes' ranks in it
MB = 1e6


# ---- the mesh

_NODES = ("#9cc3e6", "#f2c38b", "#a8d5a2", "#d7b5e0", "#e8a9a9", "#c9c98f", "#9fd3d0", "#c7c7c7")


def mesh_of(nodes: int, per_node: int, shard_group: int) -> Shown | Note:
    """Draw ranks as a mesh, for sliders: a row is a shard group, a column holds the same shard; colours are nodes.

    A row of one colour unshards inside a node. The title says what the two axes send, in parts of the parameters P.
    """
    ranks, s = nodes * per_node, shard_group
    if ranks % s:
        return Note((f"{ranks} ranks make no groups of {s}: choose a smaller group.",))
    # of 4 ranks in groups of 2: [[0, 1], [2, 3]]
    rows = [list(range(first, first + s)) for first in range(0, ranks, s)]
    r = len(rows)
    figure = _ranks_of(rows, nodes, per_node)
    figure.update_xaxes(title_text="shard axis: a row holds one model, in shards")
    figure.update_yaxes(title_text="replicate axis")

    # two all-gathers and a reduce-scatter of P in the row, an all-reduce of P / s in the column
    within, across = 3 * (s - 1) / s, 2 / s * (r - 1) / r
    pace = "inside a node" if on_one_node(rows, per_node) else "from node to node"
    title = f"{r} x {s}: rows unshard {pace}, {within:.2f} P a rank; columns reduce {across:.2f} P"
    in_a_step = "all-gathers and a reduce-scatter in the row, an all-reduce in the column"
    where = f"P: bytes of all parameters; a step: {in_a_step}"
    groups = "; ".join(f"row {index}: ranks {', '.join(map(str, row))}" for index, row in enumerate(rows[:8]))
    alt = f"A mesh of {r} rows and {s} columns. {groups}. {title}."
    titled(figure, title, where, alt, 66 + max(110, 46 * r))
    return Shown(figure, alt_text(figure))


def _ranks_of(rows: list[list[int]], nodes: int, per_node: int) -> go.Figure:
    """Draw the ranks; their names are shorter where the rows are long."""
    s = len(rows[0])
    form = "{}"
    columns = [str(index + 1) for index in range(s)]
    if s <= 8:
        form = "rank {}"
        columns = [f"shard {column} of {s}" for column in columns]
    if s <= 4:
        form = "rank {} · node {}"

    owners, texts, replicas = [], [], []
    for index, row in enumerate(rows):
        replicas.append(f"replica {index}")
        # the owner of a cell gives its colour: a row of one colour is inside a node
        row_nodes = [rank // per_node for rank in row]
        owners.append(row_nodes)
        texts.append([form.format(rank, node) for rank, node in zip(row, row_nodes)])
    colours = [_NODES[index % len(_NODES)] for index in range(nodes)]
    return mesh(columns, replicas, owners, texts, colours)


# ---- a unit's gradient: summed inside each shard group first, then across the replicas

MOST_ROWS = 16  # of a picture that a screen holds
MOMENTS = ("backward", "reduce-scatter in each row", "all-reduce in each column")
_WHOLE, _IN_GROUP, _OF_ALL = "a rank's own gradient", "sum over its shard group", "sum over all ranks"
_KINDS = {
    _WHOLE: CATEGORY_COLOURS["unsharded_gradients"],
    _IN_GROUP: COLLECTIVE_COLOURS["reduce_scatter"],
    _OF_ALL: COLLECTIVE_COLOURS["all_reduce"],
}


def gradient_cells(replicas: int, shard_group: int) -> Iterator[HeldCell]:
    """Yield what each rank of a mesh of `replicas` rows and `shard_group` columns holds of a gradient, in time order.

    In `gradient_cells(2, 2)` rank 3 holds both parts of its own gradient, then part 1 summed over ranks 2 and 3, then
    part 1 summed over ranks 0 to 3.
    """
    ranks = replicas * shard_group
    for rank in range(ranks):
        # the ranks of this rank's row are `first` to `last`
        first = rank // shard_group * shard_group
        last = first + shard_group - 1
        for part in range(shard_group):
            yield HeldCell(_row(rank, part), 0, _WHOLE, f"of rank {rank}")
        shard_row = _row(rank, rank - first)
        yield HeldCell(shard_row, 1, _IN_GROUP, f"sum over ranks {first} to {last}")
        yield HeldCell(shard_row, 2, _OF_ALL, f"sum over ranks 0 to {ranks - 1}")


def _row(rank: int, part: int) -> str:
    """Return the name of a row: a part of the gradient on a rank."""
    return f"rank {rank}: part {part}"


def gradient_diagram(replicas: int = 2, shard_group: int = 2) -> go.Figure:
    """Draw the three moments of a unit's gradient under hybrid sharding, with a play button.

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
    groups = [range(first, first + shard_group) for first in range(0, ranks, shard_group)]
    columns = [range(first, ranks, shard_group) for first in range(shard_group)]
    subtitle = (
        f"Drawn from the rule, nothing was run: {replicas} rows (shard groups) of {shard_group} ranks, a gradient in"
        f" {shard_group} parts"
    )
    alt = (
        f"Which parts of a gradient each of {ranks} ranks holds. After backward each has all parts of its own gradient."
        f" A reduce-scatter in each row ({_listed(groups)}) leaves a rank one part, summed over its row. An all-reduce"
        f" in each column ({_listed(columns)}) sums that part over all ranks. Divided by {ranks} that sum is the"
        " shard of the mean gradient that the optimizer takes."
    )
    return cells_in_time(
        list(gradient_cells(replicas, shard_group)),
        rows,
        MOMENTS,
        _KINDS,
        "Hybrid sharding sums a gradient inside each row first, then across the rows",
        subtitle,
        alt,
    )


def _listed(groups: Sequence[Sequence[int]]) -> str:
    """Return groups of ranks as words: `ranks 0, 1; ranks 2, 3`."""
    return "; ".join(f"ranks {', '.join(map(str, group))}" for group in groups)


# ---- what the ledger of a run says


def by_collective(record: RunRecord, rank: int = 0) -> dict[str, tuple[int, float]]:
    """Return (bytes sent, seconds on the link) by kind of collective, of one rank's last timed step."""
    timed_steps = [row["step"] for row in record.table("steps") if row["step_time_s"] is not None]
    last = max(timed_steps)
    nbytes: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for row in record.table("ledger"):
        if row["rank"] == rank and row["step"] == last:
            kind = row["kind"]
            nbytes[kind] += row["wire_bytes"]
            spent[kind] += (row["end_ns"] - row["start_ns"]) / 1e9
    return {kind: (nbytes[kind], spent[kind]) for kind in nbytes}


def sent(record: RunRecord) -> dict[str, int]:
    """Return the bytes that a rank sends in a step: `within` its shard group, and `across` the groups.

    All-gathers and reduce-scatters stay within a group, all-reduces go across.
    """
    nbytes = {kind: total for kind, (total, _) in by_collective(record).items()}
    # what is left are all-gathers and reduce-scatters
    across = nbytes.pop("all_reduce", 0)
    return {"within": sum(nbytes.values()), "across": across}


def slow(record: RunRecord) -> int:
    """Return the bytes that a rank sends at the network's pace: a group over both nodes sends everything at it."""
    nbytes = sent(record)
    return nbytes["across"] or nbytes["within"]


def link_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """Draw the time that each run's collectives take on the emulated links, stacked, in ms of one rank's step.

    The bars' names have the bytes, and the links that they travel on.
    """
    by_run = {record.spec["strategy"]: by_collective(record) for record in runs}
    parts = []
    for kind, colour in COLLECTIVE_COLOURS.items():
        if any(kind in totals for totals in by_run.values()):
            # a run without collectives of the kind has a part of 0 ms
            milliseconds = [1e3 * totals.get(kind, (0, 0.0))[1] for totals in by_run.values()]
            parts.append(Part(kind.replace("_", "-"), colour, milliseconds))

    ends, in_all, descriptions = {}, {}, []
    for record, (name, totals) in zip(runs, by_run.items()):
        in_all[name] = seconds(sum(spent for _, spent in totals.values()))
        ends[name] = f"<b>{in_all[name]}</b> · {_by_pace(record)}"
        kinds = [f"{kind} {size(nbytes)} in {seconds(spent)}" for kind, (nbytes, spent) in totals.items()]
        descriptions.append(f"{name}: {', '.join(kinds)}")
    axis = "time on the links in one step (ms)"
    figure = stacked_bars(ends, parts, axis, "%{x:.1f} ms", lambda ms: seconds(ms / 1e3))

    first, last = runs[0].spec["strategy"], runs[-1].spec["strategy"]
    title = f"{first} keeps the links busy for {in_all[first]} a step, {last} for {in_all[last]}"
    subtitle = f"Counted on 4 CPU ranks; links are emulated ({WITHIN} within a node, {ACROSS} a rank between nodes)"
    return titled(figure, title, subtitle, f"Stacked bars: {'; '.join(descriptions)}.", height=190)


def _by_pace(record: RunRecord) -> str:
    """Return the bytes that a rank sends in a step, by the link whose pace they travel at."""
    words = f"{size(slow(record))} at the network's pace"
    nbytes = sent(record)
    if nbytes["across"]:
        words = f"{words}, {size(nbytes['within'])} at the fast one's"
    return words


# ---- larger clusters, computed


def leaving_a_node(billions: float, nodes: int, per_node: int) -> tuple[float, float]:
    """Return the GB that leave one node in a step under (full_shard over all, hybrid_shard with a group a node).

    Parameters and gradients are in bf16. A ring over all ranks enters and leaves a node once; a node's s all-reduces
    all leave it: `leaving_a_node(1, 2, 2) == (4.5, 2.0)`.
    """
    payload, ranks = 2 * billions, nodes * per_node
    # two all-gathers and a reduce-scatter around a ring that leaves each node once
    full = 3 * payload * (ranks - 1) / ranks
    # all-reduces of P / s by each of a node's s ranks: together of P
    hybrid = 2 * payload * (nodes - 1) / nodes
    return full, hybrid


def node_table(billions: float, nodes: int, per_node: int) -> Table:
    """Return the bytes that leave a node in a step, and that a GPU keeps, under both strategies."""
    full, hybrid = leaving_a_node(billions, nodes, per_node)
    # GB: bf16 parameters and gradients (2 + 2), fp32 masters and two moments (4 + 8)
    state = 16 * billions
    rows = [
        ["full_shard over all GPUs", f"{full:,.1f}", nodes * per_node, f"{state / (nodes * per_node):,.1f}"],
        ["hybrid_shard, a group a node", f"{hybrid:,.1f}", nodes, f"{state / per_node:,.1f}"],
    ]
    ratio = "nothing leaves a single node's groups"
    if hybrid:
        ratio = f"{full / hybrid:.2f} times as much"
    caption = (
        f"Computed for bf16 parameters and gradients: {ratio}. State: 16 bytes a parameter, activations and unsharded"
        " units on top."
    )
    return table(["", "GB leaving a node, a step", "ranks in a ring across", "GB of state on a GPU"], rows, caption)
