"""Lanes on a clock: spans of time or of places as bars in rows, few enough for a browser, labelled where space allows.

A step of a large model has tens of thousands of intervals; a browser draws about five thousand quickly. Above that,
neighbours that lie within the same small window become one mark that says how many it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from fsdplab.common.sizes import seconds
from fsdplab.figures.bars import INSIDE
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, ink_on, plot_width, words_width

LIMIT = 5_000
CLOCK = dict(showgrid=False, zeroline=False)  # of an axis that carries lanes


def named_axis(names: Mapping[Any, str], first: float, last: float) -> dict[str, Any]:
    """An axis from one end to the other with a name at each place: `named_axis({0: "rank 0"}, 0.5, -0.5)`."""
    ticks = dict(tickmode="array", tickvals=list(names), ticktext=list(names.values()))
    return CLOCK | dict(range=[first, last], **ticks)


class Span(NamedTuple):
    """One bar: its row, where it begins, how long it is, the text inside it, and what a hover shows."""

    row: float | str
    start: float
    length: float
    text: str = ""
    hover: str = ""


def lane(name: str, colour: str, spans: Iterable[Span], height: float = 0.86, edge: float = 1, **more: Any) -> go.Bar:
    """All spans of one colour as one trace; `height` is a bar's thickness in rows, `more` further settings of it."""
    found = list(spans)
    rows, starts, lengths, texts, hovers = ([span[place] for span in found] for place in range(5))
    settings = INSIDE | dict(textfont=dict(size=13, color=ink_on(colour)), hovertemplate="%{hovertext}<extra></extra>")
    return go.Bar(
        name=name, orientation="h", y=rows, base=starts, x=lengths, text=texts, hovertext=hovers, width=height,
        marker=dict(color=colour, line=dict(color=EDGE, width=edge)), **settings,
    ).update(more)  # fmt: skip


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


def downsample(marks: list[Mark], limit: int = LIMIT) -> tuple[list[Mark], str]:
    """(at most `limit` marks, the subtitle's words on those that were merged; empty where none was).

    Marks merge only with neighbours of the same lane and group, the smallest first.
    """
    if len(marks) <= limit:
        return marks, ""
    ordered = sorted(marks, key=lambda mark: (mark.y, mark.group, mark.start))
    lanes = [list(run) for _, run in groupby(ordered, lambda mark: (mark.y, mark.group))]
    low, high = 0.0, max(mark.end for mark in marks) - min(mark.start for mark in marks)
    for _ in range(20):  # the window to the millionth of the span
        middle = (low + high) / 2
        low, high = (low, middle) if sum(len(_runs(lane, middle)) for lane in lanes) <= limit else (middle, high)
    drawn = [_joined(run) for lane in lanes for run in _runs(lane, high)]
    near = f"neighbours within {seconds(high / 1e3)} are one"
    return drawn, f"{len(marks):,} intervals drawn as {len(drawn):,} marks ({near})"


def _runs(marks: list[Mark], window: float) -> list[list[Mark]]:
    """The marks of a lane in runs of neighbours that together span at most `window` ms."""
    runs: list[list[Mark]] = []
    for mark in marks:
        if runs and mark.end - runs[-1][0].start <= window:
            runs[-1].append(mark)
        else:
            runs.append([mark])
    return runs


def _joined(run: list[Mark]) -> Mark:
    if len(run) == 1:
        return run[0]
    busy = sum(mark.end - mark.start for mark in run)
    names = f" · {len(run)} intervals, from {run[0].name.removeprefix(' · ')} to {run[-1].name.removeprefix(' · ')}"
    return Mark(run[0].group, run[0].y, run[0].start, max(mark.end for mark in run), names, "", busy)


def mark_lanes(
    marks: list[Mark], colours: dict[str, str], height: dict[str, float], span: float, yaxis: str = "y"
) -> list[go.Bar]:
    """One trace a group, in the order of `colours`; `height` is in lanes, `span` the clock's length in ms."""
    groups = {name: [mark for mark in marks if mark.group == name] for name in colours}
    pixels = plot_width(["rank 0  reduce-scatter"]) / span
    return [
        lane(
            written(name), colours[name],
            [_span(mark, pixels) for mark in mine], height.get(name, 0.84),
            edge=0.6 if len(mine) < 400 else 0, yaxis=yaxis,
            hovertemplate="%{hovertext}<br>from %{base:.3f} ms<extra></extra>",
        )
        for name, mine in groups.items() if mine
    ]  # fmt: skip


def written(lane: str) -> str:
    """A lane's name as it is written: `reduce-scatter`, `other communication`."""
    return lane.replace("_", "-" if lane.startswith(("all", "reduce")) else " ")


def _span(mark: Mark, pixels: float) -> Span:
    """A mark with the longest of its names that fits its width; `pixels` is that of a millisecond."""
    length = mark.end - mark.start
    names = (mark.name.partition(" · ")[0], mark.short)
    text = next((text for text in names if text and words_width(text, 13) <= length * pixels - 6), "")
    hover = f"{mark.name.removeprefix(' · ')}<br>{seconds((mark.busy or length) / 1e3)}"
    return Span(mark.y, round(mark.start, 4), round(length, 4), text, hover)
