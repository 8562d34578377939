"""Stragglers: how much later than the first rank each rank issued each collective.

A collective cannot begin before its last rank has issued it, so a late rank is every rank's exposed time. On an
emulated link a row of the ledger begins when the link starts the collective, for all ranks at once; there, a gather's
issue is read from the units' states and a reduction's from the end of the unit's backward.
"""

from __future__ import annotations

import statistics
from collections import Counter

from fsdplab.common.sizes import three_digits
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import (
    COLLECTIVES,
    MS,
    Row,
    breakdown_of,
    conditions,
    duration,
    label,
    named_rows,
    profiled,
    rows_of,
)
from fsdplab.figures.style import DARK_INK, HEAT, titled
from fsdplab.records import RunRecord

_ALIKE = 0.01  # of the step: lateness below it is no straggler, and not red
_MOST_CELLS = 2_000  # above it neighbouring collectives share a column, which shows the latest of them
_ROOM_FOR_NUMBERS = 24  # columns of cells above which numbers no longer fit
Key = tuple[int, str, str, str, int]  # step, unit, phase, kind, which of them


def straggler_map(record: RunRecord) -> go.Figure:
    """Ranks (rows) x collectives in time order (columns): ms by which each rank issued later than the first, mean over
    the profiled steps.

    Needs a `timeline` table and two ranks (ValueError without). Issued at 1.0 and 1.4 ms, the second rank is 0.4 ms
    late.
    """
    rows = profiled(rows_of(record, "timeline"), record)
    issued, how = issues(record, rows)
    columns = _columns(issued)
    ranks = sorted({rank for times in issued.values() for rank in times})
    if len(ranks) < 2 or not columns:
        raise ValueError(
            f"{label(record)} has no collective of two ranks to compare; run it with --world-size 2 or more and"
            " --profile 2"
        )
    late = {rank: [_lateness(keys, issued, rank) for keys in columns.values()] for rank in ranks}
    most = max(*(value for values in late.values() for value in values), 2 * _alike_ms(record)) or 1
    every = -(-len(columns) * len(ranks) // _MOST_CELLS)
    drawn = {
        rank: [max(values[place : place + every]) for place in range(0, len(values), every)]
        for rank, values in late.items()
    }
    figure = go.Figure(_heat(drawn, list(columns)[::every], most, numbers=len(columns) <= _ROOM_FOR_NUMBERS))
    how = f"{every} collectives a column" if every > 1 else how
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(
        type="category", showgrid=False, tickangle=-45, title_text="collectives in the order of the step"
    )
    title = _finding(record, late)
    means = ", ".join(f"rank {rank} {duration(statistics.fmean(late[rank]) * MS)}" for rank in ranks)
    alt = f"Heat map of lateness. {title}. Mean lateness: {means}."
    height = 300 + max(16, min(46, 900 // len(ranks))) * len(ranks)
    return titled(figure, title, conditions(record, "cells: ms after the first rank", how), alt, height, top=92)


def issues(record: RunRecord, rows: list[Row]) -> tuple[dict[Key, dict[int, int]], str]:
    """({collective: {rank: when it issued, ns}}, the source of these times)."""
    steps = {row["step"] for row in rows}
    # copies on the host are no collectives
    travel = [row for row in rows if row["lane"] in COLLECTIVES and row["name"] == row["lane"]]
    if not any(row["emulated"] for row in travel):
        ledger = [{**row, "name": row["kind"]} for row in named_rows(record, "ledger") if row["step"] in steps]
        return _numbered([(row, row["start_ns"]) for row in ledger or travel]), ""
    life = [row for row in named_rows(record, "life") if row["state"] == "unsharding" and row["step"] in steps]
    gathers = [({**row, "name": "all_gather"}, row["time_ns"]) for row in life]
    ends: dict[tuple[int, int, str], int] = {}
    for row in rows:
        if row["lane"] == "compute" and row["phase"] == "backward":
            key = row["rank"], row["step"], row["unit"]
            ends[key] = max(ends.get(key, 0), row["end_ns"])
    found = [
        (row, ends.get((row["rank"], row["step"], row["unit"]))) for row in travel if row["lane"] == "reduce_scatter"
    ]
    reductions = [(row, end) for row, end in found if end]
    return _numbered(gathers + reductions), "reductions: after backward"


def _numbered(found: list[tuple[Row, int]]) -> dict[Key, dict[int, int]]:
    """Issues by collective; the n-th of a kind on one rank belongs to the n-th on the others. Collectives that one rank
    lacks are left out.
    """
    ordinal: Counter[tuple[int, tuple[int, str, str, str]]] = Counter()
    issued: dict[Key, dict[int, int]] = {}
    for row, time_ns in sorted(found, key=lambda pair: pair[1]):
        which = row["step"], row["unit"], row["phase"], row["name"]
        issued.setdefault((*which, ordinal[row["rank"], which]), {})[row["rank"]] = time_ns
        ordinal[row["rank"], which] += 1
    most = max(map(len, issued.values()), default=0)
    return {key: times for key, times in issued.items() if len(times) == most}


def _columns(issued: dict[Key, dict[int, int]]) -> dict[str, list[Key]]:
    """{column: its collective in each step}, in the order of the step."""
    columns: dict[str, list[Key]] = {}
    for key in sorted(issued, key=lambda key: (key[0], min(issued[key].values()))):
        again = f" #{key[4] + 1}" if key[4] else ""
        columns.setdefault(f"{key[3]} {key[1]} {_SHORT.get(key[2], key[2])}{again}", []).append(key)
    return columns


_SHORT = {"forward": "fwd", "backward": "bwd"}


def _lateness(keys: list[Key], issued: dict[Key, dict[int, int]], rank: int) -> float:
    return statistics.fmean(issued[key][rank] - min(issued[key].values()) for key in keys) / MS


def _heat(late: dict[int, list[float]], columns: list[str], most: float, numbers: bool) -> go.Heatmap:
    return go.Heatmap(
        x=columns, y=[f"rank {rank}" for rank in late],
        z=[[round(value, 4) for value in values] for values in late.values()],
        text=[[three_digits(value) if value else "first" for value in values] for values in late.values()],
        texttemplate="%{text}" if numbers else None, textfont=dict(size=13, color=DARK_INK),
        hovertemplate="%{y}, %{x}<br>%{z:.3f} ms after the first rank<extra></extra>",
        xgap=2, ygap=3, zmin=0, zmax=most, colorscale=HEAT,
        showscale=not numbers,
        colorbar=dict(
            title=dict(text="later than the<br>first rank (ms)", font=dict(size=14)), thickness=16,
            tickfont=dict(size=14), outlinewidth=0,
            lenmode="pixels", len=150, y=1, yanchor="top", nticks=4,
        ),
    )  # fmt: skip


def _alike_ms(record: RunRecord) -> float:
    """Lateness in ms that is ignored."""
    split = breakdown_of(record)
    return _ALIKE * split["step_ns"] / MS if split else 0.0


def _finding(record: RunRecord, late: dict[int, list[float]]) -> str:
    """The title: which rank is late, by how much and how often; or that none is."""
    mean = {rank: statistics.fmean(values) for rank, values in late.items()}
    slow = max(mean, key=lambda rank: mean[rank])
    if mean[slow] <= _alike_ms(record):
        return (
            f"{label(record)}: no straggler, ranks issue within {duration(max(map(max, late.values())) * MS)} of one"
            " another"
        )
    last = sum(0 < value == max(values[index] for values in late.values()) for index, value in enumerate(late[slow]))
    return (
        f"{label(record)}: rank {slow} straggles, {duration(mean[slow] * MS)} late on average, last in {last} of"
        f" {len(late[slow])} collectives"
    )
