"""Lesson 21 in the notebook's process: what Newton-Schulz makes of a whole matrix and of its parts, three ways to step
a sharded matrix counted in bytes and FLOPs, and runs of Muon beside AdamW.

P are the elements of all matrices, n the ranks. What travels for Muon is bfloat16, 2 bytes an element. Singular values
and collectives are measured, ways are computed, bytes and memory of runs are measured beside their prediction, and
times are those of the steady card, which are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from fsdplab.common.sizes import seconds, size
from fsdplab.engine.core.owners import newton_schulz_flops
from fsdplab.figures import lines
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, COLLECTIVE_COLOURS, LANE_COLOURS, STEP_COLOURS, titled
from fsdplab.planning.links import parse_link
from fsdplab.planning.muon import OwnersStep, matrices_of
from fsdplab.records import RunRecord, known
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.steady_card import GIGAFLOPS, spec_of, steady  # noqa: F401 (the notebook calls it)
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads.shapes import model as shape_of

from .on_ranks import gradients, orthogonalised

SENT = 2  # bytes of an element that travels
MATRICES = ("down", "up", "query")
BF16_FLOPS = 2 * GIGAFLOPS * 1e9  # of the steady card


# ---- singular values


def gradient(name: str = "down") -> torch.Tensor:
    """Return the gradient of a matrix of gpt-tiny's first block, measured.

    Sizes are down [64, 256], up [256, 64], query [64, 64].
    """
    return gradients()[name]


def pieces(matrix: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return what `ranks` ranks make of a matrix if each orthogonalises its rows alone.

    The parts are joined again: [rows, columns].
    """
    return torch.cat([orthogonalised(rows).float() for rows in matrix.chunk(ranks)])


def values(matrix: torch.Tensor) -> list[float]:
    """Return the singular values of a matrix, the largest first."""
    return torch.linalg.svdvals(matrix.float()).tolist()


def largest(ranks: int, matrix: str = "down") -> float:
    """Return the largest singular value where `ranks` ranks orthogonalise their rows alone."""
    return values(pieces(gradient(matrix), ranks))[0]


def values_figure(ranks: int, matrix: str = "down") -> go.Figure:
    """Draw the singular values of a gradient, of the whole matrix after Newton-Schulz, and of the ranks' parts."""
    given = gradient(matrix)
    before, whole, joined = values(given), values(orthogonalised(given)), values(pieces(given, ranks))
    # the gradient's own scale plays no part: Newton-Schulz divides by the norm
    scaled = [value / before[0] for value in before]
    # 1 for the largest value
    places = list(range(1, len(before) + 1))
    figure = go.Figure(
        [
            lines.line("the gradient, largest = 1", "#6b7380", places, scaled, dash="dot"),
            lines.line("the whole matrix", "#0064c8", places, whole),
        ]
    )
    title = f"The whole matrix orthogonalised: singular values {whole[0]:.2f} to {whole[-1]:.2f}"
    alt = (
        f"Lines of {len(before)} singular values, the largest first. The gradient's fall from 1 to {scaled[-1]:.1e}."
        f" After Newton-Schulz those of the whole matrix lie between {whole[-1]:.2f} and {whole[0]:.2f}."
    )
    if ranks > 1:
        parts = "halves" if ranks == 2 else f"{ranks} parts"
        figure.add_trace(lines.line(f"{parts}, each alone", "#e01f3d", places, joined, dash="dash"))
        title = f"Orthogonalised in {parts}: singular values {joined[0]:.2f} to {joined[-1]:.3f}"
        alt = (
            f"{alt} Where each of {ranks} ranks orthogonalises its rows alone, those of the joined matrix fall from"
            f" {joined[0]:.2f} to {joined[-1]:.3f}."
        )
    figure.update_xaxes(title_text="singular values, the largest first")
    figure.update_yaxes(title_text="value", range=[0, 1.08 * max(1.2, *joined)])
    rows, columns = given.shape
    subtitle = f"Measured: a gradient [{rows}, {columns}] of gpt-tiny, five iterations in bfloat16"
    return titled(figure, title, subtitle, alt, 340)


# ---- an exchange, drawn

MOMENTS = ("momentum on shards", "all-to-all", "Newton-Schulz", "all-to-all back")
_KINDS = {
    "rows of the momentum": CATEGORY_COLOURS["sharded_gradients"],
    "a whole matrix": CATEGORY_COLOURS["unsharded_gradients"],
    "a whole update": CATEGORY_COLOURS["unsharded_parameters"],
    "rows of the update": CATEGORY_COLOURS["sharded_parameters"],
}


def exchange_cells(ranks: int = 3) -> Iterator[HeldCell]:
    """Yield what each rank holds of as many matrices as there are ranks, moment by moment; rank r owns matrix r."""
    # of each matrix every rank has rows, and its owner has all for two moments
    for rank, matrix in product(range(ranks), repeat=2):
        row = f"rank {rank}: matrix {'ABCDEFGH'[matrix]}"
        yield HeldCell(row, 0, "rows of the momentum", f"part {rank}")
        if rank == matrix:
            yield HeldCell(row, 1, "a whole matrix", f"parts 0 to {ranks - 1}")
            yield HeldCell(row, 2, "a whole update", "orthogonal")
        yield HeldCell(row, 3, "rows of the update", f"part {rank}")


def exchange_diagram(ranks: int = 3) -> go.Figure:
    """Draw the four moments of a step with owners, with a play button."""
    cells = list(exchange_cells(ranks))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    alt = (
        f"Which parts of {ranks} matrices each of {ranks} ranks holds. First every rank has its rows of the momentum of"
        " each matrix. After an all-to-all each rank has all parts of the matrix that it owns, and of no other. It"
        " computes that matrix's update. After an all-to-all back every rank has its rows of every update."
    )
    return cells_in_time(
        cells,
        rows,
        MOMENTS,
        _KINDS,
        "Each matrix is whole once, on its owner",
        f"Drawn from the rule, nothing was run: {ranks} ranks, {ranks} matrices, rank 0 owns A, rank 1 B, and so on",
        alt,
    )


# ---- three ways, counted


@dataclass(frozen=True)
class Way:
    """What a step of Muon takes of the busiest rank.

    `flops` are computed, `sent` are the bytes that it sends for the optimizer, and `padding` the bytes that all other
    collectives of the step send in addition.
    """

    name: str
    flops: float
    sent: float
    padding: float = 0.0

    def seconds(self, link: str) -> tuple[float, float]:
        """Return the seconds on the steady card: (computing, on the link)."""
        nbytes = self.sent + self.padding
        return self.flops / BF16_FLOPS, nbytes / parse_link(link).bytes_per_s


def ways(model: str, ranks: int) -> list[Way]:
    """Return all-gather everywhere, an owner a matrix, and whole matrices a rank, for the matrices of a model's blocks.

    Whole matrices a rank: nothing travels for the optimizer, but the blocks' shares are unequal, and two all-gathers
    and a reduce-scatter send as much from each rank as from the fullest: 3 (n - 1) (max - L / n) elements of fp32 for a
    block of L.
    """
    shape = shape_of(model)
    block = matrices_of(shape.block)
    block_elements = sum(map(math.prod, block))
    elements = shape.layers * block_elements
    gather_everywhere = Way(
        "all-gather everywhere",
        shape.layers * sum(map(newton_schulz_flops, block)),
        # an all-gather of all matrices; every rank computes each of them
        SENT * elements * (ranks - 1) / ranks,
    )

    owners = OwnersStep.of(shape, ranks, whole=False)
    owner_each = Way("an owner a matrix", owners.flops, float(sum(row.step_bytes for row in owners.traffic())))

    # elements of the fullest rank beyond an equal share
    uneven = max(_shares(block, ranks, math.prod)) - block_elements / ranks
    # three collectives a block, 4 bytes an element of fp32
    padding = 3 * 4 * shape.layers * (ranks - 1) * uneven
    # of the busiest rank, where each block's shares go to the ranks in turn, so that all blocks together balance
    shares = _shares(block, ranks, newton_schulz_flops)
    flops = []
    for rank in range(ranks):
        flops.append(sum(shares[(rank + layer) % ranks] for layer in range(shape.layers)))
    whole_matrices = Way("whole matrices a rank", max(flops), 0.0, padding)
    return [gather_everywhere, owner_each, whole_matrices]


def _shares(block: Sequence[tuple[int, int]], ranks: int, cost: Callable[[tuple[int, int]], float]) -> list[float]:
    """Return what each rank has of a block's whole matrices: the largest first, each to the rank that has least."""
    load = [0.0] * ranks
    for shape in sorted(block, key=cost, reverse=True):
        least = load.index(min(load))
        load[least] += cost(shape)
    return load


def ways_figure(model: str, ranks: int, link: str) -> go.Figure:
    """Draw the three ways as bars: seconds of computing and on the link, in a step on the steady card."""
    computing, on_link, totals, ends, bars = [], [], {}, {}, []
    for way in ways(model, ranks):
        computing_s, link_s = way.seconds(link)
        total_s = computing_s + link_s
        totals[way.name] = total_s
        computing.append(1e3 * computing_s)
        on_link.append(1e3 * link_s)

        nbytes = size(int(way.sent + way.padding))
        work = f"{way.flops / 1e9:,.0f} GFLOP, {nbytes}"
        ends[way.name] = f"<b>{seconds(total_s)}</b> · {work}"
        bars.append(f"{way.name} {seconds(computing_s)} of computing and {seconds(link_s)} on the link")
    parts = [
        Part("Newton-Schulz", STEP_COLOURS["compute only"], computing),
        Part("on the link", COLLECTIVE_COLOURS["all_gather in backward"], on_link),
    ]
    axis = "a rank's optimizer step, nothing overlapped (ms)"
    figure = stacked_bars(ends, parts, axis, "%{x:.1f} ms", lambda ms: seconds(ms / 1e3))
    best = min(totals, key=lambda name: totals[name])
    title = f"{model} on {ranks} ranks: {best} takes {seconds(totals[best])}, the least"
    subtitle = f"Computed for the steady card ({BF16_FLOPS / 1e9:.0f} GFLOP/s in bf16), a link of {link}"
    return titled(figure, title, subtitle, f"Stacked bars: {'; '.join(bars)}.", height=230)


# ---- collectives of a step


@doing("one step of torch.optim.Muon on the shards of two ranks")
def counted() -> dict[str, dict[str, int]]:
    """Count the collectives by kind that rank 0 of two issues in a step of Muon on gpt-tiny's 12 matrices.

    The matrices are sharded by PyTorch.
    """
    return dict(LessonRanks(__file__)("collectives_of_a_step", 2)[0])


def collectives(by_optimizer: dict[str, dict[str, int]]) -> Table:
    """Return what a step sends, PyTorch's own optimizer beside owners."""
    rows = []
    for name, kinds in by_optimizer.items():
        listed = ", ".join(f"{count} {kind}s" for kind, count in kinds.items())
        rows.append([name, sum(kinds.values()), listed])
    caption = "Counted on 2 ranks: one step of Muon on the 12 matrices of gpt-tiny, sharded by PyTorch's fully_shard."
    return table(["", "collectives", "of which"], rows, caption)


# ---- runs


def beside(runs: Sequence[RunRecord]) -> Table:
    """Return predicted and measured of each run: optimizer state, peak, bytes sent in a step."""
    rows = []
    for record in runs:
        spec, summary = spec_of(record), record.summary
        assert spec is not None, "a run of this notebook can run here"
        predicted, peak = predict(spec), summary.peak_memory_bytes
        assert predicted.by_category is not None, "the runs of this notebook are predicted"
        nbytes = [
            predicted.by_category["optimizer_state"],
            peak.split["optimizer_state"],
            known(predicted.peak_bytes),
            known(peak.total),
            known(predicted.bytes_per_step),
            known(summary.comm.bytes_per_step),
        ]
        rows.append([spec.optimizer, *(f"{value / 1e3:.0f}" for value in nbytes)])
    header = ["optimizer"]
    for what in ("state kB", "peak kB", "kB sent"):
        header += [f"{what}, predicted", f"{what}, measured"]
    caption = "A rank of 2 CPU ranks; sent in one step. Predicted by arithmetic, before the run."
    return table(header, rows, caption)


def steps_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """Draw steps of simulated runs as bars: forward and backward, exposed communication, and the optimizer."""
    computing, exposed, optimizer, ends, bars = [], [], [], {}, []
    for record in runs:
        spec = record.spec
        step_time = known(record.summary.step_time_s.median)
        optimizer_time, exchange = _optimizer(record)
        exposed_time = known(record.summary.comm.exposed_s) - exchange  # the exchange is the optimizer's
        # what is left of the step, so that the three parts of a bar are the step
        computing.append(1e3 * (step_time - optimizer_time - exposed_time))
        exposed.append(1e3 * exposed_time)
        optimizer.append(1e3 * optimizer_time)

        tokens = spec["batch_size"] * spec["sequence_length"]
        name = f"{spec['optimizer']}, {tokens:,} tokens a rank"
        share = optimizer_time / step_time
        ends[name] = f"<b>{seconds(step_time)}</b>, optimizer {share:.1%}"
        bars.append(f"{name} {seconds(step_time)}, of which {seconds(optimizer_time)} the optimizer")
        title = f"{name}: the optimizer takes {share:.0%} of the step"  # of the last run
    parts = [
        Part("forward and backward", STEP_COLOURS["compute only"], computing),
        Part("exposed communication", STEP_COLOURS["exposed"], exposed),
        Part("optimizer", LANE_COLOURS["optimizer"], optimizer),
    ]
    figure = stacked_bars(ends, parts, "one step (ms)", "%{x:.0f} ms", lambda ms: seconds(ms / 1e3))
    job = runs[0].spec
    subtitle = f"Simulated on the steady card for {job['world_size']} ranks; the link is emulated ({job['link']})"
    return titled(figure, title, subtitle, f"Stacked bars of steps: {'; '.join(bars)}.", height=110 + 40 * len(ends))


def optimizer_s(record: RunRecord) -> float:
    """Return the seconds of the optimizer in a simulated step, its exchange included."""
    return _optimizer(record)[0]


def _optimizer(record: RunRecord) -> tuple[float, float]:
    """Return the seconds of the optimizer in a simulated step, and of these its exposed exchange."""
    profile = record.summary.profile
    assert profile is not None, "a simulated step has a profile"
    return known(profile.optimizer_s), known(profile.exchange_s)
