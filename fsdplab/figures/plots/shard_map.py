"""The map of slices: every rank keeps 1/n of every unit, and gets the rest while it computes with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.common.words import plural
from fsdplab.figures.lanes import Span, lane, named_axis
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, conditions, label, rows_of, unit_order
from fsdplab.figures.style import CATEGORY_COLOURS, GRID, titled
from fsdplab.records import RunRecord

# the filling of a unit's cell by its state
STATE_COLOURS = {
    "sharded": "rgba(0,0,0,0)", "unsharding": "#ccd2d9", "unsharded": CATEGORY_COLOURS["unsharded_parameters"]
}  # fmt: skip
_FILLINGS = {"on its way": "unsharding", "unsharded from the other ranks": "unsharded"}
_ENTERED_BY = {"sharded": "reshard", "unsharding": "start_unshard", "unsharded": "finish_unshard"}  # methods of Unit
_ROOM_FOR_NAMES = 20  # units above which their names no longer fit under the cells
_MOST_CELLS = 1_500  # above it only the first ranks are drawn


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
    states: dict[tuple[int, str], list[tuple[int, str]]]

    @property
    def keys(self) -> list[tuple[int, str]]:
        """(rank, unit) of every unit on every rank."""
        return [(rank, unit) for rank in self.ranks for unit in self.units]

    @property
    def shown(self) -> list[int]:
        """The ranks that fit on a map: all, or the first of them where units times ranks are very many."""
        return self.ranks[: max(1, _MOST_CELLS // len(self.units))]

    def at(self, at_ns: float) -> dict[tuple[int, str], str]:
        """Every unit's state on every rank at an instant; ValueError for one outside of the step."""
        if not 0 <= at_ns <= self.length:
            raise ValueError(
                f"at_ns is {at_ns:.0f}; expected 0 to {self.length}, ns since step {self.step} began; choose an instant"
                " of the step"
            )
        return {key: [state for since, state in states if since <= at_ns][-1] for key, states in self.states.items()}


def unit_states(record: RunRecord) -> UnitStates:
    """The states in the memory step, or in the first step that has them; ValueError with the remedy without any.

    The step begins where its timeline does on the first rank, else by the memory's clock, else at the first row.
    """
    rows = rows_of(record, "life")
    measured = {row["step"] for row in record.table("memory")}
    step = min((row["step"] for row in rows if row["step"] in measured), default=min(row["step"] for row in rows))
    rows = [row for row in rows if row["step"] == step]
    timeline = [row for row in record.table("timeline") if row["step"] == step]
    begins = [row["start_ns"] for row in timeline if row["lane"] == "step"]
    if not begins and step in measured:
        begins = list(record.summary.memory_start_ns.values())
    begin = min(begins or [row["time_ns"] for row in rows])
    end = max([row["end_ns"] for row in timeline] + [row["time_ns"] for row in rows])
    ranks, units = sorted({row["rank"] for row in rows}), unit_order(record, {row["unit"] for row in rows})
    states = {(rank, unit): [(0, "sharded")] for rank in ranks for unit in units}
    for key, found in grouped(rows, lambda row: (row["rank"], row["unit"])).items():
        found.sort(key=lambda row: row["time_ns"])
        first = "unsharded" if found[0]["state"] == "sharded" else "sharded"  # a unit that is resharded was whole
        states[key] = [(0, first), *((max(0, row["time_ns"] - begin), row["state"]) for row in found)]
    return UnitStates(step, begin, end - begin, ranks, units, states)


def hover_text(rank: int, unit: str, state: str) -> str:
    """A unit's state, and what set it: `rank 0, blocks.3: unsharding (start_unshard, unit.py line 148)`."""
    return f"rank {rank}, {unit}: {state_words(state)}"


def state_words(state: str) -> str:
    """A state and the engine's method that set it: `unsharding (start_unshard, unit.py line 148)`."""
    method = _ENTERED_BY[state]
    return f"{state} ({method}, unit.py line {_lines_of_unit()[method]})"


@cache
def _lines_of_unit() -> dict[str, int]:
    """Where each method of the engine's Unit begins, read from its source: importing it would import torch."""
    found = find_spec("fsdplab.engine.core.unit")
    assert found is not None and found.origin is not None, "the engine is a part of this package"
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    (unit,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Unit"]
    return {node.name: node.lineno for node in unit.body if isinstance(node, ast.FunctionDef)}


def slice_map(record: RunRecord, at_ns: float) -> go.Figure:
    """Ranks x units at one instant: each cell is a unit, filled with the rank's own slice and what it has unsharded.

    `at_ns`: ns since the memory step began, 0 to its length (ValueError names it). Needs a `life` table: the lab's
    engine, with a profile.
    """
    life = unit_states(record)
    title, alt = finding(record, life, at_ns)
    where = conditions(record, f"step {life.step}, {at_ns / MS:.2f} ms after it began")
    few = f"; the first {plural(len(life.shown), 'rank')}" if life.shown != life.ranks else ""
    where = f"{where}; cell: one unit, 1/{len(life.ranks)} of it a rank{few}"
    return titled(cells_figure(life, at_ns), title, where, alt, map_height(life) + 60)


def cells_figure(life: UnitStates, at_ns: float) -> go.Figure:
    """The cells at an instant with their axes, without a title; the first trace holds a cell for each rank and unit."""
    across, down = axes(life)
    figure = go.Figure(cells(life, at_ns)).update_layout(barmode="overlay", bargap=0)
    return figure.update_xaxes(across).update_yaxes(down)


def map_height(life: UnitStates, row: int = 56) -> int:
    """Pixels of the map's rows, each at most `row` high."""
    return min(row, 700 // len(life.shown)) * len(life.shown)


def cells(life: UnitStates, at_ns: float, **place: str) -> list[go.Bar]:
    """Every unit's cell on every rank, filled by its state, with the rank's own slice over it. A unit is 0.9 wide."""
    state, share = life.at(at_ns), 0.9 / len(life.ranks)
    keys = [key for key in life.keys if key[0] in life.shown]
    left = {unit: place - 0.45 for place, unit in enumerate(life.units)}
    row = {rank: place for place, rank in enumerate(life.ranks)}
    words = {(rank, unit): hover_text(rank, unit, state[rank, unit]) for rank, unit in keys}
    wholes = [Span(row[rank], left[unit], 0.9, hover=words[rank, unit]) for rank, unit in keys]
    owns = [Span(row[rank], left[unit] + share * row[rank], share, hover=words[rank, unit]) for rank, unit in keys]
    look: dict[str, Any] = dict(height=0.72, marker_line_color="#808488", **place)
    whole = lane("unit", "#ffffff", wholes, showlegend=False, **look)
    legend = [lane(name, STATE_COLOURS[of], [Span(-9, 0, 0)], **look) for name, of in _FILLINGS.items()]
    own = lane("own slice", CATEGORY_COLOURS["sharded_parameters"], owns, **look)
    return [whole.update(marker_color=[STATE_COLOURS[state[key]] for key in keys]), *legend, own]


def axes(life: UnitStates) -> tuple[dict[str, Any], dict[str, Any]]:
    """The axes of the cells' columns, and of their rows with the first rank on top."""
    every = -(-len(life.units) // _ROOM_FOR_NAMES)
    units = {place: unit for place, unit in enumerate(life.units) if place % every == 0}
    ranks = {place: f"rank {rank}" for place, rank in enumerate(life.shown)}
    across = named_axis(units, -0.55, len(life.units) - 0.45) | dict(linecolor=GRID)
    return across, named_axis(ranks, len(life.shown) - 0.45, -0.55)


def finding(record: RunRecord, life: UnitStates, at_ns: float) -> tuple[str, str]:
    """(title, alternative text): which units are whole at the instant, on the first rank."""
    state, rank = life.at(at_ns), life.ranks[0]
    whole, coming = ([unit for unit in life.units if state[rank, unit] == name] for name in ("unsharded", "unsharding"))
    units = f"{len(whole)} of {plural(len(life.units), 'unit')} whole on rank {rank}"
    title = f"{label(record)}: {units}{f' ({_few(whole)})' if whole else ''}"
    title += f", {_few(coming)} on {'its' if len(coming) == 1 else 'their'} way" if coming else ""
    words = f"Map of ranks by units {at_ns / MS:.2f} ms into the step. {title}; the others hold"
    return title, f"{words} 1/{len(life.ranks)} each."


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
