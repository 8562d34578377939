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
Columns = dict[str, list[Key]]  # by its name, a collective of each step
Late = dict[int, list[float | None]]  # of each rank and column, ms after the first rank


def straggler_map(record: RunRecord) -> go.Figure:
    """Draw ranks (rows) x collectives (columns): ms by which each rank came later than the first, mean over profiled
    steps.

    Needs a `timeline` table and two ranks (ValueError without). Come at 1.0 and 1.4 ms, the second is 0.4 ms late.
    """
    # the memory step is slow on every rank, and says nothing of who is late
    rows = profile.profiled(profile.rows_of(record, "timeline"), record)
    issued = arrivals_of(record, profile.distinct(rows, "step"))
    columns = _columns(issued, profile.unnamed(record))
    # ranks that took part in any collective: with process groups, not all are in each
    every_rank: set[int] = set()
    for times in issued.values():
        every_rank.update(times)
    ranks = sorted(every_rank)
    if len(ranks) < 2 or not columns:
        raise ValueError(f"{label(record)} has no collective of two ranks to compare; {_remedy(record)}")
    late: Late = {}
    for rank in ranks:
        # a row of the map: the rank's mean lateness at each column
        late[rank] = [_lateness(keys, issued, rank) for keys in columns.values()]
    means, highest = _means_and_highest(late)
    # 8 ranks x 1,000 collectives are 8,000 cells: 4 collectives share a column
    shared = -(-len(columns) * len(ranks) // _MOST_CELLS)  # collectives that share a column
    figure = _cells(columns, late, shared, _strongest(record, highest))
    title = _finding(record, highest)
    mean_words = []
    for rank, mean in means.items():
        mean_words.append(f"rank {rank} {duration(mean * MS)}")
    alt = f"Heat map of lateness. {title}. Mean lateness: {', '.join(mean_words)}."
    how = f"{shared} collectives a column" if shared > 1 else ""
    where = profile.conditions(record, "cells: ms after the first rank", how)
    row_height = max(16, min(46, 900 // len(ranks)))
    return titled(figure, title, where, alt, 208 + row_height * len(ranks))


def _remedy(record: RunRecord) -> str:
    if record.spec.get("engine") == "trace":
        return "give the traces of two ranks or more"
    return "run it with --world-size 2 or more and --profile 2"


def _cells(columns: Columns, late: Late, shared: int, strongest: float) -> go.Figure:
    """Draw the map; numbers stand in its cells where they fit, else a scale of colours beside it."""
    drawn = [_latest(values, shared) for values in late.values()]
    # a shared column has the name of its first collective
    names = list(columns)[::shared]
    ranks = [f"rank {rank}" for rank in late]
    # with numbers in the cells no scale of colours is needed
    has_numbers = len(columns) <= _ROOM_FOR_NUMBERS
    texts = []  # a row a rank
    for values in drawn:
        if has_numbers:
            texts.append([_words(value) for value in values])
        else:
            texts.append([""] * len(values))
    scale_title = "" if has_numbers else "later than the<br>first rank (ms)"
    hover = "%{y}, %{x}<br>%{z:.3f} ms after the first rank"
    figure = heat_map(names, ranks, drawn, texts, hover, scale_title, strongest)
    # as high as its labels need, whatever the number of ranks
    scale = dict(lenmode="pixels", len=150, y=1, yanchor="top", nticks=4)
    figure.update_traces(colorbar=scale)
    return figure.update_xaxes(tickangle=-45, title_text="collectives in the order of the step")


def _strongest(record: RunRecord, highest: float) -> float:
    """Return the ms of the strongest colour: at least two hundredths of a step, so that little lateness stays pale."""
    split = profile.breakdown_of(record)
    alike = _ALIKE * split.step_ns / MS if split else 0.0
    # the last 1.0 is for a map of zeros, whose scale would have no length
    return max(highest, 2 * alike) or 1.0


# ---- the columns, and how late each rank came to each


def _columns(issued: Arrivals, nameless: str) -> Columns:
    """Return {column: its collective in each step}, in the order of the step."""
    columns: Columns = {}
    names = _short_names({key.unit for key in issued})
    # by the first rank's arrival: the order in which the step issues them
    in_order = sorted(issued, key=lambda key: (key.step, min(issued[key].values())))
    for key in in_order:
        words = [key.kind]
        # where the trace names no unit at all, a column is "all_gather fwd"
        if nameless != NO_UNIT:
            words.append(names[key.unit] or nameless)
        words.append(_SHORT.get(key.phase, key.phase))
        # the second collective of a unit, phase and kind in a step is "#2"
        if key.number:
            words.append(f"#{key.number + 1}")
        # the same name in each step: a column's mean is over these
        columns.setdefault(" ".join(words), []).append(key)
    return columns


def _short_names(units: set[str]) -> dict[str, str]:
    """Return units short enough for a slanted label: long names without their common beginning, then cut at the end.

    A cut that would make two units one is not made.
    """
    if max(map(len, units), default=0) <= _LONGEST_NAME:
        return {unit: unit for unit in units}
    # a name without a dot, such as the root's, shares no beginning with those of blocks
    in_modules = [unit for unit in units if "." in unit]
    common = ""
    if len(in_modules) > 1:
        # "model.layers.1" and "model.layers.12" begin alike up to "model.layers.1": cut back to "model.layers"
        common = os.path.commonprefix(in_modules).rpartition(".")[0]
    shortened, cut = {}, {}
    for unit in units:
        name = unit
        if common and unit.startswith(f"{common}."):
            name = f"…{unit.removeprefix(common)}"
        shortened[unit] = name
        cut[unit] = name
        if len(name) > _LONGEST_NAME:
            cut[unit] = f"{name[: _LONGEST_NAME - 1]}…"
    # two columns of one name would become one
    all_differ = len(set(cut.values())) == len(units)
    return cut if all_differ else shortened


def _lateness(keys: list[Key], issued: Arrivals, rank: int) -> float | None:
    """Return the mean ms after the first rank; None for a collective of other ranks."""
    late = []
    for key in keys:
        times = issued[key]
        if rank in times:
            first = min(times.values())
            late.append(times[rank] - first)
    if not late:
        return None
    return statistics.fmean(late) / MS


def _means_and_highest(late: Late) -> tuple[dict[int, float], float]:
    """Return (the mean lateness of each rank in ms, the highest lateness of all)."""
    means, highest = {}, 0.0
    for rank, values in late.items():
        # None where the rank takes no part in a collective
        known = [value for value in values if value is not None]
        means[rank] = statistics.fmean(known)
        highest = max(highest, *known)
    return means, highest


def _latest(values: list[float | None], shared: int) -> list[float | None]:
    """Return the latest of each `shared` values: a column for several collectives."""
    latest: list[float | None] = []
    for place in range(0, len(values), shared):
        of_column = values[place : place + shared]
        known = [round(value, 4) for value in of_column if value is not None]
        latest.append(max(known, default=None))
    return latest


# ---- words


def _words(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0:
        return "first"
    return three_digits(value)


def _finding(record: RunRecord, highest: float) -> str:
    """Return the title: which rank is late, by how much and how often; or that none is so again and again."""
    found = late_rank_of(record)
    name = label(record)
    apart = f"ranks come within {duration(highest * MS)} of one another"
    none_is_late = f"{name}: no straggler, {apart}"
    # too few steps to tell chance from habit, or enough and nobody stands out
    if found is None:
        few = too_few_steps(record)
        if few:
            return f"{name}: {apart}; who is late, {few}"
        return none_is_late
    split = profile.breakdown_of(record)
    if split is not None:
        # others must wait for the late rank for long enough: who sends ahead may be late for free
        lost = found.a_step_ns
        # of 10 ms of waiting in a step, 9 may be for this rank; records of earlier versions have its own delay alone
        if split.waiting_ns is not None:
            lost = found.of_waiting(split.waiting_ns)
        if lost < WORTH_SAYING * split.step_ns:
            return none_is_late
    last = f"last to {found.last} of {found.of} collectives"
    if found.phase:
        last += f" in {found.phase}"
    by = duration(found.by_ns)
    return f"{name}: rank {found.rank} straggles, {last}, {by} after the others (median)"
