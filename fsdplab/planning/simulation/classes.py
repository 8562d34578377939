"""Ranks that cannot differ are simulated once.

Two ranks are alike when they compute at one pace and their shard groups and replica groups hold the same kinds of
ranks: then every collective of theirs begins and ends at the same instants. The kinds are found by refining a first
guess, the paces, until no group separates ranks of one kind (as automata are minimised: Moore 1956). Without a slow
rank there is one kind, whatever the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankClass:
    """Ranks that are alike: the first of them, how many, their pace (1.5: compute takes 1.5 times as long), and the
    classes of their shard group and of their replica group, by index.
    """

    first: int
    count: int
    pace: float
    groups: Mapping[str, tuple[int, ...]]


def rank_classes(shards: int, replicas: int, paces: Mapping[int, float]) -> list[RankClass]:
    """The classes of `shards` x `replicas` ranks in the order of their first ranks; `paces` of the slow ones.

    >>> [each.count for each in rank_classes(8, 1250, {})]
    [10000]
    >>> [(each.first, each.count) for each in rank_classes(4, 2, {5: 1.5})]
    [(0, 3), (1, 1), (4, 3), (5, 1)]
    """
    ranks = shards * replicas
    if not paces:
        return [RankClass(0, ranks, 1.0, {"shard": (0,), "replicate": (0,)})]
    colours = _numbered([paces.get(rank, 1.0) for rank in range(ranks)])
    while True:
        rows = [tuple(sorted(set(colours[first : first + shards]))) for first in range(0, ranks, shards)]
        columns = [tuple(sorted(set(colours[place::shards]))) for place in range(shards)]
        finer = _numbered([(colours[rank], rows[rank // shards], columns[rank % shards]) for rank in range(ranks)])
        if max(finer) == max(colours):
            break
        colours = finer
    counts = Counter(colours)
    return [
        RankClass(
            first := colours.index(colour), counts[colour], paces.get(first, 1.0),
            {"shard": rows[first // shards], "replicate": columns[first % shards]},
        )
        for colour in sorted(counts)
    ]  # fmt: skip


def _numbered(keys: list[Hashable]) -> list[int]:
    """Equal keys get equal numbers, in order of first appearance: `["b", "a", "b"]` -> `[0, 1, 0]`."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]
