"""algbw and busbw: two bandwidths of one timing, and why both are quoted.

algbw = P / t says what the caller gets. busbw = algbw (n-1)/n, twice that for an all_reduce, says what each rank's link
carried: it is the one to compare across collectives, numbers of ranks, and with a link's data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdplab.common.sizes import size
from fsdplab.teaching.core.display import Table, table


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that one rank sends, over P: `bus_factor("all_reduce", 4) == 1.5`, 0.75 for the other two."""
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (ranks - 1) / ranks


@dataclass(frozen=True)
class Timing:
    """One collective on P = `nbytes` bytes: median over repeats of the quickest rank's time."""

    kind: str
    nbytes: int
    ranks: int
    seconds: float

    @property
    def algbw(self) -> float:
        """P / t in bytes a second."""
        return self.nbytes / self.seconds

    @property
    def busbw(self) -> float:
        """What each rank's link carried, bytes a second: comparable across collectives and numbers of ranks."""
        return self.algbw * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, repr=False)
class Bandwidth:
    """Timings of several collectives over several sizes, as `measure_bandwidth` returns them."""

    timings: tuple[Timing, ...]

    def at(self, kind: str, nbytes: int) -> Timing:
        """One timing; LookupError where it was not measured."""
        for timing in self.timings:
            if (timing.kind, timing.nbytes) == (kind, nbytes):
                return timing
        raise LookupError(
            f"{kind} of {nbytes} bytes was not measured; measured: {sorted({t.nbytes for t in self.timings})}"
        )

    @property
    def largest(self) -> int:
        """The largest payload measured, in bytes."""
        return max(timing.nbytes for timing in self.timings)

    def table(self) -> Table:
        """The largest payload's numbers."""
        rows = [
            [t.kind, size(t.nbytes), f"{t.seconds * 1e3:.2f}", f"{t.algbw / 1e9:.2f}", f"{t.busbw / 1e9:.2f}"]
            for t in self.timings
            if t.nbytes == self.largest
        ]
        caption = f"Measured on {self.timings[0].ranks} real CPU ranks: gloo over the loopback of this machine."
        return table(["collective", "P", "ms", "algbw GB/s", "busbw GB/s"], rows, caption)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
