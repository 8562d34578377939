"""One time cursor over three views of one step: each rank's timeline, its memory, and the unsharded units.

All views share one time axis: hover draws the cursor through all of them, `linked_at` puts it at an instant and adds
the map of slices. The step is the one whose memory was measured.
"""

from __future__ import annotations

from typing import Any

from fsdplab.common.sizes import size
from fsdplab.figures.lanes import Mark, downsample, mark_lanes, named_axis
from fsdplab.figures.lines import peak
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots import shard_map
from fsdplab.figures.plots.memory import MB, bands, total
from fsdplab.figures.plots.shard_map import UnitStates, unit_states
from fsdplab.figures.plots.timeline import lane_bars, lanes_of, phase_lines, phases
from fsdplab.figures.profile_data import MS, Row, conditions, label, rows_of, short_unit, timeline_of
from fsdplab.figures.style import ALARM, titled
from fsdplab.records import RunRecord

MARKS = 1_800  # of the timeline and of the units' states each: with the memory's edges, at most about 5,000
_CURSOR = "#d0105a"
_LANES = 120  # of units' states: above it neighbouring units share a lane
_LANE = 12  # pixels of a unit's states
_NAMED = 40  # lanes that are named each; of more, the ranks are
_GAP = 34  # pixels between two panels


def linked_view(record: RunRecord, limit: int = MARKS) -> go.Figure:
    """The memory step on one clock: rank timeline, memory of the worst rank (MB), and the units' states on every rank.

    Needs `timeline`, `memory` and `life` of that step (ValueError with the remedy). Hover shows the cursor in all.
    """
    return _linked(record, None, limit)


def linked_at(record: RunRecord, at_ns: float) -> go.Figure:
    """The linked view with the cursor `at_ns` after the step began, and under it the map of slices at that instant.

    ValueError outside of the step. `linked_at(record, 3_000_000)` is 3 ms into the step.
    """
    return _linked(record, at_ns, MARKS)


def peak_instant(record: RunRecord) -> int:
    """When the worst rank's memory peaks, in ns since the step began: where a cursor starts."""
    life = unit_states(record)
    return min(max(0, max(memory_of_step(record, life), key=total)["time_ns"]), life.length)


def _linked(record: RunRecord, at_ns: float | None, limit: int) -> go.Figure:
    life = unit_states(record)
    memory = memory_of_step(record, life)
    _, rows = timeline_of(record, life.step)
    lanes, end = lanes_of(rows), life.length / MS
    heights = [round(22 * lanes.bottom), 160, max(70, _LANE * len(life.keys)) if len(life.keys) <= _NAMED else 300]
    heights += [] if at_ns is None else [shard_map.map_height(life, 46)]
    domains, top = _domains(heights), max(memory, key=total)
    timeline, merged = lane_bars(rows, lanes, end, limit)
    drawn = [*memory, {**memory[-1], "time_ns": max(life.length, memory[-1]["time_ns"])}]
    stack = bands(drawn, [round(row["time_ns"] / MS, 4) for row in drawn], yaxis="y2")
    figure = go.Figure([*timeline, *stack, *_life_bars(life, end, limit)])
    spike = dict(
        showspikes=True, spikemode="across", spikesnap="cursor", spikethickness=2, spikedash="solid", spikecolor=_CURSOR
    )  # fmt: skip
    clock = dict(range=[0, 1.005 * end], anchor="y3", title_text="time since the step began (ms)")
    figure.update_layout(
        xaxis=clock | spike,
        yaxis=lanes.axis(heights[0]) | dict(domain=domains[0]),
        yaxis2=dict(domain=domains[1], title_text="live memory (MB)", range=[0, 1.25 * total(top) / MB], nticks=5),
        yaxis3=_life_axis(life) | dict(domain=domains[2]),
        spikedistance=-1, barmode="overlay", hovermode="closest", **phase_lines(phases(rows), end, domains[2][0]),
    )  # fmt: skip
    figure.add_trace(peak(top["time_ns"] / MS, total(top) / MB, yaxis="y2"))
    if at_ns is None:
        title, alt = _finding(record, life, top)
        _name_peak(figure, top, domains)
    else:
        title, alt = shard_map.finding(record, life, at_ns)
        _add_map(figure, life, at_ns, domains)
    where = conditions(record, f"step {life.step}", merged)
    titled(figure, title, where, alt, sum(heights) + _GAP * (len(heights) - 1) + 70)
    return figure.update_layout(margin_b=70)


def memory_of_step(record: RunRecord, life: UnitStates) -> list[Row]:
    """The memory rows of the rank with the highest peak, `time_ns` moved to the clock of `life`."""
    rows = [row for row in rows_of(record, "memory") if row["step"] == life.step]
    if not rows:
        raise ValueError(
            f"{label(record)} has no memory of step {life.step}; run it again with memory=True and --profile 2"
        )
    worst = max(rows, key=total)["rank"]
    shift = record.summary.memory_start_ns.get(worst, life.begin) - life.begin
    mine = sorted((row for row in rows if row["rank"] == worst), key=lambda row: row["time_ns"])
    return [{**row, "time_ns": row["time_ns"] + shift} for row in mine]


def _life_bars(life: UnitStates, end: float, limit: int) -> list[go.Bar]:
    """A narrow lane for each rank and unit: pale while the unit is on its way, blue while it is whole."""
    marks, every = [], _sharing(life)
    for place, (rank, unit) in enumerate(life.keys):
        states = [*life.states[rank, unit], (life.length, "")]
        for (since, state), (until, _) in zip(states, states[1:]):
            if state != "sharded" and until > since:
                words = f" · {shard_map.hover_text(rank, unit, state)}"
                marks.append(Mark(state, place // every + 0.5, since / MS, until / MS, words))
    drawn, _ = downsample(marks, limit)
    colours = {name: colour for name, colour in shard_map.STATE_COLOURS.items() if name != "sharded"}
    return mark_lanes(drawn, colours, {}, end, yaxis="y3")


def _sharing(life: UnitStates) -> int:
    """How many units share a lane: 1 for up to 120 units times ranks, 2 for up to 240."""
    return -(-len(life.keys) // _LANES)


def _domains(heights: list[int]) -> list[tuple[float, float]]:
    """(bottom, top) of each panel on the paper, from the top down: heights in pixels to shares."""
    whole, top, domains = sum(heights) + _GAP * (len(heights) - 1), 0, []
    for height in heights:
        domains.append((max(0.0, 1 - (top + height) / whole), 1 - top / whole))
        top += height + _GAP
    return domains


def _life_axis(life: UnitStates) -> dict[str, Any]:
    """Lanes of units, labelled where space allows: every unit of a few, else every rank."""
    count, every, texts = len(life.keys), _sharing(life), {}
    for place, (rank, unit) in enumerate(life.keys):
        first = f"<b>rank {rank}</b>" if unit == life.units[0] else ""
        if first or count <= _NAMED:
            texts[place // every + 0.5] = f"{first}  {short_unit(unit)}".strip() if count <= _NAMED else first
    return named_axis(texts, (count - 1) // every + 1.1, -0.1) | dict(tickfont=dict(size=_LANE - 1))


def _add_map(figure: go.Figure, life: UnitStates, at_ns: float, domains: list[tuple[float, float]]) -> None:
    """The map of slices at an instant, and the cursor through the panels that share the clock, with its time."""
    across, down = shard_map.axes(life)
    figure.add_traces(
        [trace.update(showlegend=False) for trace in shard_map.cells(life, at_ns, xaxis="x2", yaxis="y4")]
    )
    figure.update_layout(
        xaxis=dict(title=None, ticksuffix=" ms"),
        xaxis2=across | dict(domain=[0, 1], anchor="y4"),
        yaxis4=down | dict(domain=domains[3], anchor="x2"),
    )
    at, line = at_ns / MS, dict(color=_CURSOR, width=2.5)
    figure.add_shape(type="line", name="cursor", x0=at, x1=at, y0=domains[2][0], y1=1, yref="paper", line=line)
    figure.add_annotation(
        name="cursor", x=at, y=domains[0][0], yref="paper", text=f"<b>{at:.2f} ms</b>", showarrow=False,
        xanchor="left", yanchor="top", xshift=4, font=dict(color=_CURSOR, size=14),
    )  # fmt: skip


def _name_peak(figure: go.Figure, row: Row, domains: list[tuple[float, float]]) -> None:
    """The number of the peak, and a line from it down through the units' states."""
    at, line = row["time_ns"] / MS, dict(color=ALARM, width=1.5, dash="dot")
    words = dict(text=f"<b>peak {size(total(row))}</b>", showarrow=False, yshift=16, font=dict(color=ALARM, size=14))
    figure.add_annotation(x=at, y=total(row) / MB, yref="y2", **words)
    ends = dict(y0=domains[2][0], y1=domains[1][1], yref="paper")
    figure.add_shape(type="line", name="peak", x0=at, x1=at, line=line, **ends)


def _finding(record: RunRecord, life: UnitStates, top: Row) -> tuple[str, str]:
    """(title, alternative text): the peak, and which units are unsharded then."""
    state = life.at(min(max(top["time_ns"], 0), life.length))
    whole = [unit for unit in life.units if state.get((top["rank"], unit)) != "sharded"]
    peaks = f"rank {top['rank']} peaks at {size(total(top))} after {top['time_ns'] / MS:.1f} ms"
    title = f"{label(record)}: {peaks}, when {len(whole)} of {len(life.units)} units are unsharded"
    words = f"Timeline, memory and units' states of one step on one clock. {title}: {', '.join(whole) or 'none'}."
    return title, words
