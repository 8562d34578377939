"""Stragglers: how much later than the first rank each rank came to each collective.

A collective cannot begin before its last rank has come, so a late rank is every rank's exposed time. The figure shows
every lateness; its title names a rank only where the findings would, too (profiling/late_rank.py).
"""

from __future__ import annotations

import os
import statistics

from fsdplab.common.sizes import three_digits
from fsdplab.common.words import NO_UNIT
from fsdplab.figures import profile_data as profile
from fsdplab.figures.lines import heat_map
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, duration, label
from fsdplab.figures.style import titled
from fsdplab.profiling.arrivals import Arrivals, Key, arrivals_of
from fsdplab.profiling.findings import WORTH_SAYING
from fsdplab.profiling.late_rank import late_rank_of, too_few_steps
from fsdplab.records import RunRecord

_ALIKE = 0.01  # of the step: lateness below it is not red
_MOST_CELLS = 2_000  # above it neighbouring collectives share a column, which shows the latest of them
_ROOM_FOR_NUMBERS = 24  # columns of cells above which numbers no longer fit
_LONGEST_NAME = 24
_SHORT = {"forward": "fwd", "backward": "bwd"}
Late = dict[int, list[float | None]]  # of each rank and column, ms after the first rank


def straggler_map(record: RunRecord) -> go.Figure:
    """Ranks (rows) x collectives (columns): ms by which each rank came later than the first, mean over profiled steps.

    Needs a `timeline` table and two ranks (ValueError without). Come at 1.0 and 1.4 ms, the second is 0.4 ms late.
    """
    rows = profile.profiled(profile.rows_of(record, "timeline"), record)
    issued = arrivals_of(record, {row["step"] for row in rows})
    columns = _columns(issued, profile.unnamed(record))
    ranks = sorted({rank for times in issued.values() for rank in times})
    if len(ranks) < 2 or not columns:
        remedy = "run it with --world-size 2 or more and --profile 2"
        if record.spec.get("engine") == "trace":
            remedy = "give the traces of two ranks or more"
        raise ValueError(f"{label(record)} has no collective of two ranks to compare; {remedy}")
    late: Late = {rank: [_lateness(keys, issued, rank) for keys in columns.values()] for rank in ranks}
    known = {rank: [value for value in values if value is not None] for rank, values in late.items()}
    highest = max(max(values, default=0.0) for values in known.values())
    split = profile.breakdown_of(record)
    alike = _ALIKE * split.step_ns / MS if split else 0.0
    most = max(highest, 2 * alike) or 1.0
    every = -(-len(columns) * len(ranks) // _MOST_CELLS)
    drawn, numbers = [_latest(values, every) for values in late.values()], len(columns) <= _ROOM_FOR_NUMBERS
    texts = [[_words(value) if numbers else "" for value in values] for values in drawn]
    hover = "%{y}, %{x}<br>%{z:.3f} ms after the first rank"
    scale = "" if numbers else "later than the<br>first rank (ms)"
    figure = heat_map(list(columns)[::every], [f"rank {rank}" for rank in ranks], drawn, texts, hover, scale, most)
    figure.update_traces(colorbar=dict(lenmode="pixels", len=150, y=1, yanchor="top", nticks=4))
    figure.update_xaxes(tickangle=-45, title_text="collectives in the order of the step")
    title = _finding(record, highest)
    means = ", ".join(f"rank {rank} {duration(statistics.fmean(known[rank]) * MS)}" for rank in ranks)
    alt = f"Heat map of lateness. {title}. Mean lateness: {means}."
    height = 208 + max(16, min(46, 900 // len(ranks))) * len(ranks)
    how = f"{every} collectives a column" if every > 1 else ""
    return titled(figure, title, profile.conditions(record, "cells: ms after the first rank", how), alt, height)


def _columns(issued: Arrivals, nameless: str) -> dict[str, list[Key]]:
    """{column: its collective in each step}, in the order of the step."""
    columns: dict[str, list[Key]] = {}
    names = _short_names({key[1] for key in issued})
    for key in sorted(issued, key=lambda key: (key[0], min(issued[key].values()))):
        again = f" #{key[4] + 1}" if key[4] else ""
        unit = "" if nameless == NO_UNIT else f" {names[key[1]] or nameless}"
        columns.setdefault(f"{key[3]}{unit} {_SHORT.get(key[2], key[2])}{again}", []).append(key)
    return columns


def _short_names(units: set[str]) -> dict[str, str]:
    """Units short enough for a slanted label: long names without their common beginning."""
    if max(map(len, units), default=0) <= _LONGEST_NAME:
        return {unit: unit for unit in units}
    named = [unit for unit in units if "." in unit]
    common = os.path.commonprefix(named).rpartition(".")[0] if len(named) > 1 else ""
    found = {unit: f"…{unit[len(common) :]}" if common and unit.startswith(f"{common}.") else unit for unit in units}
    cut = {unit: name if len(name) <= _LONGEST_NAME else f"{name[:23]}…" for unit, name in found.items()}
    return cut if len(set(cut.values())) == len(units) else found


def _lateness(keys: list[Key], issued: Arrivals, rank: int) -> float | None:
    """Mean ms after the first rank; None for a collective of other ranks."""
    late = [issued[key][rank] - min(issued[key].values()) for key in keys if rank in issued[key]]
    return statistics.fmean(late) / MS if late else None


def _latest(values: list[float | None], every: int) -> list[float | None]:
    """The latest of each `every` values: a column for several collectives."""
    columns = [values[place : place + every] for place in range(0, len(values), every)]
    return [max((round(value, 4) for value in column if value is not None), default=None) for column in columns]


def _words(value: float | None) -> str:
    return "" if value is None else three_digits(value) if value else "first"


def _finding(record: RunRecord, highest: float) -> str:
    """The title: which rank is late, by how much and how often; or that none is so again and again."""
    found, split = late_rank_of(record), profile.breakdown_of(record)
    # others must wait for the late rank for long enough: who sends ahead may be late for free
    waiting = None if split is None else split.waiting_ns
    lost = 0.0 if found is None else found.a_step_ns if waiting is None else found.of_waiting(waiting)
    if found is None or split and lost < WORTH_SAYING * split.step_ns:
        apart = f"ranks come within {duration(highest * MS)} of one another"
        few = too_few_steps(record) if found is None else ""
        return f"{label(record)}: {apart}; who is late, {few}" if few else f"{label(record)}: no straggler, {apart}"
    last = f"last to {found.last} of {found.of} collectives{f' in {found.phase}' if found.phase else ''}"
    return f"{label(record)}: rank {found.rank} straggles, {last}, {duration(found.by_ns)} after the others (median)"
