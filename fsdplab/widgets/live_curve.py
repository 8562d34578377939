"""Loss and step time while a batch runs, as a small picture that is written anew after each step.

A figure of plotly would be built and sent anew twenty times a second; these are a few polylines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from math import isfinite

from fsdplab.common.sizes import seconds as in_words
from fsdplab.common.sizes import three_digits
from fsdplab.figures.style import strategy_colour

from .choices import label
from .lab_state import Curve

# zero1's colour is pale and no_shard's is grey: an edge makes lines plain on white and on black
_EDGED = "-webkit-text-stroke:.6px gray"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 520, 150, 64, 12, 22


def picture_of(curves: Sequence[Curve]) -> str:
    """Loss and seconds of each step so far, of all runs of the batch, side by side; empty before the first step."""
    begun = [curve for curve in curves if any(map(isfinite, curve.losses))]
    if not begun:
        return ""
    # other engines have their strategies' colours: their lines are dashed
    colours = [
        (strategy_colour(curve.spec.strategy, curve.spec.engine), curve.spec.engine in ("lab", "twin"))
        for curve in begun
    ]
    names = "".join(
        f"<span style='white-space:nowrap'><span style='color:{colour};{_EDGED}'>{'━━' if whole else '╍╍'}</span>"
        f" {escape(label(curve.spec))}</span> "
        for (colour, whole), curve in zip(colours, begun)
    )
    loss = _chart("loss", "steps", [curve.losses for curve in begun], colours, three_digits)
    times = _chart("step", "timed", [curve.seconds for curve in begun], colours, in_words)
    words = ", ".join(f"{label(curve.spec)}: {len(curve.losses)} steps" for curve in begun)
    alt = f"role='img' aria-label='Loss and step time so far: {escape(words)}'"
    return (
        f"<div class='fsdplab-live' {alt}><div>{names} (measured, rank 0)</div>"
        f"<div style='display:flex;flex-wrap:wrap;gap:4px 16px'>{loss}{times}</div></div>"
    )


def _chart(
    title: str,
    unit: str,
    lines: Sequence[Sequence[float]],
    looks: Sequence[tuple[str, bool]],
    say: Callable[[float], str],
) -> str:
    """One chart: a line a run over its steps, the y axis marked at its ends."""
    lines = [[value for value in line if isfinite(value)] for line in lines]  # a run that diverges ends with nan
    values = [value for line in lines for value in line]
    if not values:
        return ""
    low, high = min(values), max(values)
    span, steps = (high - low) or abs(high) or 1.0, max(2, *map(len, lines), 2)
    right, bottom = _WIDTH - 10, _HEIGHT - _BELOW

    def at(step: int, value: float) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * step / (steps - 1), bottom - (bottom - _TOP) * (value - low) / span

    drawn = "".join(_line([at(*point) for point in enumerate(line)], *look) for line, look in zip(lines, looks))
    axis = f"<path d='M{_LEFT},{_TOP}V{bottom}H{right}' fill='none' stroke='currentColor' opacity='.4'/>"
    marks = "".join(
        f"<text x='{_LEFT - 6}' y='{y + 4:.0f}' text-anchor='end'>{escape(say(value))}</text>"
        for value, y in {low: bottom, high: at(0, high)[1]}.items()
    )
    below = (
        f"<text x='{right}' y='{_HEIGHT - 5}' text-anchor='end'>{escape(title)}, {max(map(len, lines))} {unit}</text>"
    )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' style='flex:1 1 380px;max-width:720px;font-size:13px'"
        f" fill='currentColor'>{axis}{drawn}{marks}{below}</svg>"
    )


def _line(points: Sequence[tuple[float, float]], colour: str, whole: bool) -> str:
    """A run's line; a single step is a point."""
    x, y = points[-1] if points else (0.0, 0.0)
    way = "".join(f"M{x0:.1f},{y0:.1f}L{x1:.1f},{y1:.1f}" for (x0, y0), (x1, y1) in pairwise(points))
    end = (
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}' stroke='currentColor' stroke-opacity='.6'/>"
        if points
        else ""
    )
    dashes = "" if whole else " stroke-dasharray='5 4'"
    edge = f"<path d='{way}' stroke='currentColor' stroke-width='4' fill='none' opacity='.45'{dashes}/>"
    return f"{edge}<path d='{way}' stroke='{colour}' stroke-width='2.4' fill='none'{dashes}/>{end}"
