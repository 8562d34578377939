"""Lesson 11 in the notebook's process: strategies behind one link, and the numbers with which a choice is defended.

Peaks and bytes are those of real runs. Step and exposed time are the steady card's, so that what the lesson says about
time holds on every machine. Every sentence with a number or a winner is made here, from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.figures import pareto
from fsdplab.figures.fastest import fastest_words
from fsdplab.figures.plotly_go import go
from fsdplab.figures.view import view, views
from fsdplab.records import RunRecord, Spread, known
from fsdplab.sessions import RunSpec, Watcher
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.core.own_run import busiest, why_it_differs
from fsdplab.teaching.core.recorded import recorded as recorded_run

from .on_ranks import CARD, JOB  # noqa: F401 (the notebook calls it)

MB, MS = 1e6, 1e6  # bytes, nanoseconds
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


def recorded() -> list[RunRecord]:
    """Load the five runs of the lesson as they were recorded once: real ranks, bytes and peaks."""
    return [recorded_run(f"lesson-11/{name}") for name in STRATEGIES]


def peak(run: RunRecord) -> int:
    """Return the bytes at the peak of the worst rank."""
    return known(run.summary.peak_memory_bytes.total)


def exposed(run: RunRecord) -> float:
    """Return the exposed seconds a step, as in the figures."""
    return known(run.summary.comm.exposed_s)


def step_s(run: RunRecord) -> float:
    """Return the median step in seconds."""
    return known(run.summary.step_time_s.median)


def on_the_link(run: RunRecord) -> float:
    """Return the seconds that the link was busy in a rank's last step: bytes over bandwidth, hidden or not."""
    rows = [row for row in run.table("ledger") if row["rank"] == 0]
    last = max(row["step"] for row in rows)
    return sum(row["end_ns"] - row["start_ns"] for row in rows if row["step"] == last) / 1e9


def traffic_table(runs: Sequence[RunRecord]) -> Table:
    """Return the bytes of each run, those of the formula, and their time on the link."""
    rows = []
    for run in runs:
        comm = run.summary.comm
        sent, formula = known(comm.bytes_per_step), known(run.summary.formula_bytes_per_step)
        rows.append(
            [
                run.spec["strategy"],
                f"{sent / MB:.1f}",
                f"{formula / MB:.1f}",
                str(comm.collectives_per_step),
                f"{1e3 * on_the_link(run):.0f}",
            ]
        )
    caption = "A step, one rank. Bytes measured, formula computed, time on the emulated link's clock."
    return table(["strategy", "MB sent", "formula, MB", "collectives", "ms on the link"], rows, caption)


# ---- times, on the steady card


def on_steady_card(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return each finished run with its own measured peak, and with the steady card's times in place of this machine's.

    The card has blocks as units: runs with other units are named and left out.
    """
    names = [field.name for field in fields(RunSpec)]
    on_card = []
    for run in runs:
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


def cost_table(runs: Sequence[RunRecord]) -> Table:
    """Return peak, time on the link, exposed time and step of each run that finished."""
    rows = []
    for run in runs:
        if run.status != "finished":
            continue
        rows.append(
            [
                _name(run),
                f"{peak(run) / MB:.0f}",
                f"{1e3 * on_the_link(run):.0f}",
                f"{1e3 * exposed(run):.0f}",
                f"{1e3 * step_s(run):.0f}",
                f"{known(run.summary.comm.overlap):.0%}",
            ]
        )
    caption = "Peak measured. Times of one step on the steady card, simulated; `hidden`: part of the communication."
    return table(["run", "peak, MB", "ms on the link", "exposed, ms", "step, ms", "hidden"], rows, caption)


def phase_table(runs: Sequence[RunRecord]) -> Table:
    """Return what must fit under what: messages and computing of each run's forward and backward, in ms."""
    rows = []
    for run in runs:
        cells = []
        for phase in ("forward", "backward"):
            cells.append(f"{_messages_ms(run, phase):.0f}")
            cells.append(f"{_computing_ms(run, phase):.0f}")
        rows.append([_name(run), *cells, f"{1e3 * exposed(run):.0f}"])
    header = ["run", "forward: messages", "computing", "backward: messages", "computing", "exposed"]
    caption = "ms of one step on the steady card, simulated. `exposed`: what did not fit, or came late."
    return table(header, rows, caption)


def _messages_ms(run: RunRecord, phase: str) -> float:
    """Return the milliseconds of one rank's messages in a phase."""
    others = ("compute", "exposed", "waiting", "step")
    return _lanes_ms(run, phase, lambda lane: lane not in others)


def _computing_ms(run: RunRecord, phase: str) -> float:
    """Return the milliseconds of one rank's computing in a phase."""
    return _lanes_ms(run, phase, lambda lane: lane == "compute")


def _lanes_ms(run: RunRecord, phase: str, is_counted: Callable[[str], bool]) -> float:
    """Return the milliseconds of rank 0's rows in a phase, of the lanes that are counted."""
    nanoseconds = 0
    for row in run.table("timeline"):
        if row["rank"] == 0 and row["phase"] == phase and is_counted(row["lane"]):
            nanoseconds += row["end_ns"] - row["start_ns"]
    return nanoseconds / MS


def _name(run: RunRecord) -> str:
    """Return the strategy, with the settings that are not the usual ones: `full_shard, prefetch=0`."""
    words = [run.spec["strategy"]]
    for setting, usual in (("prefetch", 1), ("link_queues", 1), ("units", "auto")):
        value = run.spec[setting]
        if value != usual:
            words.append(f"{setting}={value}")
    return ", ".join(words)


def steps_here(here: Sequence[RunRecord]) -> Table:
    """Return this machine's own steps beside the recorded ones and the steady card's, and why they differ."""
    then = [of(recorded(), run.spec["strategy"]) for run in here]
    rows = []
    for run, earlier, on_card in zip(here, then, on_steady_card(here)):
        steps = [f"{1e3 * step_s(record):.0f}" for record in (run, earlier, on_card)]
        rows.append([_name(run), *steps])
    caption = f"Here: {fastest_words(views(here))}. {why_it_differs(busiest(here))}"
    return table(["run", "step on this machine, ms", "recorded, ms", "on the steady card, ms"], rows, caption)


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
    timed = _with_peak(steady(job(strategy=run.spec["strategy"], link=link)), run)
    spec = timed.spec | {"card": card}
    if peak(run) <= card:
        return replace(timed, spec=spec)
    return replace(timed, spec=spec, status="out_of_memory", summary=replace(timed.summary, step_time_s=Spread()))
