"""How far the clocks of ranks are apart, from the ends of collectives that end together.

No rank ends an all_gather, a reduce_scatter or an all_reduce before all have begun it, and they end it together: ends
that are always apart by the same time are of different clocks. One shift a rank is estimated, as the median over its
collectives with a neighbour; ranks that share none are connected through others, and, where nothing else does it,
through messages between two ranks, whose ends are less sharp.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from fsdplab.common.collectives import PAIRED, collective_row
from fsdplab.common.sizes import seconds

Row = Mapping[str, Any]
_LEAST_ERROR_NS = 1_000  # kernels of one collective end some microseconds apart
_FEW = 3  # below so many collectives their own spread says nothing
_UNSURE_NS = 100_000
_CONTRADICTION_NS = 1_000_000  # a collective that ends so long before a rank begins it is on another clock


class Clock(NamedTuple):
    """By how much a rank's clock is ahead of the first rank's, and how sure that is (one standard error), in ns."""

    ahead_ns: int = 0
    error_ns: int = 0


class _Edge(NamedTuple):
    """Two ranks that share collectives: how far the second is ahead of the first. Sorted, the best edges come first."""

    by_messages: bool
    error: float
    first: int
    second: int
    ahead: float


def clocks_of(meetings: Iterable[Sequence[Row]]) -> dict[int, Clock]:
    """The clock of each rank that shares collectives with others; the lowest rank of those that are connected is the
    reference.

    Ranks 0 and 1 that end three collectives at 5, 15, 25 and at 75, 85, 95 ms: the clock of rank 1 is 70 ms ahead.
    """
    connected: dict[int, dict[int, Clock]] = {}  # of each rank its whole component
    for edge in sorted(_edges(meetings)):  # the best first: ranks that are connected already need no worse one
        here = connected.setdefault(edge.first, {edge.first: Clock()})
        there = connected.setdefault(edge.second, {edge.second: Clock()})
        if here is there:
            continue
        # How far the second component's reference is ahead of the first's: rank 1 is 30 ahead of rank 0 and rank 3 is
        # 10 ahead of rank 2; an edge from 1 to 3 of 50 puts rank 2 at 30 + 50 - 10 = 70 ahead of rank 0.
        ahead = here[edge.first].ahead_ns + edge.ahead - there[edge.second].ahead_ns
        error = math.hypot(edge.error, here[edge.first].error_ns, there[edge.second].error_ns)
        # all of the second component moves into the first
        for rank, clock in there.items():
            here[rank] = Clock(round(clock.ahead_ns + ahead), round(math.hypot(clock.error_ns, error)))
            connected[rank] = here
    # the lowest rank of each component is its reference
    clocks: dict[int, Clock] = {}
    components = {id(component): component for component in connected.values()}
    for component in components.values():
        lowest = min(component)
        reference = component[lowest].ahead_ns
        for rank, clock in component.items():
            error_ns = 0 if rank == lowest else clock.error_ns
            clocks[rank] = Clock(clock.ahead_ns - reference, error_ns)
    return clocks


def _edges(meetings: Iterable[Sequence[Row]]) -> list[_Edge]:
    """The pairs of ranks that share collectives: in each the lowest rank beside every other one."""
    apart: dict[tuple[bool, int, int], list[int]] = defaultdict(list)
    for members in meetings:
        kind = members[0]["kind"]
        if len(members) < 2 or not (collective_row(kind).ends_together or kind == PAIRED):
            continue
        first, *others = sorted(members, key=lambda row: row["rank"])
        for row in others:
            apart[kind == PAIRED, first["rank"], row["rank"]].append(row["end_ns"] - first["end_ns"])
    edges = []
    for (by_messages, lower, higher), differences in apart.items():
        edges.append(_Edge(by_messages, _error(differences), lower, higher, median(differences)))
    return edges


def _error(apart: Sequence[int]) -> float:
    """The standard error of a median, from the median deviation."""
    if len(apart) < _FEW:
        return _UNSURE_NS
    middle = median(apart)
    deviation = median(abs(difference - middle) for difference in apart)
    # of normal noise: its standard deviation is 1.4826 median deviations, and a median's error 1.2533 of a mean's
    error = 1.4826 * 1.2533 * deviation / math.sqrt(len(apart))
    return max(_LEAST_ERROR_NS, error)


def contradict(meetings: Iterable[Sequence[Row]]) -> bool:
    """Whether some rank ended a collective long before another one began it: their clocks differ."""
    for members in meetings:
        if len(members) < 2 or not collective_row(members[0]["kind"]).ends_together:
            continue
        last_start = max(row["start_ns"] for row in members)
        first_end = min(row["end_ns"] for row in members)
        if last_start - first_end > _CONTRADICTION_NS:
            return True
    return False


def in_words(clocks: Mapping[int, Clock]) -> str:
    """What to say of clocks that differ by more than they are sure of; "" where they do not.

    >>> in_words({0: Clock(), 1: Clock(6_000_000, 1_000)})
    "the ranks' clocks differ: rank 1's is 6.00 ms ahead (± 1.00 µs) of rank 0's; all times are set to rank 0's"
    """
    differing = {rank: clock for rank, clock in clocks.items() if abs(clock.ahead_ns) > 2 * clock.error_ns}
    if not differing:
        return ""
    most = max(differing, key=lambda rank: abs(differing[rank].ahead_ns))
    reference = min(clocks)
    error = seconds(max(clock.error_ns for clock in differing.values()) / 1e9)
    apart = seconds(abs(differing[most].ahead_ns) / 1e9)
    if len(differing) > 1:
        return (
            f"the clocks of {len(differing)} ranks differ from rank {reference}'s, rank {most}'s most: by {apart}"
            f" (± {error}); all times are set to rank {reference}'s"
        )
    way = "ahead of" if differing[most].ahead_ns > 0 else "behind"
    return (
        f"the ranks' clocks differ: rank {most}'s is {apart} {way} rank"
        f" {reference}'s (± {error}); all times are set to rank {reference}'s"
    )
