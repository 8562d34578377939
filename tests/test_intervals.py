"""Interval algebra on hand-written sets, and against counting instant by instant."""

from __future__ import annotations

import numpy as np
import pytest

from fsdplab.profiling.intervals import (
    EMPTY,
    Cells,
    before,
    clip,
    close_gaps,
    covered,
    intersect,
    length,
    subtract,
    union,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "function,arguments,expected",
    [
        (union, ([(5, 8), (0, 3)], [(2, 4), (8, 9)]), [[0, 4], [5, 9]]),
        (union, ([(3, 3), (4, 2)],), []),
        (union, (), []),
        (intersect, ([(0, 4), (6, 8)], [(2, 7)]), [[2, 4], [6, 7]]),
        (intersect, ([(0, 4)], [(4, 6)]), []),
        (subtract, ([(0, 9)], [(2, 4)]), [[0, 2], [4, 9]]),
        (subtract, ([(0, 9)], []), [[0, 9]]),
        (subtract, ([(2, 4)], [(0, 9)]), []),
        (clip, ([(0, 9)], 2, 4), [[2, 4]]),
        (clip, ([(0, 9)], 9, 20), []),
        (close_gaps, ([(0, 3), (4, 5), (9, 10)], 2), [[0, 5], [9, 10]]),
        (close_gaps, ([(0, 3), (5, 6)], 2), [[0, 3], [5, 6]]),
    ],
)
def test_by_hand(function, arguments, expected):
    found = function(*arguments)
    assert found.dtype == np.int64 and found.tolist() == expected


def test_starts_are_inside_and_ends_are_not():
    assert covered([(2, 4), (6, 7)], [1, 2, 3, 4, 6, 7]).tolist() == [False, True, True, False, True, False]
    assert covered(EMPTY, [1]).tolist() == [False]


def test_length_counts_an_instant_once():
    assert length([(0, 3), (2, 4)]) == 4 and length(EMPTY) == 0


@pytest.mark.parametrize("seed", range(20))
def test_against_counting_every_instant(seed):
    draw = np.random.default_rng(seed)
    sets = [np.sort(draw.integers(0, 60, size=(draw.integers(0, 9), 2)), axis=1) for _ in "ab"]
    a, b = ({instant for start, end in each.tolist() for instant in range(start, end)} for each in sets)
    for function, expected in ((union, a | b), (intersect, a & b), (subtract, a - b)):
        found = function(*sets)
        assert {instant for start, end in found.tolist() for instant in range(start, end)} == expected
        assert (found[1:, 0] > found[:-1, 1]).all()  # sorted, disjoint, not even touching
    assert length(sets[0]) == len(a) == length(intersect(*sets)) + length(subtract(*sets))


@pytest.mark.parametrize("seed", range(5))
def test_what_lies_before_an_instant_is_what_lies_in_the_stretch_until_it(seed):
    chance = np.random.default_rng(seed)
    whole, instants = union(np.sort(chance.integers(0, 60, size=(6, 2)), axis=1)), chance.integers(-5, 70, size=9)
    assert before(whole, instants).tolist() == [length(clip(whole, -9, instant)) for instant in instants.tolist()]
    assert before(EMPTY, instants).tolist() == [0] * 9


@pytest.mark.parametrize("seed", range(20))
def test_cells_give_what_counting_every_instant_gives(seed):
    """Labels are painted in turn, the last wins; sums over them are the lengths of what has each."""
    draw = np.random.default_rng(seed)
    spans = np.sort(draw.integers(0, 60, size=(draw.integers(1, 9), 2)), axis=1)
    labels = draw.integers(0, 3, size=len(spans))
    cells, by_instant = Cells([0, 60], spans), [-1] * 60
    for (start, end), label in zip(spans.tolist(), labels.tolist()):
        by_instant[start:end] = [label] * (end - start)
    painted = cells.paint(spans, labels)
    assert np.repeat(painted, cells.length).tolist() == by_instant
    assert cells.sums(painted, 3).tolist() == [by_instant.count(label) for label in range(3)]
    assert np.repeat(cells.inside(spans), cells.length).tolist() == [label >= 0 for label in by_instant]
    runs, whose = cells.runs(painted)
    assert [by_instant[start:end] for start, end in runs.tolist()] == [
        [label] * (end - start) for (start, end), label in zip(runs.tolist(), whose.tolist())
    ]
    assert cells.between(painted >= 0, 0, 60) == sum(label >= 0 for label in by_instant)
