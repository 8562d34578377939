"""Lesson 07 in the notebook's process: one job behind an emulated link, and how much of its communication shows.

M are the instants in which a message is on its way, C those in which the rank computes: what is exposed is M without C.
Every sentence under a figure is made here, from the record of this machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import COLLECTIVES, breakdown_of, duration, percent, timeline_of, worst_cells
from fsdplab.planning.links import parse_link
from fsdplab.profiling.intervals import length, subtract
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, call_on_ranks
from fsdplab.teaching.core.display import Note, Table, table

from .figures import communication_bars
from .on_ranks import TARGET_MS, complaint

__all__ = [
    "LINK",
    "TARGET_MS",
    "banner",
    "by_hand",
    "floor_of",
    "inflation",
    "job",
    "moving",
    "on_the_card",
    "raw",
    "seen",
    "sweep_figure",
    "swept",
    "worst_place",
]

ON_THE_RANKS = Path(__file__).with_name("on_ranks.py")
TIME_LIMIT = 150.0
LINK = "400MB/s"
JOB = {
    "model": "gpt-20m",
    "batch_size": 2,
    "sequence_length": 64,
    "steps": 1,
    "warmup": 1,
    "memory": False,
    "profile": 1,
}
MS, MB = 1e6, 1e6  # nanoseconds, bytes
Row = dict[str, Any]
Intervals = list[tuple[int, int]]


def job(**choices: Any) -> RunSpec:
    """The lesson's run behind its link: full_shard on two ranks, with what `choices` say (prefetch, link, ...)."""
    return RunSpec(**{**JOB, "link": LINK, **choices})


def raw(**choices: Any) -> RunSpec:
    """The same run with nothing emulated: bytes move as fast as this machine moves them."""
    return job(link=None, **choices)


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


def _split(record: RunRecord) -> Row:
    """The breakdown of a run that was profiled."""
    split = breakdown_of(record)
    assert split is not None, "the lesson's runs are profiled"
    return split


def seen(record: RunRecord) -> Note:
    """How much of the profiled step was exposed, and how much of the communication was hidden."""
    split = _split(record)
    exposed = split["exposed_ns"]
    first = (
        f"Seen here, on rank {split['rank']} with prefetch={record.spec['prefetch']}: {duration(exposed)} of a step of"
        f" {duration(split['step_ns'])} were exposed "
    )
    shown, link = (1e9 * part for part in moving(record))
    return Note(
        (
            (
                f"{first}({percent(exposed, split['step_ns'])}), copies and waiting for the other rank included. The"
                f" link carried messages for {duration(link)}: {percent(link - shown, link)} of that under computing,"
                f" {duration(shown)} not."
            ),
        )
    )


def worst_place(record: RunRecord) -> Note:
    """The unit and collective that are exposed longest, and the usual cause of all exposed time."""
    _, _, cells = worst_cells(record)
    by_cause: dict[str, float] = defaultdict(float)
    for cell in cells:
        by_cause[cell.shown_cause] += cell.exposed_ns
    place, cause = max(cells, key=lambda cell: cell.exposed_ns), max(by_cause, key=by_cause.__getitem__)
    share = percent(by_cause[cause], sum(by_cause.values()))
    where = f"{place.kind} of {place.unit or 'the root'} in {place.phase}"
    return Note(
        (
            (
                f"Seen here: the longest is the {where}, {duration(place.exposed_ns)} a step. Most frequent"
                f" cause: {cause.replace('_', ' ')}, {share} of the exposed time."
            ),
        )
    )


def by_hand(exposed: Callable[[Intervals, Intervals], float], record: RunRecord) -> Table:
    """The learner's `exposed(M, C)` on the intervals of the record's usual step, beside the record's own number;
    in ms.
    """
    step, rows = timeline_of(record, None)
    lines = []
    for rank in sorted({row["rank"] for row in rows}):
        moved, computed = (_intervals(rows, rank, lanes) for lanes in (COLLECTIVES, ("compute",)))
        own = next(row for row in record.table("breakdown") if (row["rank"], row["step"]) == (rank, step))
        lines.append(
            [
                f"rank {rank}",
                len(moved),
                len(computed),
                f"{exposed(moved, computed) / MS:.1f}",
                f"{own['exposed_ns'] / MS:.1f}",
            ]
        )
    header = ["", "messages", "pieces of compute", "exposed by your function, ms", "in the record, ms"]
    return table(header, lines, f"Step {step}, from the profiler's trace and the emulated link's clock.")


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
        shown, whole = moving(record)
        hidden = percent(whole - shown, whole) if whole else "nothing sent"
        computed = computing_ms(record)
        rows.append(
            [
                name,
                f"{computed:.0f}",
                f"{computed / base:.2f}",
                hidden,
                f"{1e3 * record.summary['step_time_s']['median']:.0f}",
            ]
        )
    header = ["run", "forward + backward, ms", "compute inflation", "communication hidden", "step, ms"]
    return table(
        header,
        rows,
        "Measured on this machine, computing under the profiler; the link of the emulated row is emulated.",
    )


def moving(record: RunRecord) -> tuple[float, float]:
    """(not hidden, all) in seconds of the profiled step in which the link carried messages, on the rank where most
    shows.

    Neither copies nor a late peer, which a busy machine stretches, count: the transfers on the link alone do. Without a
    link both are what the trace says of all communication.
    """
    if not record.summary.get("link"):
        split = _split(record)
        return split["exposed_ns"] / 1e9, (split["exposed_ns"] + split["overlapped_ns"]) / 1e9
    _, rows = timeline_of(record, None)
    by_rank = []
    for rank in {row["rank"] for row in rows}:
        moved = _intervals([row for row in rows if row["emulated"]], rank, COLLECTIVES)
        by_rank.append((length(subtract(moved, _intervals(rows, rank, ("compute",)))) / 1e9, length(moved) / 1e9))
    return max(by_rank)


def sweep_figure(runs: Mapping[str, RunRecord]) -> go.Figure:
    """Communication of each run, hidden and not; `runs` are records by the name of their network."""
    return communication_bars(
        {name: (*moving(record), _split(record)["step_ns"] / 1e9) for name, record in runs.items()}
    )


def swept(runs: Mapping[str, RunRecord]) -> Note:
    """How much of the communication of each network was not hidden, and the step beside it, in one sentence."""
    parts = []
    for name, record in runs.items():
        shown, whole = moving(record)
        parts.append(
            f"{name}: {duration(1e9 * shown)} of {duration(1e9 * whole)} of communication not hidden, step"
            f" {duration(_split(record)['step_ns'])}"
        )
    return Note((f"Seen here: {'; '.join(parts)}.",))


# ---- what no schedule can hide


def least_exposed_ms(compute_ms: float, communication_ms: float) -> float:
    """The exposed time that even a perfect schedule leaves: `least_exposed_ms(300, 500) == 200`."""
    return max(0.0, communication_ms - compute_ms)


def floor_of(record: RunRecord) -> Callable[..., Table]:
    """A function for sliders: compute, communication and the least exposed time for a link and a number of tokens, from
    this record's rates.
    """
    tokens_here = record.spec["batch_size"] * record.spec["sequence_length"] * record.spec["micro_batches"]
    rate, sent = computing_ms(record) / tokens_here, record.summary["comm"]["bytes_per_step"]

    def lower_bound(megabytes_per_second: float, tokens: int) -> Table:
        compute, communication = rate * tokens, 1e3 * sent / (megabytes_per_second * MB)
        least = least_exposed_ms(compute, communication)
        rows = [
            ["compute, C", f"{compute:,.0f}"],
            ["communication, M", f"{communication:,.0f}"],
            ["exposed at least, max(0, M - C)", f"{least:,.0f}"],
        ]
        caption = (
            f"Computed: {sent / MB:.0f} MB a step; {rate:.2f} ms a token was measured above, at {tokens_here} tokens,"
            " and is taken as constant."
        )
        return table(["in one step", "ms"], rows, caption)

    return lower_bound


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
