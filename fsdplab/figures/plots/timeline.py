"""The timeline of one step on every rank: computing and collectives on one clock, exposed communication in red.

Exposed time in which a message moves is red; copies and waiting have a lighter red, since no faster link helps there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.common.words import NO_UNIT, OFF_LINK, plural
from fsdplab.figures import profile_data as profile
from fsdplab.figures.bars import LIMIT, Mark, downsample, mark_lanes, named_axis, written
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, Row, duration, label, percent
from fsdplab.figures.style import EXPOSED_COLOURS, GRID, LANE_COLOURS, plot_width, titled, words_width
from fsdplab.profiling.intervals import subtract, union, within
from fsdplab.profiling.step_summary import StepSummary
from fsdplab.records import RunRecord

_OFF_LINK = OFF_LINK.removeprefix(", ")
_COLOURS = {**LANE_COLOURS, _OFF_LINK: EXPOSED_COLOURS["copying"]}
SHOWN = ("compute", *profile.COLLECTIVES, "exposed")
_GAP = 0.5  # lanes between two ranks
_LINE = 15  # pixels of a line of text
_MOST_PHASES = 40
_BRIEF = 0.002  # part of the compute below which a stretch of another phase is a hook


@dataclass(frozen=True)
class Lanes:
    """The position of each rank's lanes, from the top down: `middle[rank, lane]` on an axis that ends at `bottom`."""

    middle: dict[tuple[int, str], float]
    bottom: float

    def axis(self, height: float) -> dict[str, Any]:
        """The axis, which is `height` pixels high: the lanes' names, each rank's before its first; ranks alone where a
        lane is less than a line of text high: its colours tell the lanes.
        """
        first = dict(reversed(self.middle))
        if height < _LINE * self.bottom:
            places = [[at for (of, _), at in self.middle.items() if of == rank] for rank in first]
            every = max(1, math.ceil(_LINE * len(first) / height))
            texts = [f"<b>rank {rank}</b>" if index % every == 0 else "" for index, rank in enumerate(first)]
            names = {sum(each) / len(each): text for each, text in zip(places, texts)}
        else:
            ranks = {(rank, lane): f"<b>rank {rank}</b>  " for rank, lane in first.items()}
            names = {
                at: ranks.get(key, "") + written(key[1]).replace("communication", "comm.")
                for key, at in self.middle.items()
            }
        return named_axis(names, self.bottom + 0.15, -0.15)


def lanes_of(rows: list[Row]) -> Lanes:
    """The lanes of every rank of a step; a lane that no rank uses is left out."""
    used = {row["lane"] for row in rows}
    middle, at = {}, 0.0
    for rank in sorted({row["rank"] for row in rows}):
        for lane in (lane for lane in SHOWN if lane in used):
            middle[rank, lane] = at + (0.5 if lane != "exposed" else 0.4)
            at += 1 if lane != "exposed" else 0.8
        at += _GAP
    return Lanes(middle, max(0.0, at - _GAP))


def rank_timeline(record: RunRecord, step: int | None = None, limit: int = LIMIT) -> go.Figure:
    """Ranks stacked on one clock: compute, each collective, and exposed time in red.

    `step` is the profiled one of median length by default. Needs a `timeline` table (ValueError with the remedy without
    one). At most `limit` marks are drawn. Hover names the unit.
    """
    step, rows = profile.timeline_of(record, step)
    lanes, end = lanes_of(rows), (max(row["end_ns"] for row in rows) - step_start(rows)) / MS
    bars, merged = lane_bars(rows, lanes, end, limit)
    height = round(min(34.0, max(9.0, 1500 / lanes.bottom)) * lanes.bottom)
    clock = dict(title_text="time since the step began (ms)", range=[0, 1.005 * end])
    layout = dict(barmode="overlay", xaxis=clock, yaxis=lanes.axis(height), **phase_lines(phases(rows), end))
    figure = go.Figure(bars, layout)
    title, words = _finding(record, rows)
    alt = f"Timeline of {plural(len(_ranks(rows)), 'rank')} through step {step}. {words}"
    steps = len({row["step"] for row in record.table("breakdown")})
    drawn = f"step {step} (title: mean of {steps} profiled steps)" if steps > 1 else f"step {step}"
    where = profile.conditions(record, drawn, profile.slower_words(record), merged)
    return titled(figure, title, where, alt, 62 + height)


def step_start(rows: list[Row]) -> int:
    """When the first rank began the step, in ns."""
    whole = [row["start_ns"] for row in rows if row["lane"] == "step"]
    return min(whole or [row["start_ns"] for row in rows])


def _ranks(rows: list[Row]) -> set[int]:
    return {row["rank"] for row in rows}


def lane_bars(rows: list[Row], lanes: Lanes, end: float, limit: int) -> tuple[list[go.Bar], str]:
    """(the bars of a step's lanes on a clock of `end` ms, the subtitle's words on neighbours that were merged)."""
    origin = step_start(rows)
    marks = [_mark(row, lanes, origin) for row in uncovered(rows) if (row["rank"], row["lane"]) in lanes.middle]
    drawn, merged = downsample(marks, limit)
    bars = mark_lanes(drawn, _COLOURS, {"exposed": 0.5, _OFF_LINK: 0.5}, end)
    if bars and bars[-1].name == _OFF_LINK:
        bars[-2].update(name="exposed on the link")
    return bars, merged


def uncovered(rows: list[Row]) -> list[Row]:
    """The rows, with exposed ones cut where their rank computes.

    A record has neighbouring pieces of exposed time as one row where there are many, also across short computing. Drawn
    so, the red strip would be longer than the exposed time that the title states.
    """
    computed = grouped((row for row in rows if row["lane"] == "compute"), lambda row: row["rank"])
    whole = {rank: union([(row["start_ns"], row["end_ns"]) for row in own]) for rank, own in computed.items()}
    found = []
    for row in rows:
        if row["lane"] != "exposed" or row["rank"] not in whole:
            found.append(row)
            continue
        beside = within(whole[row["rank"]], row["start_ns"], row["end_ns"])
        pieces = subtract([(row["start_ns"], row["end_ns"])], beside)
        found += [{**row, "start_ns": int(start), "end_ns": int(end)} for start, end in pieces]
    return found


def _mark(row: Row, lanes: Lanes, origin: int) -> Mark:
    """A row's bar, named by its unit; exposed time says in which collective."""
    lane, phase, unit = row["lane"], row["phase"], "" if row["unit"] == NO_UNIT else row["unit"]
    what = " · ".join(filter(None, [unit, phase, row["name"] if lane != "compute" else "compute"]))
    place = lanes.middle[row["rank"], lane]
    start, end = ((row[name] - origin) / MS for name in ("start_ns", "end_ns"))
    if lane == "exposed":
        group = _OFF_LINK if row["name"].endswith(OFF_LINK) else "exposed"
        return Mark(group, place, start, end, f" · exposed: {what}")
    if phase == "optimizer":
        return Mark("optimizer", place, start, end, " · optimizer")
    group = lane if lane != "compute" else f"compute in {'backward' if phase == 'backward' else 'forward'}"
    what = what if unit else f" · {what}"  # no label where no unit has a name
    return Mark(group, place, start, end, what, profile.short_unit(unit))


def phases(rows: list[Row]) -> list[tuple[float, str]]:
    """(begin in ms, name) of the phases, as the first rank's compute goes through them.

    A hook's few microseconds of another phase in the middle of one are no change of phase.
    """
    first, origin = min(_ranks(rows)), step_start(rows)
    computed = [row for row in rows if row["rank"] == first and row["lane"] == "compute" and row["phase"]]
    whole = sum(row["end_ns"] - row["start_ns"] for row in computed)
    found: list[tuple[float, str]] = []
    for name, run in groupby(sorted(computed, key=lambda row: row["start_ns"]), lambda row: row["phase"]):
        own = list(run)
        spent = sum(row["end_ns"] - row["start_ns"] for row in own)
        if spent >= _BRIEF * whole and (not found or found[-1][1] != name):
            found.append(((own[0]["start_ns"] - origin) / MS, name))
    return [(0.0, found[0][1]), *found[1:]] if found else []


def phase_lines(found: Sequence[tuple[float, str]], end: float, bottom: float = 0) -> dict[str, list[dict[str, Any]]]:
    """Of a layout: a line where each phase begins, and the phase's name above the lanes. Of names that would stand in
    each other's place that of the longest phase, and of very many phases the longest.
    """
    ends = [*(begin for begin, _ in found[1:]), end]
    longest = sorted(range(len(found)), key=lambda index: found[index][0] - ends[index])[:_MOST_PHASES]
    taken: list[tuple[float, float]] = []
    lines, names = [], []
    for begin, name in (found[index] for index in longest):
        late = begin > 0.9 * end  # beside the right edge the name stands before the line
        width = words_width(f"{name} → ", 14)
        left = begin / end * plot_width() - (width - 22 if late else 0)
        place = dict(x0=begin, x1=begin, y0=bottom, y1=1, yref="paper", layer="below")
        lines.append(dict(type="line", line=dict(color=GRID, width=2), **place))
        if all(left + width <= first or left >= last for first, last in taken):
            taken.append((left, left + width))
            side = dict(xanchor="right", xshift=22) if late else dict(xanchor="left", xshift=2)
            above = dict(y=1, yref="paper", yanchor="bottom", showarrow=False, font=dict(size=14))
            names.append(dict(x=begin, text=f"{name} →", **above, **side))
    return {"shapes": lines, "annotations": names}


def _finding(record: RunRecord, rows: list[Row]) -> tuple[str, str]:
    """(title, the alternative text): how much of a profiled step is exposed, the mean that is called so everywhere."""
    split = profile.breakdown_of(record)
    if split is None:
        red = sum(row["end_ns"] - row["start_ns"] for row in rows if row["lane"] == "exposed") / len(_ranks(rows))
        title = f"{label(record)}: {duration(red)} of communication is exposed in the step"
        return title, f"{title}."
    title = f"{label(record)}: {_exposed_words(split, rows)}"
    hidden = percent(split.overlapped_ns, split.communication_ns)
    words = f"{hidden} of {duration(split.communication_ns)} of communication is hidden under compute"
    return title, f"{title}; on rank {split.rank}, the most exposed, {words}."


def _exposed_words(split: StepSummary, rows: list[Row]) -> str:
    """How much is exposed; where the rows tell copies and waiting apart, how much of it on the link."""
    step = duration(split.step_ns)
    if split.on_link_ns is None or not any(row["name"].endswith(OFF_LINK) for row in rows):
        share = percent(split.exposed_ns, split.step_ns)
        return f"{share} of the step is exposed communication ({duration(split.exposed_ns)} of {step})"
    besides = duration(split.exposed_ns - split.on_link_ns)
    return f"{duration(split.on_link_ns)} of {step} are exposed on the link, and {besides} in {_OFF_LINK}"
