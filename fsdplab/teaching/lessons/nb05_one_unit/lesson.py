"""Lesson 05: what one sharded layer holds, moment by moment: drawn from the rule, then measured on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.figures.bars import Part, Span, lane, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, titled
from fsdplab.sessions import RanksFailed
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time
from fsdplab.teaching.core.display import HasTable, Note, Table, present, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

_on_ranks = LessonRanks(__file__)
PARTS = ("05.shard", "05.unshard", "05.reshard", "05.guarded", "05.reduce")


# ---- which rows each rank keeps


def rows_figure(rows: int, ranks: int) -> go.Figure:
    """Draw every rank's c = ceil(rows / n) places: rows of the tensor, as torch.chunk cuts them, then padding."""
    c = -(-rows // ranks)
    row_cells, padding = [], []
    for number in range(ranks * c):
        # of 7 rows on 3 ranks c is 3: number 7 is place 1 on rank 2, and padding
        rank, place = divmod(number, c)
        if number < rows:
            row_cells.append(Span(f"rank {rank}", place, 1, str(number)))
        else:
            padding.append(Span(f"rank {rank}", place, 1, "0"))
    figure = go.Figure()
    for name, colour, cells in (
        ("row of the tensor", CATEGORY_COLOURS["sharded_parameters"], row_cells),
        ("padding", "#d0d4d9", padding),
    ):
        figure.add_trace(lane(name, colour, cells, hovertemplate=f"%{{y}}, {name} %{{text}}<extra></extra>"))
    ticks = range(0, c, max(1, c // 16))
    figure.update_xaxes(
        title="place in the shard",
        range=[0, c],
        tickvals=[place + 0.5 for place in ticks],
        ticktext=[str(place) for place in ticks],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_layout(barmode="overlay")

    # ranks without a row: 5 rows on 4 ranks leave rank 3 none
    empty, shards = 0, []
    for rank in range(ranks):
        first, last = rank * c, min(rows, (rank + 1) * c) - 1
        if first < rows:
            shards.append(f"rank {rank} rows {first} to {last}")
        else:
            shards.append(f"rank {rank} no row")
            empty += 1
    title = f"{rows} rows on {ranks} ranks: c = {c}, {plural(len(padding), 'padding row')}"
    if empty:
        title = f"{title}, {plural(empty, 'rank')} without a row"
    alt = f"Cells of {c} places for each rank. {'; '.join(shards)}. {title}."
    return titled(figure, title, "Computed: every rank sends c rows", alt, 110 + 34 * ranks)


# ---- one layer's life, drawn

MOMENTS = ("shard", "unshard", "forward", "reshard", "unshard", "backward", "reshard", "reduce")
_UNSHARDED = (1, 2, 4, 5)  # moments at which the whole weight is there
_GRADIENT = (5, 6)  # moments at which autograd's unsharded gradient is there
_KINDS = {
    "its own shard": CATEGORY_COLOURS["sharded_parameters"],
    "unsharded weight": CATEGORY_COLOURS["unsharded_parameters"],
    "unsharded gradient": CATEGORY_COLOURS["unsharded_gradients"],
    "shard of the mean gradient": CATEGORY_COLOURS["sharded_gradients"],
}


def life_cells(rank: int, ranks: int = 2) -> Iterator[HeldCell]:
    """Yield all that one of `ranks` ranks holds, moment by moment; its shard is there from the first to the last."""
    part = f"part {rank} of {ranks}"
    for moment, name in enumerate(MOMENTS):
        yield HeldCell(f"rank {rank}: shard", moment, "its own shard", part)
        if moment in _UNSHARDED:
            label, rest_label = "", ""  # labelled when they arrive
            if name == "unshard":
                label, rest_label = "own", f"from {plural(ranks - 1, 'rank')}"
            yield HeldCell(f"rank {rank}: weight, own part", moment, "unsharded weight", label)
            yield HeldCell(f"rank {rank}: weight, the rest", moment, "unsharded weight", rest_label)
        if moment in _GRADIENT:
            yield HeldCell(f"rank {rank}: gradient", moment, "unsharded gradient", "whole")
    yield HeldCell(f"rank {rank}: gradient", len(MOMENTS) - 1, "shard of the mean gradient", part)


def life_diagram(ranks: int = 2) -> go.Figure:
    """Draw the eight moments of a layer on the first and the last of `ranks` ranks, with a play button."""
    cells: list[HeldCell] = []
    rows = []
    for rank in (0, ranks - 1):
        cells += life_cells(rank, ranks)
        rows += [f"rank {rank}: {thing}" for thing in ("shard", "weight, own part", "weight, the rest", "gradient")]
    alt = (
        f"Cells of memory on the first and the last of {ranks} ranks over eight calls. The own shard is always there."
        " After each unshard, and during forward and backward, all parts of the weight are there, all but one of them"
        " from other ranks; reshard frees them. Backward leaves an unsharded gradient, which reduce turns into this"
        " rank's part of the mean."
    )
    return cells_in_time(
        cells,
        rows,
        MOMENTS,
        _KINDS,
        f"A layer on {ranks} ranks: whole while it computes, 1/{ranks} of it at rest",
        "Drawn from the rule, nothing was run: what is in memory after each call, on the first and on the last rank",
        alt,
    )


# ---- one layer's life, measured


@doing("reading a tensor without memory, in a process of its own")
def read_dropped() -> None:
    """Read a tensor without memory, in a process of its own, and show how that process ends."""
    try:
        _on_ranks("read_dropped", 1)
        outcome = "It returned a number: this torch noticed, or read whatever lay there."
    except RanksFailed as failure:
        outcome = failure.report.message.splitlines()[0]
    present(Note(("whole.untyped_storage().resize_(0); whole.sum()", outcome)))


@dataclass(frozen=True, repr=False)
class Life(HasTable):
    """One layer's training step on rank 0: bytes held after each moment, and the differences from the whole layer."""

    weight_bytes: int
    ranks: int
    moments: tuple[dict[str, Any], ...]
    differences: dict[str, float]
    provenance: ClassVar = dict.fromkeys(("bytes held by a layer", "difference from the whole layer"), "measured")

    @property
    def peak_megabytes(self) -> float:
        """Return the most that the layer's weight and gradient held at once, in MB."""
        return max(held(moment) for moment in self.moments) / 1e6

    def table(self) -> Table:
        """Return the largest difference from the unsharded layer, over all ranks."""
        rows = [[name, f"{value:g}"] for name, value in self.differences.items()]
        return table(["", "largest difference from the whole layer"], rows, f"Measured on {self.ranks} real ranks.")


def held(moment: dict[str, Any]) -> int:
    """Return all bytes that a moment of a layer's life names."""
    return sum(value for name, value in moment.items() if name != "moment")


@doing("one layer's training step on real ranks")
def life_of_a_layer(rows: int = 1025, columns: int = 512, world_size: int = 2) -> Life:
    """Take one sharded Linear of `rows` x `columns` through a training step on real ranks, by the functions in use."""
    by_rank = _on_ranks("layer_life", world_size, parts=PARTS, rows=rows, columns=columns)
    worst = {}
    for name in by_rank[0]["differences"]:
        # of all ranks the largest difference; moments are those of rank 0
        worst[name] = max(seen["differences"][name] for seen in by_rank)
    return Life(4 * rows * columns, world_size, tuple(by_rank[0]["moments"]), worst)


def layer_figure(life: Life) -> go.Figure:
    """Draw the bytes of one layer's weight and gradient after each moment of its life, stacked by kind.

    Time runs from the top to the bottom.
    """
    totals, ends, bars = [], {}, []
    for moment in life.moments:
        name, total = moment["moment"], held(moment)
        totals.append(total)
        ends[name] = f"<b>{size(total)}</b>"
        bars.append(f"{name} {size(total)}")
    parts = []
    for kind in life.moments[0]:
        if kind != "moment":
            megabytes = [moment[kind] / 1e6 for moment in life.moments]
            parts.append(Part(kind.replace("_", " "), CATEGORY_COLOURS[kind], megabytes))
    whole = 2 * life.weight_bytes  # with its gradient
    levels = {f"unsharded: {size(whole)}": whole / 1e6}
    figure = stacked_bars(ends, parts, "bytes held by one rank (MB)", "%{x:.3f} MB", levels=levels)

    at_rest, peak = size(totals[-1]), size(max(totals))
    title = f"A weight of {size(life.weight_bytes)} and its gradient: {at_rest} at rest, {peak} at the peak"
    where = f"Measured on rank 0 of {life.ranks} CPU ranks: storages after each call"
    subtitle = f"{where}; the messages' own buffers are left out"
    alt = f"Bars from top to bottom in time order: {'; '.join(bars)}. Unsharded {size(whole)}."
    return titled(figure, title, subtitle, alt, height=140 + 34 * len(totals))
