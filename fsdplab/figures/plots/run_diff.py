"""Two runs compared unit by unit: communication, exposed time and gathered memory."""

from __future__ import annotations

from fsdplab.common.sizes import three_digits
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.exposed import few_words, foremost
from fsdplab.figures.profile_data import (
    MS,
    Row,
    conditions,
    duration,
    group,
    label,
    named_rows,
    profiled,
    unit_order,
    unnamed,
    worst_cells,
)
from fsdplab.figures.style import EDGE, PHASE_COLOURS, titled
from fsdplab.figures.view import views
from fsdplab.records import RunRecord

MB = 1e6
UnitPhase = tuple[str, str]
_ROOM_FOR_NUMBERS = 24  # units above which numbers no longer fit
PANELS = {
    "communication_ns": "communication (ms a step)",
    "exposed_ns": "exposed time (ms a step)",
    "gathered": "mean gathered memory (MB)",
}


def difference(a: RunRecord, b: RunRecord) -> go.Figure:
    """Bars of b minus a for every unit and phase: communication and exposed time in ms a step, and mean gathered memory
    in MB where both have it.

    Both records need an `exposed` table (ValueError with the remedy). A unit that one of them lacks counts as zero
    there; 2.0 ms in a and 0.5 ms in b is -1.5.
    """
    runs = (a, b)
    times = [spent(run) for run in runs]
    held = [gathered_memory(run) for run in runs]
    panels = [name for name in PANELS if name != "gathered" or all(held)]
    changes = {name: _changes(name, times, held) for name in panels}
    found = {unit for spends in times for unit, _ in spends}
    units = unit_order(
        a,
        foremost(
            {unit: sum(abs(value) for key, value in changes["exposed_ns"].items() if key[0] == unit) for unit in found}
        ),
    )
    figure = go.Figure([bar for place, name in enumerate(panels) for bar in _bars(changes[name], units, place, name)])
    for place, name in enumerate(panels):
        _axis(figure, place, len(panels), PANELS[name], changes[name])
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05)
    figure.update_yaxes(
        autorange="reversed", type="category", showgrid=False, categoryorder="array", categoryarray=units
    )
    first, second = names_of(a, b)
    title, alt = _finding(first, second, changes)
    title = title if first in [view.label for view in views(runs)] else f"{label(a).split(',')[0]}: {title}"
    where = f"{conditions(runs, few_words(units, found))}; bars: {second} minus {first}"
    return titled(figure, title, where, alt, height=230 + max(18, min(58, 1200 // len(units))) * len(units), top=122)


def names_of(a: RunRecord, b: RunRecord) -> tuple[str, str]:
    """The runs' labels, or only their difference where they have one name: `("prefetch 0", "prefetch 1")`."""
    first, second = views([a, b])
    namesakes = first.note and second.note
    return (first.note, second.note) if namesakes else (first.label, second.label)


def spent(record: RunRecord) -> dict[UnitPhase, dict[str, float]]:
    """Communication and exposed ns a step of each (unit, phase), on the rank exposed longest, mean over its profiled
    steps.
    """
    sums: dict[UnitPhase, dict[str, float]] = {}
    nameless = unnamed(record)
    for cell in worst_cells(record)[2]:
        held = sums.setdefault((cell.unit or nameless, cell.phase), {"communication_ns": 0.0, "exposed_ns": 0.0})
        held["communication_ns"] += cell.communication_ns
        held["exposed_ns"] += cell.exposed_ns
    return sums


def gathered_memory(record: RunRecord) -> dict[UnitPhase, float]:
    """Mean bytes that each unit's gathered parameters hold over a step, by the phase that gathered them; empty where
    unknown.

    A unit of 8 MB that is unsharded for a quarter of the step holds 2 MB on average. From `life`, the ledger's gathers,
    and the steps' length.
    """
    life = profiled(named_rows(record, "life"), record)
    nbytes = {row["unit"]: row["logical_bytes"] for row in named_rows(record, "ledger") if row["kind"] == "all_gather"}
    lengths = {row["step"]: row["step_ns"] for row in record.table("breakdown") if row["rank"] == 0}
    mine = [row for row in life if row["rank"] == 0 and row["step"] in lengths]
    held: dict[UnitPhase, float] = {}
    for (step, unit), found in group(mine, lambda row: (row["step"], row["unit"])).items():
        for phase, kept in _stays(found):
            share = kept / lengths[step] / len({row["step"] for row in mine})
            held[unit, phase] = held.get((unit, phase), 0.0) + share * nbytes.get(unit, 0)
    return held


def _stays(found: list[Row]) -> list[tuple[str, int]]:
    """(phase, ns) of each stay of a unit in memory: from the start of its gather to its reshard."""
    stays, since = [], None
    for row in sorted(found, key=lambda row: row["time_ns"]):
        if row["state"] == "sharded" and since:
            stays.append((since["phase"], row["time_ns"] - since["time_ns"]))
        since = None if row["state"] == "sharded" else since or row
    return stays


def _changes(
    name: str, times: list[dict[UnitPhase, dict[str, float]]], held: list[dict[UnitPhase, float]]
) -> dict[UnitPhase, float]:
    """b minus a in ms or MB, by (unit, phase)."""
    if name == "gathered":
        return {key: (held[1].get(key, 0) - held[0].get(key, 0)) / MB for key in held[0] | held[1]}
    nothing = {name: 0.0}
    return {
        key: (times[1].get(key, nothing)[name] - times[0].get(key, nothing)[name]) / MS for key in times[0] | times[1]
    }


def _bars(changes: dict[UnitPhase, float], units: list[str], place: int, name: str) -> list[go.Bar]:
    """One panel's bars, a colour a phase."""
    suffix = str(place + 1) if place else ""
    phases = [phase for phase in PHASE_COLOURS if any(key[1] == phase for key in changes)]
    quantity = "MB" if name == "gathered" else "ms"
    return [
        go.Bar(
            name=phase, legendgroup=phase, showlegend=place == 0, orientation="h", xaxis=f"x{suffix}", yaxis="y",
            y=units, x=[changes.get((unit, phase), 0) for unit in units],
            marker=dict(color=PHASE_COLOURS[phase], line=dict(color=EDGE, width=1)),
            text=[_signed(changes.get((unit, phase), 0)) if len(units) <= _ROOM_FOR_NUMBERS else "" for unit in units],
            textposition="outside", textfont=dict(size=13), cliponaxis=False,
            hovertemplate="%{y} in " + phase + ": %{x:+.3f} " + quantity + "<extra></extra>",
        )
        for phase in phases
    ]  # fmt: skip


def _signed(value: float) -> str:
    """`_signed(-1.5) == "-1.50"`; what rounds to nothing is not written."""
    return "" if abs(value) < 0.005 else f"{'+' if value > 0 else '-'}{three_digits(abs(value))}"


def _axis(figure: go.Figure, place: int, panels: int, title: str, changes: dict[UnitPhase, float]) -> None:
    """A panel's axis: its third or half of the width, with space for the numbers at the bars' ends."""
    low, high = min(0, *changes.values(), 0), max(0, *changes.values(), 0)
    margin = 0.22 * (high - low) or 1
    layout = {"xaxis" + (str(place + 1) if place else ""): dict(
        domain=[place / panels + 0.03 * (place > 0), (place + 1) / panels], anchor="y", title_text=title,
        title_font_size=15,
        range=[low - margin * (low < 0 or not high), high + margin * (high > 0 or not low)],
        zeroline=True, zerolinewidth=2,
        zerolinecolor="#808488",
    )}  # fmt: skip
    figure.update_layout(layout)


def _finding(first: str, second: str, changes: dict[str, dict[UnitPhase, float]]) -> tuple[str, str]:
    """(title, alternative text): the change of exposed time in all, and the largest of one unit in one phase."""
    exposed = changes["exposed_ns"]
    total = sum(exposed.values())
    unit, phase = max(exposed, key=lambda key: abs(exposed[key]))
    if abs(total) < 0.005 and abs(exposed[unit, phase]) < 0.005:
        title = f"{second} and {first} are exposed alike"
    else:
        title = f"{second} is exposed {duration(abs(total) * MS)} a step {'less' if total < 0 else 'more'} than {first}"
        title += f", most in {unit} {phase} ({_signed(exposed[unit, phase])} ms)"
    sums = "; ".join(f"{PANELS[name]} {_signed(sum(values.values())) or '0'}" for name, values in changes.items())
    return title, f"Bars of the difference by unit and phase. {title}. In all: {sums}."
