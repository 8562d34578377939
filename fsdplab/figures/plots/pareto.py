"""Which runs are worth choosing: peak memory against step time, where less of both is better.

A run is on the front if no other needs less memory without being slower. Other runs are not worth choosing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.fastest import fastest_words
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, card_line, strategy_colour, titled
from fsdplab.figures.view import Runs, RunView, emulated_links, how_and_where, views

MB = 1e6
_LARGEST, _SMALLEST = 64, 12  # bubbles' diameters in pixels
_WIDTH, _HEIGHT = 880, 380  # the plot's pixels in a static picture, the narrowest place, by which labels are placed
_GLYPH, _LINE = 8.2, 20

Ranges = tuple[list[float], list[float]]  # of x and of y, each from its low to its high end
Sides = tuple[float, float, float, float]  # of a box, in pixels: left, below, right, above


def pareto(runs: Runs) -> go.Figure:
    """Bubbles of peak memory (MB, x) against the median step (ms, y), area = exposed time, with the Pareto front and
    the card as lines.

    `runs`: records, or a comparison dict. ValueError if no run has both numbers. Runs out of memory have no step and
    are named in the subtitle.
    """
    shown = views(runs)
    drawn = [run for run in shown if run.peak and run.step_median]
    if not drawn:
        raise ValueError(
            "no run has both a peak and a timed step to draw; run with memory=True, and with steps=1 or more"
        )
    best = front(drawn)
    ranges = _ranges(drawn)
    figure = go.Figure([*_front_line(best, ranges), *[_bubble(run, drawn) for run in drawn]])
    figure.update_xaxes(title_text="peak memory of the worst rank (MB)", range=ranges[0])
    figure.update_yaxes(title_text="median step (ms)", range=ranges[1])
    figure.update_layout(showlegend=False)
    for card in sorted({run.card for run in shown if run.card and run.card / MB < ranges[0][1]}):
        card_line(figure, card, any(run.card_emulated for run in shown))
    for run, (across, down) in zip(drawn, placed(drawn, ranges, _lines(figure, ranges))):
        _label(figure, run, across, down, run in best)
    return titled(figure, _finding(drawn, best), _conditions(shown, drawn), _alt(drawn, best), height=560, top=112)


def front(runs: Sequence[RunView]) -> list[RunView]:
    """The runs that no other beats in memory and time at once, by memory: of (10 MB, 3 s), (20 MB, 2 s), (30 MB, 2 s)
    the first two.
    """
    best: list[RunView] = []
    for run in sorted(runs, key=lambda run: (run.known_peak, run.known_step)):
        if not best or run.known_step < best[-1].known_step:
            best.append(run)
    return best


def _ranges(drawn: list[RunView]) -> Ranges:
    """Both axes from zero, with space for the bubbles and their labels."""
    return [0, 1.3 * max(run.known_peak for run in drawn) / MB], [0, 1.3e3 * max(run.known_step for run in drawn)]


def _front_line(best: list[RunView], ranges: Ranges) -> list[go.Scatter]:
    """The front as a staircase: left of it and below it there is nothing to choose."""
    xs, ys = [run.known_peak / MB for run in best], [run.known_step * 1e3 for run in best]
    return [
        go.Scatter(
            x=[xs[0], *xs, ranges[0][1]], y=[ranges[1][1], *ys, ys[-1]], mode="lines", name="Pareto front",
            line=dict(color="#808488", width=2, dash="dot", shape="hv"), hoverinfo="skip",
        )
    ]  # fmt: skip


def diameter(run: RunView, drawn: Sequence[RunView]) -> float:
    """A bubble's diameter in pixels: its area is the exposed time; a quarter of the longest exposed time gives half its
    diameter.
    """
    longest = max((other.exposed_s or 0 for other in drawn), default=0)
    return max(_SMALLEST, _LARGEST * math.sqrt((run.exposed_s or 0) / longest)) if longest else _SMALLEST + 8


def _bubble(run: RunView, drawn: list[RunView]) -> go.Scatter:
    """One run; hollow where its exposed time was not measured."""
    colour = strategy_colour(run.strategy, run.engine)
    known = run.exposed_s is not None
    return go.Scatter(
        x=[run.known_peak / MB], y=[run.known_step * 1e3], mode="markers", name=run.label,
        marker=dict(
            size=diameter(run, drawn), opacity=0.85, color=colour if known else "rgba(128,132,136,0.15)",
            symbol="circle",
            line=dict(color=EDGE if known else colour, width=1 if known else 3),
        ),
        hovertemplate=f"{run.label}<br>%{{x:.1f}} MB, %{{y:.1f}} ms<br>{_exposed(run)}<extra></extra>",
    )  # fmt: skip


def _lines(figure: go.Figure, ranges: Ranges) -> list[Sides]:
    """The boxes in pixels that the front's and the cards' lines fill, which labels keep off."""
    stairs = figure.data[0]
    corners = [point for a, b, c in zip(stairs.x, stairs.y, stairs.x[1:]) for point in ((a, b), (c, b))]
    corners += [(stairs.x[-1], stairs.y[-1])]
    cards = [((shape.x0, 0), (shape.x0, ranges[1][1])) for shape in figure.layout.shapes]
    pairs = [*zip(corners, corners[1:]), *cards]
    pixels = [[(x / ranges[0][1] * _WIDTH, y / ranges[1][1] * _HEIGHT) for x, y in pair] for pair in pairs]
    return [(min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1) for a, b in pixels]


def placed(drawn: Sequence[RunView], ranges: Ranges, lines: Sequence[Sides] = ()) -> list[tuple[float, float]]:
    """Pixels from each bubble's middle to its label's: right, left, above or below, farther until it covers no label,
    bubble or line.
    """
    spots = [
        (
            run.known_peak / MB / ranges[0][1] * _WIDTH,
            run.known_step * 1e3 / ranges[1][1] * _HEIGHT,
            diameter(run, drawn) / 2,
        )
        for run in drawn
    ]
    taken = [*lines, *((x - r, y - r, x + r, y + r) for x, y, r in spots)]
    shifts = []
    for run, (x, y, radius) in zip(drawn, spots):
        half = len(_words(run)) * _GLYPH / 2
        shifts.append(_free_place(x, y, radius, half, taken))
        taken.append(_box(x + shifts[-1][0], y + shifts[-1][1], half))
    return shifts


def _free_place(x: float, y: float, radius: float, half: float, taken: list[Sides]) -> tuple[float, float]:
    """The nearest of the places around a bubble where a label of half width `half` covers nothing and stays on the
    plot.
    """
    tries = []
    for step in range(12):
        beside, above = radius + half + 8, radius + 14 + step * _LINE
        lift = step * _LINE
        tries += [(beside, lift), (beside, -lift), (-beside, lift), (-beside, -lift), (0, above), (0, -above)]
    fits = (place for place in tries if _is_free(_box(x + place[0], y + place[1], half), taken))
    return next(fits, tries[0])


def _box(x: float, y: float, half: float) -> Sides:
    return x - half, y - _LINE / 2, x + half, y + _LINE / 2


def _is_free(box: Sides, taken: list[Sides]) -> bool:
    inside = box[0] >= 0 and box[2] <= _WIDTH and box[1] >= 0 and box[3] <= _HEIGHT
    return inside and all(box[2] <= a or c <= box[0] or box[3] <= b or d <= box[1] for a, b, c, d in taken)


def _words(run: RunView) -> str:
    return f"{run.label} · {_exposed(run)}" if run.exposed_s is not None else run.label


def _label(figure: go.Figure, run: RunView, across: float, down: float, best: bool) -> None:
    text = _words(run).replace(run.label, f"<b>{run.label}</b>", 1) if best else _words(run)
    figure.add_annotation(
        x=run.known_peak / MB,
        y=run.known_step * 1e3,
        text=text,
        showarrow=False,
        xshift=across,
        yshift=down,
        font=dict(size=14),
    )


def _finding(drawn: list[RunView], best: list[RunView]) -> str:
    if len(drawn) == 1:
        return f"{drawn[0].label}: {size(drawn[0].peak)} and {seconds(drawn[0].step_median)} a step"
    small, told = best[0], fastest_words(drawn)
    if told.startswith(f"{small.label} is fastest"):
        return f"{small.label} needs least memory, {size(small.peak)}, and {told.removeprefix(f'{small.label} ')}"
    return f"{small.label} needs least memory, {size(small.peak)}; {told}"


def _conditions(shown: list[RunView], drawn: list[RunView]) -> str:
    links = emulated_links(shown)
    longest = max((run.exposed_s or 0 for run in drawn), default=0)
    area = (
        f"bubble area: exposed time, at most {seconds(longest)}"
        if longest
        else "exposed time not measured (--profile 2)"
    )
    missing = [
        f"{run.label} {'ran out of memory' if run.over_card else 'has no timed step'}"
        for run in shown
        if run not in drawn
    ]
    linked = f"; the link is emulated ({', '.join(links)})" if links else ""
    return "; ".join([f"{how_and_where(shown)}{linked}", area, *missing[:2]])


def _alt(drawn: list[RunView], best: list[RunView]) -> str:
    runs = [f"{run.label} {size(run.peak)}, {seconds(run.step_median)}, {_exposed(run)}" for run in drawn]
    return (
        f"Scatter of peak memory against step time: {'; '.join(runs)}. On the Pareto front:"
        f" {', '.join(run.label for run in best)}."
    )


def _exposed(run: RunView) -> str:
    return "nothing sent" if run.sends_nothing else f"exposed {seconds(run.exposed_s)}"
