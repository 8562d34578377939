"""Two runs compared unit by unit: communication, exposed time and unsharded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import three_digits
from fsdplab.figures import profile_data as profile
from fsdplab.figures.axis_units import AxisUnit, byte_unit
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, Row, duration, where
from fsdplab.figures.style import EDGE, PHASE_COLOURS, titled
from fsdplab.figures.view import views
from fsdplab.records import RunRecord

UnitPhase = tuple[str, str]
Amounts = Mapping[UnitPhase, float]
_ROOM_FOR_NUMBERS = 24  # units above which numbers no longer fit
PANELS = {
    "communication_ns": "communication (ms a step)",
    "exposed_ns": "exposed time (ms a step)",
    "unsharded": "mean unsharded memory ({})",
}


def difference(a: RunRecord, b: RunRecord) -> go.Figure:
    """Draw bars of b minus a for every unit and phase: communication and exposed time in ms a step, and mean unsharded
    memory where both have it.

    Both records need an `exposed` table (ValueError with the remedy). A unit that one of them lacks counts as zero
    there; 2.0 ms in a and 0.5 ms in b is -1.5.
    """
    changes = _changes(amounts(a), amounts(b))
    units, few = profile.foremost_units(a, changes["exposed_ns"])
    # bytes, of which the largest change chooses the unit
    unit = byte_unit(changes.get("unsharded", {}).values())
    if "unsharded" in changes:
        changes["unsharded"] = {key: unit.of(nbytes) for key, nbytes in changes["unsharded"].items()}
    figure = go.Figure()
    # panels stand side by side and share the rows: x axis, x2, x3, from the left
    for place, (name, change) in enumerate(changes.items()):
        figure.add_traces(_bars(change, units, place, _quantity(name, unit)))
    for place, (name, change) in enumerate(changes.items()):
        axis = _axis(place, len(changes), PANELS[name].format(unit.symbol), change)
        figure.update_layout({f"xaxis{place + 1}": axis})
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05)
    in_order = dict(categoryorder="array", categoryarray=units)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, **in_order)
    title, where, alt = _words_of_difference(a, b, changes, few, unit)
    row_height = max(18, min(58, 1200 // len(units)))  # pixels
    return titled(figure, title, where, alt, 108 + row_height * len(units))


def _changes(before: Mapping[str, Amounts], after: Mapping[str, Amounts]) -> dict[str, Amounts]:
    """Return what each panel shows, of the panels that both runs have: the later amounts minus the earlier."""
    changes: dict[str, Amounts] = {}
    for name in PANELS:
        earlier, later = before[name], after[name]
        # a run without `life` has no unsharded memory to compare; its panel is left out
        if not earlier or not later:
            continue
        change = {}
        # the keys of both: a unit that only one of the runs has counts as 0 in the other
        for key in {**earlier, **later}:
            change[key] = later.get(key, 0.0) - earlier.get(key, 0.0)
        changes[name] = change
    return changes


def _quantity(name: str, unit: AxisUnit) -> str:
    """Return the unit of a panel's axis."""
    return unit.symbol if name == "unsharded" else "ms"


def _words_of_difference(
    a: RunRecord, b: RunRecord, changes: Mapping[str, Amounts], few: str, unit: AxisUnit
) -> tuple[str, str, str]:
    """Return (title, subtitle, alternative text); of two runs of one name their difference is enough."""
    before, after = views([a, b])
    # two runs of full_shard: "full_shard: prefetch 2 is exposed ... less than prefetch 0"
    if before.note and after.note:
        first, second = before.note, after.note
        title, alt = _change(first, second, changes, unit)
        title = f"{profile.label(a)}: {title}"
    else:
        first, second = before.label, after.label
        title, alt = _change(first, second, changes, unit)
    where = f"{profile.conditions([a, b], few)}; bars: {second} minus {first}"
    return title, where, alt


def amounts(record: RunRecord) -> Mapping[str, Amounts]:
    """Return what each panel shows of one run, by (unit, phase): communication and exposed ms a step on the rank
    exposed longest, mean over its profiled steps, and bytes of unsharded memory.
    """
    nameless = profile.unnamed(record)
    communication: dict[UnitPhase, float] = defaultdict(float)
    exposed: dict[UnitPhase, float] = defaultdict(float)
    _, _, cells = profile.worst_cells(record)
    # collectives of several kinds (all_gather, reduce_scatter) of one unit and phase add up
    for cell in cells:
        key = (cell.unit or nameless, cell.phase)
        communication[key] += cell.communication_ns / MS
        exposed[key] += cell.exposed_ns / MS
    return {"communication_ns": communication, "exposed_ns": exposed, "unsharded": gathered_memory(record)}


def gathered_memory(record: RunRecord) -> dict[UnitPhase, float]:
    """Return the mean bytes of each unit's unsharded parameters over a step, by the phase that unsharded them; {} where
    unknown.

    A unit of 8 MB that is unsharded for a quarter of the step holds 2 MB on average. From `life`, the ledger's
    all-gathers, and the steps' length.
    """
    nbytes = {}  # of each unit
    # an all-gather's payload is the whole unit: what its unsharded parameters take
    for row in where(profile.named_rows(record, "ledger"), kind="all_gather"):
        nbytes[row["unit"]] = row["logical_bytes"]
    # rank 0 stands for all ranks, which unshard the units in the same order
    life = profile.profiled(profile.named_rows(record, "life"), record)
    of_first_rank = where(life, rank=0)
    windows = _windows(record, of_first_rank)
    last_end = max((end for _, end in windows), default=0)
    held: dict[UnitPhase, float] = defaultdict(float)
    for unit, of_unit in grouped(of_first_rank, lambda row: row["unit"]).items():
        for phase, begin, end in _stays(of_unit, last_end):
            for start, step_end in windows:
                kept_ns = min(end, step_end) - max(begin, start)
                if kept_ns > 0:
                    # one stay of 25 ms in one of two steps of 100 ms: 25 / 100 / 2, an eighth of all steps
                    share = kept_ns / (step_end - start) / len(windows)
                    held[unit, phase] += share * nbytes.get(unit, 0)
    return dict(held)


def _windows(record: RunRecord, life: list[Row]) -> list[tuple[int, int]]:
    """Return (start, end) of rank 0's profiled steps whose transitions are known; of a step without a lane in the
    timeline, from its first transition on.
    """
    lanes = {
        row["step"]: (row["start_ns"], row["end_ns"]) for row in where(record.table("timeline"), rank=0, lane="step")
    }
    first: dict[int, int] = {}
    for row in life:
        first[row["step"]] = min(row["time_ns"], first.get(row["step"], row["time_ns"]))
    if not first:
        return []
    windows = []
    for row in where(profile.profiled(record.table("breakdown"), record), rank=0):
        step, length = row["step"], row["step_ns"]
        if step in lanes:
            windows.append(lanes[step])
        elif step in first:
            windows.append((first[step], first[step] + length))
    return sorted(windows)


def _stays(of_unit: list[Row], last_end: int) -> list[tuple[str, int, int]]:
    """Return (phase, begin, end) of each stay of a unit in memory: from the start of its all-gather to its reshard,
    which may be in a later step, or behind the last one.
    """
    stays = []
    since: Row | None = None  # the row in which its all-gather started
    for row in sorted(of_unit, key=lambda row: row["time_ns"]):
        # both unsharding and unsharded: memory is taken from the start of the all-gather
        if row["state"] != "sharded":
            since = since or row
            continue
        if since:
            stays.append((since["phase"], since["time_ns"], row["time_ns"]))
        since = None
    if since:
        stays.append((since["phase"], since["time_ns"], last_end))
    return stays


def _bars(changes: Amounts, units: list[str], place: int, quantity: str) -> list[go.Bar]:
    """Draw a panel's bars, one trace a phase; numbers stand at their ends where there are few."""
    # a phase without any change has neither bars nor an entry in the legend
    in_panel = {phase for _, phase in changes}
    bars = []
    for phase, colour in PHASE_COLOURS.items():
        if phase not in in_panel:
            continue
        lengths = [changes.get((unit, phase), 0) for unit in units]
        numbers = [""] * len(units)
        if len(units) <= _ROOM_FOR_NUMBERS:
            numbers = [_signed(length) for length in lengths]
        hover = "%{y} in " + phase + ": %{x:+.3f} " + quantity + "<extra></extra>"
        bar = go.Bar(
            name=phase,
            legendgroup=phase,
            # the panels' bars of a phase share one entry, which switches them together
            showlegend=place == 0,
            orientation="h",
            # plotly's name of the first axis is "x", of the second "x2"
            xaxis=f"x{place + 1}" if place else "x",
            yaxis="y",
            y=units,
            x=lengths,
            marker=dict(color=colour, line=dict(color=EDGE, width=1)),
            text=numbers,
            textposition="outside",
            textfont=dict(size=13),
            cliponaxis=False,
            hovertemplate=hover,
        )
        bars.append(bar)
    return bars


def _signed(value: float) -> str:
    """Write a number with its sign: `_signed(-1.5) == "-1.50"`; what rounds to nothing is not written."""
    if abs(value) < 0.005:
        return ""
    sign = "+" if value > 0 else "-"
    return f"{sign}{three_digits(abs(value))}"


def _axis(place: int, panels: int, title: str, changes: Amounts) -> dict[str, Any]:
    """Return a panel's axis: its third or half of the width, with space for the numbers at the bars' ends."""
    # the second zero: without any change, `min(0)` would be an error
    low = min(0, *changes.values(), 0)
    high = max(0, *changes.values(), 0)
    margin = 0.22 * (high - low) or 1  # where nothing changed, the axis still has a length
    # numbers stand beyond a bar's end, so a side without bars needs no space; a panel without any keeps both
    space_left = margin * (low < 0 or not high)
    space_right = margin * (high > 0 or not low)
    left = place / panels
    right = (place + 1) / panels
    if place > 0:
        left += 0.03  # between two panels
    return dict(
        domain=[left, right],
        anchor="y",
        title_text=title,
        title_font_size=15,
        zeroline=True,
        zerolinewidth=2,
        zerolinecolor="#808488",
        range=[low - space_left, high + space_right],
    )


def _change(first: str, second: str, changes: Mapping[str, Amounts], unit_of_bytes: AxisUnit) -> tuple[str, str]:
    """Return (title, alternative text): the change of exposed time in all, and the unit that changed most in this
    direction.

    Of +21, -40 and -20 ms the sum is -39 and the unit that of -40: one that rose cannot be where the time fell.
    """
    exposed = changes["exposed_ns"]
    total = sum(exposed.values())
    if total > 0:
        more = "more"
        # the unit that rose most, as the sum rose; below, the one that fell most
        along = max(exposed, key=lambda key: exposed[key])
    else:
        more = "less"
        along = min(exposed, key=lambda key: exposed[key])
    unit, phase = along
    most = f"{unit} {phase} ({_signed(exposed[along])} ms)"
    # less than half a hundredth of a millisecond rounds to nothing
    if abs(total) >= 0.005:
        length = duration(abs(total) * MS)
        title = f"{second} is exposed {length} a step {more} than {first}, most in {most}"
    else:
        title = f"{second} and {first} are exposed alike"
        # +3 ms in one unit and -3 ms in another: alike in all, and still worth a look
        if abs(exposed[along]) >= 0.005:
            title += f" in all, not in every unit: {most}"
    sums = []
    for name, values in changes.items():
        in_all = _signed(sum(values.values())) or "0"
        sums.append(f"{PANELS[name].format(unit_of_bytes.symbol)} {in_all}")
    return title, f"Bars of the difference by unit and phase. {title}. In all: {'; '.join(sums)}."
