"""Exposed communication: every unit's collectives, in ms, with the cause where it is known."""

from __future__ import annotations

import statistics

from fsdplab.common.sizes import three_digits
from fsdplab.common.words import plural
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import (
    MS,
    Row,
    breakdown_of,
    conditions,
    duration,
    group,
    label,
    percent,
    profiled,
    rows_of,
    unit_order,
)
from fsdplab.figures.style import DARK_INK, HEAT, titled
from fsdplab.records import RunRecord

_PHASES = ("forward", "backward", "optimizer", "")
_CAUSES = {"hidden": "", "unknown": ""}
MOST_ROWS = 90  # units that fit on a page; of more, those with most exposed time are drawn

Cell = tuple[float, float, str]  # exposed and communication in ms a step, and the usual cause


def exposed_heatmap(record: RunRecord) -> go.Figure:
    """Units (rows, in the forward's order) x collectives of each phase (columns): exposed ms a step, and the cause.

    Means over the profiled steps of the rank that is exposed longest, so that the cells sum to that rank's exposed
    time. Needs an `exposed` table (ValueError with the remedy without one). An empty cell: the unit has no such
    collective.
    """
    rank, rows = worst_rank(record)
    cells = {
        key: _cell(found) for key, found in group(rows, lambda row: (row["unit"], row["phase"], row["kind"])).items()
    }
    found = {unit for unit, _, _ in cells}
    units = unit_order(
        record, foremost({unit: sum(cell[0] for key, cell in cells.items() if key[0] == unit) for unit in found})
    )
    columns = sorted(
        {key[1:] for key in cells},
        key=lambda column: (_PHASES.index(column[0]) if column[0] in _PHASES else 9, column[1]),
    )
    grid = [[cells.get((unit, *column)) for column in columns] for unit in units]
    figure = go.Figure(_heat(grid, units, columns))
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(side="top", type="category", showgrid=False)
    total = sum(cell[0] for cell in cells.values())
    title, alt = _finding(record, cells, total)
    steps = len({row["step"] for row in rows})
    where = conditions(
        record, f"rank {rank}, the most exposed, mean of {plural(steps, 'profiled step')}", few_words(units, found)
    )
    return titled(figure, title, where, alt, height=170 + max(14, min(38, 1300 // len(units))) * len(units), top=124)


def foremost(weights: dict[str, float]) -> list[str]:
    """The units of most weight, as many as fit on a page: all of them up to 90."""
    return sorted(weights, key=lambda unit: -abs(weights[unit]))[:MOST_ROWS]


def few_words(drawn: list[str], found: set[str]) -> str:
    """The subtitle's text on units left out; empty where none was: `"the 90 foremost of 224 units"`."""
    return f"the {len(drawn)} foremost of {len(found)} units" if len(drawn) < len(found) else ""


def worst_rank(record: RunRecord) -> tuple[int, list[Row]]:
    """(the rank exposed longest over the profiled steps, its rows of `exposed`)."""
    by_rank = group(profiled(rows_of(record, "exposed"), record), lambda row: row["rank"])
    split = breakdown_of(record)
    worst = (
        split["rank"]
        if split and split["rank"] in by_rank
        else max(by_rank, key=lambda rank: sum(row["exposed_ns"] for row in by_rank[rank]))
    )
    return worst, by_rank[worst]


def _cell(found: list[Row]) -> Cell:
    """(exposed, communication) in ms a step and the usual cause, of one unit's collective in one phase."""
    steps = len({row["step"] for row in found})
    exposed, communication = (
        sum(row[name] for row in found) / steps / MS for name in ("exposed_ns", "communication_ns")
    )
    causes = [row["cause"] for row in found if row["exposed_ns"]]
    return exposed, communication, statistics.mode(causes) if causes else "hidden"


def _heat(grid: list[list[Cell | None]], units: list[str], columns: list[tuple[str, str]]) -> go.Heatmap:
    return go.Heatmap(
        x=[f"{phase} {kind}".strip() for phase, kind in columns],
        y=units,
        z=[[cell and cell[0] for cell in row] for row in grid],
        text=[[_words(cell) for cell in row] for row in grid],
        texttemplate="%{text}",
        textfont=dict(size=14, color=DARK_INK),
        customdata=[
            [cell and f"{cell[1]:.3f} ms of communication, {cell[2].replace('_', ' ')}" for cell in row] for row in grid
        ],
        hovertemplate="%{y}, %{x}<br>exposed %{z:.3f} ms of %{customdata}<extra></extra>",
        hoverongaps=False,
        xgap=3,
        ygap=3,
        zmin=0,
        zmax=max((cell[0] for row in grid for cell in row if cell), default=0) or 1,
        colorscale=HEAT,
        colorbar=dict(
            title=dict(text="exposed<br>(ms a step)", font=dict(size=14)),
            thickness=16,
            tickfont=dict(size=14),
            outlinewidth=0,
        ),
    )


def _words(cell: Cell | None) -> str:
    if cell is None:
        return ""
    cause = _CAUSES.get(cell[2], cell[2].replace("_", " "))
    return f"{three_digits(cell[0])} ms{' · ' if cause else ''}{cause}" if cell[0] else "hidden"


def _finding(record: RunRecord, cells: dict[tuple[str, str, str], Cell], total: float) -> tuple[str, str]:
    """(title, alternative text): the cell with most exposed time, and its share."""
    if not total:
        return (
            f"{label(record)}: all communication is hidden under compute",
            "Heat map of exposed communication: every cell is hidden.",
        )
    ranked = sorted(cells, key=lambda key: -cells[key][0])
    first = ranked[0]
    exposed = cells[first][0]
    title = (
        f"{label(record)}: {first[2]} of {first[0]} in {first[1]} exposes {duration(exposed * MS)},"
        f" {percent(exposed, total)} of the exposed time"
    )
    most = "; ".join(f"{' '.join(key)} {duration(cells[key][0] * MS)}" for key in ranked[:5] if cells[key][0])
    return title, f"Heat map of exposed communication, {duration(total * MS)} a step. Most: {most}."
