"""Lesson 11 in the notebook's process: strategies behind one link, and the numbers with which a choice is defended.

Peaks and bytes are those of real runs. Step and exposed time are the steady card's, so that what the lesson says about
time holds on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.figures import pareto
from fsdplab.figures.plotly_go import go
from fsdplab.figures.view import view
from fsdplab.records import RunRecord, Spread, known
from fsdplab.sessions import RunSpec, Watcher
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching.core.display import Note

from .on_ranks import CARD, JOB  # noqa: F401 (the notebook calls it)

MB = 1e6
STRATEGIES = OVER_ALL_RANKS  # that keep one copy over all ranks, the least sharded first


def job(**choices: Any) -> RunSpec:
    """Return the lesson's run behind its link, with what `choices` say: `job(strategy="zero2")`."""
    return RunSpec(**{**JOB, **choices})


class Told(Watcher):
    """Prints a line for each run that has ended: what was run, and how many of `runs` are left."""

    def __init__(self, runs: int) -> None:
        self._runs, self._ended = runs, 0

    def ended(self, record: RunRecord) -> None:
        """Print the line of a run."""
        self._ended += 1
        outcome = record.status
        if view(record).over_card:
            outcome = f"{outcome}, over the card"
        line = f"{record.spec['strategy']}: {outcome} ({self._ended} of {self._runs})"
        if record.failure:
            line = f"{line}: {record.failure['message']}"
        print(line)


def of(runs: Sequence[RunRecord], strategy: str) -> RunRecord:
    """Return the first run of a strategy."""
    return next(run for run in runs if run.spec["strategy"] == strategy)


def peak(run: RunRecord) -> int:
    """Return the bytes at the peak of the worst rank."""
    return known(run.summary.peak_memory_bytes.total)


def on_the_link(run: RunRecord) -> float:
    """Return the seconds that the link was busy in a rank's last step: bytes over bandwidth, hidden or not."""
    rows = [row for row in run.table("ledger") if row["rank"] == 0]
    last = max(row["step"] for row in rows)
    return sum(row["end_ns"] - row["start_ns"] for row in rows if row["step"] == last) / 1e9


# ---- times, on the steady card


def on_steady_card(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return each finished run with its own measured peak, and with the steady card's times in place of this machine's.

    The card has blocks as units: runs with other units are named and left out.
    """
    names = [field.name for field in fields(RunSpec)]
    on_card = []
    for run in runs:
        # a record's spec has more entries than a run is given
        spec = RunSpec(**{name: run.spec[name] for name in names if name in run.spec})
        if spec.units in ("auto", "block"):
            on_card.append(_with_peak(steady(spec), run))
        else:
            print(f"{_name(run)}: not on the steady card, which has blocks as units")
    return on_card


def _with_peak(timed: RunRecord, run: RunRecord) -> RunRecord:
    """Return the simulated step with the measured peak of the run that it stands for."""
    summary = replace(timed.summary, peak_memory_bytes=run.summary.peak_memory_bytes, card=run.summary.card)
    origin = timed.provenance | {"peak_memory_bytes": "measured"}
    return replace(timed, summary=summary, provenance=origin, status=run.status)


def _name(run: RunRecord) -> str:
    """Return the strategy, with the settings that are not the usual ones: `full_shard, prefetch=0`."""
    words = [run.spec["strategy"]]
    for setting, usual in (("prefetch", 1), ("link_queues", 1), ("units", "auto")):
        value = run.spec[setting]
        if value != usual:
            words.append(f"{setting}={value}")
    return ", ".join(words)


# ---- sliders


def choices_at(runs: Sequence[RunRecord]) -> Callable[[int, int], go.Figure | Note]:
    """Return a figure for sliders: the Pareto figure of the same strategies behind another link.

    The other slider is the size of the card.
    """

    def drawn(megabytes_per_second: int, card_megabytes: int) -> go.Figure | Note:
        card = int(card_megabytes * MB)
        timed = [_behind(run, f"{megabytes_per_second}MB/s", card) for run in runs]
        if all(run.status != "finished" for run in timed):
            return Note((f"None of them fits a card of {card_megabytes} MB.",))
        return pareto(timed)

    return drawn


def _behind(run: RunRecord, link: str, card: int) -> RunRecord:
    """Return the run behind `link`; without a step where its peak exceeds the card."""
    # times of the other link, the peak as it was measured
    timed = _with_peak(steady(job(strategy=run.spec["strategy"], link=link)), run)
    spec = timed.spec | {"card": card}
    if peak(run) <= card:
        return replace(timed, spec=spec)
    return replace(timed, spec=spec, status="out_of_memory", summary=replace(timed.summary, step_time_s=Spread()))
