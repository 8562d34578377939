"""The unit of an axis of bytes or of seconds, chosen by how far the axis reaches: a peak of 43.6 GB is not read from
40k MB, nor a step of 12 s from 12,000 ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdplab.common.sizes import BYTES


class AxisUnit(NamedTuple):
    """A unit of an axis: its symbol, how many bytes or seconds one is, and how a hover writes a number in it."""

    symbol: str
    size: float
    digits: str  # as d3-format has it: ".1f", or ".3r" for three significant digits

    def of(self, amount: float) -> float:
        """Return bytes or seconds in this unit: `byte_unit([2e9]).of(5e8) == 0.5`."""
        return amount / self.size

    def hover(self, axis: str) -> str:
        """Return what a hover shows of a place on an axis: `byte_unit([2e9]).hover("x") == "%{x:.2f} GB"`."""
        return f"%{{{axis}:{self.digits}}} {self.symbol}"


MEGABYTES = AxisUnit("MB", BYTES["MB"], ".1f")
MILLISECONDS = AxisUnit("ms", 1e-3, ".3r")


def byte_unit(amounts: Iterable[float]) -> AxisUnit:
    """Return the unit of an axis that shows these bytes, by the largest: GB from one on, MB, or kB below a tenth.

    >>> byte_unit([43.6e9, 12e6]).symbol, byte_unit([300e6]).symbol, byte_unit([5e3]).symbol
    ('GB', 'MB', 'kB')
    """
    most = max(map(abs, amounts), default=0.0)
    if most >= BYTES["GB"]:
        return AxisUnit("GB", BYTES["GB"], ".2f")
    if 0 < most < BYTES["MB"] / 10:
        return AxisUnit("kB", BYTES["kB"], ".1f")
    return MEGABYTES


def time_unit(durations: Iterable[float]) -> AxisUnit:
    """Return the unit of an axis that shows these seconds, by the longest: seconds from one on, ms, or µs below a
    tenth.

    >>> time_unit([12.4, 0.3]).symbol, time_unit([0.342]).symbol, time_unit([5e-5]).symbol
    ('s', 'ms', 'µs')
    """
    longest = max(map(abs, durations), default=0.0)
    # as `sizes.seconds` rounds: what it writes as 1.00 s is on an axis of seconds
    if longest >= 0.9995:
        return AxisUnit("s", 1.0, ".3r")
    if 0 < longest < MILLISECONDS.size / 10:
        return AxisUnit("µs", 1e-6, ".3r")
    return MILLISECONDS
