"""The unit of an axis of bytes, chosen by how far the axis reaches: a peak of 43.6 GB is not read from 40k MB."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdplab.common.sizes import BYTES


class ByteUnit(NamedTuple):
    """A unit of an axis: its symbol, and how many bytes one is."""

    symbol: str
    nbytes: float

    def of(self, nbytes: float) -> float:
        """Return bytes in this unit: `byte_unit([2e9]).of(5e8) == 0.5`."""
        return nbytes / self.nbytes

    def hover(self, axis: str) -> str:
        """Return what a hover shows of a place on an axis: `byte_unit([2e9]).hover("x") == "%{x:.2f} GB"`."""
        digits = 2 if self.symbol == "GB" else 1
        return f"%{{{axis}:.{digits}f}} {self.symbol}"


MEGABYTES = ByteUnit("MB", BYTES["MB"])


def byte_unit(amounts: Iterable[float]) -> ByteUnit:
    """Return the unit of an axis that shows these bytes, by the largest: GB from one on, MB, or kB below a tenth.

    >>> byte_unit([43.6e9, 12e6]).symbol, byte_unit([300e6]).symbol, byte_unit([5e3]).symbol
    ('GB', 'MB', 'kB')
    """
    most = max(map(abs, amounts), default=0.0)
    if most >= BYTES["GB"]:
        return ByteUnit("GB", BYTES["GB"])
    if 0 < most < BYTES["MB"] / 10:
        return ByteUnit("kB", BYTES["kB"])
    return MEGABYTES
