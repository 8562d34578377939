"""Lesson 07 in the notebook's process: one job behind an emulated link, and how much of its communication shows.

M are the instants in which a message is on its way, C those in which the rank computes: what is exposed is M without C.
What is judged about time comes from the steady card, whose times are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fsdplab.common.sizes import seconds
from fsdplab.engine.core.step import Schedule
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import COLLECTIVES
from fsdplab.figures.style import GRID, STEP_COLOURS, titled
from fsdplab.profiling.intervals import length
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

from .on_ranks import TARGET_MS, complaint

_on_ranks = LessonRanks(__file__)
MS = 1e6  # nanoseconds
Row = dict[str, Any]
Intervals = list[tuple[int, int]]


# ---- what no schedule can hide


def least_exposed_ms(compute_ms: float, communication_ms: float) -> float:
    """Return the exposed time that even a perfect schedule leaves: `least_exposed_ms(300, 500) == 200`."""
    return max(0.0, communication_ms - compute_ms)


# (MB/s of the link, exposed ms, ms of all communication) points by the schedule's name
Curves = Mapping[str, list[tuple[int, float, float]]]
_LINES = ((STEP_COLOURS["exposed"], 3, "solid"), ("#4aa3e0", 3, "solid"), ("#6b7380", 2, "dash"))  # colour, width, dash


def exposed_curves(curves: Curves, link: int, tokens: int) -> go.Figure:
    """Draw the exposed part of the communication (y) over the link (x), a line a schedule.

    `link` is marked, and the title has its ms. The axis is in doublings of the slowest link: as much width from 25 to
    50 MB/s as from 3,200 to 6,400.
    """
    links = sorted({speed for points in curves.values() for speed, _, _ in points})
    places = {speed: math.log2(speed / links[0]) for speed in links}
    figure = go.Figure()
    for (name, points), (colour, width, dash) in zip(curves.items(), _LINES, strict=True):
        # 25 MB/s is at 0, 50 at 1, 100 at 2
        at = [places[speed] for speed, _, _ in points]
        shares = [100 * exposed / moved for _, exposed, moved in points]
        hover = f"{name}, %{{customdata[0]}} MB/s<br>%{{customdata[1]:.1f}} of %{{customdata[2]:.1f}} ms<extra></extra>"
        rows = [list(point) for point in points]
        figure.add_trace(line(name, colour, at, shares, width, dash, customdata=rows, hovertemplate=hover))

    figure.update_xaxes(
        title_text="link (MB/s)",
        range=[-0.3, places[links[-1]] + 0.3],
        tickmode="array",
        tickvals=list(places.values()),
        ticktext=[f"{speed:,}" for speed in links],
    )
    figure.update_yaxes(title_text="exposed, % of communication", range=[-3, 105])
    mark = dict(color=GRID, width=4)
    figure.add_shape(type="line", x0=places[link], x1=places[link], y0=0, y1=1, yref="paper", line=mark)

    (on_demand, demand_name), (ahead, ahead_name), (least_possible, _) = _exposed_at(link, curves)
    _, _, moved = _point_at(link, next(iter(curves.values())))
    parts = f"{on_demand} ({demand_name}), {ahead} ({ahead_name})"
    title = f"{link:,} MB/s, {tokens} tokens: messages take {seconds(moved / 1e3)}; exposed are {parts}"
    least = f"at least {least_possible} under any schedule"
    where = f"{least}; a step on the steady card, simulated with the engine's own schedule"
    return titled(figure, title, where, f"Lines of exposed time over the link. {title}; {least}.", 324)


def _point_at(link: int, points: list[tuple[int, float, float]]) -> tuple[int, float, float]:
    """Return the point of a curve at a link, (MB/s, exposed ms, ms of all communication)."""
    return next(point for point in points if point[0] == link)


def _exposed_at(link: int, curves: Curves) -> list[tuple[str, str]]:
    """Return (exposed time, name) of each curve at a link, in the order of the curves.

    `("120 ms", "one unit ahead")`; no exposed time is "0 ms".
    """
    words = []
    for name, points in curves.items():
        _, exposed, _ = _point_at(link, points)
        words.append((seconds(exposed / 1e3) if exposed else "0 ms", name))
    return words


LINKS = (25, 50, 100, 200, 400, 800, 1600, 3200, 6400)  # MB/s
TOKENS = (32, 64, 128, 256, 512)  # of a rank's step
MOST_AHEAD = {"unsharded when needed": 0, "one unit ahead": 1}  # the curves, by their prefetch depth


def exposed_over_links(job: RunSpec) -> Callable[[int, int], go.Figure]:
    """Return a figure for sliders: exposed ms of the job's step on the steady card over the link, for some tokens.

    The curves of `TOKENS` are computed at once, before a slider is moved.
    """
    for tokens_of_a_rank in TOKENS:
        curves_of(job, tokens_of_a_rank, LINKS)

    def drawn(megabytes_per_second: int, tokens: int) -> go.Figure:
        curves = curves_of(job, tokens, tuple(sorted({*LINKS, megabytes_per_second})))
        return exposed_curves(curves, megabytes_per_second, tokens)

    return drawn


@lru_cache(maxsize=32)
def curves_of(job: RunSpec, tokens: int, links: tuple[int, ...]) -> Curves:
    """Return (MB/s, exposed ms, ms of all communication) points by the schedule's name.

    The last curve is what no schedule can hide.
    """
    curves: Curves = {name: [] for name in (*MOST_AHEAD, "no schedule can hide")}
    for link in links:
        # the same sequences, shorter or longer, so that a step has so many tokens
        behind = replace(job, link=f"{link}MB/s", sequence_length=tokens // job.batch_size)
        records = {}
        for name, depth in MOST_AHEAD.items():
            records[name] = steady(replace(behind, prefetch=depth))

        rows = next(iter(records.values())).table("timeline")  # of the first schedule
        moved = length(_intervals(rows, 0, COLLECTIVES)) / MS
        # the optimizer's step is left out, as no message may travel under it
        before_optimizer = [row for row in rows if row["phase"] != "optimizer"]
        computed = length(_intervals(before_optimizer, 0, ("compute",))) / MS
        for name, record in records.items():
            exposed_ms = 1e3 * known(record.summary.comm.exposed_s)
            curves[name].append((link, exposed_ms, moved))
        curves["no schedule can hide"].append((link, least_exposed_ms(computed, moved), moved))
    return curves


def _intervals(rows: list[Row], rank: int, lanes: tuple[str, ...]) -> Intervals:
    """Return the (start, end) of a rank's rows in some lanes, in ns."""
    return [(row["start_ns"], row["end_ns"]) for row in rows if row["rank"] == rank and row["lane"] in lanes]


# ---- the learner's rule

Rule = Callable[[list[str], int, int], list[str]]


class Ruled(Schedule):
    """The engine's schedule with a learner's rule in place of its own."""

    rule: Rule

    def before_forward(self, unit: str) -> list[str]:
        """Note that `unit` begins; return what the rule says to unshard behind its forward."""
        super().before_forward(unit)
        if not self._learned:  # the first step: the order is not known yet
            return []
        return self._said(self._learned, unit)

    def before_backward(self, unit: str) -> list[str]:
        """Return what the rule says to unshard behind the backward of `unit`."""
        # backward takes the units in reverse order of their forwards
        order = self._ended[::-1]
        if unit not in order:
            return []
        return self._said(order, unit)

    def _said(self, order: list[str], unit: str) -> list[str]:
        """Return the units that the rule names, of those that there are."""
        names = type(self).rule(list(order), order.index(unit), self.depth)
        return [name for name in names if name in order]


def with_rule(rule: Rule, job: RunSpec) -> RunRecord:
    """Take a step of the job on the steady card, with a learner's rule for its all-gathers.

    They set out when `rule(order, position, depth)` says so.
    """
    return steady(job, schedule=type("Learners", (Ruled,), {"rule": staticmethod(rule)}))


# ---- the card of the last exercise


@doing("training with your settings on 2 ranks, whose computing is emulated")
def on_the_card(settings: dict[str, Any]) -> Table:
    """Return the exposed ms of a step on the emulated card with these settings, by collective and phase.

    Two real ranks train. ValueError for settings that are none.
    """
    refused = complaint(settings)
    if refused:
        raise ValueError(refused)
    by_rank = _on_ranks("on_this_rank", **settings)
    # the rank that is exposed longest, as in a record
    worst = max(by_rank, key=lambda rank: sum(rank["exposed"].values()))
    total = sum(worst["exposed"].values())
    rows = [[name, f"{ms:.0f}"] for name, ms in worst["exposed"].items()]
    rows.append(["sum", f"{total:.0f}"])
    chosen = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    caption = (
        f"{chosen}: {total:.0f} of {worst['communication_ms']:.0f} ms are exposed (target {TARGET_MS}). Link and"
        " compute emulated, engine and ranks real."
    )
    return table(["exposed in one step", "ms"], rows, caption)
