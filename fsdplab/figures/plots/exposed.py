"""Exposed communication: every unit's collectives, in ms, with the cause where it is known."""

from __future__ import annotations

from fsdplab.common.sizes import three_digits
from fsdplab.common.words import NO_UNIT, plural
from fsdplab.figures import profile_data as profile
from fsdplab.figures.heat import heat_map
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.breakdown import PART_COLUMN
from fsdplab.figures.profile_data import MS, duration, label
from fsdplab.figures.style import titled
from fsdplab.figures.view import view
from fsdplab.profiling.step_summary import ExposedCell
from fsdplab.records import RunRecord

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
    title, alt = _finding(record, cells)
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


def _finding(record: RunRecord, cells: Cells) -> tuple[str, str]:
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
