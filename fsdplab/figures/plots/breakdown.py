"""A step's time: computing alone, overlapped with communication, exposed communication, and the rest; and the parts of
what is exposed, by unit too.

The four parts sum to the step, because they are one partition of it, and on the link, copying and waiting for a peer
sum to what is exposed. A high overlap alone gains nothing on a busy CPU, so compute inflation is shown too if a run of
the same work without communication is among the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdplab.common.sizes import seconds, three_digits
from fsdplab.common.words import NO_UNIT, plural
from fsdplab.figures import profile_data as profile
from fsdplab.figures.axis_units import time_unit
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.lines import heat_map
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, duration, label, percent
from fsdplab.figures.style import EXPOSED_COLOURS, STEP_COLOURS, titled
from fsdplab.figures.view import missing, view, views
from fsdplab.profiling.step_summary import ExposedCell, StepSummary
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord

Splits = dict[str, StepSummary]  # of each run, by label
# the name of a part in the legend -> its field of a StepSummary or an ExposedCell: "copying" -> "copying_ns"
PART_COLUMN = dict(zip(EXPOSED_COLOURS, PARTS_OF_EXPOSED))
# "compute only" -> "compute_only_ns"
COLUMN = {name: f"{name.replace(' ', '_')}_ns" for name in STEP_COLOURS}
# fields of a spec in which two runs must agree, so that they compute the same
_SAME_WORK = (
    "model",
    "batch_size",
    "sequence_length",
    "micro_batches",
    "precision",
    "checkpoint",
    "engine",
    "optimizer",
)


def step_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Draw stacked bars, one a run, of the step of the rank exposed longest: compute only, overlapped, exposed, other.

    `records`: one record or several with a `breakdown` table; ValueError with the remedy if none has one. 10 + 6 + 3 +
    1 ms is a step of 20 ms.
    """
    runs = profile.listed(records)
    shown, splits = _with_breakdown(runs)
    inflation = _inflation(shown, splits)
    ends = {}
    for name, split in splits.items():
        # the number at a bar's end is the whole step, as the numbers inside are its parts
        ends[name] = _total(split, inflation.get(name))
    figure = _stacked(ends, splits, COLUMN, STEP_COLOURS, "time of one step")
    mean = "mean of the profiled steps"
    left_out, slower = _missing(runs, shown), _slower_words(shown)
    where = profile.conditions(shown.values(), mean, left_out, slower)
    alt = _alt(splits, COLUMN, "the step", "step_ns")
    return titled(figure, _finding(splits), where, alt, 78 + 60 * len(shown))


def exposed_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Draw stacked bars, one a run, of its exposed time: on the link, copying, and waiting for a peer, in ms a step.

    ValueError with the remedy if no record has these parts. 6 + 3 + 1 ms are 10 ms exposed.
    """
    runs = profile.listed(records)
    shown, every_split = _with_breakdown(runs)
    splits: Splits = {}
    ends = {}
    for name, split in every_split.items():
        # records of earlier versions have the exposed time without its parts
        if split.on_link_ns is not None:
            splits[name] = split
            ends[name] = f"<b>{duration(split.exposed_ns)}</b> exposed"
    if not splits:
        first = next(iter(every_split))
        raise ValueError(
            f"{first} does not say what its exposed time was spent on: it was recorded with an"
            " earlier version; run it again with --profile 2"
        )
    figure = _stacked(ends, splits, PART_COLUMN, EXPOSED_COLOURS, "exposed time of one step")
    how = "mean of the profiled steps of the rank exposed longest"
    # the subtitle's provenance is of the runs that are drawn: others were left out above
    drawn = [shown[name] for name in splits]
    where = profile.conditions(drawn, how, _missing(runs, splits))
    alt = _alt(splits, PART_COLUMN, "exposed time", "exposed_ns")
    return titled(figure, _on_the_link(shown, splits), where, alt, 78 + 60 * len(splits))


def _with_breakdown(runs: list[RunRecord]) -> tuple[dict[str, RunRecord], Splits]:
    """Return (the runs that have a breakdown, their breakdowns), by label; ValueError with the remedy where none has
    one.
    """
    shown: dict[str, RunRecord] = {}
    splits: Splits = {}
    for run, record in zip(views(runs), runs):
        if not record.table("breakdown"):
            continue
        shown[run.label] = record
        split = profile.breakdown_of(record)
        if split is not None:
            splits[run.label] = split
    if not shown:
        profile.rows_of(runs[0], "breakdown")  # raises the error with the remedy
    return shown, splits


def _missing(runs: list[RunRecord], shown: Mapping[str, object]) -> str:
    every_run = views(runs)
    drawn = [run for run in every_run if run.label in shown]
    return missing(every_run, drawn, "has no such profile")


def _slower_words(shown: Mapping[str, RunRecord]) -> str:
    """Say of which runs profiled steps were longer than timed ones."""
    sentences = []
    for name, record in shown.items():
        words = profile.slower_words(record)
        if not words:
            continue
        if len(shown) > 1:
            words = f"{name}: {words}"
        sentences.append(words)
    return "; ".join(sentences)


def _stacked(
    ends: Mapping[str, str], splits: Splits, columns: Mapping[str, str], colours: Mapping[str, str], axis: str
) -> go.Figure:
    """Draw a bar a run of the parts in `columns`, each with its duration where it fits."""
    reached_s = []
    for split in splits.values():
        whole_ns = sum(getattr(split, column) for column in columns.values())
        reached_s.append(whole_ns / 1e9)
    unit = time_unit(reached_s)
    parts = []
    # one part a column, with a length for each run: a row of the figure is a run
    for name, column in columns.items():
        lengths = [unit.of(getattr(split, column) / 1e9) for split in splits.values()]
        parts.append(Part(name, colours[name], lengths))
    axis = f"{axis} ({unit.symbol})"
    return stacked_bars(ends, parts, axis, unit.hover("x"), lambda length: seconds(length * unit.size))


def _inflation(shown: Mapping[str, RunRecord], splits: Splits) -> dict[str, float]:
    """Return the compute time of each run over that of the same work without communication, where there is such a run.

    `{"full_shard": 1.25}`: its compute took a quarter longer than on a rank that sends nothing.
    """
    # 1. what each run computes, as a key: runs of one key differ in sharding, link and ranks alone
    work = {}
    for name, record in shown.items():
        work[name] = tuple(record.spec.get(field) for field in _SAME_WORK)
    # 2. the first run of each key that sends nothing, such as one on a single rank
    alone: dict[tuple[Any, ...], StepSummary] = {}
    for name, split in splits.items():
        if not split.communication_ns:
            alone.setdefault(work[name], split)
    # 3. the ratio; `compute_ns` includes the overlapped part, in which communication takes cores or bandwidth from it
    inflation = {}
    for name, split in splits.items():
        quiet = alone.get(work[name])
        if split.communication_ns and quiet is not None:
            inflation[name] = split.compute_ns / quiet.compute_ns
    return inflation


def _total(split: StepSummary, inflation: float | None) -> str:
    """Say at the bar's end: the step, the overlap, the compute inflation, and how long a GPU was busy."""
    words = "no communication"
    if split.hidden is not None:
        words = f"{100 * split.hidden:.0f} % hidden"
    if inflation:
        words += f", compute ×{inflation:.2f}"
    if split.device_busy_ns:
        words += f", device busy {duration(split.device_busy_ns)}"
    return f"<b>{duration(split.step_ns)}</b> · {words}"


def _on_the_link(shown: Mapping[str, RunRecord], splits: Splits) -> str:
    """Return the title: the run that is exposed longest, and how much of this time a message moves."""
    most = max(splits, key=lambda name: splits[name].exposed_ns)
    split = splits[most]
    if not split.exposed_ns:
        return "No run has exposed communication"
    exposed, on_link = duration(split.exposed_ns), duration(split.on_link_ns or 0)
    title = f"{most}: {exposed} a step are exposed, {on_link} of it on the link"
    record = shown[most]
    traces = record.summary.traces
    # from some ranks' traces alone, a wait for an absent rank cannot be told from time on the link
    if traces and traces.ranks < record.spec["world_size"]:
        title += " or waiting for ranks whose traces were not given"
    return title


def _finding(splits: Splits) -> str:
    """Return the title: which run is exposed longest, and which least."""
    # runs that send nothing, as on one rank, would always be exposed least
    exposed = {}
    for name, split in splits.items():
        if split.communication_ns:
            exposed[name] = split.exposed_ns
    if not exposed:
        return "No run sends anything: there is nothing to hide"
    least = min(exposed, key=lambda name: exposed[name])
    most = max(exposed, key=lambda name: exposed[name])
    longest = duration(exposed[most])
    # one run alone, or several that are exposed alike: there is no difference to state
    if least == most:
        share = percent(exposed[most], splits[most].step_ns)
        return f"{most}: {longest} of communication is exposed, {share} of its step"
    shortest = duration(exposed[least])
    return f"{most} is exposed longest, {longest} a step; least: {least}, {shortest}"


def _alt(splits: Splits, columns: Mapping[str, str], of: str, whole: str) -> str:
    runs = []
    for name, split in splits.items():
        parts = []
        for part, column in columns.items():
            length = duration(getattr(split, column))
            parts.append(f"{part} {length}")
        total = duration(getattr(split, whole))
        runs.append(f"{name} {', '.join(parts)} of {total}")
    return f"Stacked bars of {of}: {'; '.join(runs)}."


# ---- exposed communication: every unit's collectives, with the cause where it is known


_ORDER = {"forward": 0, "backward": 1, "optimizer": 2, "": 3}
_LEAST = 130  # pixels of the cells, so that the labels of the colour bar stay apart
_TWO_LINES = 34  # pixels above which a row has room for a number and its cause, one over the other

CellKey = tuple[str, str, str]  # unit, phase and kind
Cells = dict[CellKey, ExposedCell]


def exposed_heatmap(record: RunRecord) -> go.Figure:
    """Draw units (rows, in the forward's order) x collectives of each phase (columns): exposed ms a step, and why.

    Means over the profiled steps of the rank that is exposed longest, so that the cells sum to the run's exposed time;
    the findings count the same cells with the same causes. Needs an `exposed` table (ValueError with the remedy without
    one). An empty cell: the unit has no such collective.
    """
    rank, steps, every_cell = profile.worst_cells(record)
    nameless = profile.unnamed(record)
    cells: Cells = {}
    exposed = {}
    for cell in every_cell:
        # a collective without a unit is the root's, or has a row of its own where the root has a name
        key = (cell.unit or nameless, cell.phase, cell.kind)
        cells[key] = cell
        exposed[key] = cell.exposed_ns
    units, few = profile.foremost_units(record, exposed)
    # pixels: 10 units get 38 each, 90 get 14, so that the map is about a page high at most
    row_height = max(14, min(38, 1300 // len(units)))  # pixels
    between = "<br>" if row_height > _TWO_LINES else " · "
    figure = _map_of_cells(cells, units, between)
    figure.update_xaxes(side="top")
    title, alt = _most_exposed(record, cells)
    mean = f"rank {rank}, the most exposed"
    if not view(record).simulated:
        mean += f", mean of {plural(steps, 'profiled step')}"
    where = profile.conditions(record, mean, profile.slower_words(record), few)
    height_of_cells = max(_LEAST, row_height * len(units))
    return titled(figure, title, where, alt, 46 + height_of_cells)


def _map_of_cells(cells: Cells, units: list[str], between: str) -> go.Figure:
    """Draw the cells with their numbers and causes; `between` stands between the two."""
    # the columns that occur, in the order of the step: "forward all_gather", "backward all_gather", ...
    columns = sorted({(phase, kind) for _, phase, kind in cells}, key=_place_of_column)
    # each is a list of rows, a row a unit
    values: list[list[float | None]] = [[None] * len(columns) for _ in units]
    texts = [[""] * len(columns) for _ in units]
    # what the template's %{customdata} is: one text a cell, None where the cell is empty
    hovers: list[list[str | None]] = [[None] * len(columns) for _ in units]
    for row, unit in enumerate(units):
        for place, (phase, kind) in enumerate(columns):
            cell = cells.get((unit, phase, kind))
            if cell is not None:  # the unit has such a collective
                values[row][place] = cell.exposed_ns / MS
                texts[row][place] = _words(cell, between)
                hovers[row][place] = _hover(cell)
    names = [f"{phase} {kind}".strip() for phase, kind in columns]
    hover = "%{y}, %{x}<br>exposed %{z:.3f} ms of %{customdata}"
    return heat_map(names, units, values, texts, hover, "exposed<br>(ms a step)", customdata=hovers)


def _place_of_column(column: tuple[str, str]) -> tuple[int, str]:
    phase, kind = column
    return _ORDER.get(phase, len(_ORDER)), kind


def _words(cell: ExposedCell, between: str) -> str:
    """Return a cell's exposed time, and its cause where one is known."""
    if not cell.exposed_ns:
        return "hidden"
    words = f"{three_digits(cell.exposed_ns / MS)} ms"
    # "hidden" and "unknown" explain no exposed time, so the number stands alone
    if cell.shown_cause not in ("hidden", "unknown"):
        cause = cell.shown_cause.replace("_", " ")
        words += f"{between}{cause}"
    return words


def _hover(cell: ExposedCell) -> str:
    """Return a cell's communication, its cause, and the parts of its exposed time that there are."""
    cause = cell.shown_cause.replace("_", " ")
    words = f"{cell.communication_ns / MS:.3f} ms of communication, {cause}"
    parts = []
    for name, column in PART_COLUMN.items():
        milliseconds = getattr(cell, column) / MS
        if milliseconds:
            parts.append(f"{name} {milliseconds:.3f} ms")
    if parts:
        words += f"<br>{', '.join(parts)}"
    return words


def _most_exposed(record: RunRecord, cells: Cells) -> tuple[str, str]:
    """Return (title, alternative text): the cell with most exposed time, and its share."""
    name = label(record)
    exposed = {}
    for key, cell in cells.items():
        if cell.exposed_ns:
            exposed[key] = cell.exposed_ns
    total = sum(exposed.values())
    if not total:
        words = "Heat map of exposed communication: every cell is hidden."
        return f"{name}: all communication is hidden under compute", words
    ranked = sorted(exposed, key=lambda key: -exposed[key])
    first = ranked[0]
    longest = duration(exposed[first])
    # cells that read the same are not told apart by what a title cannot show
    alike = [key for key in ranked if duration(exposed[key]) == longest]
    exposed_by_them = sum(exposed[key] for key in alike)
    share = percent(exposed_by_them, total)
    if len(alike) > 1:
        title = f"{name}: {len(alike)} collectives expose {longest} each, {share} of the exposed time"
    else:
        unit, phase, kind = first
        collective = kind
        if unit != NO_UNIT:
            collective += f" of {unit}"
        title = f"{name}: {collective} in {phase} exposes {longest}, {share} of the exposed time"
    most = []
    for key in ranked[:5]:
        words = " ".join(key)
        most.append(f"{words} {duration(exposed[key])}")
    return title, f"Heat map of exposed communication, {duration(total)} a step. Most: {'; '.join(most)}."
