"""Lesson 01, the part in the notebook's process: what collectives move, that they compose, and how fast they are here.

P is the whole payload in bytes and n the number of ranks, here as in every table of the course.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from fsdplab.common.collectives import bus_factor
from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, STRATEGY_COLOURS, mark_level, titled
from fsdplab.teaching.core.checking import solution
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

RECORDED = "lesson-01/bandwidth.json"
SIZES = (64_000, 256_000, 1_000_000, 4_000_000, 16_000_000)
_on_ranks = LessonRanks(__file__)


@doing("three collectives on real ranks")
def watch(world_size: int = 3, block: int = 2) -> Table:
    """Return the values of every rank before and after each collective, on real ranks: small whole numbers."""
    by_rank = _on_ranks("watch", world_size, block=block)
    rows = []
    for rank, values in enumerate(by_rank):
        cells = []
        for name in ("start", "reduce_scatter", "all_gather", "all_reduce"):
            cells.append(" ".join(f"{value:.0f}" for value in values[name]))
        rows.append([f"rank {rank}", *cells])
    header = ["", "starts with", "1. after reduce_scatter", "2. then all_gather", "or at once: all_reduce"]
    return table(header, rows, f"Measured: {world_size} real ranks, {world_size * block} numbers each.")


@doing("sending around the ring on real ranks")
def count_ring(exercise: str = "01.ring_all_gather", megabytes: float = 12, world_size: int = 3) -> list[list[int]]:
    """All-gather P = `megabytes` MB with the learner's ring (or the reference: it prints which) on real ranks.

    Returns the bytes of each message that a rank sent, by rank.
    """
    solution(exercise)
    elements = int(megabytes * 1e6 / 4 / world_size)  # of a rank, in fp32
    return _on_ranks("sent", world_size, exercise=exercise, elements=elements)


@doing("timing collectives of five sizes on real ranks")
def measure_bandwidth(
    sizes: Sequence[int] = SIZES, world_size: int = 2, repeats: int = 7, chosen: Callable[[list[float]], float] = median
) -> Bandwidth:
    """Time all_gather, reduce_scatter and all_reduce for each payload size (bytes) on real ranks.

    `chosen` is the time that stands for the repeats; the shortest is least disturbed by other programs.
    """
    # a payload of fp32 is cut into as many equal blocks as there are ranks
    divided = [nbytes - nbytes % (4 * world_size) for nbytes in sizes]
    by_rank = _on_ranks("timed", world_size, sizes=divided, repeats=repeats)
    timings = []
    for kind, nbytes in product(by_rank[0], divided):
        # of each repeat the quickest rank's time: the others came later, and waited less
        repeats_by_rank = [seconds[kind][nbytes] for seconds in by_rank]
        quickest = [min(times) for times in zip(*repeats_by_rank)]
        timings.append(Timing(kind, nbytes, world_size, chosen(quickest)))
    return Bandwidth(tuple(timings))


def recorded_bandwidth() -> Bandwidth:
    """Load the timings that were recorded once, the shortest of many repeats: the same for everybody."""
    timings = json.loads((shared_folder("data") / RECORDED).read_text(encoding="utf-8"))["timings"]
    return Bandwidth(tuple(Timing(**timing) for timing in timings))


# ---- a ring all-gather, drawn

BLOCK_COLOURS = ("#6cc4f0", "#f09a1a", "#0aa06c", "#cc7fa8", "#f0e442", "#b9a5e0", "#e88a72", "#b8bdc4")
MOST_WITH_ROWS = 4  # ranks whose blocks have a row each


def ring_cells(ranks: int) -> list[HeldCell]:
    """Return the blocks that every rank holds at the start and after each of the n - 1 steps.

    In step s, rank r receives block r - 1 - s (mod n) from its left neighbour: `ring_cells(3)` has 3 + 6 + 9 cells.
    """
    cells = []
    for rank, moment in product(range(ranks), repeat=2):
        for step in range(-1, moment):  # -1: its own block, there from the start
            # on rank 0 of 3: its own block 0 (step -1), then blocks 2 and 1
            block = (rank - 1 - step) % ranks
            label = ""
            if step < 0:
                label = "own"
            if moment > 0 and step == moment - 1:
                label = f"from rank {(rank - 1) % ranks}"
            cells.append(HeldCell(_row(rank, block), moment, f"block {block}", label))
    return cells


def arriving_cells(ranks: int) -> list[HeldCell]:
    """Return the newest block of every rank at the start and after each step.

    This is for more ranks than rows of blocks fit.
    """
    cells = []
    for rank, moment in product(range(ranks), repeat=2):
        block = (rank - moment) % ranks
        cells.append(HeldCell(f"rank {rank}", moment, f"block {block}", str(block)))
    return cells


def _row(rank: int, block: int) -> str:
    """Return the name of a row: a block's place on a rank."""
    return f"rank {rank}: block {block}"


def ring_figure(ranks: int = 3) -> go.Figure:
    """Draw the ring's steps with a play button: all blocks of a rank for up to four ranks, for more the newest one.

    ValueError unless there are two to eight ranks.
    """
    if not 2 <= ranks <= len(BLOCK_COLOURS):
        raise ValueError(
            f"a ring of {ranks} ranks cannot be drawn; expected 2 to {len(BLOCK_COLOURS)}, which a screen holds:"
            " ring_figure(ranks=3)"
        )
    if ranks <= MOST_WITH_ROWS:
        cells, verb, after = ring_cells(ranks), "holds", "after step"
        rows = [_row(rank, block) for rank, block in product(range(ranks), repeat=2)]
    else:
        cells, verb, after = arriving_cells(ranks), "gets", "step"
        rows = [f"rank {rank}" for rank in range(ranks)]
    moments = ["start", *(f"{after} {step}" for step in range(ranks - 1))]
    colours = {f"block {block}": BLOCK_COLOURS[block] for block in range(ranks)}
    steps = []
    for step in range(ranks - 1):
        messages = []
        for rank in range(ranks):
            messages.append(f"rank {rank} receives block {(rank - 1 - step) % ranks} from rank {(rank - 1) % ranks}")
        steps.append(f"step {step}: {', '.join(messages)}")
    alt = (
        f"Which blocks each of {ranks} ranks {verb}. At the start each has its own. {'; '.join(steps)}."
        " In the end all ranks hold all blocks."
    )
    return cells_in_time(
        cells,
        rows,
        moments,
        colours,
        f"A ring all-gather on {ranks} ranks: {ranks - 1} steps, one block a rank in each",
        "Drawn from the rule, nothing was run: in each step every rank passes on the block that it received last",
        alt,
    )


# ---- bytes that a rank sends, over the number of ranks

RANKS = (2, 3, 4, 8, 16, 64, 512)


def sent_figure(megabytes: float, ranks: int) -> go.Figure:
    """Draw the MB that one rank sends in each collective on a payload of P = `megabytes` MB, for few and many ranks.

    `ranks` is marked. Dashed: what it comes near to with ever more ranks, P and 2 P.
    """
    figure = go.Figure()
    # the chosen number of ranks has a large mark
    marker_sizes = [18 if count == ranks else 7 for count in RANKS]
    for kind, name in (("all_gather", "all_gather, reduce_scatter"), ("all_reduce", "all_reduce")):
        drawn = line(
            name,  # two collectives send the same
            COLLECTIVE_COLOURS[kind],
            [str(count) for count in RANKS],
            [megabytes * bus_factor(kind, count) for count in RANKS],
            mode="lines+markers",
            marker_size=marker_sizes,
            hovertemplate=f"{name} on %{{x}} ranks: %{{y:.2f}} MB<extra></extra>",
        )
        figure.add_trace(drawn)
    mark_level(figure, megabytes, "P", "y", colour="#808488")
    mark_level(figure, 2 * megabytes, "2 P", "y", colour="#808488")
    figure.update_xaxes(title="ranks", type="category")
    figure.update_yaxes(title="MB sent by one rank", range=[0, 2.3 * megabytes])
    one = three_digits(megabytes * bus_factor("all_gather", ranks))
    both = three_digits(megabytes * bus_factor("all_reduce", ranks))
    title = f"P = {megabytes:g} MB on {ranks} ranks: all_gather and reduce_scatter {one} MB, all_reduce {both} MB"
    alt = f"Two lines of MB sent by one rank over the number of ranks, which rise towards P and 2 P. {title}."
    return titled(figure, title, "Computed: P (n-1)/n, and 2 P (n-1)/n for all_reduce", alt, 270)


# ---- bandwidths

GB = 1e9


@dataclass(frozen=True)
class Timing:
    """One collective on P = `nbytes` bytes: the quickest rank's time, one that stands for several repeats."""

    kind: str
    nbytes: int
    ranks: int
    seconds: float

    @property
    def algbw(self) -> float:
        """Return P / t in bytes a second."""
        return self.nbytes / self.seconds

    @property
    def busbw(self) -> float:
        """Return the bytes a second of each rank's link: comparable across collectives and numbers of ranks."""
        return self.algbw * bus_factor(self.kind.removeprefix("gloo's "), self.ranks)


@dataclass(frozen=True)
class Bandwidth:
    """Timings of several collectives over several sizes, as `measure_bandwidth` returns them."""

    timings: tuple[Timing, ...]

    def at(self, kind: str, nbytes: int) -> Timing:
        """Return one timing; LookupError where it was not measured."""
        for timing in self.timings:
            if (timing.kind, timing.nbytes) == (kind, nbytes):
                return timing
        measured = sorted({timing.nbytes for timing in self.timings})
        raise LookupError(f"{kind} of {nbytes} bytes was not measured; measured: {measured}")

    @property
    def largest(self) -> int:
        """Return the largest payload measured, in bytes."""
        return max(timing.nbytes for timing in self.timings)


def bandwidth_figure(measured: Bandwidth) -> go.Figure:
    """Draw lines of busbw (GB/s) over the payload's size, one a collective."""
    by_kind: dict[str, list[Timing]] = {}
    for timing in measured.timings:
        by_kind.setdefault(timing.kind, []).append(timing)
    figure = go.Figure()
    for kind, timings in by_kind.items():
        drawn = line(
            kind,
            COLLECTIVE_COLOURS.get(kind, STRATEGY_COLOURS["no_shard"]),
            [size(timing.nbytes) for timing in timings],
            [timing.busbw / GB for timing in timings],
            mode="lines+markers",
            hovertemplate=f"{kind}, %{{x}}: %{{y:.2f}} GB/s<extra></extra>",
        )
        figure.add_trace(drawn)
    highest = max(timing.busbw for timing in measured.timings)
    figure.update_xaxes(title="payload P", type="category")
    figure.update_yaxes(title="busbw (GB/s)", range=[0, 1.15 * highest / GB])

    at_largest, ends = {}, []
    for kind in by_kind:
        at_largest[kind] = measured.at(kind, measured.largest).busbw
        ends.append(f"{kind} {_rate(at_largest[kind])}")
    # the title compares the fastest collective's largest message with its smallest
    best = max(at_largest, key=lambda kind: at_largest[kind])
    # small messages show latency, large ones bandwidth
    smallest = min(by_kind[best], key=lambda timing: timing.nbytes)
    least = f"{_rate(smallest.busbw)} at {size(smallest.nbytes)}"
    largest = size(measured.largest)
    title = f"{best}: {_rate(at_largest[best])} at {largest}, {least}"
    where = f"Measured on {measured.timings[0].ranks} CPU ranks, gloo over this machine's loopback"
    alt = f"Lines of bus bandwidth over payload size. At {largest}: {'; '.join(ends)}."
    return titled(figure, title, f"{where}: no network is involved", alt, 280)


def _rate(bytes_per_s: float) -> str:
    """Return a bandwidth in words: `1.23 GB/s`."""
    return f"{three_digits(bytes_per_s / GB)} GB/s"
