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
    """Every rank's c = ceil(rows / n) places: rows of the tensor, as torch.chunk cuts them, then padding."""
    c = -(-rows // ranks)
    places = [divmod(number, c) for number in range(ranks * c)]  # (rank, place) of each row, then of the padding
    own = [Span(f"rank {rank}", place, 1, str(row)) for row, (rank, place) in enumerate(places[:rows])]
    padding = [Span(f"rank {rank}", place, 1, "0") for rank, place in places[rows:]]
    kinds = (("row of the tensor", CATEGORY_COLOURS["sharded_parameters"], own), ("padding", "#d0d4d9", padding))
    hover = "%{{y}}, {} %{{text}}<extra></extra>"
    figure = go.Figure([lane(name, colour, cells, hovertemplate=hover.format(name)) for name, colour, cells in kinds])
    shown = range(0, c, max(1, c // 16))
    figure.update_xaxes(
        title="place in the shard",
        range=[0, c],
        tickvals=[place + 0.5 for place in shown],
        ticktext=[str(place) for place in shown],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_layout(barmode="overlay")
    empty = sum(rank * c >= rows for rank in range(ranks))
    title = f"{rows} rows on {ranks} ranks: c = {c}, {plural(len(padding), 'padding row')}"
    title += f", {plural(empty, 'rank')} without a row" if empty else ""
    held = "; ".join(
        f"rank {rank} " + (f"rows {rank * c} to {min(rows, (rank + 1) * c) - 1}" if rank * c < rows else "no row")
        for rank in range(ranks)
    )
    alt = f"Cells of {c} places for each rank. {held}. {title}."
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
    """All that one of `ranks` ranks holds, moment by moment; its shard is there from the first to the last."""
    part = f"part {rank} of {ranks}"
    for moment, name in enumerate(MOMENTS):
        yield HeldCell(f"rank {rank}: shard", moment, "its own shard", part)
        if moment in _UNSHARDED:
            arrives = name == "unshard"
            yield HeldCell(f"rank {rank}: weight, own part", moment, "unsharded weight", "own" if arrives else "")
            came = f"from {plural(ranks - 1, 'rank')}" if arrives else ""
            yield HeldCell(f"rank {rank}: weight, the rest", moment, "unsharded weight", came)
        if moment in _GRADIENT:
            yield HeldCell(f"rank {rank}: gradient", moment, "unsharded gradient", "whole")
    yield HeldCell(f"rank {rank}: gradient", len(MOMENTS) - 1, "shard of the mean gradient", part)


def life_diagram(ranks: int = 2) -> go.Figure:
    """The eight moments of a layer on the first and the last of `ranks` ranks, with a play button."""
    things = ("shard", "weight, own part", "weight, the rest", "gradient")
    drawn = (0, ranks - 1)
    rows = [f"rank {rank}: {thing}" for rank in drawn for thing in things]
    return cells_in_time(
        [cell for rank in drawn for cell in life_cells(rank, ranks)],
        rows,
        MOMENTS,
        _KINDS,
        f"A layer on {ranks} ranks: whole while it computes, 1/{ranks} of it at rest",
        "Drawn from the rule, nothing was run: what is in memory after each call, on the first and on the last rank",
        f"Cells of memory on the first and the last of {ranks} ranks over eight calls. The own shard is always there."
        " After each unshard, and during forward and backward, all parts of the weight are there, all but one of them"
        " from other ranks; reshard frees them. Backward leaves an unsharded gradient, which reduce turns into this"
        " rank's part of the mean.",
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
        """Most that the layer's weight and gradient held at once, MB."""
        return max(held(moment) for moment in self.moments) / 1e6

    def table(self) -> Table:
        """The largest difference from the unsharded layer, over all ranks."""
        rows = [[name, f"{value:g}"] for name, value in self.differences.items()]
        return table(["", "largest difference from the whole layer"], rows, f"Measured on {self.ranks} real ranks.")


def held(moment: dict[str, Any]) -> int:
    """All bytes that a moment of a layer's life names."""
    return sum(value for name, value in moment.items() if name != "moment")


@doing("one layer's training step on real ranks")
def life_of_a_layer(rows: int = 1025, columns: int = 512, world_size: int = 2) -> Life:
    """One Linear of `rows` x `columns`, sharded, through a training step on real ranks with the functions in use."""
    by_rank = _on_ranks("layer_life", world_size, parts=PARTS, rows=rows, columns=columns)
    worst = {name: max(each["differences"][name] for each in by_rank) for name in by_rank[0]["differences"]}
    return Life(4 * rows * columns, world_size, tuple(by_rank[0]["moments"]), worst)


def layer_figure(life: Life) -> go.Figure:
    """Bytes of one layer's weight and gradient after each moment of its life, stacked by kind, in time order from the
    top.
    """
    totals = {moment["moment"]: held(moment) for moment in life.moments}
    parts = [
        Part(kind.replace("_", " "), CATEGORY_COLOURS[kind], [moment[kind] / 1e6 for moment in life.moments])
        for kind in life.moments[0]
        if kind != "moment"
    ]
    whole = 2 * life.weight_bytes
    levels = {f"unsharded: {size(whole)}": whole / 1e6}
    ends = {name: f"<b>{size(total)}</b>" for name, total in totals.items()}
    figure = stacked_bars(ends, parts, "bytes held by one rank (MB)", "%{x:.3f} MB", levels=levels)
    rest, peak = [*totals.values()][-1], max(totals.values())
    title = f"A weight of {size(life.weight_bytes)} and its gradient: {size(rest)} at rest, {size(peak)} at the peak"
    summary = "; ".join(f"{name} {size(total)}" for name, total in totals.items())
    where = f"Measured on rank 0 of {life.ranks} CPU ranks: storages after each call"
    subtitle = f"{where}; the messages' own buffers are left out"
    alt = f"Bars from top to bottom in time order: {summary}. Unsharded {size(whole)}."
    return titled(figure, title, subtitle, alt, height=140 + 34 * len(totals))
