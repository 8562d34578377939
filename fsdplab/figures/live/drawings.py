"""Two drawings of a plan as SVG, in plain Python: memory beside the card, and the timeline of a simulated step.

They have the colours of the other figures. Text is of the page's colour, and lengths are pixels of the page, so that a
phone gets a drawing of its own size instead of a small copy of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size
from fsdplab.figures.style import ALARM, GRID, LANE_COLOURS
from fsdplab.planning.planner import Plan

_GIB = 2**30
_ROW, _GAP, _TEXT = 30, 12, 13  # pixels of a bar, between two, and of letters
_LANE, _BETWEEN = 18, 6
_NAMES = 104  # pixels of the lanes' names
_TICK = 84  # pixels between two values of an axis at least
_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_NANOSECONDS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_NEAR = 0.5  # pixels between two marks that are drawn as one
_EDGE = "rgba(20,22,26,0.65)"
_PAPER = "var(--paper, #fff)"
_INK = "currentColor"

Interval = tuple[float, float]


def memory_drawing(found: Plan, band: Interval, width: int) -> str:
    """Draw the peak and what rests between steps by category, under the card's line, and the peak's band in bytes."""
    card, peak = found.spec.gpu.memory_bytes, found.memory.peak
    end = max(card, peak.total, band[1]) * 1.04
    scale = (width - 2) / end  # pixels of a byte
    at_peak, at_rest = 22, 22 + 17 + _ROW + _GAP  # where the two rows begin, their names first
    bottom = at_rest + 17 + _ROW + _GAP
    parts = [
        *_axis(end, scale, bottom, _BYTES),
        *_memory_row("at the peak", peak.by_category, at_peak, scale),
        *_whisker(band, at_peak + 17 + _ROW / 2, scale),
        *_memory_row("between steps", found.memory.resting.by_category, at_rest, scale),
        *_card_line(card, (at_peak + 17, at_rest + 17), scale, width),
    ]
    categories = ", ".join(f"{title} {size(nbytes)}" for title, nbytes in _named(peak.by_category))
    alt = (
        f"Memory of a rank: {size(peak.total)} at the peak, {size(band[0])} to {size(band[1])} by the band, of a card"
        f" of {size(card)}: {categories}"
    )
    return _svg(width, bottom + 22, alt, parts)


def _memory_row(name: str, by_category: Mapping[str, float], top: float, scale: float) -> Iterator[str]:
    """Draw a row: its name and sum, and below them the bar of its categories."""
    yield _text(0, top + 11, f"{name}: {size(sum(by_category.values()))}")
    yield from _stack(by_category, top + 17, scale)


def _card_line(card: float, bars: Iterable[float], scale: float, width: int) -> Iterator[str]:
    """Draw the card's line beside the bars only, which begin at `bars`, so that it does not cross their names."""
    at = card * scale
    path = "".join(f"M{at:.1f} {top - 3}v{_ROW + 6}" for top in bars)
    yield f'<path class="card" d="{path}" stroke="{ALARM}" stroke-width="2.5" stroke-dasharray="7 5"/>'
    anchor = "end" if at > width / 2 else "start"
    yield _text(at, 12, f"card {size(card)} ({card / _GIB:.4g} GiB)", anchor, ALARM)


def _named(by_category: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the categories that hold something, with their titles."""
    for name, row in CATEGORY_ROWS.items():
        if by_category[name] >= 1:
            yield row.title, by_category[name]


def _stack(by_category: Mapping[str, float], top: float, scale: float) -> Iterator[str]:
    """Draw the bar of the categories, one beside the other."""
    start = 0.0
    for name, row in CATEGORY_ROWS.items():
        length = by_category[name] * scale
        if length > 0:
            words = f"{row.title}: {size(by_category[name])}"
            yield (
                f'<rect x="{start:.1f}" y="{top}" width="{length:.1f}" height="{_ROW}" fill="{row.colour}"'
                f' stroke="{_EDGE}" stroke-width="0.8"><title>{escape(words)}</title></rect>'
            )
        start += length


def _whisker(band: Interval, middle: float, scale: float) -> Iterator[str]:
    """Draw the band of the peak, as a line with two ends."""
    low, high = band[0] * scale, band[1] * scale
    path = f"M{low:.1f} {middle - 7}v14M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 7}v14"
    for colour, thick in ((_PAPER, 5), (_INK, 2)):  # readable over any colour
        yield f'<path d="{path}" stroke="{colour}" stroke-width="{thick}" fill="none"/>'


# ---- the step


# lane of a record -> its name here, in their order from the top
_LANES = {
    "compute": "compute",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "other_communication": "other comm.",
    "exposed": "exposed",
}
_UNKNOWN_COLOUR = "#6b7380"


def step_drawing(timeline: Sequence[Mapping[str, Any]], width: int) -> str:
    """Draw the lanes of one rank's simulated step on one clock, exposed communication in red; `timeline` are a record's
    rows, in ns.
    """
    step_ns = max(row["end_ns"] for row in timeline)
    scale = (width - _NAMES - 2) / step_ns  # pixels of a nanosecond
    marks: list[str] = []
    top = 4
    for lane, name in _LANES.items():
        by_colour = _by_colour(timeline, lane)
        if not by_colour:
            continue
        marks.append(_text(0, top + 14, name, colour=ALARM if lane == "exposed" else _INK))
        marks += [_marks(colour, spans, top, scale) for colour, spans in by_colour.items()]
        top += _LANE + _BETWEEN
    axis = _axis(step_ns, scale, top, _NANOSECONDS, start=_NAMES)
    return _svg(width, top + 22, _alt_of_step(timeline, step_ns), [*axis, *marks])


def _by_colour(timeline: Sequence[Mapping[str, Any]], lane: str) -> dict[str, list[Interval]]:
    """Return the intervals of a lane by the colour of their mark; computing has one for each phase."""
    by_colour: dict[str, list[Interval]] = {}
    for row in timeline:
        if row["lane"] == lane and row["end_ns"] > row["start_ns"]:
            by_colour.setdefault(_colour(lane, row["phase"]), []).append((row["start_ns"], row["end_ns"]))
    return by_colour


def _colour(lane: str, phase: str) -> str:
    for name in (f"{lane} in {phase}", lane, phase):
        if name in LANE_COLOURS:
            return LANE_COLOURS[name]
    return _UNKNOWN_COLOUR


def _alt_of_step(timeline: Sequence[Mapping[str, Any]], step_ns: float) -> str:
    exposed_ns = 0
    names = {}  # in the order in which the step reaches the lanes
    for row in timeline:
        length = row["end_ns"] - row["start_ns"]
        if row["lane"] in _LANES and length > 0:
            names[_LANES[row["lane"]]] = True
            if row["lane"] == "exposed":
                exposed_ns += length
    return (
        f"One simulated step of {seconds(step_ns / 1e9)}: lanes {', '.join(names)}; communication is exposed for"
        f" {seconds(exposed_ns / 1e9)}, {exposed_ns / step_ns:.0%} of the step"
    )


@dataclass
class _Stretch:
    """A mark as it is drawn, in pixels from where the clock begins; it grows by what is near its end."""

    start: float
    end: float


def _marks(colour: str, spans: Iterable[Interval], top: float, scale: float) -> str:
    """Draw all marks of a colour as one path; neighbours that are nearer than half a pixel are one."""
    stretches: list[_Stretch] = []
    for start, end in sorted((start * scale, end * scale) for start, end in spans):
        if stretches and start - stretches[-1].end < _NEAR:
            stretches[-1].end = max(end, stretches[-1].end)
        else:
            stretches.append(_Stretch(start, end))
    path = ""
    for stretch in stretches:
        left = _NAMES + stretch.start
        width = max(stretch.end - stretch.start, 0.4)
        path += f"M{left:.1f} {top}h{width:.1f}v{_LANE}H{left:.1f}z"
    return f'<path d="{path}" fill="{colour}"/>'


# ---- what both drawings share


def _axis(
    end: float, scale: float, top: float, units: Sequence[tuple[str, float]], start: float = 0.0
) -> Iterator[str]:
    """Draw thin lines from the top at round values, and the values below."""
    step = _round_step(_TICK / scale)
    unit, one = next((unit, one) for unit, one in units if end >= one)
    right = start + end * scale
    for place in range(math.floor(end / step) + 1):
        at = start + place * step * scale
        words = f"{place * step / one:,.4g} {unit}" if place else "0"
        anchor = "middle" if place else "start"
        if right - at < _TICK / 3:  # words in the middle would be cut there
            anchor = "end"
        yield f'<path d="M{at:.1f} 4V{top}" stroke="{GRID}"/>' + _text(at, top + 15, words, anchor)


def _round_step(least: float) -> float:
    """Return the first of 1, 2 and 5 times powers of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least)


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = _INK) -> str:
    """Write words with an edge of the page's colour, which keeps lines out of the letters."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" stroke="{_PAPER}"'
        f' stroke-width="3" paint-order="stroke">{escape(words)}</text>'
    )


def _svg(width: int, height: float, alt: str, parts: Iterable[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {width} {height:.0f}" width="{width}"'
        f' height="{height:.0f}" font-size="{_TEXT}">{"".join(parts)}</svg>'
    )
