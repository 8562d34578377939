"""algbw and busbw: two bandwidths of one timing, and why both are quoted.

algbw = P / t is the caller's bandwidth. busbw = algbw (n-1)/n, twice that for an all_reduce, is that of each rank's
link: it is the one to compare across collectives, numbers of ranks, and with a link's data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, STRATEGY_COLOURS, titled
from fsdplab.teaching.core.display import HasTable, Table, table

GB = 1e9


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
        """The bytes a second of each rank's link: comparable across collectives and numbers of ranks."""
        return self.algbw * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, repr=False)
class Bandwidth(HasTable):
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
        caption = (
            f"Measured on {self.timings[0].ranks} real CPU ranks: gloo over the loopback of this machine. {self.words}"
        )
        return table(["collective", "P", "ms", "algbw GB/s", "busbw GB/s"], rows, caption)

    @property
    def words(self) -> str:
        """What the largest payload's times say: they change with what else the machine does."""
        largest = [timing for timing in self.timings if timing.nbytes == self.largest]
        longer = self.at("all_reduce", self.largest).seconds / self.at("all_gather", self.largest).seconds
        slowest = min(largest, key=lambda timing: timing.busbw).kind
        return f"This time all_reduce took {longer:.1f} times as long as all_gather; {slowest} has the lowest busbw."


def bandwidth_figure(measured: Bandwidth) -> go.Figure:
    """Lines of busbw over the payload's size, one a collective."""
    kinds = list(dict.fromkeys(timing.kind for timing in measured.timings))
    figure = go.Figure([_line(kind, [t for t in measured.timings if t.kind == kind]) for kind in kinds])
    figure.update_xaxes(title="payload P", type="category")
    figure.update_yaxes(title="busbw (GB/s)", range=[0, 1.15 * max(t.busbw for t in measured.timings) / GB])
    ranks = measured.timings[0].ranks
    subtitle = f"Measured on {ranks} CPU ranks, gloo over this machine's loopback: no network is involved"
    return titled(figure, _finding(measured, kinds), subtitle, _alt(measured, kinds), 280)


def _line(kind: str, timings: list[Timing]) -> go.Scatter:
    colour = COLLECTIVE_COLOURS.get(kind, STRATEGY_COLOURS["no_shard"])
    hover = f"{kind}, %{{x}}: %{{y:.2f}} GB/s<extra></extra>"
    places, rates = [size(t.nbytes) for t in timings], [t.busbw / GB for t in timings]
    return line(kind, colour, places, rates, mode="lines+markers", hovertemplate=hover)


def _finding(measured: Bandwidth, kinds: list[str]) -> str:
    best = max((measured.at(kind, measured.largest) for kind in kinds), key=lambda timing: timing.busbw)
    smallest = measured.at(best.kind, min(timing.nbytes for timing in measured.timings))
    ends = [f"{three_digits(timing.busbw / GB)} GB/s at {size(timing.nbytes)}" for timing in (best, smallest)]
    return f"{best.kind}: {ends[0]}, {ends[1]}"


def _alt(measured: Bandwidth, kinds: list[str]) -> str:
    at = size(measured.largest)
    ends = "; ".join(f"{kind} {three_digits(measured.at(kind, measured.largest).busbw / GB)} GB/s" for kind in kinds)
    return f"Lines of bus bandwidth over payload size. At {at}: {ends}."
