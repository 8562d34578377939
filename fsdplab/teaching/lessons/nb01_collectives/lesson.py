"""Lesson 01, the part in the notebook's process: what collectives move, that they compose, and how fast they are here.

P is the whole payload in bytes and n the number of ranks, here as in every table of the course.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median

from fsdplab.teaching.core.checking import solution
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

from .ring import ring_figure
from .sent_figure import sent_figure
from .timings import Bandwidth, Timing, bandwidth_figure, bus_factor

__all__ = [
    "bandwidth_figure", "bus_factor", "compose", "count_ring", "measure_bandwidth", "ring_figure", "sent_figure",
    "watch",
]  # fmt: skip

SIZES = (64_000, 256_000, 1_000_000, 4_000_000, 16_000_000)
_on_ranks = LessonRanks(__file__)


@doing("three collectives on real ranks")
def watch(world_size: int = 3, block: int = 2) -> Table:
    """The values of every rank before and after each collective, on real ranks: small whole numbers."""
    by_rank = _on_ranks("watch", world_size, block=block)
    columns = ("start", "reduce_scatter", "all_gather", "all_reduce")
    rows = [
        [f"rank {rank}", *(" ".join(f"{value:.0f}" for value in held[name]) for name in columns)]
        for rank, held in enumerate(by_rank)
    ]
    header = ["", "starts with", "1. after reduce_scatter", "2. then all_gather", "or at once: all_reduce"]
    return table(header, rows, f"Measured: {world_size} real ranks, {world_size * block} numbers each.")


@doing("a million sums, made in two ways on real ranks")
def compose(world_size: int = 2, elements: int = 1_000_000) -> Table:
    """Reduce-scatter then all-gather beside all-reduce on random floats (as many as divide evenly among the ranks): in
    how many does a bit differ?
    """
    elements -= elements % world_size
    by_rank = _on_ranks("compose", world_size, elements=elements)
    rows = [
        [f"rank {rank}", f"{elements:,}", f"{seen['differing_bits_in']:,}", f"{seen['largest']:.1e}"]
        for rank, seen in enumerate(by_rank)
    ]
    header = ["", "floats compared", "floats with a differing bit", "largest difference"]
    return table(header, rows, f"Measured on {world_size} real ranks.")


@doing("sending around the ring on real ranks")
def count_ring(exercise: str = "01.ring_all_gather", megabytes: float = 12, world_size: int = 3) -> list[list[int]]:
    """All-gather P = `megabytes` MB with the learner's ring (or the reference: it says which) on real ranks; bytes of
    each message that a rank sent, by rank.
    """
    solution(exercise)
    return _on_ranks("sent", world_size, exercise=exercise, elements=int(megabytes * 1e6 / 4 / world_size))


@doing("timing collectives of five sizes on real ranks")
def measure_bandwidth(sizes: Sequence[int] = SIZES, world_size: int = 2, repeats: int = 7) -> Bandwidth:
    """Time all_gather, reduce_scatter and all_reduce for each payload size (bytes) on real ranks."""
    divided = [nbytes - nbytes % (4 * world_size) for nbytes in sizes]
    by_rank = _on_ranks("timed", world_size, sizes=divided, repeats=repeats)
    timings = []
    for kind, nbytes in product(by_rank[0], divided):
        quickest = map(min, *(ranks[kind][nbytes] for ranks in by_rank))
        timings.append(Timing(kind, nbytes, world_size, median(quickest)))
    return Bandwidth(tuple(timings))
