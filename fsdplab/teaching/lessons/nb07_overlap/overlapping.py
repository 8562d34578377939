"""Lesson 07 in the notebook's process: one job behind an emulated link, and how much of its communication shows.

M are the instants in which a message is on its way, C those in which the rank computes: what is exposed is M without C.
Every sentence under a figure is made here, from the record beside it; what is judged about time comes from the steady
card, whose times are the same on every machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdplab.engine.core.step import Schedule
from fsdplab.figures import alt_text, rank_timeline
from fsdplab.figures.fastest import fastest_words
from fsdplab.figures.profile_data import COLLECTIVES, breakdown_of, duration, percent, timeline_of, worst_cells
from fsdplab.figures.view import view
from fsdplab.planning.links import parse_link
from fsdplab.profiling.intervals import length
from fsdplab.profiling.step_summary import StepSummary
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec, call_on_ranks
from fsdplab.sessions.steady_card import GIGAFLOPS, steady
from fsdplab.teaching.core.display import Note, Shown, Table, table
from fsdplab.teaching.core.waiting import doing

from .figures import Curves, exposed_curves
from .on_ranks import TARGET_MS, complaint

__all__ = [
    "LINK",
    "LINKS",
    "TARGET_MS",
    "TOKENS",
    "banner",
    "by_hand",
    "card_note",
    "explained",
    "exposed_over_links",
    "factor",
    "inflation",
    "on_the_card",
    "on_the_link_ns",
    "raw_words",
    "seen",
    "steady",
    "timeline_at",
    "with_rule",
    "worst_place",
]

ON_THE_RANKS = Path(__file__).with_name("on_ranks.py")
TIME_LIMIT = 150.0
LINK = "400MB/s"
MS, MB = 1e6, 1e6  # nanoseconds, bytes
Row = dict[str, Any]
Intervals = list[tuple[int, int]]
InMs = list[tuple[float, float]]


def banner(link: str = LINK) -> Note:
    """The network of the notebook's runs; shown before the first of them."""
    words = parse_link(link).words
    return Note(
        (
            f"Network of this notebook: an emulated link of {words} between the ranks.",
            (
                "Ranks, bytes and computing are real. How long a message takes is the link's: latency + bytes /"
                " bandwidth, one after the other."
            ),
        )
    )


# ---- what a figure showed, in a sentence


def _split(record: RunRecord) -> StepSummary:
    """The breakdown of a run that was profiled."""
    split = breakdown_of(record)
    assert split is not None, "the lesson's runs are profiled"
    return split


def explained(record: RunRecord) -> Note:
    """Where the exposed time of a run on the steady card comes from: bytes over the link's rate."""
    sent, link = known(record.summary.comm.bytes_per_step), parse_link(record.spec["link"])
    exposed, carried = on_the_link_ns(record), _split(record).communication_ns
    return Note(
        (
            f"{sent / MB:.0f} MB at {link.words} keep the link busy for {duration(carried)}. For {duration(exposed)} of"
            f" it ({percent(exposed, carried)}) the rank computes nothing: the answer to the prediction.",
        )
    )


def seen(record: RunRecord, on_card: RunRecord) -> Note:
    """A measured step beside the same one on the steady card: exposed on the link, and what the card does not have."""
    split, card = _split(record), _split(on_card)
    waiting = known(split.waiting_ns) + known(split.no_core_ns)
    return Note(
        (
            f"Exposed on the link: {duration(on_the_link_ns(record))} of a step of {duration(split.step_ns)} here,"
            f" {duration(on_the_link_ns(on_card))} of {duration(card.step_ns)} on the steady card.",
            f"Besides, the rank copies for {duration(known(split.copying_ns))} and waits for {duration(waiting)}, for"
            " the other rank or for a core: the steady card has none of that.",
        )
    )


def on_the_link_ns(record: RunRecord) -> float:
    """Exposed ns of the profiled step in which a message moves: the one number that the lesson calls exposed."""
    return known(_split(record).on_link_ns)


def worst_place(record: RunRecord) -> Note:
    """The unit and collective that are exposed longest, and the usual cause of all exposed time."""
    _, _, cells = worst_cells(record)
    by_cause: dict[str, float] = defaultdict(float)
    for cell in cells:
        by_cause[cell.shown_cause] += cell.exposed_ns
    place, cause = max(cells, key=lambda cell: cell.exposed_ns), max(by_cause, key=by_cause.__getitem__)
    alike = sum(cell.exposed_ns > 0.99 * place.exposed_ns for cell in cells)
    longest = "the longest is" if alike == 1 else f"{alike} of {len(cells)} are as long as the longest, such as"
    share = percent(by_cause[cause], sum(by_cause.values()))
    where = f"{place.kind} of {place.unit or 'the root'} in {place.phase}"
    return Note(
        (
            (
                f"Seen here: {longest} the {where}, {duration(place.exposed_ns)} a step. Most frequent"
                f" cause: {cause.replace('_', ' ')}, {share} of the exposed time."
            ),
        )
    )


def by_hand(exposed: Callable[[InMs, InMs], float], record: RunRecord) -> Table:
    """The learner's `exposed(M, C)` on the intervals of the record's usual step, beside the record's own number;
    in ms.
    """
    step, rows = timeline_of(record, None)
    begin = min(row["start_ns"] for row in rows)
    lines = []
    for rank in sorted({row["rank"] for row in rows}):
        lists = [_intervals(rows, rank, lanes) for lanes in (COLLECTIVES, ("compute",))]
        moved, computed = ([((start - begin) / MS, (end - begin) / MS) for start, end in each] for each in lists)
        own = next(row for row in record.table("breakdown") if (row["rank"], row["step"]) == (rank, step))
        lines.append(
            [
                f"rank {rank}",
                len(moved),
                len(computed),
                f"{exposed(moved, computed):.1f}",
                f"{own['exposed_ns'] / MS:.1f}",
            ]
        )
    header = ["", "messages", "pieces of compute", "exposed by your function, ms", "in the record, ms"]
    return table(header, lines, "A step on the steady card, simulated.")


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
    base = computing_ms(next(iter(runs.values())))
    rows = []
    for name, record in runs.items():
        split = _split(record)
        hidden = percent(split.overlapped_ns, split.communication_ns) if split.communication_ns else "nothing sent"
        computed = computing_ms(record)
        rows.append(
            [
                name,
                f"{computed:.0f}",
                f"{computed / base:.2f}",
                hidden,
                f"{1e3 * known(record.summary.step_time_s.median):.0f}",
            ]
        )
    header = ["run", "forward + backward, ms", "compute inflation", "communication hidden", "step, ms"]
    return table(
        header,
        rows,
        "Measured on this machine, computing under the profiler; the link of the emulated row is emulated.",
    )


def raw_words(runs: Mapping[str, RunRecord]) -> Note:
    """The step of each run of several ranks beside the first one's, which sends nothing."""
    first, *others = (replace(view(record), strategy=name, engine="lab") for name, record in runs.items())
    ratios = ", ".join(f"{run.label} {known(run.step_median) / known(first.step_median):.2f} times" for run in others)
    return Note((f"Steps beside that of {first.label}: {ratios} as long. Of these, {fastest_words(others)}.",))


# ---- what no schedule can hide


def least_exposed_ms(compute_ms: float, communication_ms: float) -> float:
    """The exposed time that even a perfect schedule leaves: `least_exposed_ms(300, 500) == 200`."""
    return max(0.0, communication_ms - compute_ms)


LINKS = (25, 50, 100, 200, 400, 800, 1600, 3200, 6400)  # MB/s
TOKENS = (32, 64, 128, 256, 512)  # of a rank's step
MOST_AHEAD = {"gathered when needed": 0, "one unit ahead": 1}  # the curves, by their prefetch depth


def exposed_over_links(job: RunSpec) -> Callable[[int, int], Shown]:
    """A figure for sliders: exposed ms of the job's step on the steady card over the link, for a number of tokens.

    The curves of `TOKENS` are computed at once, before a slider is moved.
    """
    for each in TOKENS:
        curves_of(job, each, LINKS)

    def drawn(megabytes_per_second: int, tokens: int) -> Shown:
        curves = curves_of(job, tokens, tuple(sorted({*LINKS, megabytes_per_second})))
        figure = exposed_curves(curves, megabytes_per_second, tokens)
        return Shown(figure, alt_text(figure))

    return drawn


@lru_cache(maxsize=32)
def curves_of(job: RunSpec, tokens: int, links: tuple[int, ...]) -> Curves:
    """(MB/s, exposed ms, ms of all communication) points by the schedule's name, and of what no schedule can hide."""
    found: Curves = {name: [] for name in (*MOST_AHEAD, "no schedule can hide")}
    for link in links:
        exposed_ms, moved = _at(replace(job, link=f"{link}MB/s", sequence_length=tokens // job.batch_size))
        for name, milliseconds in exposed_ms.items():
            found[name].append((link, milliseconds, moved))
    return found


def _at(job: RunSpec) -> tuple[dict[str, float], float]:
    """Exposed ms by the schedule's name and of what no schedule can hide, and ms of all communication, at one link."""
    timed = {name: steady(replace(job, prefetch=depth)) for name, depth in MOST_AHEAD.items()}
    computed, moved = _lengths_ms(next(iter(timed.values())))
    found = {name: 1e3 * known(record.summary.comm.exposed_s) for name, record in timed.items()}
    return found | {"no schedule can hide": least_exposed_ms(computed, moved)}, moved


def _lengths_ms(record: RunRecord) -> tuple[float, float]:
    """(|C|, |M|) in ms of a step of rank 0; the optimizer's step is left out, as no message may travel under it."""
    rows = [row for row in record.table("timeline") if row["rank"] == 0]
    computed = _intervals([row for row in rows if row["phase"] != "optimizer"], 0, ("compute",))
    return length(computed) / MS, length(_intervals(rows, 0, COLLECTIVES)) / MS


# ---- the steady card's timeline


def card_note(link: str = LINK) -> Note:
    """The card on which the lesson compares schedules."""
    words = parse_link(link).words
    return Note(
        (
            f"The steady card computes {GIGAFLOPS:g} GFLOP/s in fp32, behind the same link of {words}.",
            "Simulated: its clock. Real: the engine's own order of gathers and reductions.",
        )
    )


def factor(late: RunRecord, early: RunRecord) -> float:
    """How many times as long `late` is exposed as `early`."""
    return known(late.summary.comm.exposed_s) / known(early.summary.comm.exposed_s)


Rule = Callable[[list[str], int, int], list[str]]


class Ruled(Schedule):
    """The engine's schedule with a learner's rule in place of its own."""

    rule: Rule

    def before_forward(self, unit: str) -> list[str]:
        """Note that `unit` begins; what the rule says to gather behind its forward."""
        super().before_forward(unit)
        return self._said(self._learned, unit) if self._learned else []

    def before_backward(self, unit: str) -> list[str]:
        """What the rule says to gather behind the backward of `unit`."""
        order = self._ended[::-1]
        return self._said(order, unit) if unit in order else []

    def _said(self, order: list[str], unit: str) -> list[str]:
        return [name for name in type(self).rule(list(order), order.index(unit), self.depth) if name in order]


def with_rule(rule: Rule, job: RunSpec) -> RunRecord:
    """A step of the job on the steady card, whose gathers set out when `rule(order, position, depth)` says so."""
    return steady(job, schedule=type("Learners", (Ruled,), {"rule": staticmethod(rule)}))


def timeline_at(rule: Rule, job: RunSpec) -> Callable[[int, int], Shown]:
    """A figure for sliders: the timeline under the rule, for a prefetch depth and a link."""

    def drawn(prefetch: int, megabytes_per_second: int) -> Shown:
        figure = rank_timeline(with_rule(rule, replace(job, prefetch=prefetch, link=f"{megabytes_per_second}MB/s")))
        return Shown(figure, alt_text(figure))

    return drawn


# ---- the card of the last exercise


@dataclass(frozen=True, repr=False)
class OnTheCard:
    """The exposed ms of one choice of settings on the emulated card, by collective and phase."""

    settings: dict[str, Any]
    exposed: dict[str, float]
    communication_ms: float
    provenance: dict[str, str] = field(
        default_factory=lambda: {"compute_of_the_card": "emulated", "exposed_s": "emulated"}
    )

    @property
    def exposed_ms(self) -> float:
        """The sum over collectives."""
        return sum(self.exposed.values())

    def table(self) -> Table:
        """One row a collective and phase, and the sum."""
        rows = [[name, f"{value:.0f}"] for name, value in self.exposed.items()]
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        caption = (
            f"{chosen}: {self.exposed_ms:.0f} of {self.communication_ms:.0f} ms are exposed (target {TARGET_MS}). Link"
            " and compute emulated, engine and ranks real."
        )
        return table(["exposed in one step", "ms"], [*rows, ["sum", f"{self.exposed_ms:.0f}"]], caption)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@doing("training with your settings on 2 ranks, whose computing is emulated")
def on_the_card(settings: dict[str, Any]) -> OnTheCard:
    """Train a few steps on the steady card with these settings, on two real ranks; ValueError for settings that are
    none.
    """
    refused = complaint(settings)
    if refused:
        raise ValueError(refused)
    by_rank = call_on_ranks(ON_THE_RANKS, "on_this_rank", world_size=2, payload=settings, time_limit=TIME_LIMIT)
    worst = max(by_rank, key=lambda one: sum(one["exposed"].values()))
    return OnTheCard(dict(settings), worst["exposed"], worst["communication_ms"])
