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
from fsdplab.figures.profile_data import MS, Row, distinct, duration, label, percent, where
from fsdplab.figures.style import EXPOSED_COLOURS, GRID, LANE_COLOURS, plot_width, titled, words_width
from fsdplab.profiling.intervals import subtract, union, within
from fsdplab.profiling.step_summary import StepSummary
from fsdplab.records import RunRecord

_OFF_LINK = OFF_LINK.removeprefix(", ")
COLOURS = {**LANE_COLOURS, _OFF_LINK: EXPOSED_COLOURS["copying"]}
SHOWN = ("compute", *profile.COLLECTIVES, "exposed")
_EXPOSED_HEIGHT = 0.8  # lanes that the strip of exposed time takes
_GAP = 0.5  # lanes between two ranks
_LINE = 15  # pixels of a line of text
_MOST_PHASES = 40
_BRIEF = 0.002  # part of the compute below which a stretch of another phase is a hook

Phase = tuple[float, str]  # when it begins, in ms, and its name


@dataclass(frozen=True)
class Lanes:
    """The position of each rank's lanes, from the top down: `middle[rank, lane]` on an axis that ends at `bottom`."""

    middle: dict[tuple[int, str], float]
    bottom: float

    def axis(self, height: float) -> dict[str, Any]:
        """Return the axis, which is `height` pixels high, with the names of lanes or of ranks."""
        # a lane that is lower than a line of text cannot have a name of its own
        is_readable = height >= _LINE * self.bottom
        names = self._names_of_lanes() if is_readable else self._names_of_ranks(height)
        return named_axis(names, self.bottom + 0.15, -0.15)

    def _names_of_ranks(self, height: float) -> dict[float, str]:
        """Return the ranks' names, where a lane is less than a line of text high: its colours tell the lanes."""
        places: dict[int, list[float]] = {}
        for (rank, _), at in self.middle.items():
            places.setdefault(rank, []).append(at)
        # 64 ranks on 480 pixels: 7.5 pixels each, so every second one is named
        every = max(1, math.ceil(_LINE * len(places) / height))  # so many ranks have the space of one name
        names = {}
        for index, (rank, of_rank) in enumerate(places.items()):
            # a rank's name stands at the middle of its lanes
            middle = sum(of_rank) / len(of_rank)
            names[middle] = ""  # a tick without a name, where a name would lie on the one before
            if index % every == 0:
                names[middle] = f"<b>rank {rank}</b>"
        return names

    def _names_of_lanes(self) -> dict[float, str]:
        """Return the lanes' names, and each rank's before its first."""
        names = {}
        before = None
        for (rank, lane), at in self.middle.items():
            names[at] = written(lane).replace("communication", "comm.")
            # `middle` has the lanes of one rank after the other: a new rank begins here
            if rank != before:
                names[at] = f"<b>rank {rank}</b>  {names[at]}"
            before = rank
        return names


def lanes_of(rows: list[Row]) -> Lanes:
    """Place the lanes of every rank of a step; a lane that no rank uses is left out."""
    used = distinct(rows, "lane")
    heights = {}
    for lane in SHOWN:
        if lane in used:
            heights[lane] = _EXPOSED_HEIGHT if lane == "exposed" else 1.0
    middle = {}
    at = 0.0  # where the next lane begins
    # all ranks have the same lanes, also one that does not use each: ranks are compared by eye
    for rank in sorted(_ranks(rows)):
        for lane, height in heights.items():
            middle[rank, lane] = at + height / 2
            at += height
        at += _GAP
    # without the gap behind the last rank
    return Lanes(middle, max(0.0, at - _GAP))


def rank_timeline(record: RunRecord, step: int | None = None, limit: int = LIMIT, until_ms: float = 0.0) -> go.Figure:
    """Draw the ranks stacked on one clock: compute, each collective, and exposed time in red.

    `step` is the profiled one of median length by default. Needs a `timeline` table (ValueError with the remedy without
    one). At most `limit` marks are drawn. The clock goes to `until_ms` where the step is shorter: figures of two steps
    that both go to 1,500 can be compared by eye. Hover names the unit.
    """
    step, rows = profile.timeline_of(record, step)
    lanes = lanes_of(rows)
    end_ns = max(distinct(rows, "end_ns"))
    # until the slowest rank ends, in ms since the first began
    end = max(until_ms, (end_ns - step_start(rows)) / MS)
    bars, merged = lane_bars(rows, lanes, end, limit)
    # 34 pixels a lane while they fit in 1500, then fewer, down to 9: 200 lanes are 1800 pixels high
    lane_height = min(34.0, max(9.0, 1500 / lanes.bottom))  # pixels
    height = round(lane_height * lanes.bottom)
    clock = dict(title_text="time since the step began (ms)", range=[0, 1.005 * end])
    above = phase_lines(phases(rows), end)
    layout = dict(barmode="overlay", xaxis=clock, yaxis=lanes.axis(height), **above)
    figure = go.Figure(bars, layout)
    title, words = _finding(record, rows)
    ranks = plural(len(_ranks(rows)), "rank")
    alt = f"Timeline of {ranks} through step {step}. {words}"
    which, slower = _which_step(record, step), profile.slower_words(record)
    where = profile.conditions(record, which, slower, merged)
    return titled(figure, title, where, alt, 62 + height)


def _which_step(record: RunRecord, step: int) -> str:
    steps = distinct(record.table("breakdown"), "step")
    if len(steps) < 2:
        return f"step {step}"
    return f"step {step} (title: mean of {len(steps)} profiled steps)"


def step_start(rows: list[Row]) -> int:
    """Return when the first rank began the step, in ns."""
    whole_steps = where(rows, lane="step")
    # without rows of whole steps, the first mark is the beginning
    starts = distinct(whole_steps or rows, "start_ns")
    return min(starts)


def _ranks(rows: list[Row]) -> set[int]:
    return distinct(rows, "rank")


# ---- the marks of the lanes


def lane_bars(rows: list[Row], lanes: Lanes, end: float, limit: int) -> tuple[list[go.Bar], str]:
    """Return (the bars of a step's lanes on a clock of `end` ms, the subtitle's words on merged neighbours)."""
    origin = step_start(rows)
    marks = []
    for row in uncovered(rows):
        # rows of the lane "step" and of other lanes that are not shown have no place
        if (row["rank"], row["lane"]) in lanes.middle:
            marks.append(_mark(row, lanes, origin))
    drawn, merged = downsample(marks, limit)
    # exposed time is a thinner strip; its traces come last, so that they lie over the others
    bars = mark_lanes(drawn, COLOURS, {"exposed": 0.5, _OFF_LINK: 0.5}, end)
    by_name = {bar.name: bar for bar in bars}
    if _OFF_LINK in by_name and "exposed" in by_name:
        # beside copying and waiting, the red strip is what remains of exposed time
        by_name["exposed"].update(name="exposed on the link")
    return bars, merged


def uncovered(rows: list[Row]) -> list[Row]:
    """Return the rows, with exposed ones cut where their rank computes.

    A record has neighbouring pieces of exposed time as one row where there are many, also across short computing. Drawn
    so, the red strip would be longer than the exposed time that the title states.
    """
    # 1. when each rank computes, as sorted, disjoint intervals
    computing = {}
    of_ranks = grouped(where(rows, lane="compute"), lambda row: row["rank"])
    for rank, of_rank in of_ranks.items():
        intervals = [(row["start_ns"], row["end_ns"]) for row in of_rank]
        computing[rank] = union(intervals)
    # 2. exposed 0 to 10 with computing 4 to 6 meanwhile: two pieces, 0 to 4 and 6 to 10
    cut = []
    for row in rows:
        rank = row["rank"]
        if row["lane"] != "exposed" or rank not in computing:
            cut.append(row)
            continue
        exposed = (row["start_ns"], row["end_ns"])
        meanwhile = within(computing[rank], *exposed)
        for start, end in subtract([exposed], meanwhile):
            piece = {"start_ns": int(start), "end_ns": int(end)}
            cut.append({**row, **piece})
    return cut


def _mark(row: Row, lanes: Lanes, origin: int) -> Mark:
    """Return a row's bar, named by its unit; exposed time says in which collective."""
    lane, phase = row["lane"], row["phase"]
    unit = row["unit"].replace(NO_UNIT, "")
    # the group is the colour and the entry of the legend
    group, name, short = lane, row["name"], ""
    if lane == "compute":
        name = "compute"
        group = "compute in backward" if phase == "backward" else "compute in forward"
    # " · " in front of a name keeps its words out of the bar, which shows what is left of the first " · " alone
    words = [unit, phase, name]
    name = " · ".join(filter(None, words))
    if lane == "exposed":
        name = f" · exposed: {name}"
        group = _OFF_LINK if row["name"].endswith(OFF_LINK) else "exposed"
    elif phase == "optimizer":
        group, name = "optimizer", " · optimizer"
    # "blocks.3" as a whole where the bar is long enough, else "3"
    elif unit:
        short = profile.short_unit(unit)
    else:
        name = f" · {name}"  # a bar has no label where no unit has a name
    middle = lanes.middle[row["rank"], lane]
    start = (row["start_ns"] - origin) / MS
    end = (row["end_ns"] - origin) / MS
    return Mark(group, middle, start, end, name, short)


# ---- the phases above the lanes


def phases(rows: list[Row]) -> list[Phase]:
    """Return the phases, as the first rank's compute goes through them; the first begins at 0.

    A hook's few microseconds of another phase in the middle of one are no change of phase.
    """
    first = min(_ranks(rows))
    origin = step_start(rows)
    # collectives begin before the compute that needs them or end after it, so compute alone tells the phases
    computed = [row for row in where(rows, rank=first, lane="compute") if row["phase"]]
    computed.sort(key=lambda row: row["start_ns"])
    whole = _length_of(computed)
    found: list[Phase] = []
    # each stretch of neighbours with one phase: forward, backward, optimizer; again forward with micro-batches
    for name, stretch in groupby(computed, lambda row: row["phase"]):
        stretch_rows = list(stretch)
        is_hook = _length_of(stretch_rows) < _BRIEF * whole
        # behind a hook that was skipped, the phase before it goes on
        goes_on = bool(found) and found[-1][1] == name
        if is_hook or goes_on:
            continue
        # what comes before the first compute, such as the first all-gather, belongs to the first phase
        begin = 0.0
        if found:
            begin = (stretch_rows[0]["start_ns"] - origin) / MS
        found.append((begin, name))
    return found


def _length_of(rows: list[Row]) -> int:
    return sum(row["end_ns"] - row["start_ns"] for row in rows)


def phase_lines(found: Sequence[Phase], end: float, bottom: float = 0) -> dict[str, list[dict[str, Any]]]:
    """Return what a layout needs: a line where each phase begins, and the phase's name above the lanes.

    Of names that would stand in each other's place only that of the longest phase is written, and of very many phases
    only the longest have a line.
    """
    taken: list[tuple[float, float]] = []  # pixels from the left edge that names fill
    lines, names = [], []
    look = dict(type="line", line=dict(color=GRID, width=2), yref="paper", layer="below")
    above = dict(y=1, yref="paper", yanchor="bottom", showarrow=False, font=dict(size=14))
    # the longest first: each takes its place before shorter ones can
    for begin, name in _longest_first(found, end)[:_MOST_PHASES]:
        lines.append(dict(x0=begin, x1=begin, y0=bottom, y1=1, **look))
        width = words_width(f"{name} → ", 14)  # pixels
        # about where plotly will write it; exact pixels are known in the browser alone
        left = begin / end * plot_width()
        side = dict(xanchor="left", xshift=2)
        if begin > 0.9 * end:  # beside the right edge the name stands before the line
            left -= width - 22
            side = dict(xanchor="right", xshift=22)
        right = left + width
        # the name would overlap one that is written: the phase keeps its line
        if any(left < last and first < right for first, last in taken):
            continue
        taken.append((left, right))
        names.append(dict(x=begin, text=f"{name} →", **above, **side))
    return {"shapes": lines, "annotations": names}


def _longest_first(found: Sequence[Phase], end: float) -> list[Phase]:
    ends = [begin for begin, _ in found[1:]]  # a phase lasts until the next
    ends.append(end)
    lengths = []
    for (begin, _), until in zip(found, ends):
        lengths.append(until - begin)
    order = sorted(range(len(found)), key=lambda index: -lengths[index])
    return [found[index] for index in order]


# ---- words


def _finding(record: RunRecord, rows: list[Row]) -> tuple[str, str]:
    """Return (title, alternative text): how much of a profiled step is exposed, a mean that is the same everywhere."""
    split = profile.breakdown_of(record)
    if split is None:
        exposed = where(rows, lane="exposed")
        # a timeline without a breakdown table, so the title is of the drawn step and not a mean
        red = _length_of(exposed) / len(_ranks(rows))  # mean of the ranks
        title = f"{label(record)}: {duration(red)} of communication is exposed in the step"
        return title, f"{title}."
    title = f"{label(record)}: {_exposed_words(split, rows)}"
    hidden = percent(split.overlapped_ns, split.communication_ns)
    communication = duration(split.communication_ns)
    words = f"{hidden} of {communication} of communication is hidden under compute"
    return title, f"{title}; on rank {split.rank}, the most exposed, {words}."


def _exposed_words(split: StepSummary, rows: list[Row]) -> str:
    """Say how much is exposed; where the rows tell copies and waiting apart, how much of it on the link."""
    step = duration(split.step_ns)
    # no row is off the link where all exposed time is on it, and in records of earlier versions
    told_apart = any(row["name"].endswith(OFF_LINK) for row in rows)
    if split.on_link_ns is None or not told_apart:
        share = percent(split.exposed_ns, split.step_ns)
        return f"{share} of the step is exposed communication ({duration(split.exposed_ns)} of {step})"
    on_link = duration(split.on_link_ns)
    besides = duration(split.exposed_ns - split.on_link_ns)
    return f"{on_link} of {step} are exposed on the link, and {besides} in {_OFF_LINK}"
