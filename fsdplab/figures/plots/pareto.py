"""Which runs are worth choosing: peak memory against step time, where less of both is better.

A run is on the front if no other needs less memory without being slower. Other runs are not worth choosing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.bars import whiskers
from fsdplab.figures.fastest import fastest_words, those_that_fit
from fsdplab.figures.lines import line, points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, card_words, mark_level, plot_width, strategy_colour, titled, words_width
from fsdplab.figures.view import Runs, RunView, emulated_links, how_and_where, missing, views
from fsdplab.records import known

MB = 1e6
_LARGEST, _SMALLEST = 64, 12  # bubbles' diameters in pixels
_HEIGHT, _LINE = 380, 20  # pixels of the plot's height and of a label's, by which labels are placed

Ranges = tuple[list[float], list[float]]  # of x and of y, each from its low to its high end
Point = tuple[float, float]
Sides = tuple[float, float, float, float]  # of a box, in pixels: left, below, right, above


def pareto(runs: Runs) -> go.Figure:
    """Bubbles of peak memory (MB, x) against the median step (ms, y), area = exposed time, with the quartiles of the
    step as whiskers, and the Pareto front and the card as lines.

    `runs`: records, or a comparison dict. ValueError if no run has both numbers. Runs out of memory have no step and
    are named in the subtitle.
    """
    shown = views(runs)
    drawn = [run for run in shown if run.peak and run.step_median]
    if not drawn:
        raise ValueError(
            "no run has both a peak and a timed step to draw; run with memory=True, and with steps=1 or more"
        )
    best = front(those_that_fit(drawn))
    xs, ys = ([_spot(run)[axis] for run in best] for axis in (0, 1))
    highest = [max(_spot(run)[axis] for run in drawn) for axis in (0, 1)]
    ranges = [0, 1.3 * highest[0]], [0, 1.3 * highest[1]]  # with space for the bubbles and their labels
    stairs = [xs[0], *xs, ranges[0][1]], [ranges[1][1], *ys, ys[-1]]  # left of the front and below it there is no run
    front_line = line("Pareto front", "#808488", *stairs, 2, "dot", line_shape="hv", hoverinfo="skip")
    figure = go.Figure([front_line, *[_bubble(run, drawn) for run in drawn]]).update_layout(showlegend=False)
    figure.update_xaxes(title_text="peak memory of the worst rank (MB)", range=ranges[0])
    figure.update_yaxes(title_text="median step (ms)", range=ranges[1])
    for card in sorted({run.card for run in shown if run.card and run.card / MB < ranges[0][1]}):
        mark_level(figure, card / MB, card_words(card, any(run.card_emulated for run in shown)))
    for run, (across, down) in zip(drawn, placed(drawn, ranges, _lines(figure, ranges))):
        text = _words(run).replace(run.label, f"<b>{run.label}</b>", 1) if run in best else _words(run)
        (x, y), font = _spot(run), dict(size=14)
        leader = dict(arrowhead=0, arrowwidth=1, arrowcolor="#808488", standoff=diameter(run, drawn) / 2)
        figure.add_annotation(text=text, font=font, x=x, y=y, ax=across, ay=-down, **leader)
    told = "; ".join(f"{run.label} {size(run.peak)}, {seconds(run.step_median)}, {_exposed(run)}" for run in drawn)
    worth = ", ".join(run.label for run in best)
    alt = f"Scatter of peak memory against step time: {told}. On the Pareto front: {worth}."
    return titled(figure, _finding(drawn, best[0]), _conditions(shown, drawn), alt, _HEIGHT + 68)


def _spot(run: RunView) -> Point:
    """Where a run lies on the axes: (peak in MB, step in ms)."""
    return known(run.peak) / MB, known(run.step_median) * 1e3


def front(runs: Sequence[RunView]) -> list[RunView]:
    """The runs that no other beats in memory and time: of (10 MB, 3 s), (20 MB, 2 s), (30 MB, 2 s) the first two."""
    best: list[RunView] = []
    for run in sorted(runs, key=_spot):
        if not best or _spot(run)[1] < _spot(best[-1])[1]:
            best.append(run)
    return best


def diameter(run: RunView, drawn: Sequence[RunView]) -> float:
    """A bubble's diameter in pixels: its area is the exposed time, so a quarter of the longest has half of it."""
    longest = max((other.exposed_s or 0 for other in drawn), default=0)
    return max(_SMALLEST, _LARGEST * math.sqrt((run.exposed_s or 0) / longest)) if longest else _SMALLEST + 8


def _bubble(run: RunView, drawn: list[RunView]) -> go.Scatter:
    """One run; hollow where its exposed time was not measured."""
    colour, (x, y) = strategy_colour(run.strategy, run.engine), _spot(run)
    measured = run.exposed_s is not None
    look = dict(color=colour if measured else "rgba(128,132,136,0.15)", opacity=0.85, symbol="circle")
    edge = dict(color=EDGE if measured else colour, width=1 if measured else 3)
    return points(
        run.label, colour, [x], [y], diameter(run, drawn), marker=look | dict(line=edge),
        error_y=whiskers([run], 1e-3),
        hovertemplate=f"{run.label}<br>%{{x:.1f}} MB, %{{y:.1f}} ms<br>{_exposed(run)}<extra></extra>",
    )  # fmt: skip


def _pixels(at: Point, ranges: Ranges) -> Point:
    """Where a point of MB and ms lies on the plot, in pixels from its lower left corner."""
    return at[0] / ranges[0][1] * plot_width(), at[1] / ranges[1][1] * _HEIGHT


def _lines(figure: go.Figure, ranges: Ranges) -> list[Sides]:
    """The boxes in pixels that the front's and the cards' lines fill, which labels keep off."""
    stairs = figure.data[0]
    corners = [point for a, b, c in zip(stairs.x, stairs.y, stairs.x[1:]) for point in ((a, b), (c, b))]
    corners += [(stairs.x[-1], stairs.y[-1])]
    cards = [((shape.x0, 0), (shape.x0, ranges[1][1])) for shape in figure.layout.shapes]
    ends = [[_pixels(point, ranges) for point in pair] for pair in (*zip(corners, corners[1:]), *cards)]
    return [(min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1) for a, b in ends]


def placed(drawn: Sequence[RunView], ranges: Ranges, lines: Sequence[Sides] = ()) -> list[Point]:
    """Pixels from each bubble's middle to its label's: the nearest place that covers no label, bubble or line."""
    middles = [_pixels(_spot(run), ranges) for run in drawn]
    radii = [diameter(run, drawn) / 2 for run in drawn]
    taken = [(x - r, y - r, x + r, y + r) for (x, y), r in zip(middles, radii)]
    shifts = []
    for run, (x, y), radius in zip(drawn, middles, radii):
        half, costs = words_width(_words(run), 14) / 2, []
        for cost in range(12):
            beside, lift, above = radius + half + 12, cost * _LINE, radius + 14 + cost * _LINE
            sides = ((beside, lift), (beside, -lift), (-beside, lift), (-beside, -lift), (0.0, above), (0.0, -above))
            for across, up in sides:
                box = x + across - half, y + up - _LINE / 2, x + across + half, y + up + _LINE / 2
                if box[0] >= 0 and box[2] <= plot_width() and box[1] >= 0 and box[3] <= _HEIGHT:
                    costs.append((cost + 100 * _covered(box, taken) + 3 * _covered(box, lines), (across, up), box))
        _, shift, box = min(costs, default=(0, (radius + half + 12, 0.0), taken[0]), key=lambda place: place[0])
        shifts.append(shift)
        taken.append(box)
    return shifts


def _covered(box: Sides, taken: Sequence[Sides]) -> int:
    return sum(not (box[2] <= a or c <= box[0] or box[3] <= b or d <= box[1]) for a, b, c, d in taken)


def _words(run: RunView) -> str:
    return f"{run.label} · {_exposed(run)}" if run.exposed_s is not None else run.label


def _exposed(run: RunView) -> str:
    return "nothing sent" if run.sends_nothing else f"exposed {seconds(run.exposed_s)}"


def _finding(drawn: list[RunView], small: RunView) -> str:
    if len(drawn) == 1:
        return f"{small.label}: {size(small.peak)} and {seconds(small.step_median)} a step"
    told = fastest_words(those_that_fit(drawn))
    joined = f", and {told.removeprefix(small.label).strip()}" if told.startswith(f"{small.label} is") else f"; {told}"
    return f"{small.label} needs least memory, {size(small.peak)}{joined}"


def _conditions(shown: list[RunView], drawn: list[RunView]) -> str:
    links = emulated_links(shown)
    longest = max((run.exposed_s or 0 for run in drawn), default=0)
    area = f"bubble area: exposed time, at most {seconds(longest)}"
    marks = [area if longest else "exposed time not measured (--profile 2)"]
    marks += ["whiskers: quartiles of the step time"] if whiskers(drawn) else []
    marks.append(missing(shown, drawn, "lacks a measured peak or a timed step"))
    linked = f"; the link is emulated ({links})" if links else ""
    return "; ".join(filter(None, [f"{how_and_where(shown)}{linked}", *marks]))
