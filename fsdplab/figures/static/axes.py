"""Where things go in a static picture: every axis of a figure as a ruler from data to pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from fsdplab.figures.plotly_go import go

Trace: TypeAlias = "go.Bar | go.Scatter | go.Heatmap"


@dataclass(frozen=True)
class Axis:
    """Data -> pixels along one axis; `names` is None for numbers, `marked` holds ticks that the figure sets itself."""

    low: float
    high: float
    start: float
    end: float
    names: tuple[str, ...] | None = None
    marked: tuple[tuple[float, str], ...] | None = None
    grid: bool = True

    def __call__(self, value: float | str) -> float:
        """Pixel of a number or of a category's middle: `Axis(0, 10, 0, 100)(2) == 20`."""
        number = self.names.index(str(value)) if self.names else float(value)
        return self.start + (number - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def band(self) -> float:
        """Pixels that one category, or one unit of a number, has."""
        return abs((self.end - self.start) / (self.high - self.low))

    def ticks(self) -> list[tuple[float, str]]:
        """(pixel, label) of every tick: each category, those the figure sets, or round numbers."""
        if self.names:
            return [(self(name), name) for name in self.names]
        if self.marked is not None:
            return [(self(value), text) for value, text in self.marked]
        step = nice_step(abs(self.high - self.low) / max(2, min(8, abs(self.end - self.start) / 45)))
        first = math.ceil(min(self.low, self.high) / step)
        last = math.floor(max(self.low, self.high) / step)
        return [(self(index * step), f"{index * step:,.10g}") for index in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """The round number (1, 2 or 5 times a power of ten) at or above a rough step: `nice_step(33) == 50`."""
    power = 10 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


@dataclass(frozen=True)
class Box:
    """The plot's pixels on the picture; `x` and `y` are rulers of plotly's paper: 0 at the left and bottom, 1 at the
    right and top.
    """

    left: float
    right: float
    top: float
    bottom: float

    @property
    def x(self) -> Axis:
        return Axis(0, 1, self.left, self.right)

    @property
    def y(self) -> Axis:
        return Axis(0, 1, self.bottom, self.top)


def axis_of(trace: Trace, letter: str) -> str:
    """The name of a trace's axis: `x`, `y2`."""
    return trace[letter + "axis"] or letter


def settings(figure: go.Figure, name: str) -> go.layout.XAxis | go.layout.YAxis:
    """The layout of an axis by its name: `y2` is kept as `yaxis2`."""
    return figure.layout[f"{name[0]}axis{name[1:]}"]


def pairs(figure: go.Figure) -> list[tuple[str, str]]:
    """The panels, as pairs of axes: `[("x", "y"), ("x", "y2")]`."""
    return list(dict.fromkeys((axis_of(trace, "x"), axis_of(trace, "y")) for trace in figure.data))


def axes(figure: go.Figure, box: Box) -> dict[str, Axis]:
    """Every axis that a trace uses."""
    return {name: _axis(figure, name, box.x if name[0] == "x" else box.y) for pair in pairs(figure) for name in pair}


def categories(figure: go.Figure, name: str) -> tuple[str, ...] | None:
    """The axis's categories in order of appearance, None where it carries numbers."""
    ordered = settings(figure, name).categoryarray
    values = [value for trace in figure.data if axis_of(trace, name[0]) == name for value in _values(trace, name[0])]
    names = [str(value) for value in (ordered if ordered is not None else values)]
    return tuple(dict.fromkeys(names)) if any(isinstance(value, str) for value in values) else None


def _values(trace: Trace, letter: str) -> tuple[float | str, ...]:
    return trace[letter] if trace[letter] is not None else ()


def _axis(figure: go.Figure, name: str, paper: Axis) -> Axis:
    layout = settings(figure, name)
    names = categories(figure, name)
    if names:
        low, high = -0.5, len(names) - 0.5
    elif layout.range:
        low, high = layout.range
    else:
        low, high = _extent(figure, name)
    start, end = (paper(share) for share in layout.domain or (0, 1))
    if layout.autorange == "reversed":
        low, high = high, low
    marked = (
        tuple(zip(layout.tickvals, layout.ticktext))
        if layout.tickvals is not None and layout.ticktext is not None
        else None
    )
    return Axis(low, high, start, end, names, marked, layout.showgrid is not False)


def _extent(figure: go.Figure, name: str) -> tuple[float, float]:
    """From zero (or the smallest value, if negative) to a little beyond the largest value or stack."""
    letter = name[0]
    stacks: dict[float | str, float] = {}
    other = "y" if letter == "x" else "x"
    for trace in figure.data:
        if axis_of(trace, letter) != name:
            continue
        stacked = isinstance(trace, go.Bar) or trace.stackgroup
        for place, value in zip(trace[other], trace[letter]):
            stacks[place] = stacks.get(place, 0) + value if stacked else max(stacks.get(place, value), value)
    low, high = min(0, *stacks.values()), max(stacks.values())
    return low, high + 0.08 * (high - low or 1)
