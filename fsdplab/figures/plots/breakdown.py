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
from fsdplab.figures.byte_axis import ByteUnit, byte_unit
from fsdplab.figures.lines import heat_map
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, Row, duration, label, percent, where
from fsdplab.figures.style import EDGE, EXPOSED_COLOURS, PHASE_COLOURS, STEP_COLOURS, titled
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
    figure = _stacked(ends, splits, COLUMN, STEP_COLOURS, "time of one step (ms)")
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
    figure = _stacked(ends, splits, PART_COLUMN, EXPOSED_COLOURS, "exposed time of one step (ms)")
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
    parts = []
    # one part a column, with a length in ms for each run: a row of the figure is a run
    for name, column in columns.items():
        lengths = [getattr(split, column) / MS for split in splits.values()]
        parts.append(Part(name, colours[name], lengths))
    return stacked_bars(ends, parts, axis, "%{x:.3f} ms", lambda ms: duration(ms * MS))


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


# ---- two runs compared unit by unit: communication, exposed time and unsharded memory


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


def _quantity(name: str, unit: ByteUnit) -> str:
    """Return the unit of a panel's axis."""
    return unit.symbol if name == "unsharded" else "ms"


def _words_of_difference(
    a: RunRecord, b: RunRecord, changes: Mapping[str, Amounts], few: str, unit: ByteUnit
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


def _change(first: str, second: str, changes: Mapping[str, Amounts], unit_of_bytes: ByteUnit) -> tuple[str, str]:
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
