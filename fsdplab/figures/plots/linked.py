"""One time cursor over three views of one step: each rank's timeline, its memory, and the unsharded units; and the map
of slices.

All views share one time axis: hover draws the cursor through all of them, `linked_at` puts it at an instant and adds
the map of slices. The step is the one whose memory was measured.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.figures.axis_units import AxisUnit, byte_unit
from fsdplab.figures.bars import Mark, Span, downsample, lane, mark_lanes, named_axis
from fsdplab.figures.lines import peak
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.memory import bands, total
from fsdplab.figures.plots.timeline import Lanes, lane_bars, lanes_of, phase_lines, phases
from fsdplab.figures.profile_data import (
    MS,
    Row,
    conditions,
    distinct,
    label,
    rows_of,
    short_unit,
    timeline_of,
    unit_order,
    where,
)
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, GRID, titled
from fsdplab.records import RunRecord

MARKS = 1_800  # of the timeline and of the units' states each: with the memory's edges, at most about 5,000
_CURSOR = "#d0105a"
_LANES = 120  # of units' states: above it neighbouring units share a lane
_LANE = 12  # pixels of a unit's states
_NAMED = 40  # lanes that are named each; of more, the ranks are
_GAP = 34  # pixels between two panels


def linked_view(record: RunRecord, limit: int = MARKS) -> go.Figure:
    """Draw the memory step on one clock: rank timeline, memory of the worst rank, and the units' states on every
    rank.

    Needs `timeline`, `memory` and `life` of that step (ValueError with the remedy). Hover shows the cursor in all.
    """
    step = _step_of(record)
    heights = _heights(step)
    figure, merged = _panels(step, heights, limit)
    title, alt = _finding(record, step.life, step.top)
    _name_peak(figure, step, _domains(heights))
    return _finished(figure, step, title, alt, merged, heights)


def linked_at(record: RunRecord, at_ns: float) -> go.Figure:
    """Draw the linked view with the cursor `at_ns` after the step began, and under it the map of slices at that
    instant.

    ValueError outside of the step. `linked_at(record, 3_000_000)` is 3 ms into the step.
    """
    step = _step_of(record)
    # a fourth panel below the others, with axes of its own; rows of 46 pixels instead of the map's 56
    heights = [*_heights(step), map_height(step.life, 46)]
    figure, merged = _panels(step, heights, MARKS)
    title, alt = finding(record, step.life, at_ns)
    _add_map(figure, step.life, at_ns, _domains(heights))
    return _finished(figure, step, title, alt, merged, heights)


def peak_instant(record: RunRecord) -> int:
    """Return when the worst rank's memory peaks, in ns since the step began: where a cursor starts."""
    life = unit_states(record)
    top = max(memory_of_step(record, life), key=total)
    # clipped to the step: an event of memory may lie just before or after it
    return min(max(0, top["time_ns"]), life.length)


# ---- the step and its panels


@dataclass(frozen=True)
class _Step:
    """What the panels of one step show: its timeline, the memory of the rank with the highest peak, and its units."""

    record: RunRecord
    life: UnitStates
    memory: list[Row]
    rows: list[Row]
    lanes: Lanes

    @property
    def end(self) -> float:
        """Where the clock ends, in ms."""
        return self.life.length / MS

    @property
    def top(self) -> Row:
        """The row of the highest memory."""
        return max(self.memory, key=total)

    @property
    def unit(self) -> AxisUnit:
        """The unit of the memory's axis."""
        return byte_unit([total(self.top)])


def _step_of(record: RunRecord) -> _Step:
    life = unit_states(record)
    memory = memory_of_step(record, life)
    _, rows = timeline_of(record, life.step)
    return _Step(record, life, memory, rows, lanes_of(rows))


def _heights(step: _Step) -> list[int]:
    """Return the pixels of each panel, from the top down."""
    # 22 pixels a lane: compute, two collectives and exposed time of two ranks are 8.1 lanes, 178 pixels
    timeline = round(22 * step.lanes.bottom)
    memory = 160
    lives = len(step.life.keys)
    units = 300
    if lives <= _NAMED:
        # up to 40 lanes have names and 12 pixels each; more of them share 300 pixels without names of units
        units = max(70, _LANE * lives)
    return [timeline, memory, units]


def _panels(step: _Step, heights: list[int], limit: int) -> tuple[go.Figure, str]:
    """Return (the panels on one clock, the subtitle's words on marks that were merged)."""
    domains = _domains(heights)
    of_timeline, of_memory, of_units = domains[:3]  # below them there may be the map of slices
    timeline, merged = lane_bars(step.rows, step.lanes, step.end, limit)
    memory = _memory_bands(step)
    units = _life_bars(step.life, step.end, limit)
    figure = go.Figure([*timeline, *memory, *units])
    # the axis of all three panels, written below the lowest; half a percent longer, so that the last mark has its edge
    clock = dict(range=[0, 1.005 * step.end], anchor="y3", title_text="time since the step began (ms)")
    # a hover draws it through all panels
    cursor = dict(
        showspikes=True, spikemode="across", spikesnap="cursor", spikethickness=2, spikedash="solid", spikecolor=_CURSOR
    )
    peak_bytes = total(step.top)
    # a quarter above the peak is for its number
    memory_axis = dict(
        title_text=f"live memory ({step.unit.symbol})", range=[0, 1.25 * step.unit.of(peak_bytes)], nticks=5
    )
    bottom, _ = of_units
    figure.update_layout(
        xaxis=clock | cursor,
        yaxis=step.lanes.axis(heights[0]) | dict(domain=of_timeline),
        yaxis2=dict(domain=of_memory) | memory_axis,
        yaxis3=_life_axis(step.life) | dict(domain=of_units),
        spikedistance=-1,  # the cursor is drawn wherever the mouse is, also far from any mark
        barmode="overlay",
        hovermode="closest",
        **phase_lines(phases(step.rows), step.end, bottom),
    )
    figure.add_trace(peak(step.top["time_ns"] / MS, peak_bytes, step.unit, yaxis="y2"))
    return figure, merged


def _memory_bands(step: _Step) -> list[go.Scatter]:
    last = step.memory[-1]
    # memory keeps its last level to the end of the step
    end = {**last, "time_ns": max(step.life.length, last["time_ns"])}
    rows = [*step.memory, end]
    times = [round(row["time_ns"] / MS, 4) for row in rows]
    return bands(rows, times, unit=step.unit, yaxis="y2")


def _finished(figure: go.Figure, step: _Step, title: str, alt: str, merged: str, heights: list[int]) -> go.Figure:
    where = conditions(step.record, f"step {step.life.step}", merged)
    # 70 pixels below the panels are for the clock's numbers and title
    height = sum(heights) + _GAP * (len(heights) - 1)
    titled(figure, title, where, alt, height + 70)
    return figure.update_layout(margin_b=70)


def _domains(heights: list[int]) -> list[tuple[float, float]]:
    """Return (bottom, top) of each panel on the paper, from the top down: heights in pixels to shares."""
    # two panels of 100 pixels with a gap of 34: (0.573, 1.0) and (0.0, 0.427) of 234 pixels
    whole = sum(heights) + _GAP * (len(heights) - 1)
    domains, top = [], 0
    for height in heights:
        bottom = top + height  # both in pixels from the upper edge
        domains.append((max(0.0, 1 - bottom / whole), 1 - top / whole))
        top = bottom + _GAP
    return domains


def memory_of_step(record: RunRecord, life: UnitStates) -> list[Row]:
    """Return the memory rows of the rank with the highest peak, `time_ns` moved to the clock of `life`."""
    rows = where(rows_of(record, "memory"), step=life.step)
    if not rows:
        raise ValueError(
            f"{label(record)} has no memory of step {life.step}; run it again with memory=True and --profile 2"
        )
    # one rank at one instant has the highest peak, and its memory is drawn
    worst = max(rows, key=total)["rank"]
    # the memory's clock may begin before or after that of `life`
    shift = record.summary.memory_start_ns.get(worst, life.begin) - life.begin
    of_worst = []
    for row in where(rows, rank=worst):
        of_worst.append({**row, "time_ns": row["time_ns"] + shift})
    return sorted(of_worst, key=lambda row: row["time_ns"])


# ---- the units' states


def _life_bars(life: UnitStates, end: float, limit: int) -> list[go.Bar]:
    """Draw a narrow lane for each rank and unit: pale while the unit is on its way, blue while it is whole."""
    marks = []
    # `keys` has all units of rank 0, then those of rank 1: neighbours that share a lane are mostly of one rank
    shared = _sharing(life)
    for place, (rank, unit) in enumerate(life.keys):
        middle = place // shared + 0.5  # of its lane
        states = life.states[rank, unit]
        ends = [since for since, _ in states[1:]]  # a state lasts until the next
        ends.append(life.length)
        for (since, state), until in zip(states, ends):
            # an empty lane stands for a sharded unit; a state that ended before the step began has no length
            if state == "sharded" or until <= since:
                continue
            words = f" · {hover_text(rank, unit, state)}"
            marks.append(Mark(state, middle, since / MS, until / MS, words))
    drawn, _ = downsample(marks, limit)
    colours = {name: STATE_COLOURS[name] for name in _FILLINGS}
    return mark_lanes(drawn, colours, {}, end, yaxis="y3")


def _sharing(life: UnitStates) -> int:
    """Return how many units share a lane: 1 for up to 120 units times ranks, 2 for up to 240."""
    return -(-len(life.keys) // _LANES)


def _life_axis(life: UnitStates) -> dict[str, Any]:
    """Return the axis of units' lanes, labelled where space allows: every unit of a few, else every rank."""
    count, shared = len(life.keys), _sharing(life)
    texts = {}
    for place, (rank, unit) in enumerate(life.keys):
        words = []
        # a rank's name stands at the first of its units
        if unit == life.units[0]:
            words.append(f"<b>rank {rank}</b>")
        if count <= _NAMED:
            words.append(short_unit(unit))
        if words:
            middle = place // shared + 0.5  # of its lane
            texts[middle] = "  ".join(words).strip()  # a unit may have an empty short name
    # from high to low, so that the first lane is on top
    lanes = (count - 1) // shared + 1
    axis = named_axis(texts, lanes + 0.1, -0.1)
    return axis | dict(tickfont=dict(size=_LANE - 1))


# ---- the cursor, the peak, and the words


def _add_map(figure: go.Figure, life: UnitStates, at_ns: float, domains: list[tuple[float, float]]) -> None:
    """Add the map of slices at an instant, and the cursor through the panels that share the clock, with its time."""
    # x2 and y4 are the map's: y, y2 and y3 are taken by the panels, which share the axis x
    across, down = axes(life)
    for trace in cells(life, at_ns, xaxis="x2", yaxis="y4"):
        figure.add_trace(trace.update(showlegend=False))
    figure.update_layout(
        # the map begins where the clock's title would stand, so the unit of time goes to the numbers
        xaxis=dict(title=None, ticksuffix=" ms"),
        xaxis2=across | dict(domain=[0, 1], anchor="y4"),
        yaxis4=down | dict(domain=domains[3], anchor="x2"),
    )
    at = at_ns / MS
    under_timeline, _ = domains[0]
    bottom, _ = domains[2]  # of the panels that share the clock
    line = dict(color=_CURSOR, width=2.5)
    figure.add_shape(type="line", name="cursor", x0=at, x1=at, y0=bottom, y1=1, yref="paper", line=line)
    figure.add_annotation(
        name="cursor",
        x=at,
        y=under_timeline,
        yref="paper",
        text=f"<b>{at:.2f} ms</b>",
        showarrow=False,
        xanchor="left",
        yanchor="top",
        xshift=4,
        font=dict(color=_CURSOR, size=14),
    )


def _name_peak(figure: go.Figure, step: _Step, domains: list[tuple[float, float]]) -> None:
    """Write the number of the peak, and draw a line from it down through the units' states."""
    at, nbytes = step.top["time_ns"] / MS, total(step.top)
    text = f"<b>peak {size(nbytes)}</b>"
    font = dict(color=ALARM, size=14)
    figure.add_annotation(x=at, y=step.unit.of(nbytes), yref="y2", text=text, showarrow=False, yshift=16, font=font)
    _, top = domains[1]  # of the memory
    bottom, _ = domains[2]  # of the units' states
    line = dict(color=ALARM, width=1.5, dash="dot")
    figure.add_shape(type="line", name="peak", x0=at, x1=at, y0=bottom, y1=top, yref="paper", line=line)


def _finding(record: RunRecord, life: UnitStates, top: Row) -> tuple[str, str]:
    """Return (title, alternative text): the peak, and which units are unsharded then."""
    # an event of memory may lie just outside of the step's own clock
    at_ns = min(max(top["time_ns"], 0), life.length)
    state = life.at(at_ns)
    rank = top["rank"]
    # a unit that is unsharding counts: its memory is taken when its all-gather starts
    whole = [unit for unit in life.units if state.get((rank, unit)) != "sharded"]
    peaks = f"rank {rank} peaks at {size(total(top))} after {top['time_ns'] / MS:.1f} ms"
    title = f"{label(record)}: {peaks}, when {len(whole)} of {len(life.units)} units are unsharded"
    names = ", ".join(whole) or "none"
    return title, f"Timeline, memory and units' states of one step on one clock. {title}: {names}."


# ---- the map of slices: every rank keeps 1/n of every unit, and gets the rest while it computes with it


# the filling of a unit's cell by its state
STATE_COLOURS = {
    "sharded": "rgba(0,0,0,0)",
    "unsharding": "#ccd2d9",
    "unsharded": CATEGORY_COLOURS["unsharded_parameters"],
}
_FILLINGS = ("unsharding", "unsharded")  # the states that are named in the legend
_ENTERED_BY = {"sharded": "reshard", "unsharding": "start_unshard", "unsharded": "finish_unshard"}  # methods of Unit
_ROOM_FOR_NAMES = 20  # units above which their names no longer fit under the cells
_MOST_CELLS = 1_500  # above it only the first ranks are drawn
_WIDTH, _HEIGHT = 0.9, 0.72  # of a unit's cell, in places of the axes
_GREY = "#808488"


States = dict[tuple[int, str], list[tuple[int, str]]]  # of each rank and unit: (ns since the step began, state)


@dataclass(frozen=True)
class UnitStates:
    """The states of every unit on every rank in one step, in ns since the step began.

    `states[rank, unit]` is a list of (since, state), the first at 0: `[(0, "sharded"), (1_000, "unsharding")]`.
    """

    step: int
    begin: int
    length: int
    ranks: list[int]
    units: list[str]
    states: States

    @property
    def keys(self) -> list[tuple[int, str]]:
        """(rank, unit) of every unit on every rank."""
        return [(rank, unit) for rank in self.ranks for unit in self.units]

    @property
    def shown(self) -> list[int]:
        """The ranks that fit on a map: all, or the first of them where units times ranks are very many."""
        # 50 units: 30 ranks fit; 2,000 units: none would, so the first rank is drawn
        fitting = _MOST_CELLS // len(self.units)
        return self.ranks[: max(1, fitting)]

    def at(self, at_ns: float) -> dict[tuple[int, str], str]:
        """Return every unit's state on every rank at an instant; ValueError for one outside of the step."""
        if not 0 <= at_ns <= self.length:
            raise ValueError(
                f"at_ns is {at_ns:.0f}; expected 0 to {self.length}, ns since step {self.step} began; choose an instant"
                " of the step"
            )
        state_then = {}
        for key, changes in self.states.items():
            # never empty, as every list of states begins at 0
            so_far = [state for since, state in changes if since <= at_ns]
            state_then[key] = so_far[-1]
        return state_then


def unit_states(record: RunRecord) -> UnitStates:
    """Return the states in the memory step, or in the first step that has them; ValueError with the remedy without any.

    The step begins where its timeline does on the first rank, else by the memory's clock, else at the first row.
    """
    every_row = rows_of(record, "life")
    measured = distinct(record.table("memory"), "step")
    with_states = distinct(every_row, "step")
    # the panels need one step that has both tables; without memory, the first step with states
    step = min(with_states & measured or with_states)
    rows = where(every_row, step=step)
    timeline = where(record.table("timeline"), step=step)
    # ns on the clock of the trace; the states' rows have the same clock
    begins = [row["start_ns"] for row in where(timeline, lane="step")]
    if not begins and step in measured:
        begins = list(record.summary.memory_start_ns.values())
    # without a timeline the last change of a state is the step's end, as far as it is known
    instants = distinct(rows, "time_ns")
    begin = min(begins or instants)
    end = max(instants | distinct(timeline, "end_ns"))
    ranks = sorted(distinct(rows, "rank"))
    units = unit_order(record, distinct(rows, "unit"))
    return UnitStates(step, begin, end - begin, ranks, units, _states(rows, ranks, units, begin))


def _states(rows: list[Row], ranks: list[int], units: list[str], begin: int) -> States:
    """Return (since, state) of every unit on every rank; one without a row is sharded all the time."""
    states: States = {}
    for rank in ranks:
        for unit in units:
            states[rank, unit] = [(0, "sharded")]
    by_unit = grouped(rows, lambda row: (row["rank"], row["unit"]))
    for key, of_unit in by_unit.items():
        of_unit.sort(key=lambda row: row["time_ns"])
        first = "sharded"
        if of_unit[0]["state"] == "sharded":  # a unit that is resharded was whole
            first = "unsharded"
        states[key] = [(0, first)]
        for row in of_unit:
            # a row from just before the step's own start counts as its first instant
            since = max(0, row["time_ns"] - begin)
            states[key].append((since, row["state"]))
    return states


def hover_text(rank: int, unit: str, state: str) -> str:
    """Return a unit's state, and what set it: `rank 0, blocks.3: unsharding (start_unshard, unit.py line 148)`."""
    return f"rank {rank}, {unit}: {state_words(state)}"


def state_words(state: str) -> str:
    """Return a state and the engine's method that set it: `unsharding (start_unshard, unit.py line 148)`."""
    method = _ENTERED_BY[state]
    return f"{state} ({method}, unit.py line {_lines_of_unit()[method]})"


@cache
def _lines_of_unit() -> dict[str, int]:
    """Return where each method of the engine's Unit begins, read from its source: importing it would import torch."""
    found = find_spec("fsdplab.engine.core.unit")
    assert found is not None and found.origin is not None, "the engine is a part of this package"
    source = Path(found.origin).read_text(encoding="utf-8")
    tree = ast.parse(source)
    # exactly one class of this name: otherwise unpacking raises
    (unit,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Unit"]
    return {node.name: node.lineno for node in unit.body if isinstance(node, ast.FunctionDef)}


def slice_map(record: RunRecord, at_ns: float) -> go.Figure:
    """Draw ranks x units at one instant: each cell is a unit, filled with the rank's own shard and what is unsharded.

    `at_ns`: ns since the memory step began, 0 to its length (ValueError names it). Needs a `life` table: the lab's
    engine, with a profile.
    """
    life = unit_states(record)
    title, alt = finding(record, life, at_ns)
    where = conditions(record, f"step {life.step}, {at_ns / MS:.2f} ms after it began")
    where += f"; cell: one unit, 1/{len(life.ranks)} of it a rank"
    if life.shown != life.ranks:
        where += f"; the first {plural(len(life.shown), 'rank')}"
    return titled(cells_figure(life, at_ns), title, where, alt, map_height(life) + 60)


def cells_figure(life: UnitStates, at_ns: float) -> go.Figure:
    """Draw the cells at an instant with their axes, without a title; the first trace has one for each rank and unit."""
    # bars overlap on purpose: a rank's own shard lies over its unit's cell
    across, down = axes(life)
    figure = go.Figure(cells(life, at_ns)).update_layout(barmode="overlay", bargap=0)
    return figure.update_xaxes(across).update_yaxes(down)


def map_height(life: UnitStates, row: int = 56) -> int:
    """Return the pixels of the map's rows, each at most `row` high."""
    return min(row, 700 // len(life.shown)) * len(life.shown)


def cells(life: UnitStates, at_ns: float, **place: str) -> list[go.Bar]:
    """Draw every unit's cell on every rank, filled by its state, with the rank's own shard over it."""
    states = life.at(at_ns)
    # each rank's own part of a cell's width; on 4 ranks, rank 1 has the second quarter
    share = _WIDTH / len(life.ranks)
    wholes, shards, fillings = [], [], []  # one of each a cell
    for row, rank in enumerate(life.shown):
        for column, unit in enumerate(life.units):
            state = states[rank, unit]
            hover = hover_text(rank, unit, state)
            # a column's middle is its number: unit 3 fills 2.55 to 3.45
            left = column - _WIDTH / 2
            wholes.append(Span(row, left, _WIDTH, hover=hover))
            shards.append(Span(row, left + share * row, share, hover=hover))
            fillings.append(STATE_COLOURS[state])
    look: dict[str, Any] = dict(height=_HEIGHT, marker_line_color=_GREY, **place)
    # one trace has the cells of all states, each with a colour of its own, which a page exchanges as time goes on
    whole = lane("unit", "#ffffff", wholes, showlegend=False, **look)
    whole.update(marker_color=fillings)
    outside = Span(-9, 0, 0)  # a bar outside of the plot gives each filling its place in the legend
    legend = [lane(name, STATE_COLOURS[name], [outside], **look) for name in _FILLINGS]
    own = lane("own shard", CATEGORY_COLOURS["sharded_parameters"], shards, **look)
    return [whole, *legend, own]


def axes(life: UnitStates) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the axes of the cells' columns, and of their rows with the first rank on top."""
    # of 50 units every third is named, so that at most 20 names stand under the cells
    every = -(-len(life.units) // _ROOM_FOR_NAMES)
    units = {}
    for column in range(0, len(life.units), every):
        units[column] = life.units[column]
    ranks = {row: f"rank {rank}" for row, rank in enumerate(life.shown)}
    across = named_axis(units, -0.55, len(life.units) - 0.45) | dict(linecolor=GRID)
    down = named_axis(ranks, len(life.shown) - 0.45, -0.55)
    return across, down


def finding(record: RunRecord, life: UnitStates, at_ns: float) -> tuple[str, str]:
    """Return (title, alternative text): which units are whole at the instant, on the first rank."""
    states = life.at(at_ns)
    rank = life.ranks[0]
    whole, coming = [], []
    for unit in life.units:
        state = states[rank, unit]
        # a unit on its way is named apart: nothing can be computed with it yet
        if state == "unsharded":
            whole.append(unit)
        elif state == "unsharding":
            coming.append(unit)
    units = plural(len(life.units), "unit")
    title = f"{label(record)}: {len(whole)} of {units} whole on rank {rank}"
    if whole:
        title += f" ({_few(whole)})"
    if coming:
        their = "its" if len(coming) == 1 else "their"
        title += f", {_few(coming)} on {their} way"
    share = f"1/{len(life.ranks)}"
    alt = f"Map of ranks by units {at_ns / MS:.2f} ms into the step. {title}; the others hold {share} each."
    return title, alt


def _few(names: list[str]) -> str:
    """Return at most three names; of more the first two and how many others."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{', '.join(names[:2])} and {len(names) - 2} more"
