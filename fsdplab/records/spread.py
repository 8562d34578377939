"""The spread of a run's step times, and whether one run is faster than another beyond chance.

The rule reads the figures of a `Spread` alone, so a record, the JSON of a comparison and a page come to the same
winner. `tests/test_spread.py` holds it by seeded simulation: among two to eight equal runs of 4, 10 or 30 steps a
winner is claimed in at most 2 % of cases, and a run that is 15 % faster, with 2 % of scatter, is found at four steps
each in at least 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from .typed import Amount, Size

FEWEST = 4  # timed steps: with fewer no run is called faster than another
LEAST = 0.02  # of the faster median: two runs of one program differ by so much
_NOISE = 4.0  # times the interquartile ranges over the root of the steps
_FEW = 10  # steps, below which all steps of one run must be shorter than all of the other


@dataclass(frozen=True)
class Spread:
    """Seconds of a run's timed steps: median, quartiles, extremes, how many; None for what is not known.

    Records of before had the median and the minimum alone.
    """

    median: Amount | None = None
    min: Amount | None = None
    q1: Amount | None = None
    q3: Amount | None = None
    max: Amount | None = None
    count: Size | None = None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Take the spread of a series: `Spread.of([0.1, 0.2, 0.3])` has median 0.2 and quartiles 0.15 and 0.25."""
        if not seconds:
            return cls()
        q1 = q3 = seconds[0]
        if len(seconds) > 1:
            q1, _, q3 = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(
            median=statistics.median(seconds), min=min(seconds), q1=q1, q3=q3, max=max(seconds), count=len(seconds)
        )

    @property
    def scatter(self) -> float | None:
        """Half the interquartile range as a part of the median: 0.03 is ±3 %; None with fewer than 4 steps."""
        if not self.median or self.q1 is None or self.q3 is None or (self.count or 0) < FEWEST:
            return None
        return (self.q3 - self.q1) / 2 / self.median


@dataclass(frozen=True)
class Race:
    """Which of several runs is fastest: `leaders` are their places, the shortest median first.

    More than one leader: these cannot be distinguished. Their medians would have to differ by `within`, a part of the
    shortest, to be distinguished; None where too few steps were timed to say.
    """

    leaders: tuple[int, ...]
    within: float | None = None

    @property
    def winner(self) -> int | None:
        """The place of the one run that is faster than every other beyond chance; None where there is none."""
        return self.leaders[0] if len(self.leaders) == 1 else None


def race(spreads: Sequence[Spread]) -> Race:
    """Find the fastest of several runs, or those that may be: runs without a timed step take no part.

    >>> slow, fast = Spread.of([0.50, 0.51, 0.52, 0.53]), Spread.of([0.40, 0.41, 0.42, 0.43])
    >>> race([slow, fast]), race([fast, fast]).leaders
    (Race(leaders=(1,), within=None), (0, 1))
    """
    timed = sorted((spread.median, place) for place, spread in enumerate(spreads) if spread.median)
    if not timed:
        return Race(())
    (best, first), *others = timed
    level = []  # those that cannot be distinguished from the first
    differences = []  # by which their medians would have to differ
    for _, place in others:
        if not is_below(spreads[first], spreads[place]):
            level.append(place)
            differences.append(least_difference(spreads[first], spreads[place]))
    known = [difference for difference in differences if difference is not None]
    within = None
    if known and len(known) == len(level):
        within = max(known) / best
    return Race((first, *level), within)


def is_below(fast: Spread, slow: Spread) -> bool:
    """Return whether `fast` is faster than `slow` beyond chance; False wherever the figures do not say so."""
    needed = least_difference(fast, slow)
    return needed is not None and (slow.median or 0) - (fast.median or 0) > needed


def least_difference(fast: Spread, slow: Spread) -> float | None:
    """Return the seconds by which the medians must differ for a claim, given both scatters; None below 4 steps.

    It is the largest of three: 2 % of the faster median; four times the interquartile ranges (root of the sum of their
    squares, each over the root of its steps); and what it takes for the boxes not to overlap, of all steps where a run
    has fewer than ten, of the quartiles otherwise.
    """
    one, other = astuple(fast), astuple(slow)
    if None in (*one, *other) or min(one[-1], other[-1]) < FEWEST:
        return None
    (median, _, q1, q3, most, steps), (slow_median, slow_least, slow_q1, slow_q3, _, slow_steps) = one, other
    noise = _NOISE * math.hypot((q3 - q1) / math.sqrt(steps), (slow_q3 - slow_q1) / math.sqrt(slow_steps))
    overlap = q3 - slow_q1
    if min(steps, slow_steps) < _FEW:
        overlap = most - slow_least
    return max(LEAST * median, noise, slow_median - median + overlap)


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each timed step, its slowest rank's, from rows of the table `steps`."""
    slowest: dict[int, float] = defaultdict(float)
    for row in steps:
        if row.get("step_time_s") is not None:
            slowest[row["step"]] = max(slowest[row["step"]], row["step_time_s"])
    return list(slowest.values())
