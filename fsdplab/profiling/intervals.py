"""Sets of instants as sorted, disjoint, half-open intervals of integer nanoseconds, and a stretch of time in cells: the
arithmetic under every overlap figure.

Integers, so that sums are exact; numpy, because a trace has a million intervals. A set is an int64 array of shape [k,
2]; touching intervals are one, empty ones are dropped. All functions are pure and take anything `union` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Intervals = np.ndarray
EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def pairs(spans: Any) -> Intervals:
    """Spans, of which there may be none, as an array of shape [k, 2]."""
    return np.asarray(spans, dtype=np.int64).reshape(-1, 2)


def union(*sets: Any) -> Intervals:
    """The instants in any of the sets; the members of a set may overlap and come in any order.

    >>> union([(5, 8), (0, 3)], [(2, 4), (8, 9)]).tolist()
    [[0, 4], [5, 9]]
    """
    spans = np.concatenate([EMPTY, *map(pairs, sets)])  # EMPTY, so that no sets at all are a set, too
    is_filled = spans[:, 1] > spans[:, 0]
    if is_filled.all() and (spans[1:, 0] > spans[:-1, 1]).all():
        return spans  # most are sorted and disjoint already
    filled = spans[is_filled]
    return _merged(filled[np.argsort(filled[:, 0], kind="stable")])


def _merged(ordered: Intervals, below: int = 1) -> Intervals:
    """Non-empty intervals in order of their starts, with those less than `below` apart made one."""
    if not len(ordered):
        return EMPTY
    # of [0, 9], [2, 4], [12, 15] the ends so far are 9, 9, 15: a gap before the third, and so [0, 9] and [12, 15]
    ends = np.maximum.accumulate(ordered[:, 1])
    has_gap = ordered[1:, 0] - ends[:-1] >= below
    is_first: np.ndarray = np.append(True, has_gap)
    is_last: np.ndarray = np.append(has_gap, True)
    return _paired(ordered[is_first, 0], ends[is_last])


def _paired(starts: np.ndarray, ends: np.ndarray) -> Intervals:
    """Pair starts and ends as intervals; `np.stack` takes three times as long for the few of a step."""
    pairs: Intervals = np.empty((len(starts), 2), dtype=np.int64)
    pairs[:, 0] = starts
    pairs[:, 1] = ends
    return pairs


def intersect(a: Any, b: Any) -> Intervals:
    """The instants in both: `intersect([(0, 4)], [(2, 9)])` is `[[2, 4]]`."""
    return _where(a, b, wanted=3)


def subtract(a: Any, b: Any) -> Intervals:
    """The instants in `a` and not in `b`: `subtract([(0, 9)], [(2, 4)])` is `[[0, 2], [4, 9]]`."""
    return _where(a, b, wanted=1)


def length(a: Any) -> int:
    """How many nanoseconds the set holds; overlapping members count once: `length([(0, 3), (2, 4)])` is 4."""
    return size(union(a))


def clip(a: Any, start: int, end: int) -> Intervals:
    """The part of a set between two instants: `clip([(0, 9)], 2, 4)` is `[[2, 4]]`."""
    return within(union(a), start, end)


def within(whole: Intervals, start: int, end: int) -> Intervals:
    """`clip` of a set that is sorted and disjoint already: only the part between the instants is looked at."""
    # from the first interval that ends behind `start` to the last one that begins before `end`
    first = np.searchsorted(whole[:, 1], start, side="right")
    last = np.searchsorted(whole[:, 0], end, side="left")
    if first >= last or start >= end:
        return EMPTY
    return np.clip(whole[first:last], start, end)


def before(whole: Intervals, instants: np.ndarray) -> np.ndarray:
    """Nanoseconds of a sorted, disjoint set before each instant: `before([[0, 4], [6, 9]], [2, 7])` is `[2, 5]`."""
    if not len(whole):
        return np.zeros(len(instants), dtype=np.int64)
    lengths = whole[:, 1] - whole[:, 0]
    sums: np.ndarray = np.concatenate([[0], np.cumsum(lengths)])  # of the first k intervals, for each k
    begun: np.ndarray = np.asarray(np.searchsorted(whole[:, 0], instants, side="right"))
    # of the interval that an instant lies in, what comes after the instant does not count: of [6, 9] at 7 these are 2
    still_to_come = np.maximum(0, whole[begun - 1, 1] - instants)
    not_yet = np.where(begun > 0, still_to_come, 0)
    total: np.ndarray = sums[begun] - not_yet
    return total


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
    many = len(ends)
    order = np.argsort(ends, kind="stable")
    place: np.ndarray = np.empty(many, dtype=np.int64)  # of each end among the sorted ones
    place[order] = np.arange(many)
    # Each group's places are lifted above those of all groups before it, so that one maximum serves them all. Of the
    # ends 5, 3, 8, 2 the places are 2, 1, 3, 0, lifted 2, 1, 3, 4, and the highest so far 2, 2, 3, 4.
    base: np.ndarray = groups * many
    lifted = np.maximum.accumulate(place + base)
    return ends[order][lifted - base]


def close_gaps(a: Any, below: int) -> Intervals:
    """The set with gaps shorter than `below` filled: `close_gaps([(0, 3), (4, 5)], 2)` is `[[0, 5]]`."""
    return _merged(union(a), below)


def covered(a: Any, instants: Sequence[int] | np.ndarray) -> np.ndarray:
    """For each instant, whether the set holds it (starts, not ends): `covered([(2, 4)], [1, 2, 4])` is `[F, T, F]`."""
    whole = union(a)
    # inside of one, an interval more has begun than has ended
    begun = np.searchsorted(whole[:, 0], instants, side="right")
    ended = np.searchsorted(whole[:, 1], instants, side="right")
    return np.asarray(begun > ended)


def _where(a: Any, b: Any, wanted: int) -> Intervals:
    """Find the instants where (in a) + 2 (in b) is `wanted`: one sweep over all edges."""
    a = union(a)
    b = union(b)
    edges = np.concatenate([a[:, 0], a[:, 1], b[:, 0], b[:, 1]])
    if not len(edges):
        return EMPTY
    # a start adds its set's weight and an end takes it away: the sum is 1 in `a` only, 2 in `b` only, 3 in both
    weights: np.ndarray = np.repeat([1, -1, 2, -2], [len(a), len(a), len(b), len(b)])
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    state = np.cumsum(weights[order])  # from each edge to the next one
    starts, ends = edges[:-1], edges[1:]
    is_wanted = (state[:-1] == wanted) & (ends > starts)  # edges at one instant have nothing between them
    return _merged(_paired(starts[is_wanted], ends[is_wanted]))


def first_label(cases: Sequence[tuple[np.ndarray, Any]], otherwise: Any) -> np.ndarray:
    """For each place the label of the first case that holds there.

    >>> first_label([(np.array([True, False, False]), 1), (np.array([True, True, False]), 2)], otherwise=0).tolist()
    [1, 2, 0]
    """
    conditions = [condition for condition, _ in cases]
    labels = [label for _, label in cases]
    return np.select(conditions, labels, otherwise)


class Cells:
    """A stretch of time cut into cells in which nothing changes, so that every question about it is a column of labels.

    Whatever begins or ends is an edge. Sums over labels add up, because a cell has one label: nothing is subtracted
    from anything. `start`, `end` and `length` are in ns, one for each cell.

    >>> cells = Cells([0, 9], [[2, 4]])
    >>> cells.length.tolist(), cells.inside([[2, 4]]).tolist(), cells.runs(np.array([1, 1, 2]))[0].tolist()
    ([2, 2, 5], [False, True, False], [[0, 4], [4, 9]])
    """

    def __init__(self, *edges: Any) -> None:
        instants = [np.asarray(some_edges, dtype=np.int64).ravel() for some_edges in edges]
        ordered = np.sort(np.concatenate(instants))
        is_new = np.diff(ordered, prepend=ordered[0] - 1) > 0
        self._edges = ordered[is_new]  # np.unique takes five times as long
        self.start = self._edges[:-1]
        self.end = self._edges[1:]
        self.length = self.end - self.start

    def at(self, edges: Any) -> np.ndarray:
        """The number of the cell that begins at each edge."""
        cells: np.ndarray = np.asarray(np.searchsorted(self._edges, edges))
        return cells

    def inside(self, spans: Any) -> np.ndarray:
        """Which cells lie in any of the spans, which may overlap; their bounds are edges."""
        # a span holds the cells from the one that begins with it up to the one that begins at its end
        first, last = self.at(pairs(spans)).T
        many = len(self._edges) + 1
        begun = np.bincount(first, minlength=many)
        ended = np.bincount(last, minlength=many)
        depth = np.cumsum(begun - ended)  # in how many spans each cell lies
        return depth[: len(self.start)] > 0

    def paint(self, spans: Intervals, labels: Sequence[int] | np.ndarray) -> np.ndarray:
        """For each cell the label of the last span that holds it, -1 for none.

        >>> Cells([0, 9], [[2, 4]]).paint(np.array([[0, 9], [2, 4]]), [7, 8]).tolist()
        [7, 8, 7]
        """
        column = np.full(len(self.start), -1)
        for (first, last), label in zip(self.at(spans).tolist(), labels):
            column[first:last] = label
        return column

    def runs(self, labels: np.ndarray) -> tuple[Intervals, np.ndarray]:
        """Join neighbours of one label to spans: (the spans, their labels); cells of label -1 are left out."""
        # of the labels 1, 1, 2 runs begin at the cells 0 and 2, and end before the cells 2 and 3
        first = np.flatnonzero(np.diff(labels, prepend=-2))  # -2 is no label, so that the first cell begins a run
        after: np.ndarray = np.append(first[1:], len(labels))[: len(first)]  # without cells there are no runs
        spans = _paired(self.start[first], self.end[after - 1])
        run_labels = labels[first]
        is_kept = run_labels >= 0
        return spans[is_kept], run_labels[is_kept]

    def between(self, where: np.ndarray, begin: Any, end: Any) -> np.ndarray:
        """Nanoseconds of these cells from the edges `begin` to the edges `end`.

        >>> Cells([0, 9], [[2, 4]]).between(np.array([True, True, False]), [0, 2], [9, 4]).tolist()
        [4, 2]
        """
        lengths = self.length * where  # 0 for other cells
        sums: np.ndarray = np.concatenate([[0], np.cumsum(lengths)])  # of all cells before each edge
        return sums[self.at(end)] - sums[self.at(begin)]

    def sums(self, labels: np.ndarray, many: int) -> np.ndarray:
        """Nanoseconds of each label from 0 to `many` - 1; a label below 0 is no label.

        >>> Cells([0, 9], [[2, 4]]).sums(np.array([1, -1, 1]), 2).tolist()
        [0, 7]
        """
        is_chosen = labels >= 0
        sums = np.bincount(labels[is_chosen], self.length[is_chosen], minlength=many)
        return sums[:many].astype(np.int64)
