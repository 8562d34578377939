"""Two runs compared unit by unit: communication, exposed time and unsharded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import three_digits
from fsdplab.figures import profile_data as profile
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, Row
from fsdplab.figures.style import EDGE, PHASE_COLOURS, titled
from fsdplab.figures.view import views
from fsdplab.records import RunRecord

MB = 1e6
UnitPhase = tuple[str, str]
Amounts = Mapping[UnitPhase, float]
_ROOM_FOR_NUMBERS = 24  # units above which numbers no longer fit
PANELS = {
    "communication_ns": "communication (ms a step)",
    "exposed_ns": "exposed time (ms a step)",
    "unsharded": "mean unsharded memory (MB)",
}


def difference(a: RunRecord, b: RunRecord) -> go.Figure:
    """Bars of b minus a for every unit and phase: communication and exposed time in ms a step, and mean unsharded
    memory in MB where both have it.

    Both records need an `exposed` table (ValueError with the remedy). A unit that one of them lacks counts as zero
    there; 2.0 ms in a and 0.5 ms in b is -1.5.
    """
    before, after = amounts(a), amounts(b)
    panels = [name for name in PANELS if before[name] and after[name]]
    changes = {
        name: {key: after[name].get(key, 0.0) - before[name].get(key, 0.0) for key in {**before[name], **after[name]}}
        for name in panels
    }
    units, few = profile.foremost_units(a, changes["exposed_ns"])
    figure = go.Figure([bar for place, name in enumerate(panels) for bar in _bars(changes[name], units, place, name)])
    for place, name in enumerate(panels):
        figure.update_layout({f"xaxis{place + 1}": _axis(place, len(panels), PANELS[name], changes[name])})
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05)
    figure.update_yaxes(
        autorange="reversed", type="category", showgrid=False, categoryorder="array", categoryarray=units
    )
    runs = views([a, b])
    namesakes = all(run.note for run in runs)  # of one name: their difference is enough
    first, second = (run.note if namesakes else run.label for run in runs)
    title, alt = _finding(first, second, changes)
    title = f"{profile.label(a)}: {title}" if namesakes else title
    where = f"{profile.conditions([a, b], few)}; bars: {second} minus {first}"
    return titled(figure, title, where, alt, 108 + max(18, min(58, 1200 // len(units))) * len(units))


def amounts(record: RunRecord) -> Mapping[str, Amounts]:
    """What each panel shows of one run, by (unit, phase): communication and exposed ms a step on the rank exposed
    longest, mean over its profiled steps, and MB of unsharded memory.
    """
    nameless = profile.unnamed(record)
    found: dict[str, dict[UnitPhase, float]] = {name: defaultdict(float) for name in PANELS}
    for cell in profile.worst_cells(record)[2]:
        for name in ("communication_ns", "exposed_ns"):
            found[name][cell.unit or nameless, cell.phase] += getattr(cell, name) / MS
    return found | {"unsharded": {key: nbytes / MB for key, nbytes in gathered_memory(record).items()}}


def gathered_memory(record: RunRecord) -> dict[UnitPhase, float]:
    """Mean bytes of each unit's unsharded parameters over a step, by the phase that unsharded them; {} where unknown.

    A unit of 8 MB that is unsharded for a quarter of the step holds 2 MB on average. From `life`, the ledger's
    all-gathers, and the steps' length.
    """
    life = profile.profiled(profile.named_rows(record, "life"), record)
    nbytes = {
        row["unit"]: row["logical_bytes"] for row in profile.named_rows(record, "ledger") if row["kind"] == "all_gather"
    }
    lengths = {row["step"]: row["step_ns"] for row in record.table("breakdown") if row["rank"] == 0}
    mine = [row for row in life if row["rank"] == 0 and row["step"] in lengths]
    held: dict[UnitPhase, float] = {}
    for (step, unit), found in grouped(mine, lambda row: (row["step"], row["unit"])).items():
        for phase, kept in _stays(found):
            share = kept / lengths[step] / len({row["step"] for row in mine})
            held[unit, phase] = held.get((unit, phase), 0.0) + share * nbytes.get(unit, 0)
    return held


def _stays(found: list[Row]) -> list[tuple[str, int]]:
    """(phase, ns) of each stay of a unit in memory: from the start of its all-gather to its reshard."""
    stays, since = [], None
    for row in sorted(found, key=lambda row: row["time_ns"]):
        if row["state"] == "sharded" and since:
            stays.append((since["phase"], row["time_ns"] - since["time_ns"]))
        since = None if row["state"] == "sharded" else since or row
    return stays


def _bars(changes: Amounts, units: list[str], place: int, name: str) -> list[go.Bar]:
    suffix = str(place + 1) if place else ""
    phases = [phase for phase in PHASE_COLOURS if any(key[1] == phase for key in changes)]
    quantity = "MB" if name == "unsharded" else "ms"
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


def _axis(place: int, panels: int, title: str, changes: Amounts) -> dict[str, Any]:
    """A panel's axis: its third or half of the width, with space for the numbers at the bars' ends."""
    low, high = min(0, *changes.values(), 0), max(0, *changes.values(), 0)
    margin = 0.22 * (high - low) or 1
    return dict(
        domain=[place / panels + 0.03 * (place > 0), (place + 1) / panels], anchor="y", title_text=title,
        title_font_size=15, zeroline=True, zerolinewidth=2, zerolinecolor="#808488",
        range=[low - margin * (low < 0 or not high), high + margin * (high > 0 or not low)],
    )  # fmt: skip


def _finding(first: str, second: str, changes: Mapping[str, Amounts]) -> tuple[str, str]:
    """(title, alternative text): the change of exposed time in all, and the unit that changed most in this direction.

    Of +21, -40 and -20 ms the sum is -39 and the unit that of -40: one that rose cannot be where the time fell.
    """
    exposed = changes["exposed_ns"]
    total = sum(exposed.values())
    along = max(exposed, key=lambda key: exposed[key] if total > 0 else -exposed[key])
    most = f"{along[0]} {along[1]} ({_signed(exposed[along])} ms)"
    if abs(total) >= 0.005:
        more = "less" if total < 0 else "more"
        title = f"{second} is exposed {profile.duration(abs(total) * MS)} a step {more} than {first}, most in {most}"
    else:
        title = f"{second} and {first} are exposed alike"
        title += f" in all, not in every unit: {most}" if abs(exposed[along]) >= 0.005 else ""
    sums = "; ".join(f"{PANELS[name]} {_signed(sum(values.values())) or '0'}" for name, values in changes.items())
    return title, f"Bars of the difference by unit and phase. {title}. In all: {sums}."
