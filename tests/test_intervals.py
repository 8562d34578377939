"""Interval algebra on hand-written sets, and against counting instant by instant."""

from __future__ import annotations

import numpy as np
import pytest

from fsdplab.profiling.intervals import (
    EMPTY,
    clip,
    close_gaps,
    covered,
    intersect,
    length,
    lengths_of,
    split,
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
        (split, ([(0, 9), (20, 22)], [4, 15, 20]), [[0, 4], [4, 9], [20, 22]]),
        (split, ([], [4]), []),
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
def test_lengths_of_many_sets_are_those_of_each(seed):
    chance = np.random.default_rng(seed)
    sets = [chance.integers(0, 40, size=(int(chance.integers(0, 6)), 1)) for _ in range(8)]
    sets = [np.concatenate([each, each + chance.integers(0, 12, size=each.shape)], axis=1) for each in sets]
    groups = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
    assert lengths_of(np.concatenate(sets), groups, len(sets)).tolist() == [length(each) for each in sets]
