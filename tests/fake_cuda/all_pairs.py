"""A few of all combinations, such that every pair of values occurs together at least once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

Combination = tuple[Any, ...]


def all_pairs(factors: Sequence[Sequence[Any]]) -> list[Combination]:
    """Combinations of one value a factor, each the one that has the most pairs not yet seen.

    Four factors of three values have 81 combinations; about nine of them hold all 54 pairs:

    >>> len(all_pairs([[1, 2], [3, 4], [5, 6]]))
    4
    """
    everything = list(itertools.product(*factors))
    missing = set().union(*(_pairs(one) for one in everything)) if everything else set()
    chosen = []
    while missing:
        best = max(everything, key=lambda one: len(_pairs(one) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(combination: Combination) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))
