"""Sets of instants as sorted, disjoint, half-open intervals of integer nanoseconds: the arithmetic under every overlap
figure.

Integers, so that sums are exact; numpy, because a trace has a million intervals. A set is an int64 array of shape [k,
2]; touching intervals are one, empty ones are dropped. All functions are pure and take anything `union` takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

Intervals = np.ndarray
EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def union(*sets: Any) -> Intervals:
    """The instants in any of the sets; the members of a set may overlap and come in any order.

    >>> union([(5, 8), (0, 3)], [(2, 4), (8, 9)]).tolist()
    [[0, 4], [5, 9]]
    """
    pairs = np.concatenate([EMPTY, *(np.asarray(each, dtype=np.int64).reshape(-1, 2) for each in sets)])
    if (pairs[:, 1] > pairs[:, 0]).all() and (pairs[1:, 0] > pairs[:-1, 1]).all():
        return pairs  # most are sorted and disjoint already
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    return _merged(pairs[np.argsort(pairs[:, 0], kind="stable")])


def _merged(pairs: Intervals) -> Intervals:
    """Intervals in order of their starts, none of them empty, with those that overlap or touch made one."""
    if not len(pairs):
        return EMPTY
    ends = np.maximum.accumulate(pairs[:, 1])
    edge: np.ndarray = np.ones(
        len(pairs) + 1, dtype=bool
    )  # before each interval, and after the last: whether none reaches over it
    np.greater(pairs[1:, 0], ends[:-1], out=edge[1:-1])
    return _paired(pairs[edge[:-1], 0], ends[edge[1:]])


def _paired(starts: np.ndarray, ends: np.ndarray) -> Intervals:
    """Starts and ends as intervals; `np.stack` takes three times as long for the few of a step."""
    pairs: Intervals = np.empty((len(starts), 2), dtype=np.int64)
    pairs[:, 0], pairs[:, 1] = starts, ends
    return pairs


def intersect(a: Any, b: Any) -> Intervals:
    """The instants in both: `intersect([(0, 4)], [(2, 9)])` is `[[2, 4]]`."""
    return _where(a, b, wanted=3)


def subtract(a: Any, b: Any) -> Intervals:
    """The instants in `a` and not in `b`: `subtract([(0, 9)], [(2, 4)])` is `[[0, 2], [4, 9]]`."""
    return _where(a, b, wanted=1)


def length(a: Any) -> int:
    """How many nanoseconds the set holds; overlapping members count once: `length([(0, 3), (2, 4)])` is 4."""
    whole = union(a)
    return int((whole[:, 1] - whole[:, 0]).sum())


def clip(a: Any, start: int, end: int) -> Intervals:
    """The part between two instants: `clip([(0, 9)], 2, 4)` is `[[2, 4]]`."""
    return union(np.clip(union(a), start, max(start, end)))


def within(whole: Intervals, start: int, end: int) -> Intervals:
    """`clip` of a set that is sorted and disjoint already: only the part between the instants is looked at."""
    first = np.searchsorted(whole[:, 1], start, side="right")
    last = np.searchsorted(whole[:, 0], end, side="left")
    return np.clip(whole[first:last], start, end) if first < last and start < end else EMPTY


class Measure:
    """How much of a set lies between two instants, found without looking at the set again.

    >>> Measure([(0, 4), (6, 9)]).between(2, 7)
    3
    """

    def __init__(self, a: Any) -> None:
        whole = union(a)
        self._starts, self._ends = whole[:, 0], whole[:, 1]
        self._before = np.concatenate([[0], np.cumsum(self._ends - self._starts)])
        self._lists = self._starts.tolist(), self._ends.tolist(), self._before.tolist()  # for one instant at a time

    def until(self, instants: np.ndarray) -> np.ndarray:
        """Nanoseconds of the set before each instant."""
        if not len(self._starts):
            return np.zeros(len(instants), dtype=np.int64)
        begun = np.searchsorted(self._starts, instants, side="right")
        return self._before[begun] - np.where(begun > 0, np.maximum(0, self._ends[begun - 1] - instants), 0)

    def between(self, start: int, end: int) -> int:
        """Nanoseconds of the set from `start` to `end`; 0 where `end` is earlier."""
        return self._until(end) - self._until(start) if end > start else 0

    def within(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """`between` of many pairs of instants."""
        return np.where(ends > starts, self.until(ends) - self.until(starts), 0)

    def _until(self, instant: int) -> int:
        starts, ends, before = self._lists
        begun = bisect_right(starts, instant)
        return before[begun] - max(0, ends[begun - 1] - instant) if begun else 0

    def of(self, pieces: Intervals) -> int:
        """Nanoseconds of the set inside disjoint intervals."""
        return int((self.until(pieces[:, 1]) - self.until(pieces[:, 0])).sum())


def size(disjoint: Intervals) -> int:
    """`length` of a set that is disjoint already."""
    return int((disjoint[:, 1] - disjoint[:, 0]).sum())


def latest_ends(ends: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The latest end so far, counted anew in each group; `groups` are numbers that only grow.

    >>> latest_ends(np.array([5, 3, 8, 2]), np.array([0, 0, 0, 1])).tolist()
    [5, 5, 8, 2]
    """
    if not len(ends):
        return ends
    order = np.argsort(ends, kind="stable")
    place: np.ndarray = np.empty(len(ends), dtype=np.int64)
    place[order] = np.arange(len(ends))
    return ends[order][np.maximum.accumulate(place + groups * len(ends)) - groups * len(ends)]


def lengths_of(sets: Intervals, groups: np.ndarray, many: int) -> np.ndarray:
    """`length` of the intervals of each group, which are numbered from 0 to `many` - 1.

    >>> lengths_of(np.array([[0, 3], [2, 4], [0, 9]]), np.array([0, 0, 1]), 2).tolist()
    [4, 9]
    """
    order = np.lexsort((sets[:, 0], groups))
    starts, ends, groups = sets[order, 0], sets[order, 1], groups[order]
    latest = latest_ends(ends, groups)
    begun = starts.copy()
    again = groups[1:] == groups[:-1]
    begun[1:][again] = np.maximum(starts[1:], latest[:-1])[again]
    found: np.ndarray = np.zeros(many, dtype=np.int64)
    np.add.at(found, groups, np.maximum(0, ends - begun))
    return found


def close_gaps(a: Any, below: int) -> Intervals:
    """The set with every gap shorter than `below` filled: `close_gaps([(0, 3), (4, 5), (9, 10)], 2)` is `[[0, 5], [9,
    10]]`.
    """
    whole = union(a)
    if len(whole) < 2:
        return whole
    apart = whole[1:, 0] - whole[:-1, 1] >= below
    first, last = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return np.stack([whole[first, 0], whole[last, 1]], axis=1)


def split(a: Any, cuts: Sequence[int] | np.ndarray) -> Intervals:
    """The same instants, cut at the given ones; the pieces may touch: `split([(0, 9)], [4])` is `[[0, 4], [4, 9]]`."""
    whole = union(a)
    if not len(whole):
        return EMPTY
    cuts = np.asarray(cuts, dtype=np.int64)
    inside = np.searchsorted(whole[:, 0], cuts, side="left") - 1
    cuts = cuts[(inside >= 0) & (cuts < whole[inside, 1])]
    edges = np.unique(np.concatenate([whole.ravel(), cuts]))
    pieces = _paired(edges[:-1], edges[1:])
    return pieces[covered(whole, pieces[:, 0])]


def covered(a: Any, instants: Sequence[int] | np.ndarray) -> np.ndarray:
    """For each instant, whether the set holds it (starts count, ends do not): `covered([(2, 4)], [1, 2, 4])` is `[F, T,
    F]`.
    """
    whole, instants = union(a), np.asarray(instants, dtype=np.int64)
    if not len(whole):
        return np.zeros(len(instants), dtype=bool)
    at = np.searchsorted(whole[:, 0], instants, side="right") - 1
    return (at >= 0) & (instants < whole[at, 1])


def _where(a: Any, b: Any, wanted: int) -> Intervals:
    """The instants where (in a) + 2 (in b) is `wanted`: one sweep over all edges."""
    a, b = union(a), union(b)
    edges = np.concatenate([a[:, 0], a[:, 1], b[:, 0], b[:, 1]])
    if not len(edges):
        return EMPTY
    weights: np.ndarray = np.repeat([1, -1, 2, -2], [len(a), len(a), len(b), len(b)])
    order = np.argsort(edges, kind="stable")
    edges, state = edges[order], np.cumsum(weights[order])
    held = (state[:-1] == wanted) & (edges[1:] > edges[:-1])
    return _merged(_paired(edges[:-1][held], edges[1:][held]))
