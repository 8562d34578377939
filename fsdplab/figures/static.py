"""A figure as a small SVG, with no browser: the static picture a notebook or README keeps when scripts do not run.

It draws what this package's figures use, from the plotly Figure itself so that the two never disagree: bars (stacked,
either way), lines, stacked areas, markers, line shapes, annotations, a legend, and the alternative text.
"""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass

import plotly.graph_objects as go

from fsdplab.figures.style import FONT, TEXT, alt_text

WIDTH, TOP, RIGHT, BOTTOM = 1000, 78, 24, 62
GRID = "#d9dcdf"
GLYPH = 0.56  # mean width of a character, in units of its size


@dataclass(frozen=True)
class Axis:
    """Data -> pixels along one axis; `names` is None for numbers."""

    low: float
    high: float
    start: float
    end: float
    names: tuple[str, ...] | None = None

    def __call__(self, value: object) -> float:
        """Pixel of a number or of a category's middle: `Axis(0, 10, 0, 100)(2) == 20`."""
        number = self.names.index(str(value)) if self.names else float(value)
        return self.start + (number - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def band(self) -> float:
        """Pixels that one category has."""
        return abs((self.end - self.start) / (self.high - self.low))

    def ticks(self) -> list[tuple[float, str]]:
        """(pixel, label) of every tick: each category, or round numbers."""
        if self.names:
            return [(self(name), name) for name in self.names]
        step = nice_step(abs(self.high - self.low) / 8)
        first = math.ceil(min(self.low, self.high) / step)
        last = math.floor(max(self.low, self.high) / step)
        return [(self(index * step), f"{index * step:,.10g}") for index in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """The round number (1, 2 or 5 times a power of ten) at or above a rough step: `nice_step(33) == 50`."""
    power = 10 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def svg(figure: go.Figure, width: int = WIDTH) -> str:
    """The figure as a self-contained SVG document (a few kB) with its alternative text as title and description."""
    height = int(figure.layout.height or 420)
    x_names, y_names = _categories(figure, "x"), _categories(figure, "y")
    left = 30 + (max(len(name) for name in y_names) * 15 * GLYPH if y_names else 60)
    top = TOP + 24 * len(_legend_rows(figure, width)) + 22
    x = _axis(figure, "x", x_names, left, width - RIGHT)
    y = _axis(figure, "y", y_names, height - BOTTOM, top)
    body = [*_frame(figure, x, y), *_bars(figure, x, y), *_areas(figure, x, y), *_lines(figure, x, y)]
    body += [*_shapes(figure, x, y), *_annotations(figure, x, y), *_heading(figure), *_legend(figure, width)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" font-family="{html.escape(FONT)}">'
    label = f"<title>{_plain(figure.layout.title.text)}</title><desc>{html.escape(alt_text(figure))}</desc>"
    return "\n".join([head, label, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *body, "</svg>"])


def _plain(text: str | None) -> str:
    """Escaped text without plotly's tags."""
    return html.escape(re.sub(r"<[^>]+>", "", html.unescape(text or "")))


def _categories(figure: go.Figure, axis: str) -> tuple[str, ...] | None:
    """The axis's categories in order of appearance, None where it carries numbers."""
    ordered = figure.layout[axis + "axis"].categoryarray
    values = [value for trace in figure.data for value in (trace[axis] if trace[axis] is not None else ())]
    names = [str(value) for value in (ordered if ordered is not None else values)]
    return tuple(dict.fromkeys(names)) if any(isinstance(value, str) for value in values) else None


def _axis(figure: go.Figure, letter: str, names: tuple[str, ...] | None, start: float, end: float) -> Axis:
    layout = figure.layout[letter + "axis"]
    if names:
        low, high = -0.5, len(names) - 0.5
    elif layout.range:
        low, high = layout.range
    else:
        low, high = _extent(figure, letter)
    flipped = layout.autorange == "reversed"
    return Axis(high if flipped else low, low if flipped else high, start, end, names)


def _extent(figure: go.Figure, letter: str) -> tuple[float, float]:
    """From zero (or the smallest value, if negative) to a little beyond the largest value or stack."""
    stacks: dict[object, float] = {}
    other = "y" if letter == "x" else "x"
    for trace in figure.data:
        stacked = isinstance(trace, go.Bar) or trace.stackgroup
        for place, value in zip(trace[other], trace[letter]):
            stacks[place] = stacks.get(place, 0) + value if stacked else max(stacks.get(place, value), value)
    low, high = min(0, *stacks.values()), max(stacks.values())
    return low, high + 0.08 * (high - low or 1)


def _text(x: float, y: float, text: str, size: int = 14, anchor: str = "start", colour: str = TEXT, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{text}</text>'


def _line(x0: float, y0: float, x1: float, y1: float, colour: str, width: float = 1, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="9 6"' if dash else ""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _frame(figure: go.Figure, x: Axis, y: Axis) -> list[str]:
    """Grid, tick labels and axis titles."""
    drawn = []
    for at, label in x.ticks():
        drawn += [_line(at, y.start, at, y.end, GRID)] if not x.names else []
        drawn.append(_text(at, y.start + 20, html.escape(label), anchor="middle"))
    for at, label in y.ticks():
        drawn += [_line(x.start, at, x.end, at, GRID)] if not y.names else []
        drawn.append(_text(x.start - 10, at + 5, html.escape(label), anchor="end"))
    drawn.append(_text((x.start + x.end) / 2, y.start + 48, _plain(figure.layout.xaxis.title.text), 15, "middle"))
    middle = (y.start + y.end) / 2
    upright = _text(20, middle, _plain(figure.layout.yaxis.title.text), 15, "middle")
    return drawn + [upright.replace("<text", f'<text transform="rotate(-90 20 {middle:.1f})"')]


def _colour(trace: object, index: int) -> str:
    """The fill of a bar or marker: one for the trace, or one for each point."""
    colour = trace.marker.color
    return colour if isinstance(colour, str) else colour[index] if colour is not None else "#808488"


def _bars(figure: go.Figure, x: Axis, y: Axis) -> list[str]:
    """Stacked bars, horizontal or vertical, in trace order."""
    drawn, reached = [], {}
    for trace in (trace for trace in figure.data if isinstance(trace, go.Bar)):
        flat = trace.orientation == "h"
        place, value = (y, x) if flat else (x, y)
        for index, (name, amount) in enumerate(zip(trace.y if flat else trace.x, trace.x if flat else trace.y)):
            start = reached.get(name, 0)
            reached[name] = start + amount
            if not amount:
                continue
            a, b, middle, thick = value(start), value(start + amount), place(name), 0.68 * place.band
            box = (min(a, b), middle - thick / 2, abs(b - a), thick) if flat else (middle - thick / 2, min(a, b), thick, abs(b - a))
            drawn.append(_box(*box, _colour(trace, index)))
    return drawn


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" stroke="#3c4046" stroke-width="0.8"/>'


def _areas(figure: go.Figure, x: Axis, y: Axis) -> list[str]:
    """Bands of a stack, each on top of those before it; all share the first one's places."""
    drawn, floor = [], None
    for trace in (trace for trace in figure.data if isinstance(trace, go.Scatter) and trace.stackgroup):
        floor = floor or [0.0] * len(trace.x)
        roof = [below + float(value) for below, value in zip(floor, trace.y)]
        edges = _changes([(round(x(place), 1), round(y(low), 1), round(y(high), 1)) for place, low, high in zip(trace.x, floor, roof)])
        there = _steps(trace, [(place, high) for place, _, high in edges])
        back = _steps(trace, [(place, low) for place, low, _ in edges])[::-1]
        points = " ".join(f"{a:g},{b:g}" for a, b in there + back)
        drawn.append(f'<polygon points="{points}" fill="{trace.fillcolor}" stroke="{trace.fillcolor}" stroke-width="0.8"/>')
        floor = roof
    return drawn


def _changes(edges: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """The places where a band's floor or roof moves on the page, its first and its last."""
    inner = [here for before, here, after in zip(edges, edges[1:], edges[2:]) if before[1:] != here[1:] or here[1:] != after[1:]]
    return [edges[0], *inner, *edges[1:][-1:]]


def _steps(trace: go.Scatter, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Adds the corners of a line that holds its level until the next point (shape `hv`)."""
    if trace.line.shape != "hv":
        return points
    corners = [corner for (_, level), (place, following) in zip(points, points[1:]) for corner in ((place, level), (place, following))]
    return points[:1] + corners


def _lines(figure: go.Figure, x: Axis, y: Axis) -> list[str]:
    """Lines and markers of scatters that are not stacked."""
    drawn = []
    for trace in (trace for trace in figure.data if isinstance(trace, go.Scatter) and not trace.stackgroup):
        points = [(x(a), y(b)) for a, b in zip(trace.x, trace.y)]
        if "lines" in (trace.mode or "lines"):
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in _steps(trace, points))
            drawn.append(f'<polyline points="{path}" fill="none" stroke="{trace.line.color or TEXT}" stroke-width="2.5"/>')
        if "markers" in (trace.mode or ""):
            drawn += [_marker(trace, index, *point) for index, point in enumerate(points)]
    return drawn


def _marker(trace: go.Scatter, index: int, x: float, y: float) -> str:
    if trace.marker.symbol == "line-ns":
        return _line(x, y - 12, x, y + 12, trace.marker.line.color, 3)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{_colour(trace, index)}" stroke="#ffffff"/>'


def _place(axis: Axis, reference: str | None, value: object) -> float:
    """Pixel of an annotation's or shape's coordinate: data, or `paper` (0 at the axis's start, 1 at its end)."""
    return axis.start + float(value) * (axis.end - axis.start) if reference == "paper" else axis(value)


def _shapes(figure: go.Figure, x: Axis, y: Axis) -> list[str]:
    return [
        _line(
            _place(x, shape.xref, shape.x0), _place(y, shape.yref, shape.y0), _place(x, shape.xref, shape.x1), _place(y, shape.yref, shape.y1),
            shape.line.color, shape.line.width or 1, bool(shape.line.dash),
        )
        for shape in figure.layout.shapes
    ]  # fmt: skip


def _annotations(figure: go.Figure, x: Axis, y: Axis) -> list[str]:
    """Texts at their places; anchors `left` and `right` push them aside as plotly does."""
    drawn = []
    for note in figure.layout.annotations:
        anchor = {"left": "start", "right": "end"}.get(note.xanchor, "middle")
        across = _place(x, note.xref, note.x) + (note.xshift or 0)
        drop = {"bottom": -6, "top": 14}.get(note.yanchor, 5)
        down = _place(y, note.yref, note.y) - (note.yshift or 0) + drop
        drawn.append(_text(across, down, _plain(note.text), 14, anchor, note.font.color or TEXT, "<b>" in (note.text or "")))
    return drawn


def _heading(figure: go.Figure) -> list[str]:
    title = figure.layout.title
    return [_text(16, 32, _plain(title.text), 20, bold=True), _text(16, 56, _plain(title.subtitle.text), 15)]


def _legend_rows(figure: go.Figure, width: int) -> list[list[tuple[str, str]]]:
    """(name, colour) of the traces shown in the legend, broken into rows that fit the width."""
    if figure.layout.showlegend is False or len(figure.data) < 2:
        return []
    rows, used = [[]], 0.0
    for trace in (trace for trace in figure.data if trace.showlegend is not False and trace.name):
        needed = 40 + len(trace.name) * 14 * GLYPH
        if used + needed > width - 32:
            rows, used = [*rows, []], 0.0
        filled = trace.fillcolor if isinstance(trace, go.Scatter) else None
        line = trace.line.color if isinstance(trace, go.Scatter) else None
        rows[-1].append((trace.name, filled or line or _colour(trace, 0)))
        used += needed
    return rows


def _legend(figure: go.Figure, width: int) -> list[str]:
    drawn = []
    for row, entries in enumerate(_legend_rows(figure, width)):
        at = 16.0
        for name, colour in entries:
            drawn += [_box(at, 72 + 24 * row, 14, 14, colour), _text(at + 20, 84 + 24 * row, html.escape(name))]
            at += 40 + len(name) * 14 * GLYPH
    return drawn
