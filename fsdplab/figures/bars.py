"""Horizontal bars: stacked ones, the form of half of the figures, with words at their ends; and lanes on a clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from fsdplab.common.sizes import seconds
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, EDGE, ink_on, mark_level, plot_width, words_width
from fsdplab.figures.view import RunView

_LONG_NAME = 16  # characters
INSIDE = dict(textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none")


@dataclass(frozen=True)
class Part:
    """One part of every bar: its name in the legend, its colour, and its length in each row, in the axis's unit."""

    name: str
    colour: str
    lengths: Sequence[float]


def stacked_bars(
    ends: Mapping[str, str],
    parts: Sequence[Part],
    axis: str,
    hover: str = "%{x:.1f} MB",
    number: Callable[[float], str] | None = None,
    levels: Mapping[str, float] | None = None,
    alarming: Collection[str] = (),
    marked: Sequence[float] = (),
) -> go.Figure:
    """One bar a row; `ends` has each row's name and the words at its bar's end, `axis` the axis's title.

    `number(length)` is written inside of each part that is long enough, `levels` are lines by their names, the words
    of rows in `alarming` are red, and `marked` says how far marks over each bar reach.
    `stacked_bars({"zero1": "3 MB"}, [Part("activations", "#cc7fa8", [3.0])], "peak (MB)")`.
    """
    rows, levels = list(ends), levels or {}
    totals = {row: sum(part.lengths[place] for part in parts) for place, row in enumerate(rows)}
    reached = {row: max(totals[row], mark) for row, mark in zip(rows, marked)} if marked else totals
    whole = _axis_end(reached, ends, levels)
    pixels = plot_width(map(_broken, rows)) / whole  # a unit of the axis
    figure = go.Figure([_segment(part, rows, hover, number, pixels) for part in parts])
    figure.update_layout(barmode="stack", xaxis_title=axis)
    names = dict(tickmode="array", tickvals=rows, ticktext=list(map(_broken, rows)))
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, **names)
    figure.update_xaxes(range=[0, whole])
    for row, words in ends.items():
        near = [at for at in levels.values() if 0 <= at - reached[row] < (words_width(words) + 24) / pixels]
        at, font = max(near, default=reached[row]), dict(color=ALARM) if row in alarming else None
        beside = 14 if marked else 6  # a mark has a width of its own
        figure.add_annotation(x=at, y=row, text=words, showarrow=False, xanchor="left", xshift=beside, font=font)
    for words, at in levels.items():
        mark_level(figure, at, words)
    return figure


def _broken(row: str) -> str:
    """A row's name in two lines of about one length where it is long: `full_shard,<br>prefetch 0`."""
    parts = row.split(", ")
    if len(row) <= _LONG_NAME or len(parts) == 1:
        return row
    lines = [(", ".join(parts[:at]), ", ".join(parts[at:])) for at in range(1, len(parts))]
    return ",<br>".join(min(lines, key=lambda pair: max(map(len, pair))))


def _axis_end(reached: Mapping[str, float], ends: Mapping[str, str], levels: Mapping[str, float]) -> float:
    """Where the axis ends, so that the words of every bar and the name of every line fit."""
    width = plot_width(map(_broken, reached))
    shares = {row: max(0.2, 1 - (words_width(words) + 20) / width) for row, words in ends.items()}
    return max([end / shares[row] for row, end in reached.items()] + [1.15 * at for at in levels.values()]) or 1.0


def _segment(
    part: Part, rows: Sequence[str], hover: str, number: Callable[[float], str] | None, pixels: float
) -> go.Bar:
    texts = [number(length) for length in part.lengths] if number else []  # each where it fits
    texts = [text if words_width(text, 13) + 6 < length * pixels else "" for text, length in zip(texts, part.lengths)]
    look = dict(text=texts, textfont=dict(size=13, color=ink_on(part.colour))) if texts else {}
    return go.Bar(
        name=part.name, orientation="h", y=rows, x=part.lengths,
        marker=dict(color=part.colour, line=dict(color=EDGE, width=1)),
        hovertemplate=f"%{{y}}<br>{part.name}: {hover}<extra></extra>", **INSIDE, **look,
    )  # fmt: skip


def whiskers(runs: Sequence[RunView], unit_s: float = 1.0) -> dict[str, Any] | None:
    """Error bars from the quartiles around the median step, in units of `unit_s` seconds; None where none are known."""
    known: list[tuple[Any, Any, Any]] = [
        (run.summary.step_time_s.q1, run.step_median, run.summary.step_time_s.q3) for run in runs
    ]
    if not any(map(all, known)):
        return None
    below, above = ([abs(each[1] - each[end]) / unit_s if all(each) else 0.0 for each in known] for end in (0, 2))
    return dict(type="data", array=above, arrayminus=below, symmetric=False, color="#808488", thickness=2, width=7)


# ---- lanes on a clock: spans of time or of places as bars in rows, labelled where space allows
#
# A step of a large model has tens of thousands of intervals; a browser draws about five thousand quickly. Above that,
# neighbours that lie within the same small window become one mark that says how many it holds.


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
