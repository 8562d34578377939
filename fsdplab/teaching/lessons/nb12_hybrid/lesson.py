"""Lesson 12 in the notebook's process: four ranks on two emulated nodes, and what travels within a shard group and
between the groups.

P are the bytes of all parameters, s the ranks of a shard group, r the groups that hold the same shards: r s = n ranks.
Every rank has its own end of each link. A ring over both nodes goes at the pace of the network, of which both ranks of
a node carry a part: the planner's rule (`ring_over_nodes` in `planning/hardware.py`). Bytes and memory are
those of real runs; what is said about time comes from the steady card, whose times are the same on every machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures import alt_text
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.fastest import fastest_words
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, COLLECTIVE_COLOURS, titled
from fsdplab.figures.view import views
from fsdplab.planning.links import parse_link
from fsdplab.records import RunRecord, known
from fsdplab.sessions.steady_card import steady  # noqa: F401 (the notebook calls it)
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time, mesh
from fsdplab.teaching.core.display import Note, Shown, Table, table
from fsdplab.workloads import preset

from .on_ranks import complaint, expected_ms, on_one_node

WITHIN, ACROSS, PER_NODE = "4GB/s", "400MB/s", 2
RING = f"{PER_NODE * parse_link(ACROSS).bytes_per_s / 1e6:g}MB/s"  # of a ring over all ranks, both nodes' ranks in it
MB = 1e6


# ---- the mesh

_NODES = ("#9cc3e6", "#f2c38b", "#a8d5a2", "#d7b5e0", "#e8a9a9", "#c9c98f", "#9fd3d0", "#c7c7c7")


def mesh_of(nodes: int, per_node: int, shard_group: int) -> Shown | Note:
    """Ranks as a mesh, for sliders: a row is a shard group, a column holds the same shard; the colour is the node.

    A row of one colour unshards inside a node. The title says what the two axes send, in parts of the parameters P.
    """
    ranks, s = nodes * per_node, shard_group
    if ranks % s:
        return Note((f"{ranks} ranks make no groups of {s}: choose a smaller group.",))
    rows = [list(range(first, first + s)) for first in range(0, ranks, s)]
    names = [f"shard {index + 1} of {s}" if s <= 8 else str(index + 1) for index in range(s)]
    # the rank's name, with its node where the figure is wide enough
    place = "rank {} · node {}" if s <= 4 else "rank {}" if s <= 8 else "{}"
    texts = [[place.format(rank, rank // per_node) for rank in row] for row in rows]
    owners = [[rank // per_node for rank in row] for row in rows]
    colours = [_NODES[index % len(_NODES)] for index in range(nodes)]
    figure = mesh(names, [f"replica {index}" for index in range(len(rows))], owners, texts, colours)
    figure.update_xaxes(title_text="shard axis: a row holds one model, in shards")
    figure.update_yaxes(title_text="replicate axis")
    inside, r = on_one_node(rows, per_node), len(rows)
    within, across = 3 * (s - 1) / s, 2 / s * (r - 1) / r
    pace = "inside a node" if inside else "from node to node"
    title = f"{r} x {s}: rows unshard {pace}, {within:.2f} P a rank; columns reduce {across:.2f} P"
    in_a_step = "all-gathers and a reduce-scatter in the row, an all-reduce in the column"
    where = f"P: bytes of all parameters; a step: {in_a_step}"
    groups = "; ".join(f"row {index}: ranks {', '.join(map(str, row))}" for index, row in enumerate(rows[:8]))
    alt = f"A mesh of {r} rows and {s} columns. {groups}. {title}."
    titled(figure, title, where, alt, 66 + max(110, 46 * r))
    return Shown(figure, alt_text(figure))


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
        list(gradient_cells(replicas, shard_group)),
        rows,
        MOMENTS,
        _KINDS,
        "Hybrid sharding sums a gradient inside each row first, then across the rows",
        f"Drawn from the rule, nothing was run: {replicas} rows (shard groups) of {shard_group} ranks, a gradient in"
        f" {shard_group} parts",
        f"Which parts of a gradient each of {ranks} ranks holds. After backward each has all parts of its own gradient."
        f" A reduce-scatter in each row ({_listed(groups)}) leaves a rank one part, summed over its row. An all-reduce"
        f" in each column ({_listed(columns)}) sums that part over all ranks. Divided by {ranks} that sum is the"
        " shard of the mean gradient that the optimizer takes.",
    )


def _listed(groups: list[list[int]]) -> str:
    return "; ".join("ranks " + ", ".join(map(str, group)) for group in groups)


# ---- what the ledger of a run says


def parameter_bytes(record: RunRecord) -> int:
    """P of a run: the bytes of all parameters in fp32."""
    return 4 * preset(record.spec["model"]).parameters


def groups_of(record: RunRecord) -> tuple[int, int]:
    """(s, r) of a run: under full_shard all ranks are one group."""
    s = record.spec["shard_size"] or record.spec["world_size"]
    return s, record.spec["world_size"] // s


def by_collective(record: RunRecord, rank: int = 0) -> dict[str, tuple[int, float]]:
    """(bytes sent, seconds on the link) by kind of collective, of one rank's last timed step."""
    last = max(row["step"] for row in record.table("steps") if row["step_time_s"] is not None)
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for row in record.table("ledger"):
        if (row["rank"], row["step"]) == (rank, last):
            nbytes, spent = found[row["kind"]]
            found[row["kind"]] = nbytes + row["wire_bytes"], spent + (row["end_ns"] - row["start_ns"]) / 1e9
    return dict(found)


def sent(record: RunRecord) -> dict[str, int]:
    """Bytes that a rank sends in a step: `within` its shard group (all-gathers, reductions) and `across` the groups
    (all-reduces).
    """
    kinds = by_collective(record)
    across = kinds.get("all_reduce", (0, 0.0))[0]
    return {"within": sum(nbytes for nbytes, _ in kinds.values()) - across, "across": across}


def slow(record: RunRecord) -> int:
    """Bytes that a rank sends at the network's pace: a group over both nodes sends everything at it."""
    moved = sent(record)
    return moved["across"] if groups_of(record)[1] > 1 else moved["within"]


def link_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """Time that each run's collectives take on the emulated links, stacked, in ms of one rank's step; bytes and link in
    the bars' names.
    """
    split = {record.spec["strategy"]: by_collective(record) for record in runs}
    kinds = [kind for kind in COLLECTIVE_COLOURS if any(kind in found for found in split.values())]
    spans = {kind: [1e3 * found.get(kind, (0, 0.0))[1] for found in split.values()] for kind in kinds}
    parts = [Part(kind.replace("_", "-"), COLLECTIVE_COLOURS[kind], spans[kind]) for kind in kinds]
    totals = {name: seconds(sum(spent for _, spent in found.values())) for name, found in split.items()}
    ends = {}  # the time in all, and the bytes by the pace that they travelled at
    for record, (name, total) in zip(runs, totals.items()):
        moved = sent(record)
        beside = f", {size(moved['within'])} at the fast one's" if moved["across"] else ""
        ends[name] = f"<b>{total}</b> · {size(slow(record))} at the network's pace{beside}"
    axis = "time on the links in one step (ms)"
    figure = stacked_bars(ends, parts, axis, "%{x:.1f} ms", lambda ms: seconds(ms / 1e3))
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {size(nbytes)} in {seconds(spent)}" for kind, (nbytes, spent) in found.items())
        for name, found in split.items()
    )
    first, last = runs[0].spec["strategy"], runs[-1].spec["strategy"]
    title = f"{first} keeps the links busy for {totals[first]} a step, {last} for {totals[last]}"
    subtitle = f"Counted on 4 CPU ranks; links are emulated ({WITHIN} within a node, {ACROSS} a rank between nodes)"
    return titled(figure, title, subtitle, f"Stacked bars: {summary}.", height=190)


def beside_the_formula(traffic: Callable[[float, int, int], dict[str, float]], runs: Sequence[RunRecord]) -> Table:
    """The learner's `traffic(P, s, r)` beside the ledger's bytes of each run, in MB."""
    rows = []
    for record in runs:
        s, r = groups_of(record)
        formula, ledger = traffic(parameter_bytes(record), s, r), sent(record)
        cells = [f"{each[axis] / MB:.1f}" for axis in ("within", "across") for each in (formula, ledger)]
        rows.append([record.spec["strategy"], s, r, *cells])
    header = ["run", "s", "r", "within, formula MB", "within, ledger MB", "across, formula MB", "across, ledger MB"]
    why = "the root unit is unsharded once, not twice, because it stays"
    return table(header, rows, f"A step and rank. The ledger has a little less within: {why}.")


def waits(full: RunRecord, hybrid: RunRecord) -> Table:
    """Time on the links and the part of it that is exposed, by collective and phase, of both runs on the card."""
    rows = []
    for record in (full, hybrid):
        found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for row in (row for row in record.table("exposed") if row["rank"] == 0):
            found[row["kind"], row["phase"]][0] += row["communication_ns"]
            found[row["kind"], row["phase"]][1] += row["exposed_ns"]
        for (kind, phase), (moved, shown) in found.items():
            rows.append([record.spec["strategy"], f"{kind} in {phase}", f"{moved / 1e6:.0f}", f"{shown / 1e6:.0f}"])
    totals = [f"{record.spec['strategy']} {seconds(record.summary.comm.exposed_s)}" for record in (full, hybrid)]
    caption = f"One step on the steady card, simulated. Exposed in all: {' and '.join(totals)}."
    return table(["run", "collective", "on the links, ms", "exposed, ms"], rows, caption)


def steps(runs: dict[str, RunRecord]) -> Table:
    """Step and link of each run by its name."""
    links = {True: "emulated", False: "none: raw transport"}
    rows = [[name, f"{_step_ms(run):.0f}", links[run.summary.link is not None]] for name, run in runs.items()]
    caption = "Steps measured: four ranks share this machine's cores, so run the cells again and they change."
    return table(["run", "step, ms", "link"], rows, caption)


def _step_ms(record: RunRecord) -> float:
    return 1e3 * known(record.summary.step_time_s.median)


def raw_words(full: RunRecord, hybrid: RunRecord) -> Note:
    """The two raw steps beside each other, and whether one is shorter beyond chance."""
    first, second = _step_ms(full), _step_ms(hybrid)
    return Note((f"Raw: {first:.0f} ms against {second:.0f}; {fastest_words(views([full, hybrid]))}.",))


# ---- larger clusters, computed


def leaving_a_node(billions: float, nodes: int, per_node: int) -> tuple[float, float]:
    """GB that leave one node in a step under (full_shard over all, hybrid_shard with a group a node), parameters and
    gradients in bf16.

    A ring over all ranks enters and leaves a node once; a node's s all-reduces all leave it: `leaving_a_node(1, 2, 2)
    == (4.5, 2.0)`.
    """
    payload, n = 2 * billions, nodes * per_node
    return 3 * payload * (n - 1) / n, 2 * payload * (nodes - 1) / nodes


def node_table(billions: float, nodes: int, per_node: int) -> Table:
    """The bytes that leave a node in a step, and that a GPU keeps, under both strategies."""
    full, hybrid = leaving_a_node(billions, nodes, per_node)
    state = 16 * billions
    rows = [
        ["full_shard over all GPUs", f"{full:,.1f}", nodes * per_node, f"{state / (nodes * per_node):,.1f}"],
        ["hybrid_shard, a group a node", f"{hybrid:,.1f}", nodes, f"{state / per_node:,.1f}"],
    ]
    ratio = f"{full / hybrid:.2f} times as much" if hybrid else "nothing leaves a single node's groups"
    caption = (
        f"Computed for bf16 parameters and gradients: {ratio}. State: 16 bytes a parameter, activations and unsharded"
        " units on top."
    )
    return table(["", "GB leaving a node, a step", "ranks in a ring across", "GB of state on a GPU"], rows, caption)


def mesh_table(mesh_for: Callable[[int, int, float, float], list[list[int]]]) -> Table:
    """What `mesh_for` chooses on several networks of up to 32 ranks, and the time on the links that it leads to, for
    the exercise's small model.
    """
    rows = []
    networks = (4, 2, 64, 40), (4, 2, 64, 80), (4, 2, 64, 20), (32, 8, 64, 10), (32, 8, 64, 2)
    for ranks, per_node, state, card in networks:
        chosen = mesh_for(ranks, per_node, state, card)
        refused = complaint(chosen, ranks)
        words = refused or f"{len(chosen)} row{'s' * (len(chosen) > 1)} of {len(chosen[0])}"
        spent = "-" if refused else f"{expected_ms(chosen, per_node):.0f}"
        rows.append([f"{ranks // per_node} x {per_node}", state, card, words, spent])
    header = ["nodes x ranks", "state, MB", "card, MB", "mesh", "on the links, ms"]
    caption = "Computed with the formulas of this notebook; the fast link has ten times the bandwidth of the slow one."
    return table(header, rows, caption)
