"""Two drawings of a plan as SVG, in plain Python: memory beside the card, and the timeline of a simulated step.

They have the colours of the other figures. Text is of the page's colour, and lengths are pixels of the page, so that a
phone gets a drawing of its own size instead of a small copy of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def memory_drawing(found: Plan, band: tuple[float, float], width: int) -> str:
    """The peak and what rests between steps by category, under the card's line, and the peak's band in bytes."""
    card, peak, resting = found.spec.gpu.memory_bytes, found.memory.peak, found.memory.resting
    end = max(card, peak.total, band[1]) * 1.04
    scale = (width - 2) / end
    rows = (("at the peak", peak.by_category), ("between steps", resting.by_category))
    parts, bars, top = [], [], 22
    for name, by_category in rows:
        bars.append(top + 17)
        parts += [
            _text(0, top + 11, f"{name}: {size(sum(by_category.values()))}"),
            *_stack(by_category, top + 17, scale),
        ]
        if name == rows[0][0]:
            parts += _whisker(band, top + 17 + _ROW / 2, scale)
        top += 17 + _ROW + _GAP
    at = card * scale
    # beside the bars only, so that it does not cross their names
    lines = "".join(f"M{at:.1f} {start - 3}v{_ROW + 6}" for start in bars)
    parts.append(f'<path class="card" d="{lines}" stroke="{ALARM}" stroke-width="2.5" stroke-dasharray="7 5"/>')
    words, anchor = f"card {size(card)} ({card / _GIB:.4g} GiB)", "end" if at > width / 2 else "start"
    parts.append(_text(at, 12, words, anchor, ALARM))
    alt = (
        f"Memory of a rank: {size(peak.total)} at the peak, {size(band[0])} to {size(band[1])} by the band, of a card"
        f" of {size(card)}: " + ", ".join(f"{name} {size(part)}" for name, part in _named(peak.by_category))
    )
    return _svg(width, top + 22, alt, [*_axis(end, scale, top, _BYTES), *parts])


def _named(by_category: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The categories that hold something, with their titles."""
    for name, row in CATEGORY_ROWS.items():
        if by_category[name] >= 1:
            yield row.title, by_category[name]


def _stack(by_category: Mapping[str, float], top: float, scale: float) -> Iterator[str]:
    start = 0.0
    for name, row in CATEGORY_ROWS.items():
        length = by_category[name] * scale
        if length > 0:
            words = f"{row.title}: {size(by_category[name])}"
            yield (
                f'<rect x="{start:.1f}" y="{top}" width="{length:.1f}" height="{_ROW}" fill="{row.colour}"'
                f' stroke="rgba(20,22,26,0.65)" stroke-width="0.8"><title>{escape(words)}</title></rect>'
            )
        start += length


def _whisker(band: tuple[float, float], middle: float, scale: float) -> Iterator[str]:
    low, high = (value * scale for value in band)
    path = f"M{low:.1f} {middle - 7}v14M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 7}v14"
    for colour, thick in (("var(--paper, #fff)", 5), ("currentColor", 2)):  # readable over any colour
        yield f'<path d="{path}" stroke="{colour}" stroke-width="{thick}" fill="none"/>'


def step_drawing(timeline: Sequence[Mapping[str, Any]], width: int) -> str:
    """The lanes of one rank's simulated step on one clock, exposed communication in red; `timeline` are a record's
    rows, in ns.
    """
    step_ns = max(row["end_ns"] for row in timeline)
    scale = (width - _NAMES - 2) / step_ns
    lanes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in timeline:
        if row["lane"] in _LANES and row["end_ns"] > row["start_ns"]:
            name, colour = _lane_of(row)
            lanes.setdefault(name, {}).setdefault(colour, []).append((row["start_ns"], row["end_ns"]))
    parts, top = [], 4
    for name in sorted(lanes, key=list(_LANES.values()).index):
        parts.append(_text(0, top + 14, name, colour=ALARM if name == "exposed" else "currentColor"))
        parts += [_marks(colour, spans, top, scale) for colour, spans in lanes[name].items()]
        top += _LANE + _BETWEEN
    exposed = sum(end - start for spans in lanes.get("exposed", {}).values() for start, end in spans)
    alt = (
        f"One simulated step of {seconds(step_ns / 1e9)}: lanes {', '.join(lanes)}; communication is exposed for"
        f" {seconds(exposed / 1e9)}, {exposed / step_ns:.0%} of the step"
    )
    axis = _axis(step_ns, scale, top, _NANOSECONDS, start=_NAMES)
    return _svg(width, top + 22, alt, [*axis, *parts])


# lane of a record -> its name here, in their order from the top
_LANES = {
    "compute": "compute", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce",
    "other_communication": "other comm.", "exposed": "exposed",
}  # fmt: skip


def _lane_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """A row's lane, and the colour of its mark; computing has one for each phase."""
    lane, phase = row["lane"], row["phase"]
    colour = LANE_COLOURS.get(f"{lane} in {phase}") or LANE_COLOURS.get(lane) or LANE_COLOURS.get(phase, "#6b7380")
    return _LANES[lane], colour


def _marks(colour: str, spans: Iterable[tuple[float, float]], top: float, scale: float) -> str:
    """All marks of a colour as one path; neighbours that are nearer than half a pixel are one."""
    joined: list[list[float]] = []
    for start, end in sorted((start * scale, end * scale) for start, end in spans):
        if joined and start - joined[-1][1] < _NEAR:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([start, end])
    path = "".join(
        f"M{_NAMES + start:.1f} {top}h{max(end - start, 0.4):.1f}v{_LANE}H{_NAMES + start:.1f}z"
        for start, end in joined
    )
    return f'<path d="{path}" fill="{colour}"/>'


def _axis(
    end: float, scale: float, top: float, units: Sequence[tuple[str, float]], start: float = 0.0
) -> Iterator[str]:
    """Thin lines from the top at round values, and the values below."""
    room = _TICK / scale
    step = next(each for each in _round_steps(room) if each >= room)
    unit, one = next(pair for pair in units if end >= pair[1])
    for place in range(math.floor(end / step) + 1):
        at, words = start + place * step * scale, f"{place * step / one:,.4g} {unit}" if place else "0"
        near_end = start + end * scale - at < _TICK / 3
        anchor = "end" if near_end else "middle" if place else "start"
        yield f'<path d="M{at:.1f} 4V{top}" stroke="{GRID}"/>' + _text(at, top + 15, words, anchor)


def _round_steps(above: float) -> Iterator[float]:
    """1, 2 and 5 times powers of ten."""
    power = 10.0 ** math.floor(math.log10(above))
    yield from (power, 2 * power, 5 * power, 10 * power)


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "currentColor") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" stroke="var(--paper, #fff)"'
        f' stroke-width="3" paint-order="stroke">{escape(words)}</text>'
    )


def _svg(width: int, height: float, alt: str, parts: Iterable[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {width} {height:.0f}" width="{width}"'
        f' height="{height:.0f}" font-size="{_TEXT}">{"".join(parts)}</svg>'
    )
