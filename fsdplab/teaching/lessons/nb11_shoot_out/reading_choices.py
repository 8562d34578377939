"""Lesson 11 in the notebook's process: strategies behind one link, and the numbers with which a choice is defended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.teaching.core.display import Note, Table, table

from .on_ranks import CARD, JOB, LINK_SECONDS

__all__ = [
    "CARD",
    "LINK_SECONDS",
    "cost_table",
    "exposed_ratio",
    "front_of",
    "job",
    "on_the_link",
    "seen",
    "traffic_table",
]

MB = 1e6


def job(**choices: Any) -> RunSpec:
    """The lesson's run behind its link, with what `choices` say: `job(strategy="zero2")`."""
    return RunSpec(**{**JOB, **choices})


def of(runs: Sequence[RunRecord], strategy: str) -> RunRecord:
    """The first run of a strategy."""
    return next(run for run in runs if run.spec["strategy"] == strategy)


def peak(run: RunRecord) -> int:
    """Bytes at the peak of the worst rank."""
    return run.summary["peak_memory_bytes"]["total"]


def exposed(run: RunRecord) -> float:
    """Exposed seconds a step, as in the figures: copies and waiting for the other rank included."""
    return run.summary["comm"]["exposed_s"]


def on_the_link(run: RunRecord) -> float:
    """Seconds that the link was busy in a rank's last step: bytes over bandwidth, hidden or not."""
    rows = [row for row in run.table("ledger") if row["rank"] == 0]
    last = max(row["step"] for row in rows)
    return sum(row["end_ns"] - row["start_ns"] for row in rows if row["step"] == last) / 1e9


def traffic_table(runs: Sequence[RunRecord]) -> Table:
    """The bytes of each run, those of the formula, and their time on the link."""
    rows = []
    for run in runs:
        comm = run.summary["comm"]
        sent, formula = comm["bytes_per_step"], run.summary["formula_bytes_per_step"]
        counted = [f"{sent / MB:.1f}", f"{formula / MB:.1f}", str(comm["collectives_per_step"])]
        rows.append([run.spec["strategy"], *counted, f"{1e3 * on_the_link(run):.0f}"])
    caption = "A step, one rank. Bytes measured, formula computed, time on the emulated link's clock."
    return table(["strategy", "MB sent", "formula, MB", "collectives", "ms on the link"], rows, caption)


def cost_table(runs: Sequence[RunRecord]) -> Table:
    """Peak, time on the link and exposed time of each run."""
    rows = []
    for run in (run for run in runs if run.status == "finished"):
        times = [f"{1e3 * on_the_link(run):.0f}", f"{1e3 * exposed(run):.0f}"]
        rows.append([_name(run), f"{peak(run) / MB:.0f}", *times, f"{run.summary['comm']['overlap']:.0%}"])
    caption = "Peak measured; on the link: emulated clock; exposed and hidden: the profiled step, worst rank."
    return table(["run", "peak, MB", "ms on the link", "exposed, ms", "hidden"], rows, caption)


def _name(run: RunRecord) -> str:
    numbers = [
        f"{name}={run.spec[name]}"
        for name, usual in (("prefetch", 1), ("link_queues", 1), ("units", "auto"))
        if run.spec[name] != usual
    ]
    return ", ".join([run.spec["strategy"], *numbers])


def exposed_ratio(runs: Sequence[RunRecord]) -> float:
    """Exposed time of full_shard over that of no_shard."""
    return exposed(of(runs, "full_shard")) / exposed(of(runs, "no_shard"))


def front_of(runs: Sequence[RunRecord]) -> list[str]:
    """The strategies that no other beats in peak and exposed time at once, by peak."""
    best: list[RunRecord] = []
    for run in sorted(runs, key=lambda run: (peak(run), exposed(run))):
        if not best or exposed(run) < exposed(best[-1]):
            best.append(run)
    return [run.spec["strategy"] for run in best]


def seen(runs: Sequence[RunRecord]) -> Note:
    """The numbers of the Pareto figure."""
    low, high = (pick(runs, key=peak) for pick in (min, max))
    least = min(runs, key=exposed)
    return Note(
        (
            (
                f"{_name(low)} needs least memory, {peak(low) / MB:.0f} MB, {_name(high)} most, {peak(high) / MB:.0f}"
                f" MB. {_name(least)} exposes least, {1e3 * exposed(least):.0f} ms a step. By peak and exposed time"
                f" nobody beats: {', '.join(front_of(runs))}."
            ),
        )
    )


def fits(choices: Mapping[str, Any]) -> RunSpec:
    """The learner's choice as a run on the lesson's card."""
    return job(**choices, card=CARD, profile=1)
