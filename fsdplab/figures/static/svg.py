"""A figure as a small SVG, with no browser: the static picture a notebook or README keeps when scripts do not run.

It draws what this package's figures use, from the plotly Figure itself so that the two never disagree: panels of bars
(stacked, beside each other, on a clock), lines, stacked areas, markers, cells, line shapes, annotations, a legend, and
the alternative text.
"""

from __future__ import annotations

import html
import re

from fsdplab.figures.plotly_go import go
from fsdplab.figures.static.axes import Axis, Box, axes, nice_step, pairs, settings
from fsdplab.figures.static.marks import GLYPH, areas, bars, box, cells, colour_of, line, lines, text
from fsdplab.figures.style import FONT, TEXT, alt_text

__all__ = ["Axis", "nice_step", "svg"]

WIDTH, TOP, RIGHT, BOTTOM = 1000, 78, 24, 62
GRID = "#d9dcdf"
_TILT = 0.72  # share of a tilted label's length that it takes downwards


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
        *_heading(figure),
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
    return html.escape(re.sub(r"<[^>]+>", "", html.unescape(words or "")))


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
    for up in dict.fromkeys(pair[1] for pair in panels):
        first = min((rulers[across] for across, name in panels if name == up), key=lambda ruler: ruler.start)
        drawn += _aside(figure, up, rulers[up], first)
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


def _aside(figure: go.Figure, name: str, y: Axis, x: Axis) -> list[str]:
    """A y axis's labels and its upright title."""
    crowded = y.marked is not None and len(y.marked) > 1 and abs(y(y.marked[1][0]) - y(y.marked[0][0])) < 13
    labels = [text(x.start - 10, at + 5, _plain(label), 10 if crowded else 14, "end") for at, label in y.ticks()]
    middle = (y.start + y.end) / 2
    upright = text(20, middle, _text_of(settings(figure, name)), 15, "middle")
    return [*labels, upright.replace("<text", f'<text transform="rotate(-90 20 {middle:.1f})"')]


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


def _heading(figure: go.Figure) -> list[str]:
    """Title and subtitle, a text a line."""
    title, at, drawn = figure.layout.title, 32, []
    for words, size, step in ((title.text, 20, 25), (title.subtitle.text, 15, 20)):
        for part in (words or "").split("<br>"):
            drawn.append(text(16, at, _plain(part), size, bold=size == 20))
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
