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
_NAME = 17  # pixels of a bar's name, above it
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
    # the axis holds the card, the peak and the band, with 4 % more for the last edge
    end = max(card, peak.total, band[1]) * 1.04
    scale = (width - 2) / end  # pixels of a byte
    row_height = _NAME + _ROW + _GAP
    at_peak = 22  # where the first row begins, with its name
    at_rest = at_peak + row_height
    bottom = at_rest + row_height
    # a row begins with its name, 17 pixels high, and its bar is below it
    bars = (at_peak + _NAME, at_rest + _NAME)  # where they begin
    parts = [
        *_axis(end, scale, bottom, _BYTES),
        *_memory_row("at the peak", peak.by_category, at_peak, scale),
        *_whisker(band, bars[0] + _ROW / 2, scale),
        *_memory_row("between steps", found.memory.resting.by_category, at_rest, scale),
        *_card_line(card, bars, scale, width),
    ]
    categories = []
    for title, nbytes in _named(peak.by_category):
        categories.append(f"{title} {size(nbytes)}")
    least, most = band
    peaks = f"{size(peak.total)} at the peak, {size(least)} to {size(most)} by the band"
    alt = f"Memory of a rank: {peaks}, of a card of {size(card)}: {', '.join(categories)}"
    return _svg(width, bottom + 22, alt, parts)


def _memory_row(name: str, by_category: Mapping[str, float], top: float, scale: float) -> Iterator[str]:
    """Draw a row: its name and sum, and below them the bar of its categories."""
    total = sum(by_category.values())
    yield _text(0, top + 11, f"{name}: {size(total)}")
    yield from _stack(by_category, top + _NAME, scale)


def _card_line(card: float, bars: Iterable[float], scale: float, width: int) -> Iterator[str]:
    """Draw the card's line beside the bars only, which begin at `bars`, so that it does not cross their names."""
    at = card * scale
    # an SVG path for each bar: move to the line's place 3 pixels above it, then down past it
    path = "".join(f"M{at:.1f} {top - 3}v{_ROW + 6}" for top in bars)
    yield f'<path class="card" d="{path}" stroke="{ALARM}" stroke-width="2.5" stroke-dasharray="7 5"/>'
    # the name is on the side where the drawing has more space
    anchor = "end" if at > width / 2 else "start"
    words = f"card {size(card)} ({card / _GIB:.4g} GiB)"
    yield _text(at, 12, words, anchor, ALARM)


def _named(by_category: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the categories that hold something, with their titles."""
    for name, row in CATEGORY_ROWS.items():
        nbytes = by_category[name]
        # bytes of a plan are floats: less than one is none
        if nbytes >= 1:
            yield row.title, nbytes


def _stack(by_category: Mapping[str, float], top: float, scale: float) -> Iterator[str]:
    """Draw the bar of the categories, one beside the other."""
    start = 0.0
    for name, row in CATEGORY_ROWS.items():
        nbytes = by_category[name]
        length = nbytes * scale
        # a rectangle of no width would still have its edge drawn
        if length > 0:
            place = f'x="{start:.1f}" y="{top}" width="{length:.1f}" height="{_ROW}"'
            look = f'fill="{row.colour}" stroke="{_EDGE}" stroke-width="0.8"'
            words = escape(f"{row.title}: {size(nbytes)}")  # what a hover shows
            yield f"<rect {place} {look}><title>{words}</title></rect>"
        # the next category begins where this one ends
        start += length


def _whisker(band: Interval, middle: float, scale: float) -> Iterator[str]:
    """Draw the band of the peak, as a line with two ends."""
    low, high = band[0] * scale, band[1] * scale
    end = f"{middle - 7}v14"  # upright, over the middle and below
    # left end, then the line from low to high, then the right end
    path = f"M{low:.1f} {end}M{low:.1f} {middle}H{high:.1f}M{high:.1f} {end}"
    # first wide in the page's colour, then narrow in the text's
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
    # lanes are stacked from the top, 18 pixels each with 6 between them; a lane without marks takes no space
    marks: list[str] = []
    top = 4
    for lane, name in _LANES.items():
        by_colour = _by_colour(timeline, lane)
        if not by_colour:
            continue
        ink = ALARM if lane == "exposed" else _INK
        marks.append(_text(0, top + 14, name, colour=ink))
        # one path a colour, as thousands of elements would make a phone slow
        for colour, spans in by_colour.items():
            marks.append(_marks(colour, spans, top, scale))
        top += _LANE + _BETWEEN
    axis = _axis(step_ns, scale, top, _NANOSECONDS, start=_NAMES)
    return _svg(width, top + 22, _alt_of_step(timeline, step_ns), [*axis, *marks])


def _by_colour(timeline: Sequence[Mapping[str, Any]], lane: str) -> dict[str, list[Interval]]:
    """Return the intervals of a lane by the colour of their mark; computing has one for each phase."""
    by_colour: dict[str, list[Interval]] = {}
    for row in timeline:
        start, end = row["start_ns"], row["end_ns"]
        if row["lane"] == lane and end > start:
            colour = _colour(lane, row["phase"])
            by_colour.setdefault(colour, []).append((start, end))
    return by_colour


def _colour(lane: str, phase: str) -> str:
    # compute of the optimizer: "compute in optimizer" and "compute" have no colour, "optimizer" has one
    for name in (f"{lane} in {phase}", lane, phase):
        if name in LANE_COLOURS:
            return LANE_COLOURS[name]
    return _UNKNOWN_COLOUR


def _alt_of_step(timeline: Sequence[Mapping[str, Any]], step_ns: float) -> str:
    exposed_ns = 0
    names = {}  # in the order in which the step reaches the lanes
    for row in timeline:
        lane = row["lane"]
        length = row["end_ns"] - row["start_ns"]
        if lane in _LANES and length > 0:
            names[_LANES[lane]] = True
            if lane == "exposed":
                exposed_ns += length
    lanes = ", ".join(names)
    share = exposed_ns / step_ns
    exposed = f"communication is exposed for {seconds(exposed_ns / 1e9)}, {share:.0%} of the step"
    return f"One simulated step of {seconds(step_ns / 1e9)}: lanes {lanes}; {exposed}"


@dataclass
class _Stretch:
    """A mark as it is drawn, in pixels from where the clock begins; it grows by what is near its end."""

    start: float
    end: float


def _marks(colour: str, spans: Iterable[Interval], top: float, scale: float) -> str:
    """Draw all marks of a colour as one path; neighbours that are nearer than half a pixel are one."""
    stretches: list[_Stretch] = []
    for start_ns, end_ns in sorted(spans):
        start, end = start_ns * scale, end_ns * scale
        # a large model's step has thousands of marks, of which many are narrower than a pixel
        if stretches and start - stretches[-1].end < _NEAR:
            stretches[-1].end = max(end, stretches[-1].end)
        else:
            stretches.append(_Stretch(start, end))
    path = ""
    for stretch in stretches:
        left = _NAMES + stretch.start
        width = max(stretch.end - stretch.start, 0.4)  # less would not be seen
        # a rectangle: right, down, back to the left, close
        path += f"M{left:.1f} {top}h{width:.1f}v{_LANE}H{left:.1f}z"
    return f'<path d="{path}" fill="{colour}"/>'


# ---- what both drawings share


def _axis(
    end: float, scale: float, top: float, units: Sequence[tuple[str, float]], start: float = 0.0
) -> Iterator[str]:
    """Draw thin lines from the top at round values, and the values below."""
    # 84 pixels in the axis's unit, rounded up: at 0.01 pixels a ns 8,400 ns, so a value every 10 µs
    step = _round_step(_TICK / scale)
    # the largest unit of which the axis holds at least one
    unit, one = next((unit, one) for unit, one in units if end >= one)
    right = start + end * scale
    values = math.floor(end / step) + 1
    for place in range(values):
        at = start + place * step * scale
        words, anchor = "0", "start"
        # the first value stands at the axis's beginning, where words in the middle would leave the drawing
        if place:
            words = f"{place * step / one:,.4g} {unit}"
            anchor = "middle"
        if right - at < _TICK / 3:  # words in the middle would be cut there
            anchor = "end"
        line = f'<path d="M{at:.1f} 4V{top}" stroke="{GRID}"/>'
        yield line + _text(at, top + 15, words, anchor)


def _round_step(least: float) -> float:
    """Return the first of 1, 2 and 5 times powers of ten that is not below `least`."""
    # 300: the power is 100, and of 100, 200 and 500 the last is the first that is not below
    power = 10.0 ** math.floor(math.log10(least))
    for times in (1, 2, 5):
        if times * power >= least:
            return times * power
    return 10 * power


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = _INK) -> str:
    """Write words with an edge of the page's colour, which keeps lines out of the letters."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    look = f'fill="{colour}" stroke="{_PAPER}" stroke-width="3" paint-order="stroke"'
    return f"<text {place} {look}>{escape(words)}</text>"


def _svg(width: int, height: float, alt: str, parts: Iterable[str]) -> str:
    label = f'role="img" aria-label="{escape(alt)}"'
    box = f'viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}"'
    content = "".join(parts)
    return f'<svg {label} {box} font-size="{_TEXT}">{content}</svg>'
