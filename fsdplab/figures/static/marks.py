"""What a static picture draws on its axes: bars, areas, lines, markers and cells, as SVG elements."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fsdplab.figures.plotly_go import go
from fsdplab.figures.static.axes import Axis, Trace, axis_of
from fsdplab.figures.style import TEXT, ink_on

GLYPH = 0.56  # mean width of a character, in units of its size


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
