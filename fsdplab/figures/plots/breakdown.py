"""A step's time: computing alone, overlapped with communication, exposed communication, and the rest; the parts of what
is exposed, by unit too; and two runs compared unit by unit.

The four parts sum to the step, because they are one partition of it, and on the link, copying and waiting for a peer
sum to what is exposed. A high overlap alone gains nothing on a busy CPU, so compute inflation is shown too if a run of
the same work without communication is among the runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import three_digits
from fsdplab.common.words import NO_UNIT, plural
from fsdplab.figures import profile_data as profile
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.lines import heat_map
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, Row, duration, label, percent
from fsdplab.figures.style import EDGE, EXPOSED_COLOURS, PHASE_COLOURS, STEP_COLOURS, titled
from fsdplab.figures.view import missing, view, views
from fsdplab.profiling.step_summary import ExposedCell, StepSummary
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord

Splits = dict[str, StepSummary]  # of each run, by label
PART_COLUMN = dict(zip(EXPOSED_COLOURS, PARTS_OF_EXPOSED))
COLUMN = {name: f"{name.replace(' ', '_')}_ns" for name in STEP_COLOURS}
_SAME_WORK = (
    "model", "batch_size", "sequence_length", "micro_batches", "precision", "checkpoint", "engine", "optimizer",
)  # fmt: skip


def step_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Stacked bars, one a run, of the step of the rank exposed longest: compute only, overlapped, exposed, other.

    `records`: one record or several with a `breakdown` table; ValueError with the remedy if none has one. 10 + 6 + 3 +
    1 ms is a step of 20 ms.
    """
    runs = profile.listed(records)
    shown, splits = _with_breakdown(runs)
    inflation = _inflation(shown, splits)
    ends = {name: _total(split, inflation.get(name)) for name, split in splits.items()}
    left_out = _missing(runs, shown)
    slower = {name: words for name, run in shown.items() if (words := profile.slower_words(run))}
    said = "; ".join(f"{name}: {words}" if len(shown) > 1 else words for name, words in slower.items())
    where = profile.conditions(shown.values(), "mean of the profiled steps", left_out, said)
    figure = _stacked(ends, splits, COLUMN, STEP_COLOURS, "time of one step (ms)")
    return titled(figure, _finding(splits), where, _alt(splits, COLUMN, "the step", "step_ns"), 78 + 60 * len(shown))


def exposed_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Stacked bars, one a run, of its exposed time: on the link, copying, and waiting for a peer, in ms a step.

    ValueError with the remedy if no record has these parts. 6 + 3 + 1 ms are 10 ms exposed.
    """
    runs = profile.listed(records)
    shown, found = _with_breakdown(runs)
    splits = {name: split for name, split in found.items() if split.on_link_ns is not None}
    if not splits:
        raise ValueError(
            f"{next(iter(found))} does not say what its exposed time was spent on: it was recorded with an earlier"
            " version; run it again with --profile 2"
        )
    ends = {name: f"<b>{duration(split.exposed_ns)}</b> exposed" for name, split in splits.items()}
    figure = _stacked(ends, splits, PART_COLUMN, EXPOSED_COLOURS, "exposed time of one step (ms)")
    how = "mean of the profiled steps of the rank exposed longest"
    where = profile.conditions([shown[name] for name in splits], how, _missing(runs, splits))
    alt = _alt(splits, PART_COLUMN, "exposed time", "exposed_ns")
    return titled(figure, _on_the_link(shown, splits), where, alt, 78 + 60 * len(splits))


def _with_breakdown(runs: list[RunRecord]) -> tuple[dict[str, RunRecord], dict[str, StepSummary]]:
    """(the runs that have a breakdown, their breakdowns), by label; ValueError with the remedy where none has one."""
    found = {view.label: run for view, run in zip(views(runs), runs) if run.table("breakdown")}
    if not found:
        profile.rows_of(runs[0], "breakdown")
    return found, {name: split for name, run in found.items() if (split := profile.breakdown_of(run)) is not None}


def _missing(runs: list[RunRecord], shown: Mapping[str, object]) -> str:
    seen = views(runs)
    return missing(seen, [run for run in seen if run.label in shown], "has no such profile")


def _stacked(
    ends: Mapping[str, str], splits: Splits, columns: Mapping[str, str], colours: Mapping[str, str], axis: str
) -> go.Figure:
    """A bar a run of the parts in `columns`, each with its duration where it fits."""
    parts = [
        Part(name, colours[name], [getattr(split, column) / MS for split in splits.values()])
        for name, column in columns.items()
    ]
    return stacked_bars(ends, parts, axis, "%{x:.3f} ms", lambda ms: duration(ms * MS))


def _inflation(shown: Mapping[str, RunRecord], splits: Splits) -> dict[str, float]:
    """Compute time of each run over that of the same work without communication, where there is such a run.

    `{"full_shard": 1.25}`: its compute took a quarter longer than on a rank that sends nothing.
    """
    work = {name: tuple(run.spec.get(field) for field in _SAME_WORK) for name, run in shown.items()}
    alone = {work[name]: split for name, split in reversed(splits.items()) if not split.communication_ns}
    talking = [name for name, split in splits.items() if split.communication_ns and work[name] in alone]
    return {name: splits[name].compute_ns / alone[work[name]].compute_ns for name in talking}


def _total(split: StepSummary, inflation: float | None) -> str:
    """At the bar's end: the step, the overlap, the compute inflation, and how long a GPU was busy."""
    words = "no communication" if split.hidden is None else f"{100 * split.hidden:.0f} % hidden"
    words += f", compute ×{inflation:.2f}" if inflation else ""
    words += f", device busy {duration(split.device_busy_ns)}" if split.device_busy_ns else ""
    return f"<b>{duration(split.step_ns)}</b> · {words}"


def _on_the_link(shown: Mapping[str, RunRecord], splits: Splits) -> str:
    """The title: the run that is exposed longest, and how much of this time a message moves."""
    most = max(splits, key=lambda name: splits[name].exposed_ns)
    if not splits[most].exposed_ns:
        return "No run has exposed communication"
    traces = shown[most].summary.traces
    few = traces and traces.ranks < shown[most].spec["world_size"]
    or_waiting = " or waiting for ranks whose traces were not given" if few else ""
    told = f"{duration(splits[most].exposed_ns)} a step are exposed, {duration(splits[most].on_link_ns or 0)} of it"
    return f"{most}: {told} on the link{or_waiting}"


def _finding(splits: Splits) -> str:
    exposed = {name: split.exposed_ns for name, split in splits.items() if split.communication_ns}
    if not exposed:
        return "No run sends anything: there is nothing to hide"
    least, most = (pick(exposed, key=lambda name: exposed[name]) for pick in (min, max))
    if least == most:
        share = percent(exposed[most], splits[most].step_ns)
        return f"{most}: {duration(exposed[most])} of communication is exposed, {share} of its step"
    rest = f"least: {least}, {duration(exposed[least])}"
    return f"{most} is exposed longest, {duration(exposed[most])} a step; {rest}"


def _alt(splits: Splits, columns: Mapping[str, str], of: str, whole: str) -> str:
    runs = []
    for name, split in splits.items():
        inside = ", ".join(f"{part} {duration(getattr(split, column))}" for part, column in columns.items())
        runs.append(f"{name} {inside} of {duration(getattr(split, whole))}")
    return f"Stacked bars of {of}: {'; '.join(runs)}."


# ---- exposed communication: every unit's collectives, with the cause where it is known


_ORDER = {"forward": 0, "backward": 1, "optimizer": 2, "": 3}
_LEAST = 130  # pixels of the cells, so that the labels of the colour bar stay apart

Cells = dict[tuple[str, str, str], ExposedCell]  # by unit, phase and kind


def exposed_heatmap(record: RunRecord) -> go.Figure:
    """Units (rows, in the forward's order) x collectives of each phase (columns): exposed ms a step, and the cause.

    Means over the profiled steps of the rank that is exposed longest, so that the cells sum to the run's exposed time;
    the findings count the same cells with the same causes. Needs an `exposed` table (ValueError with the remedy without
    one). An empty cell: the unit has no such collective.
    """
    rank, steps, every = profile.worst_cells(record)
    nameless = profile.unnamed(record)
    cells: Cells = {(each.unit or nameless, each.phase, each.kind): each for each in every}
    units, few = profile.foremost_units(record, {key: each.exposed_ns for key, each in cells.items()})
    columns = sorted({key[1:] for key in cells}, key=lambda column: (_ORDER.get(column[0], len(_ORDER)), column[1]))
    grid = [[cells.get((unit, *column)) for column in columns] for unit in units]
    height = max(14, min(38, 1300 // len(units)))  # pixels of a row; high ones take two lines
    figure = heat_map(
        [f"{phase} {kind}".strip() for phase, kind in columns],
        units,
        [[cell.exposed_ns / MS if cell else None for cell in row] for row in grid],
        [[_words(cell, "<br>" if height > 34 else " · ") for cell in row] for row in grid],
        "%{y}, %{x}<br>exposed %{z:.3f} ms of %{customdata}",
        "exposed<br>(ms a step)",
        customdata=[[cell and _hover(cell) for cell in row] for row in grid],
    )
    figure.update_xaxes(side="top")
    title, alt = _most_exposed(record, cells)
    simulated = view(record).simulated
    mean = f"rank {rank}, the most exposed" + ("" if simulated else f", mean of {plural(steps, 'profiled step')}")
    where = profile.conditions(record, mean, profile.slower_words(record), few)
    return titled(figure, title, where, alt, 46 + max(_LEAST, height * len(units)))


def _words(cell: ExposedCell | None, between: str) -> str:
    if cell is None:
        return ""
    cause = "" if cell.shown_cause in ("hidden", "unknown") else f"{between}{cell.shown_cause.replace('_', ' ')}"
    return f"{three_digits(cell.exposed_ns / MS)} ms{cause}" if cell.exposed_ns else "hidden"


def _hover(cell: ExposedCell) -> str:
    """A cell's communication, its cause, and the parts of its exposed time that there are."""
    parts = {name: getattr(cell, column) / MS for name, column in PART_COLUMN.items()}
    of = ", ".join(f"{name} {ms:.3f} ms" for name, ms in parts.items() if ms)
    cause = f"{cell.communication_ns / MS:.3f} ms of communication, {cell.shown_cause.replace('_', ' ')}"
    return f"{cause}<br>{of}" if of else cause


def _most_exposed(record: RunRecord, cells: Cells) -> tuple[str, str]:
    """(title, alternative text): the cell with most exposed time, and its share."""
    total = sum(each.exposed_ns for each in cells.values())
    if not total:
        words = "Heat map of exposed communication: every cell is hidden."
        return f"{label(record)}: all communication is hidden under compute", words
    first, *_ = ranked = sorted((key for key in cells if cells[key].exposed_ns), key=lambda key: -cells[key].exposed_ns)
    spent = {key: duration(cells[key].exposed_ns) for key in ranked[:5]}
    of = "" if first[0] == NO_UNIT else f" of {first[0]}"
    alike = [key for key in ranked if duration(cells[key].exposed_ns) == spent[first]]
    share = profile.percent(sum(cells[key].exposed_ns for key in alike), total)
    title = f"{label(record)}: {first[2]}{of} in {first[1]} exposes {spent[first]}, {share} of the exposed time"
    if len(alike) > 1:
        title = f"{label(record)}: {len(alike)} collectives expose {spent[first]} each, {share} of the exposed time"
    most = "; ".join(f"{' '.join(key)} {words}" for key, words in spent.items())
    return title, f"Heat map of exposed communication, {duration(total)} a step. Most: {most}."


# ---- two runs compared unit by unit: communication, exposed time and unsharded memory


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
    title, alt = _change(first, second, changes)
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


def _change(first: str, second: str, changes: Mapping[str, Amounts]) -> tuple[str, str]:
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
