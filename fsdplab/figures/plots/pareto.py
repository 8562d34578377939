"""Which runs are worth choosing: peak memory against step time, where less of both is better.

A run is on the front if no other needs less memory without being slower. Other runs are not worth choosing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.axis_units import MEGABYTES, MILLISECONDS, AxisUnit, byte_unit, time_unit
from fsdplab.figures.bars import whiskers
from fsdplab.figures.fastest import fastest_words, those_that_fit
from fsdplab.figures.lines import line, points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, card_words, mark_level, plot_width, strategy_colour, titled, words_width
from fsdplab.figures.view import Runs, RunView, emulated_links, how_and_where, missing, views
from fsdplab.records import known

_LARGEST, _SMALLEST = 64, 12  # bubbles' diameters in pixels
_HEIGHT, _LINE = 380, 20  # pixels of the plot's height and of a label's, by which labels are placed
_MARGIN = 1.3  # an axis ends at so many times its highest value: bubbles and their labels need space
_GREY = "#808488"
_HOLLOW = "rgba(128,132,136,0.15)"

Ranges = tuple[list[float], list[float]]  # of x and of y, each from its low to its high end
Point = tuple[float, float]


class Units(NamedTuple):
    """The units of both axes."""

    memory: AxisUnit = MEGABYTES
    time: AxisUnit = MILLISECONDS


class Box(NamedTuple):
    """A rectangle of the plot, in pixels from its lower left corner."""

    left: float
    below: float
    right: float
    above: float


class _Place(NamedTuple):
    """A place of a label: what speaks against it, how far it is from the bubble's middle, and what it would cover."""

    cost: int
    shift: Point
    box: Box


def pareto(runs: Runs) -> go.Figure:
    """Draw bubbles of peak memory (x) against the median step (y), area = exposed time, with the quartiles of
    the step as whiskers, and the Pareto front and the card as lines.

    `runs`: records, or a comparison dict. ValueError if no run has both numbers. Runs out of memory have no step and
    are named in the subtitle.
    """
    shown = views(runs)
    drawn = [run for run in shown if run.peak and run.step_median]
    if not drawn:
        raise ValueError(
            "no run has both a peak and a timed step to draw; run with memory=True, and with steps=1 or more"
        )
    # a run over the card is drawn, but it is no choice, and so not on the front, unless none fits
    best = front(those_that_fit(drawn))
    memory = byte_unit(known(run.peak) for run in drawn)
    time = time_unit(known(run.step_median) for run in drawn)
    units = Units(memory, time)
    ranges = _ranges(drawn, units)
    # the front is the first trace: bubbles lie over it, and `_lines` reads it from `figure.data[0]`
    figure = go.Figure(_front_line(best, ranges, units))
    figure.add_traces([_bubble(run, drawn, units) for run in drawn])
    figure.update_layout(showlegend=False)
    figure.update_xaxes(title_text=f"peak memory of the worst rank ({memory.symbol})", range=ranges[0])
    figure.update_yaxes(title_text=f"median step ({time.symbol})", range=ranges[1])
    _mark_cards(figure, shown, ranges, memory)
    # last, since the labels keep off the front and off the lines of cards
    _add_labels(figure, drawn, best, ranges, units)
    title = _finding(drawn, best[0])
    where = _conditions(shown, drawn)
    return titled(figure, title, where, _alt(drawn, best), _HEIGHT + 68)


def _spot(run: RunView, units: Units = Units()) -> Point:
    """Return where a run lies on the axes: (its peak, its step), each in the axis's unit."""
    x = units.memory.of(known(run.peak))
    y = units.time.of(known(run.step_median))
    return x, y


def front(runs: Sequence[RunView]) -> list[RunView]:
    """Return the runs that no other beats in memory and time.

    Of (10 MB, 3 s), (20 MB, 2 s), (30 MB, 2 s) these are the first two.
    """
    best: list[RunView] = []
    shortest = math.inf
    for run in sorted(runs, key=_spot):
        # they come by growing memory, so each must be faster than all before it
        _, step = _spot(run)
        # of equal peaks the faster comes first, so an equal peak that is slower is left out, too
        if step < shortest:
            best.append(run)
            shortest = step
    return best


def diameter(run: RunView, drawn: Sequence[RunView]) -> float:
    """Return a bubble's diameter in pixels: its area is the exposed time, so a quarter of the longest has half."""
    longest = _longest_exposed(drawn)
    # nothing was exposed, or it was not measured: all bubbles have 20 pixels
    if not longest:
        return _SMALLEST + 8
    # the floor of 12 pixels keeps a run that hides everything visible: there areas stop being in proportion
    share = (run.exposed_s or 0) / longest
    return max(_SMALLEST, _LARGEST * math.sqrt(share))


def _longest_exposed(drawn: Sequence[RunView]) -> float:
    return max((run.exposed_s or 0 for run in drawn), default=0)


def _ranges(drawn: Sequence[RunView], units: Units) -> Ranges:
    # axes begin at zero, since distances from it are what is compared
    peaks, steps = zip(*(_spot(run, units) for run in drawn))
    return [0, _MARGIN * max(peaks)], [0, _MARGIN * max(steps)]


def _front_line(best: Sequence[RunView], ranges: Ranges, units: Units) -> go.Scatter:
    """Draw the stairs from the upper edge along the front to the right edge; left of them and below there is no run."""
    xs, ys = zip(*(_spot(run, units) for run in best))
    right, top = ranges[0][1], ranges[1][1]
    # front (10 MB, 3 s), (20 MB, 2 s): down at 10 MB to 3 s, right to 20 MB, down to 2 s, right to the edge
    stairs_x = [xs[0], *xs, right]
    stairs_y = [top, *ys, ys[-1]]
    return line("Pareto front", _GREY, stairs_x, stairs_y, 2, "dot", line_shape="hv", hoverinfo="skip")


def _bubble(run: RunView, drawn: list[RunView], units: Units) -> go.Scatter:
    """Draw one run; hollow where its exposed time was not measured."""
    colour = strategy_colour(run.strategy, run.engine)
    x, y = _spot(run, units)
    if run.exposed_s is not None:
        fill = colour
        edge = dict(color=EDGE, width=1)
    else:
        fill = _HOLLOW
        edge = dict(color=colour, width=3)
    marker = dict(color=fill, opacity=0.85, symbol="circle", line=edge)
    hover = f"{run.label}<br>{units.memory.hover('x')}, {units.time.hover('y')}<br>{_exposed(run)}<extra></extra>"
    quartiles = whiskers([run], units.time.size)
    return points(
        run.label, colour, [x], [y], diameter(run, drawn), marker=marker, error_y=quartiles, hovertemplate=hover
    )


def _mark_cards(figure: go.Figure, shown: Sequence[RunView], ranges: Ranges, unit: AxisUnit) -> None:
    """Draw the line of each card that lies on the axis."""
    cards = {run.card for run in shown if run.card}
    emulated = any(run.card_emulated for run in shown)
    for card in sorted(cards):
        # a larger card would stretch the axis until all bubbles stand at its left
        if unit.of(card) < ranges[0][1]:
            mark_level(figure, unit.of(card), card_words(card, emulated))


# ---- labels: beside their bubbles, where they cover nothing


def _add_labels(
    figure: go.Figure, drawn: Sequence[RunView], best: Sequence[RunView], ranges: Ranges, units: Units
) -> None:
    """Write each run's name and exposed time, bold on the front, with a line to its bubble."""
    shifts = placed(drawn, ranges, _lines(figure, ranges), units)
    for run, (across, up) in zip(drawn, shifts):
        text = _words(run)
        if run in best:
            text = text.replace(run.label, f"<b>{run.label}</b>", 1)
        x, y = _spot(run, units)
        figure.add_annotation(
            text=text,
            font=dict(size=14),
            x=x,
            y=y,
            ax=across,
            ay=-up,  # plotly counts pixels of an arrow downwards
            arrowhead=0,
            arrowwidth=1,
            arrowcolor=_GREY,
            standoff=diameter(run, drawn) / 2,  # the line ends at the bubble's edge, not in its middle
        )


def _pixels(at: Point, ranges: Ranges) -> Point:
    """Return where a point of the axes lies on the plot, in pixels from its lower left corner."""
    x, y = at
    (_, right), (_, top) = ranges
    return x / right * plot_width(), y / top * _HEIGHT


def _lines(figure: go.Figure, ranges: Ranges) -> list[Box]:
    """Return the boxes that the front's and the cards' lines fill, which labels keep off."""
    stairs = figure.data[0]
    corners: list[Point] = []
    for x, y, next_x in zip(stairs.x, stairs.y, stairs.x[1:]):
        corners.append((x, y))
        corners.append((next_x, y))  # it goes to the right, then down
    corners.append((stairs.x[-1], stairs.y[-1]))
    boxes = []
    for start, end in zip(corners, corners[1:]):
        boxes.append(_box_of(start, end, ranges))
    _, top = ranges[1]
    # so far the only shapes are the lines of cards
    for card in figure.layout.shapes:
        boxes.append(_box_of((card.x0, 0), (card.x0, top), ranges))
    return boxes


def _box_of(start: Point, end: Point, ranges: Ranges) -> Box:
    """Return the box around a line between two points, a pixel wider on each side."""
    start_x, start_y = _pixels(start, ranges)
    end_x, end_y = _pixels(end, ranges)
    left, right = sorted((start_x, end_x))
    below, above = sorted((start_y, end_y))
    return Box(left - 1, below - 1, right + 1, above + 1)


def placed(drawn: Sequence[RunView], ranges: Ranges, lines: Sequence[Box] = (), units: Units = Units()) -> list[Point]:
    """Return pixels from each bubble's middle to its label's: the nearest place that covers no label, bubble, line."""
    # 1. every bubble takes its square first, so that no label covers a bubble placed later
    middles = [_pixels(_spot(run, units), ranges) for run in drawn]
    radii = [diameter(run, drawn) / 2 for run in drawn]
    taken = [_around(middle, radius, radius) for middle, radius in zip(middles, radii)]
    shifts = []
    # 2. one label after the other takes the cheapest place that is left; its own box is taken for those that follow
    for run, middle, radius in zip(drawn, middles, radii):
        # letters of 14 pixels, as in `_add_labels`
        half = words_width(_words(run), 14) / 2
        places = _places(middle, radius, half, taken, lines)
        to_the_right = (radius + half + 12, 0.0)
        fallback = _Place(0, to_the_right, taken[0])  # where the label fits nowhere
        chosen = min(places, default=fallback, key=lambda place: place.cost)
        shifts.append(chosen.shift)
        taken.append(chosen.box)
    return shifts


def _places(middle: Point, radius: float, half: float, taken: Sequence[Box], lines: Sequence[Box]) -> list[_Place]:
    """Return the places around a bubble at which its label, `half` its width to each side, stays on the plot.

    The near ones come first. A place that covers a bubble or another label costs more than any that does not.
    """
    x, y = middle
    # 12 pixels between the bubble's edge and the label
    beside = radius + half + 12
    places = []
    # each round is a line of text (20 pixels) farther up and down than the one before
    for distance in range(12):
        lift = distance * _LINE
        above = radius + 14 + distance * _LINE
        to_the_right = ((beside, lift), (beside, -lift))
        to_the_left = ((-beside, lift), (-beside, -lift))
        over_and_under = ((0.0, above), (0.0, -above))
        for across, up in (*to_the_right, *to_the_left, *over_and_under):
            box = _around((x + across, y + up), half, _LINE / 2)
            if not _is_on_plot(box):
                continue
            # a covered box costs more than the farthest place (11), a crossed line as much as three rounds
            cost = distance + 100 * _covered(box, taken) + 3 * _covered(box, lines)
            places.append(_Place(cost, (across, up), box))
    return places


def _is_on_plot(box: Box) -> bool:
    return box.left >= 0 and box.right <= plot_width() and box.below >= 0 and box.above <= _HEIGHT


def _around(middle: Point, across: float, up: float) -> Box:
    x, y = middle
    return Box(x - across, y - up, x + across, y + up)


def _covered(box: Box, taken: Sequence[Box]) -> int:
    """Count the boxes that a box overlaps."""
    count = 0
    for other in taken:
        # boxes that only touch do not overlap
        beside = box.right <= other.left or other.right <= box.left
        over = box.above <= other.below or other.above <= box.below
        count += not (beside or over)
    return count


# ---- words


def _words(run: RunView) -> str:
    if run.exposed_s is None:
        return run.label
    return f"{run.label} · {_exposed(run)}"


def _exposed(run: RunView) -> str:
    if run.sends_nothing:
        return "nothing sent"
    return f"exposed {seconds(run.exposed_s)}"


def _alt(drawn: Sequence[RunView], best: Sequence[RunView]) -> str:
    words = []
    for run in drawn:
        words.append(f"{run.label} {size(run.peak)}, {seconds(run.step_median)}, {_exposed(run)}")
    worth = ", ".join(run.label for run in best)
    return f"Scatter of peak memory against step time: {'; '.join(words)}. On the Pareto front: {worth}."


def _finding(drawn: list[RunView], small: RunView) -> str:
    """Say which run needs least memory and which is fastest; where that is the same run, its name once."""
    if len(drawn) == 1:
        return f"{small.label}: {size(small.peak)} and {seconds(small.step_median)} a step"
    least = f"{small.label} needs least memory, {size(small.peak)}"
    fastest = fastest_words(those_that_fit(drawn))
    # "zero2 needs least memory, 232 MB, and is fastest, 342 ms a step", instead of the name twice
    if fastest.startswith(f"{small.label} is"):
        is_fastest = fastest.removeprefix(small.label).strip()
        return f"{least}, and {is_fastest}"
    return f"{least}; {fastest}"


def _conditions(shown: list[RunView], drawn: list[RunView]) -> str:
    where = how_and_where(shown)
    links = emulated_links(shown)
    if links:
        where += f"; the link is emulated ({links})"
    longest = _longest_exposed(drawn)
    if longest:
        area = f"bubble area: exposed time, at most {seconds(longest)}"
    else:
        area = "exposed time not measured (--profile 2)"
    spread = "whiskers: quartiles of the step time" if whiskers(drawn) else ""
    left_out = missing(shown, drawn, "lacks a measured peak or a timed step")
    clauses = [where, area, spread, left_out]
    return "; ".join(filter(None, clauses))
