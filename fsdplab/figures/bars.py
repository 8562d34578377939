"""Horizontal bars: stacked ones, the form of half of the figures, with words at their ends; and lanes on a clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import seconds
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, EDGE, ink_on, mark_level, plot_width, words_width
from fsdplab.figures.view import RunView

_LONG_NAME = 16  # characters
_LETTERS = 13  # pixels of letters inside of a bar
_WHISKER = "#808488"
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
    """Draw one bar a row; `ends` has each row's name and the words at its bar's end, `axis` the axis's title.

    `number(length)` is written inside of each part that is long enough, `levels` are lines by their names, the words
    of rows in `alarming` are red, and `marked` says how far marks over each bar reach.
    `stacked_bars({"zero1": "3 MB"}, [Part("activations", "#cc7fa8", [3.0])], "peak (MB)")`.
    """
    rows, levels = list(ends), levels or {}
    # the bars' ends in units of the axis; the axis is longer, since words follow each bar
    reached = _reached(rows, parts, marked)
    axis_end = _axis_end(reached, ends, levels)
    pixels = plot_width(map(_broken, rows)) / axis_end  # a unit of the axis
    segments = [_segment(part, rows, hover, number, pixels) for part in parts]
    figure = go.Figure(segments)
    figure.update_layout(barmode="stack", xaxis_title=axis)
    # a row is placed by its full name; what is written beside the axis may be two lines
    written_rows = [_broken(row) for row in rows]
    names = dict(tickmode="array", tickvals=rows, ticktext=written_rows)
    # plotly puts the first row at the bottom unless the axis is reversed
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, **names)
    figure.update_xaxes(range=[0, axis_end])
    for row, words in ends.items():
        figure.add_annotation(
            x=reached[row],
            y=row,
            text=words,
            showarrow=False,
            xanchor="left",
            xshift=14 if marked else 6,  # a mark has a width of its own
            font=dict(color=ALARM) if row in alarming else None,
        )
    for name, at in levels.items():
        gaps = []
        for place, (row, words) in enumerate(ends.items()):
            # how many units of the axis the words take
            room = (words_width(words) + 24) / pixels
            if 0 <= at - reached[row] < room:
                gaps.append(_height_of_words(words, place, len(rows)))
        # the words of a bar that ends before the line stand at their bar; the line leaves them free
        mark_level(figure, at, name, gaps=gaps)
    return figure


def _height_of_words(words: str, place: int, rows: int) -> tuple[float, float]:
    """Return from where to where the words of a row reach, as parts of the plot's height from below.

    The first row is on top: `_height_of_words("3 MB", 0, 2)` is about (0.61, 0.89).
    """
    half = min(0.5, 0.28 * (1 + words.count("<br>")))  # of a row
    middle = rows - place - 0.5
    return (middle - half) / rows, (middle + half) / rows


def _reached(rows: Sequence[str], parts: Sequence[Part], marked: Sequence[float]) -> dict[str, float]:
    """Return how far each row's bar reaches, or the mark over it, where that reaches farther."""
    reached = {}
    for place, row in enumerate(rows):
        reached[row] = sum(part.lengths[place] for part in parts)
        if marked:
            reached[row] = max(reached[row], marked[place])
    return reached


def _broken(row: str) -> str:
    """Break a row's name into two lines of about one length where it is long: `full_shard,<br>prefetch 0`."""
    parts = row.split(", ")
    if len(row) <= _LONG_NAME or len(parts) == 1:
        return row
    pairs = []  # of lines, for each place of the break
    # `a, b, c` may break after a or after b
    for at in range(1, len(parts)):
        first, second = ", ".join(parts[:at]), ", ".join(parts[at:])
        pairs.append((first, second))
    most_even = min(pairs, key=lambda pair: max(map(len, pair)))
    return ",<br>".join(most_even)


def _axis_end(reached: Mapping[str, float], ends: Mapping[str, str], levels: Mapping[str, float]) -> float:
    """Return where the axis ends, so that the words of every bar and the name of every line fit."""
    width = plot_width(map(_broken, reached))
    needed = []
    for row, end in reached.items():
        room = words_width(ends[row]) + 20
        share = max(0.2, 1 - room / width)  # of the width, left of the row's words
        # a bar of 30 MB whose words take a quarter of the width needs an axis of 40 MB
        needed.append(end / share)
    # a line's name is centred on it, so half of the name is right of the line
    needed += [1.15 * at for at in levels.values()]
    return max(needed) or 1.0


def _segment(
    part: Part, rows: Sequence[str], hover: str, number: Callable[[float], str] | None, pixels: float
) -> go.Bar:
    """Draw one part of every bar, with its number where that fits."""
    texts = []
    if number is not None:
        for length in part.lengths:
            text = number(length)
            fits = words_width(text, _LETTERS) + 6 < length * pixels
            texts.append(text if fits else "")
    look: dict[str, Any] = {}
    # white or dark letters, whichever has more contrast
    if texts:
        look = dict(text=texts, textfont=dict(size=_LETTERS, color=ink_on(part.colour)))
    return go.Bar(
        name=part.name,
        orientation="h",
        y=rows,
        x=part.lengths,
        marker=dict(color=part.colour, line=dict(color=EDGE, width=1)),
        # an empty <extra> takes away plotly's box with the trace's name, which the text has already
        hovertemplate=f"%{{y}}<br>{part.name}: {hover}<extra></extra>",
        **INSIDE,
        **look,
    )


def whiskers(runs: Sequence[RunView], unit_s: float = 1.0) -> dict[str, Any] | None:
    """Return error bars from the quartiles around the median step, in units of `unit_s` seconds; None where none are
    known.
    """
    any_known = False
    below, above = [], []
    for run in runs:
        low, median, high = run.summary.step_time_s.q1, run.step_median, run.summary.step_time_s.q3
        if low and median and high:
            any_known = True
            # plotly takes lengths from the median, not places on the axis
            below.append(abs(median - low) / unit_s)
            above.append(abs(median - high) / unit_s)
        else:
            # whiskers go by place: a run without quartiles gets one of no length
            below.append(0.0)
            above.append(0.0)
    if not any_known:
        return None
    return dict(type="data", array=above, arrayminus=below, symmetric=False, color=_WHISKER, thickness=2, width=7)


# ---- lanes on a clock: spans of time or of places as bars in rows, labelled where space allows
#
# A step of a large model has tens of thousands of intervals; a browser draws about five thousand quickly. Above that,
# neighbours that lie within the same small window become one mark that says how many it holds.


LIMIT = 5_000
_MANY = 400  # marks of a group
CLOCK = dict(showgrid=False, zeroline=False)  # of an axis that carries lanes


def named_axis(names: Mapping[Any, str], first: float, last: float) -> dict[str, Any]:
    """Return an axis from one end to the other with a name at each place: `named_axis({0: "rank 0"}, 0.5, -0.5)`."""
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
    """Draw all spans of one colour as one trace; `height` is a bar's thickness in rows, `more` further settings."""
    drawn = list(spans)
    bar = go.Bar(
        name=name,
        orientation="h",
        y=[span.row for span in drawn],
        base=[span.start for span in drawn],
        x=[span.length for span in drawn],
        text=[span.text for span in drawn],
        hovertext=[span.hover for span in drawn],
        width=height,
        marker=dict(color=colour, line=dict(color=EDGE, width=edge)),
        textfont=dict(size=_LETTERS, color=ink_on(colour)),
        hovertemplate="%{hovertext}<extra></extra>",
        **INSIDE,
    )
    return bar.update(more)


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
    """Return (at most `limit` marks, the subtitle's words on those that were merged; empty where none was).

    Marks merge only with neighbours of the same lane and group, the smallest first.
    """
    if len(marks) <= limit:
        return marks, ""
    ordered = sorted(marks, key=lambda mark: (mark.y, mark.group, mark.start))
    lanes = list(grouped(ordered, lambda mark: (mark.y, mark.group)).values())
    # one window for all lanes, so that they are equally coarse
    window = _window(lanes, limit)
    drawn = []
    for of_lane in lanes:
        for run in _runs(of_lane, window):
            drawn.append(_joined(run))
    near = f"neighbours within {seconds(window / 1e3)} are one"
    return drawn, f"{len(marks):,} intervals drawn as {len(drawn):,} marks ({near})"


def _window(lanes: list[list[Mark]], limit: int) -> float:
    """Return the smallest window in ms, to the millionth of the span, whose runs of marks are at most `limit`."""
    every_mark = list(chain(*lanes))
    start = min(mark.start for mark in every_mark)
    end = max(mark.end for mark in every_mark)
    # bisection; 20 halvings of the span come to a millionth of it
    low, high = 0.0, end - start
    for _ in range(20):
        middle = (low + high) / 2
        runs = sum(len(_runs(of_lane, middle)) for of_lane in lanes)
        # few enough marks, so a smaller window may do
        if runs <= limit:
            high = middle
        else:
            low = middle
    return high


def _runs(marks: list[Mark], window: float) -> list[list[Mark]]:
    """Return the marks of a lane in runs of neighbours that together span at most `window` ms."""
    runs: list[list[Mark]] = []
    for mark in marks:
        # marks of a lane are in the order of their starts; the window begins with a run's first
        if runs and mark.end - runs[-1][0].start <= window:
            runs[-1].append(mark)
        else:
            runs.append([mark])
    return runs


def _joined(run: list[Mark]) -> Mark:
    """Make one mark of a run of neighbours: it says how many it holds, and from which to which."""
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    # ms, without the gaps that the mark bridges
    busy = sum(mark.end - mark.start for mark in run)
    end = max(mark.end for mark in run)
    from_name, to_name = first.name.removeprefix(" · "), last.name.removeprefix(" · ")
    name = f" · {len(run)} intervals, from {from_name} to {to_name}"
    return Mark(first.group, first.y, first.start, end, name, "", busy)


def mark_lanes(
    marks: list[Mark], colours: dict[str, str], height: dict[str, float], span: float, yaxis: str = "y"
) -> list[go.Bar]:
    """Draw one trace a group, in the order of `colours`; `height` is in lanes, `span` the clock's length in ms."""
    by_group = grouped(marks, lambda mark: mark.group)
    # of a millisecond, beside the longest of the lanes' labels
    pixels = plot_width(["rank 0  reduce-scatter"]) / span
    bars = []
    for group, colour in colours.items():
        of_group = by_group.get(group)
        if not of_group:
            continue
        spans = [_span(mark, pixels) for mark in of_group]
        thickness = height.get(group, 0.84)
        edge = 0.6 if len(of_group) < _MANY else 0  # the edges of many thin marks would hide their colour
        hover = "%{hovertext}<br>from %{base:.3f} ms<extra></extra>"
        bar = lane(written(group), colour, spans, thickness, edge, yaxis=yaxis, hovertemplate=hover)
        bars.append(bar)
    return bars


def written(lane: str) -> str:
    """Return a lane's name as it is written: `reduce-scatter`, `other communication`."""
    is_collective = lane.startswith(("all", "reduce"))
    return lane.replace("_", "-" if is_collective else " ")


def _span(mark: Mark, pixels: float) -> Span:
    """Return a mark's bar with the longest of its names that fits its width; `pixels` is that of a millisecond."""
    length = mark.end - mark.start
    text = ""
    # the name's first part, else the short name; a mark of several has neither
    for name in (mark.name.partition(" · ")[0], mark.short):
        if name and words_width(name, _LETTERS) <= length * pixels - 4:
            text = name
            break
    # of several intervals what they fill; of one its length
    busy = seconds((mark.busy or length) / 1e3)
    hover = f"{mark.name.removeprefix(' · ')}<br>{busy}"
    return Span(mark.y, round(mark.start, 4), round(length, 4), text, hover)
