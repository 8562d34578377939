"""Bars on a time axis: intervals as marks, few enough for a browser, labelled where space allows.

A step of a large model has tens of thousands of intervals; a browser draws about five thousand quickly. Above that,
neighbours that lie within the same small window become one mark that says how many it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdplab.common.sizes import seconds
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, ink_on

LIMIT = 5_000
_PIXELS = 1000  # width of a clock on a page of 1280 pixels
_GLYPH = 7.0  # width of a character of a bar's label


@dataclass(frozen=True, slots=True)
class Mark:
    """One bar: times in ms on the figure's clock, `y` the middle of its lane, `busy` the ms that its intervals fill."""

    group: str
    y: float
    start: float
    end: float
    name: str
    short: str = ""
    busy: float = 0.0
    count: int = 1

    @property
    def hover(self) -> str:
        """The bar's name and duration."""
        return f"{self.name.removeprefix(' · ')}<br>{seconds((self.busy or self.end - self.start) / 1e3)}"


def downsample(marks: list[Mark], limit: int = LIMIT) -> tuple[list[Mark], float]:
    """(at most `limit` marks, the window in ms within which neighbours were merged; 0 where none was).

    Marks merge only with neighbours of the same lane and group, the smallest first.
    """
    if len(marks) <= limit:
        return marks, 0.0
    marks = sorted(marks, key=lambda mark: (mark.y, mark.group, mark.start))
    edges = _edges(marks)
    low, high = 0.0, max(mark.end for mark in marks) - min(mark.start for mark in marks)
    for _ in range(24):  # the window to the ten-millionth of the span
        middle = (low + high) / 2
        low, high = (low, middle) if len(_begins(edges, middle)) <= limit else (middle, high)
    begins = _begins(edges, high)
    return [_joined(marks[begin:end]) for begin, end in zip(begins, [*begins[1:], len(marks)])], high


def _edges(marks: list[Mark]) -> list[tuple[bool, float, float]]:
    """(begins a lane or group, start, end) of marks in order: what merging asks, as plain tuples."""
    places = [(mark.y, mark.group) for mark in marks]
    return [
        (index == 0 or places[index] != places[index - 1], mark.start, mark.end) for index, mark in enumerate(marks)
    ]


def _begins(edges: list[tuple[bool, float, float]], window: float) -> list[int]:
    """Where each merged mark begins, if neighbours of one lane and group that together span at most `window` ms are
    one.
    """
    begins, since = [], 0.0
    for index, (new, start, end) in enumerate(edges):
        if new or end - since > window:
            begins.append(index)
            since = start
    return begins


def _joined(run: list[Mark]) -> Mark:
    if len(run) == 1:
        return run[0]
    busy = sum(mark.busy or mark.end - mark.start for mark in run)
    count = sum(mark.count for mark in run)
    names = f" · {count} intervals, from {run[0].name.removeprefix(' · ')} to {run[-1].name.removeprefix(' · ')}"
    return Mark(run[0].group, run[0].y, run[0].start, max(mark.end for mark in run), names, "", busy, count)


def merge_words(found: int, drawn: int, window: float) -> str:
    """The subtitle's text on merged marks; empty where none was merged."""
    return (
        f"{found:,} intervals drawn as {drawn:,} marks (neighbours within {seconds(window / 1e3)} are one)"
        if window
        else ""
    )


def bars(
    marks: list[Mark], colours: dict[str, str], height: dict[str, float], span: float, yaxis: str = "y"
) -> list[go.Bar]:
    """One trace a group, in the order of `colours`; `height` is the bar's thickness in lanes, `span` the clock's length
    in ms.
    """
    return [
        _trace([mark for mark in marks if mark.group == name], name, colour, height.get(name, 0.84), span, yaxis)
        for name, colour in colours.items()
        if any(mark.group == name for mark in marks)
    ]


def _trace(marks: list[Mark], name: str, colour: str, height: float, span: float, yaxis: str) -> go.Bar:
    return go.Bar(
        name=name.replace("_", "-") if name.startswith(("all", "reduce")) else name.replace("_", " "),
        orientation="h",
        y=[mark.y for mark in marks],
        base=[round(mark.start, 4) for mark in marks],
        x=[round(mark.end - mark.start, 4) for mark in marks],
        width=height,
        marker=dict(color=colour, line=dict(color=EDGE, width=0.6 if len(marks) < 400 else 0)),
        text=[_label(mark, span) for mark in marks],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="none",
        textfont=dict(size=12, color=ink_on(colour)),
        hovertext=[mark.hover for mark in marks],
        hovertemplate="%{hovertext}<br>from %{base:.3f} ms<extra></extra>",
        yaxis=yaxis,
    )


def _label(mark: Mark, span: float) -> str:
    """The longest of the mark's names that fits its width."""
    pixels = (mark.end - mark.start) / span * _PIXELS - 6
    long = mark.name.partition(" · ")[0]
    return next((text for text in (long, mark.short) if text and len(text) * _GLYPH <= pixels), "")
