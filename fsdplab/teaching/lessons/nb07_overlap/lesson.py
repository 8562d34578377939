"""Lesson 07 in the notebook's process: one job behind an emulated link, and how much of its communication shows.

M are the instants in which a message is on its way, C those in which the rank computes: what is exposed is M without C.
What is judged about time comes from the steady card, whose times are the same on every machine.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fsdplab.common.sizes import seconds
from fsdplab.engine.core.step import Schedule
from fsdplab.figures.fastest import fastest_words
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import COLLECTIVES, breakdown_of, percent, timeline_of, worst_cells
from fsdplab.figures.style import GRID, titled
from fsdplab.figures.view import view
from fsdplab.profiling.intervals import length
from fsdplab.profiling.step_summary import StepSummary
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching.core.beside import busiest, why_it_differs
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

from .on_ranks import TARGET_MS, complaint

_on_ranks = LessonRanks(__file__)
MS = 1e6  # nanoseconds
Row = dict[str, Any]
Intervals = list[tuple[int, int]]
InMs = list[tuple[float, float]]


def split(record: RunRecord) -> StepSummary:
    """The breakdown of a run that was profiled."""
    found = breakdown_of(record)
    assert found is not None, "the lesson's runs are profiled"
    return found


def on_the_link_ns(record: RunRecord) -> float:
    """Exposed ns of the profiled step in which a message moves: the one number that the lesson calls exposed."""
    return known(split(record).on_link_ns)


def by_cause(record: RunRecord) -> Table:
    """The exposed time of a step by its cause, the most frequent first."""
    _, _, cells = worst_cells(record)
    spent: dict[str, float] = defaultdict(float)
    for cell in cells:
        spent[cell.shown_cause.replace("_", " ")] += cell.exposed_ns
    rows = [
        [cause, f"{exposed / MS:.1f}", percent(exposed, sum(spent.values()))]
        for cause, exposed in sorted(spent.items(), key=lambda each: -each[1])
    ]
    return table(["cause", "exposed, ms a step", "share"], rows)


def by_hand(exposed: Callable[[InMs, InMs], float], record: RunRecord) -> Table:
    """The learner's `exposed(M, C)` on the intervals of the record's usual step, beside the record's own number;
    in ms.
    """
    step, rows = timeline_of(record, None)
    begin = min(row["start_ns"] for row in rows)
    cells = []
    for rank in sorted({row["rank"] for row in rows}):
        lists = [_intervals(rows, rank, lanes) for lanes in (COLLECTIVES, ("compute",))]
        moved, computed = ([((start - begin) / MS, (end - begin) / MS) for start, end in each] for each in lists)
        own = next(row for row in record.table("breakdown") if (row["rank"], row["step"]) == (rank, step))
        both = [f"{exposed(moved, computed):.1f}", f"{own['exposed_ns'] / MS:.1f}"]
        cells.append([f"rank {rank}", len(moved), len(computed), *both])
    header = ["", "messages", "pieces of compute", "exposed by your function, ms", "in the record, ms"]
    return table(header, cells, "A step on the steady card, simulated.")


def _intervals(rows: list[Row], rank: int, lanes: tuple[str, ...]) -> Intervals:
    return [(row["start_ns"], row["end_ns"]) for row in rows if row["rank"] == rank and row["lane"] in lanes]


# ---- compute inflation


def computing_ms(record: RunRecord) -> float:
    """Milliseconds of forward and backward in the usual step, mean over the ranks; the optimizer's step is left out."""
    _, rows = timeline_of(record, None)
    spent: dict[int, int] = defaultdict(int)
    for row in rows:
        if row["lane"] == "compute" and row["phase"] in ("forward", "backward"):
            spent[row["rank"]] += row["end_ns"] - row["start_ns"]
    return statistics.fmean(spent.values()) / MS


def inflation(runs: Mapping[str, RunRecord]) -> Table:
    """Forward and backward of each run beside the first one's, which sends nothing;
    with the step and what was hidden.
    """
    first = next(iter(runs.values()))
    rows = []
    for name, record in runs.items():
        own, computed, step = split(record), computing_ms(record), known(record.summary.step_time_s.median)
        hidden = percent(own.overlapped_ns, own.communication_ns) if own.communication_ns else "nothing sent"
        beside = [computed / computing_ms(first), step / known(first.summary.step_time_s.median)]
        rows.append([name, f"{computed:.0f}", f"{beside[0]:.2f}", hidden, f"{1e3 * step:.0f}", f"{beside[1]:.2f}"])
    header = ["run", "forward + backward, ms", "compute inflation", "communication hidden"]
    header += ["step, ms", "times the first"]
    others = [
        replace(view(record), strategy=name, engine="lab") for name, record in runs.items() if record is not first
    ]
    caption = "Measured on this machine, computing under the profiler; the link of the emulated row is emulated."
    fastest = f"Of the runs that send, {fastest_words(others)}."
    return table(header, rows, f"{caption} {fastest} {why_it_differs(busiest(list(runs.values())))}")


# ---- what no schedule can hide


def least_exposed_ms(compute_ms: float, communication_ms: float) -> float:
    """The exposed time that even a perfect schedule leaves: `least_exposed_ms(300, 500) == 200`."""
    return max(0.0, communication_ms - compute_ms)


# (MB/s of the link, exposed ms, ms of all communication) points by the schedule's name
Curves = Mapping[str, list[tuple[int, float, float]]]
_LINES = (("#e01f3d", 3, "solid"), ("#4aa3e0", 3, "solid"), ("#6b7380", 2, "dash"))  # colour, width, dash


def exposed_curves(curves: Curves, link: int, tokens: int) -> go.Figure:
    """Exposed part of the communication (y) over the link (x), a line a schedule; `link` is marked, and the title has
    its ms.

    The axis is in doublings of the slowest link: as much width from 25 to 50 MB/s as from 3,200 to 6,400.
    """
    links = sorted({at for points in curves.values() for at, _, _ in points})
    places = {at: math.log2(at / links[0]) for at in links}
    figure = go.Figure()
    for (name, points), (colour, width, dash) in zip(curves.items(), _LINES, strict=True):
        shares = [100 * shown / moved for _, shown, moved in points]
        hover = f"{name}, %{{customdata[0]}} MB/s<br>%{{customdata[1]:.1f}} of %{{customdata[2]:.1f}} ms<extra></extra>"
        at = [places[each] for each, _, _ in points]
        drawn = line(name, colour, at, shares, width, dash, customdata=list(map(list, points)), hovertemplate=hover)
        figure.add_trace(drawn)
    names = dict(tickmode="array", tickvals=list(places.values()), ticktext=[f"{at:,}" for at in links])
    figure.update_xaxes(title_text="link (MB/s)", range=[-0.3, places[links[-1]] + 0.3], **names)
    figure.update_yaxes(title_text="exposed, % of communication", range=[-3, 105])
    marked = dict(x0=places[link], x1=places[link], y0=0, y1=1, yref="paper", line=dict(color=GRID, width=4))
    figure.add_shape(type="line", **marked)
    here = {name: next(each[1:] for each in points if each[0] == link) for name, points in curves.items()}
    parts = [f"{seconds(shown / 1e3) if shown else '0 ms'} ({name})" for name, (shown, _) in here.items()]
    moved = seconds(next(iter(here.values()))[1] / 1e3)
    title = f"{link:,} MB/s, {tokens} tokens: messages take {moved}; exposed are {', '.join(parts[:2])}"
    least = f"at least {parts[-1].partition(' (')[0]} under any schedule"
    where = f"{least}; a step on the steady card, simulated with the engine's own schedule"
    return titled(figure, title, where, f"Lines of exposed time over the link. {title}; {least}.", 324)


LINKS = (25, 50, 100, 200, 400, 800, 1600, 3200, 6400)  # MB/s
TOKENS = (32, 64, 128, 256, 512)  # of a rank's step
MOST_AHEAD = {"unsharded when needed": 0, "one unit ahead": 1}  # the curves, by their prefetch depth


def exposed_over_links(job: RunSpec) -> Callable[[int, int], go.Figure]:
    """A figure for sliders: exposed ms of the job's step on the steady card over the link, for a number of tokens.

    The curves of `TOKENS` are computed at once, before a slider is moved.
    """
    for each in TOKENS:
        curves_of(job, each, LINKS)

    def drawn(megabytes_per_second: int, tokens: int) -> go.Figure:
        curves = curves_of(job, tokens, tuple(sorted({*LINKS, megabytes_per_second})))
        return exposed_curves(curves, megabytes_per_second, tokens)

    return drawn


@lru_cache(maxsize=32)
def curves_of(job: RunSpec, tokens: int, links: tuple[int, ...]) -> Curves:
    """(MB/s, exposed ms, ms of all communication) points by the schedule's name, and of what no schedule can hide."""
    found: Curves = {name: [] for name in (*MOST_AHEAD, "no schedule can hide")}
    for link in links:
        behind = replace(job, link=f"{link}MB/s", sequence_length=tokens // job.batch_size)
        timed = {name: steady(replace(behind, prefetch=depth)) for name, depth in MOST_AHEAD.items()}
        rows = next(iter(timed.values())).table("timeline")
        moved = length(_intervals(rows, 0, COLLECTIVES)) / MS
        # the optimizer's step is left out, as no message may travel under it
        computed = length(_intervals([row for row in rows if row["phase"] != "optimizer"], 0, ("compute",))) / MS
        exposed_ms = {name: 1e3 * known(record.summary.comm.exposed_s) for name, record in timed.items()}
        exposed_ms["no schedule can hide"] = least_exposed_ms(computed, moved)
        for name, milliseconds in exposed_ms.items():
            found[name].append((link, milliseconds, moved))
    return found


# ---- the learner's rule

Rule = Callable[[list[str], int, int], list[str]]


class Ruled(Schedule):
    """The engine's schedule with a learner's rule in place of its own."""

    rule: Rule

    def before_forward(self, unit: str) -> list[str]:
        """Note that `unit` begins; what the rule says to unshard behind its forward."""
        super().before_forward(unit)
        return self._said(self._learned, unit) if self._learned else []

    def before_backward(self, unit: str) -> list[str]:
        """What the rule says to unshard behind the backward of `unit`."""
        order = self._ended[::-1]
        return self._said(order, unit) if unit in order else []

    def _said(self, order: list[str], unit: str) -> list[str]:
        return [name for name in type(self).rule(list(order), order.index(unit), self.depth) if name in order]


def with_rule(rule: Rule, job: RunSpec) -> RunRecord:
    """A step of the job on the steady card, whose all-gathers set out when `rule(order, position, depth)` says so."""
    return steady(job, schedule=type("Learners", (Ruled,), {"rule": staticmethod(rule)}))


# ---- the card of the last exercise


@doing("training with your settings on 2 ranks, whose computing is emulated")
def on_the_card(settings: dict[str, Any]) -> Table:
    """The exposed ms of a step on the emulated card with these settings, on two real ranks, by collective and phase;
    ValueError for settings that are none.
    """
    if refused := complaint(settings):
        raise ValueError(refused)
    by_rank = _on_ranks("on_this_rank", **settings)
    worst = max(by_rank, key=lambda one: sum(one["exposed"].values()))
    exposed = {**worst["exposed"], "sum": sum(worst["exposed"].values())}
    caption = (
        f"{', '.join(f'{name}={value!r}' for name, value in settings.items())}: {exposed['sum']:.0f} of"
        f" {worst['communication_ms']:.0f} ms are exposed (target {TARGET_MS}). Link and compute emulated, engine and"
        " ranks real."
    )
    return table(["exposed in one step", "ms"], [[name, f"{ms:.0f}"] for name, ms in exposed.items()], caption)
