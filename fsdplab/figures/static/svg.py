"""A figure as a small SVG, drawn from the plotly Figure itself so that the two never disagree.

It draws what this package's figures use: panels of bars (stacked, beside each other, on a clock), lines, stacked areas,
markers, cells, line shapes, annotations, a legend, and the alternative text. `svg` puts the parts together; below it
stand what surrounds the plot, the rulers from data to pixels, and the marks that are drawn along them.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import FONT, TEXT, alt_text, ink_on

Trace: TypeAlias = "go.Bar | go.Scatter | go.Heatmap"

WIDTH, TOP, RIGHT, BOTTOM = 1000, 78, 24, 62
GRID = "#d9dcdf"
_TILT = 0.72  # share of a tilted label's length that it takes downwards
GLYPH = 0.56  # mean width of a character, in units of its size


def svg(figure: go.Figure, width: int = WIDTH) -> str:
    """The figure as a self-contained SVG document (a few kB) with its alternative text as title and description."""
    height = int(figure.layout.height or 420)
    plot = _box(figure, width, height)
    rulers = axes(figure, plot)
    body = [
        *_frame(figure, rulers),
        *cells(figure, rulers),
        *bars(figure, rulers),
        *areas(figure, rulers),
        *lines(figure, rulers),
    ]
    body += [
        *_shapes(figure, rulers, plot),
        *_annotations(figure, rulers, plot),
        *_heading(figure, width),
        *_legend(figure, width),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' font-family="{html.escape(FONT)}">'
    )
    heading = _plain((figure.layout.title.text or "").replace("<br>", " "))
    label = f"<title>{heading}</title><desc>{html.escape(alt_text(figure))}</desc>"
    return "\n".join([head, label, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *body, "</svg>"])


def _plain(words: str | None) -> str:
    """Escaped text without plotly's tags."""
    return html.escape(_unmarked(words))


def _unmarked(words: str | None) -> str:
    """Text without plotly's tags."""
    return re.sub(r"<[^>]+>", "", html.unescape(words or ""))


def _box(figure: go.Figure, width: int, height: int) -> Box:
    """The plot inside its margins, which the longest labels set."""
    unit = axes(figure, Box(0, 1, 0, 1))
    beside = [
        label
        for name, ruler in unit.items()
        if name[0] == "y" and (ruler.names or ruler.marked)
        for _, label in ruler.ticks()
    ]
    left = 30 + (max(len(_plain(label)) for label in beside) * 15 * GLYPH if beside else 60)
    tilted = [label for name, ruler in unit.items() if settings(figure, name).tickangle for _, label in ruler.ticks()]
    bottom = BOTTOM + max((len(label) * 14 * GLYPH * _TILT for label in tilted), default=0)
    above = any(settings(figure, name).side == "top" for name in unit if name[0] == "x")
    return Box(
        left,
        width - RIGHT,
        TOP + _more_lines(figure) + 24 * len(_legend_rows(figure, width)) + 22 + 20 * above,
        height - bottom,
    )


def _frame(figure: go.Figure, rulers: dict[str, Axis]) -> list[str]:
    """Grid, tick labels and axis titles of every panel; an axis that panels share is labelled once, at the lowest."""
    drawn, panels = [], pairs(figure)
    for across, up in panels:
        x, y = rulers[across], rulers[up]
        drawn += [line(at, y.start, at, y.end, GRID) for at, _ in x.ticks() if x.grid and not (x.names or x.marked)]
        drawn += [line(x.start, at, x.end, at, GRID) for at, _ in y.ticks() if y.grid and not (y.names or y.marked)]
    for across in dict.fromkeys(pair[0] for pair in panels):
        lowest = max(rulers[up].start for name, up in panels if name == across)
        drawn += _below(
            figure, across, rulers[across], lowest, min(rulers[up].end for name, up in panels if name == across)
        )
    edge = min(rulers[across].start for across, _ in panels)
    for up in dict.fromkeys(pair[1] for pair in panels):
        first = min((rulers[across] for across, name in panels if name == up), key=lambda ruler: ruler.start)
        drawn += _aside(figure, up, rulers[up], first, first.start == edge)
    return drawn


def _below(figure: go.Figure, name: str, x: Axis, bottom: float, top: float) -> list[str]:
    """An x axis's labels and title: under the plot, tilted or above it where the figure says so."""
    layout = settings(figure, name)
    ticks = [(at, html.escape(label)) for at, label in x.ticks()]
    title = _text_of(layout)
    if layout.side == "top":
        return [text(at, top - 8, label, anchor="middle") for at, label in ticks]
    if layout.tickangle:
        under = bottom + 16
        tilted = [
            text(at, under, label, 13, "end").replace("<text", f'<text transform="rotate(-45 {at:.1f} {under:.1f})"')
            for at, label in ticks
        ]
        longest = max(len(label) for _, label in ticks) * 14 * GLYPH * _TILT
        return [*tilted, text((x.start + x.end) / 2, bottom + 40 + longest, title, 15, "middle")]
    return [
        *(text(at, bottom + 20, label, anchor="middle") for at, label in ticks),
        text((x.start + x.end) / 2, bottom + 48, title, 15, "middle"),
    ]


def _aside(figure: go.Figure, name: str, y: Axis, x: Axis, is_first: bool) -> list[str]:
    """A y axis's labels and its upright title: at the picture's edge, or before a panel that stands beside others."""
    crowded = y.marked is not None and len(y.marked) > 1 and abs(y(y.marked[1][0]) - y(y.marked[0][0])) < 13
    labels = [text(x.start - 10, at + 5, _plain(label), 10 if crowded else 14, "end") for at, label in y.ticks()]
    middle, widest = (y.start + y.end) / 2, max((len(_plain(label)) for _, label in y.ticks()), default=0)
    across = 20.0 if is_first else x.start - 24 - widest * 14 * GLYPH
    upright = text(across, middle, _text_of(settings(figure, name)), 15, "middle")
    return [*labels, upright.replace("<text", f'<text transform="rotate(-90 {across:g} {middle:.1f})"')]


def _text_of(layout: go.layout.XAxis | go.layout.YAxis) -> str:
    return _plain(layout.title.text)


def _place(reference: str | None, letter: str, value: float | str, rulers: dict[str, Axis], plot: Box) -> float:
    """Pixel of an annotation's or shape's coordinate: data of an axis, or `paper`."""
    paper = plot.x if letter == "x" else plot.y
    return paper(value) if reference == "paper" else rulers[reference or letter](value)


def _shapes(figure: go.Figure, rulers: dict[str, Axis], plot: Box) -> list[str]:
    drawn = []
    for shape in figure.layout.shapes:
        x0, y0, x1, y1 = (
            _place(shape[letter + "ref"], letter, shape[letter + end], rulers, plot) for end in "01" for letter in "xy"
        )
        drawn.append(line(x0, y0, x1, y1, shape.line.color, shape.line.width or 1, bool(shape.line.dash)))
    return drawn


def _annotations(figure: go.Figure, rulers: dict[str, Axis], plot: Box) -> list[str]:
    """Texts at their places; anchors `left` and `right` push them aside as plotly does."""
    drawn = []
    for note in figure.layout.annotations:
        anchor = {"left": "start", "right": "end"}.get(note.xanchor, "middle")
        across = _place(note.xref, "x", note.x, rulers, plot) + (note.xshift or 0)
        drop = {"bottom": -6, "top": 14}.get(note.yanchor, 5)
        down = _place(note.yref, "y", note.y, rulers, plot) - (note.yshift or 0) + drop
        drawn.append(
            text(across, down, _plain(note.text), 14, anchor, note.font.color or TEXT, "<b>" in (note.text or ""))
        )
    return drawn


def _heading(figure: go.Figure, width: int) -> list[str]:
    """Title and subtitle, a text a line, in smaller letters where a line would leave the picture."""
    title, at, drawn = figure.layout.title, 32, []
    for words, size, step, glyph in ((title.text, 20, 25, 0.61), (title.subtitle.text, 15, 20, 0.53)):
        parts = (words or "").split("<br>")
        fits = (width - 32) / (glyph * max(1, *(len(_unmarked(part)) for part in parts)))
        for part in parts:
            drawn.append(text(16, at, _plain(part), min(size, int(fits)), bold=size == 20))
            at += step
    return drawn


def _more_lines(figure: go.Figure) -> int:
    """Pixels that the lines of title and subtitle take beyond the first of each."""
    title = figure.layout.title
    return 25 * (title.text or "").count("<br>") + 20 * (title.subtitle.text or "").count("<br>")


def _legend_rows(figure: go.Figure, width: int) -> list[list[tuple[str, str]]]:
    """(name, colour) of the traces shown in the legend, broken into rows that fit the width."""
    if figure.layout.showlegend is False or len(figure.data) < 2:
        return []
    rows: list[list[tuple[str, str]]] = [[]]
    used = 0.0
    for trace in (trace for trace in figure.data if trace.showlegend is not False and trace.name):
        needed = 40 + len(trace.name) * 14 * GLYPH
        if used + needed > width - 32:
            rows, used = [*rows, []], 0.0
        filled = trace.fillcolor if isinstance(trace, go.Scatter) else None
        edge = trace.line.color if isinstance(trace, go.Scatter) else None
        rows[-1].append((trace.name, filled or edge or colour_of(trace, 0)))
        used += needed
    return rows


def _legend(figure: go.Figure, width: int) -> list[str]:
    drawn, top = [], 72 + _more_lines(figure)
    for row, entries in enumerate(_legend_rows(figure, width)):
        at = 16.0
        for name, colour in entries:
            drawn += [box(at, top + 24 * row, 14, 14, colour), text(at + 20, top + 12 + 24 * row, html.escape(name))]
            at += 40 + len(name) * 14 * GLYPH
    return drawn


# ---- rulers: where things go


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
            inside = sorted((self.low, self.high))
            return [(self(value), text) for value, text in self.marked if inside[0] <= value <= inside[1]]
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
    letter, other = name[0], "y" if name[0] == "x" else "x"
    reached, stacks = [0.0], dict[float | str, float]()
    for trace in figure.data:
        if axis_of(trace, letter) != name:
            continue
        stacked = _stacks_along(figure, trace) == letter
        for place, value in zip(trace[other], trace[letter]):
            if stacked:
                value = stacks[place] = stacks.get(place, 0) + value
            reached.append(value)
    low, high = min(reached), max(reached)
    return low, high + 0.08 * (high - low or 1)


def _stacks_along(figure: go.Figure, trace: Trace) -> str:
    """The axis along which a trace is put on top of those before it: `x`, `y`, or none."""
    if isinstance(trace, go.Bar):
        on_top = figure.layout.barmode != "group"
    else:
        on_top = isinstance(trace, go.Scatter) and bool(trace.stackgroup)
    return ("x" if trace.orientation == "h" else "y") if on_top else ""


# ---- marks: bars, areas, lines, markers and cells


def text(
    x: float, y: float, words: str, size: int = 14, anchor: str = "start", colour: str = TEXT, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
        f' fill="{colour}"{weight}>{words}</text>'
    )


def line(x0: float, y0: float, x1: float, y1: float, colour: str, width: float = 1, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="9 6"' if dash else ""
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"'
        f' stroke-width="{width}"{dashes}/>'
    )


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    fill = "none" if colour == "rgba(0,0,0,0)" else colour
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="#3c4046"'
        ' stroke-width="0.8"/>'
    )


def colour_of(trace: Trace, index: int) -> str:
    """The fill of a bar or marker: one for the trace, or one for each point."""
    colour = trace.marker.color
    return colour if isinstance(colour, str) else colour[index] if colour is not None else "#808488"


def _rulers(trace: Trace, axes: dict[str, Axis]) -> tuple[Axis, Axis]:
    return axes[axis_of(trace, "x")], axes[axis_of(trace, "y")]


def bars(figure: go.Figure, axes: dict[str, Axis]) -> list[str]:
    """Bars in trace order, horizontal or vertical: stacked, beside each other (barmode `group`), or from a base of
    their own.
    """
    drawn: list[str] = []
    reached: dict[tuple[int, int, float | str], float] = {}  # how far each stack has come
    traces = [trace for trace in figure.data if isinstance(trace, go.Bar)]
    for trace in traces:
        flat = trace.orientation == "h"
        x, y = _rulers(trace, axes)
        place, value = (y, x) if flat else (x, y)
        aside, thick = _beside(figure, traces, trace, place)
        for index, (name, amount) in enumerate(zip(trace.y if flat else trace.x, trace.x if flat else trace.y)):
            key = id(x), id(y), name
            start = (
                trace.base[index]
                if trace.base is not None
                else reached.get(key, 0)
                if figure.layout.barmode != "group"
                else 0
            )
            reached[key] = start + amount
            if not amount:
                continue
            a, b, middle = value(start), value(start + amount), place(name) + aside
            sides = (
                (min(a, b), middle - thick / 2, abs(b - a), thick)
                if flat
                else (middle - thick / 2, min(a, b), thick, abs(b - a))
            )
            drawn += [box(*sides, colour_of(trace, index)), *_inside(trace, index, sides)]
    return drawn


def _beside(figure: go.Figure, traces: list[go.Bar], trace: go.Bar, place: Axis) -> tuple[float, float]:
    """(shift from the place's middle, thickness) of a trace's bars, in pixels."""
    if isinstance(trace.width, (int, float)):
        return 0.0, trace.width * place.band
    if figure.layout.barmode != "group":
        return 0.0, 0.68 * place.band
    group = [
        other
        for other in traces
        if axis_of(other, "x") == axis_of(trace, "x") and axis_of(other, "y") == axis_of(trace, "y")
    ]
    thick = 0.72 * place.band / len(group)
    return (group.index(trace) - (len(group) - 1) / 2) * thick, 0.94 * thick


def _inside(trace: go.Bar, index: int, sides: tuple[float, float, float, float]) -> list[str]:
    """A bar's own label, where it has one and room for it."""
    words = trace.text[index] if trace.text is not None else ""
    x, y, width, height = sides
    if not words or height < 13:
        return []
    if trace.textposition == "outside":
        return [text(x + width + 3, y + height / 2 + 4, html.escape(words), 12)] if not words.startswith("-") else [
            text(x - 3, y + height / 2 + 4, html.escape(words), 12, "end")
        ]  # fmt: skip
    fits = len(words) * 12 * GLYPH < width
    return (
        [text(x + width / 2, y + height / 2 + 4, html.escape(words), 12, "middle", ink_on(colour_of(trace, index)))]
        if fits
        else []
    )


def areas(figure: go.Figure, axes: dict[str, Axis]) -> list[str]:
    """Bands of a stack, each on top of those before it; all share the first one's places."""
    drawn, floor = [], None
    for trace in (trace for trace in figure.data if isinstance(trace, go.Scatter) and trace.stackgroup):
        x, y = _rulers(trace, axes)
        floor = floor or [0.0] * len(trace.x)
        roof = [below + float(value) for below, value in zip(floor, trace.y)]
        edges = _changes(
            [
                (round(x(place), 1), round(y(low), 1), round(y(high), 1))
                for place, low, high in zip(trace.x, floor, roof)
            ]
        )
        there = _steps(trace, [(place, high) for place, _, high in edges])
        back = _steps(trace, [(place, low) for place, low, _ in edges])[::-1]
        points = " ".join(f"{a:g},{b:g}" for a, b in there + back)
        drawn.append(
            f'<polygon points="{points}" fill="{trace.fillcolor}" stroke="{trace.fillcolor}" stroke-width="0.8"/>'
        )
        floor = roof
    return drawn


def _changes(edges: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """The places where a band's floor or roof moves on the page, its first and its last."""
    inner = [
        here
        for before, here, after in zip(edges, edges[1:], edges[2:])
        if before[1:] != here[1:] or here[1:] != after[1:]
    ]
    return [edges[0], *inner, *edges[1:][-1:]]


def _steps(trace: go.Scatter, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Adds the corners of a line that holds its level until the next point (shape `hv`)."""
    if trace.line.shape != "hv":
        return points
    corners = [
        corner
        for (_, level), (place, following) in zip(points, points[1:])
        for corner in ((place, level), (place, following))
    ]
    return points[:1] + corners


def lines(figure: go.Figure, axes: dict[str, Axis]) -> list[str]:
    """Lines and markers of scatters that are not stacked."""
    drawn = []
    for trace in (trace for trace in figure.data if isinstance(trace, go.Scatter) and not trace.stackgroup):
        x, y = _rulers(trace, axes)
        points = [(x(a), y(b)) for a, b in zip(trace.x, trace.y)]
        if "lines" in (trace.mode or "lines"):
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in _steps(trace, points))
            dashes = ' stroke-dasharray="3 4"' if trace.line.dash == "dot" else ""
            pen = f'stroke="{trace.line.color or TEXT}" stroke-width="{trace.line.width or 2.5}"{dashes}'
            drawn.append(f'<polyline points="{path}" fill="none" {pen}/>')
        if "markers" in (trace.mode or ""):
            drawn += [_marker(trace, index, *point) for index, point in enumerate(points)]
    return drawn


def _marker(trace: go.Scatter, index: int, x: float, y: float) -> str:
    if trace.marker.symbol == "line-ns":
        return line(x, y - 12, x, y + 12, trace.marker.line.color, 3)
    radius = (
        trace.marker.size / 2 if trace.marker.symbol == "circle" and isinstance(trace.marker.size, (int, float)) else 6
    )
    edge = trace.marker.line.color if isinstance(trace.marker.line.color, str) else "#ffffff"
    pen = f'stroke="{edge}" stroke-width="{trace.marker.line.width or 1}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour_of(trace, index)}" {pen}/>'


def cells(figure: go.Figure, axes: dict[str, Axis]) -> list[str]:
    """The cells of heat maps, with their texts where there is room."""
    drawn = []
    for trace in (trace for trace in figure.data if isinstance(trace, go.Heatmap)):
        x, y = _rulers(trace, axes)
        top = max((value for row in trace.z for value in row if value is not None), default=0) or 1
        for name, row, words in zip(trace.y, trace.z, trace.text):
            for column, value, word in zip(trace.x, row, words):
                if value is not None:
                    corner = x(column) - x.band / 2 + 1, y(name) - y.band / 2 + 1
                    drawn.append(box(*corner, x.band - 2, y.band - 2, shade(trace.colorscale, value / top)))
                    drawn += (
                        [text(x(column), y(name) + 5, html.escape(word), 13, "middle")]
                        if len(word) * 13 * GLYPH < x.band
                        else []
                    )
    return drawn


def shade(scale: Sequence[tuple[float, str]], share: float) -> str:
    """The colour at a share of a scale: `shade(((0, "#000000"), (1, "#ffffff")), 0.5) == "#808080"`."""
    low, high = next(((a, b) for a, b in zip(scale, scale[1:]) if share <= b[0]), (scale[-2], scale[-1]))
    part = min(1.0, max(0.0, (share - low[0]) / (high[0] - low[0])))
    ends = [[int(colour[start : start + 2], 16) for start in (1, 3, 5)] for _, colour in (low, high)]
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(*ends))
