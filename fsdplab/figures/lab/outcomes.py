"""What a run takes, before anything runs: memory, step and timeline, and from which bandwidth on its messages hide.

Memory of a run on this machine is played allocation by allocation (sessions.prediction), its step is that of the
steady card; runs on GPUs are the planner's. All of it is arithmetic, and each run's outcome is kept, so a control is
answered within some milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, log
from typing import Any

from fsdplab.common.sizes import percent, seconds, size
from fsdplab.planning.links import parse_link
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY, bytes_by_axis
from fsdplab.planning.planner import plan_of
from fsdplab.planning.program import OPTIMIZER, ROOT, StepWork, program_of
from fsdplab.planning.simulation import RankLog, Span, on_links_of, simulate_program, simulate_work, work_of
from fsdplab.planning.simulation.simulated_step import tables_of
from fsdplab.sessions.own_plan import OwnPlan
from fsdplab.sessions.prediction import Prediction, predict
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.steady_card import plan_of as steady_plan_of
from fsdplab.sessions.steady_card import why_not_steady
from fsdplab.workloads.own.sources import source_of

from .choices import Run, at_bandwidth

CAUSES = {
    "late_start": "issued only when the unit is needed",
    "link_busy": "the link carried another message first",
    "waiting_for_peer": "another rank came later",
    "nothing_to_hide_behind": "too little to compute meanwhile",
    "unknown": "unknown",
}
_ROOMY = 10**15  # bytes of a card on which all fits


@dataclass(frozen=True)
class Step:
    """Seconds of a step: computing alone, communication under computing, exposed, the optimizer computing, the rest."""

    computing: float
    hidden: float
    exposed: float
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of the step."""
        return self.computing + self.hidden + self.exposed + self.optimizer + self.other

    @property
    def words(self) -> str:
        """`919 ms, 65 % hidden`."""
        sent = self.hidden + self.exposed
        return seconds(self.total) + (f", {percent(self.hidden / sent)} hidden" if sent else "")


@dataclass(frozen=True)
class Outcome:
    """What a run takes: bytes by category at the peak, bytes that a rank sends, and its step with the blocks of a
    timeline. None where it is not known, with the reason for the memory.
    """

    memory: Mapping[str, int] | None
    sent: int | None
    step: Step | None
    blocks: Mapping[str, list[list[Any]]] | None = None
    why_no_memory: str = ""

    @property
    def peak(self) -> int | None:
        """The sum of the categories."""
        return sum(self.memory.values()) if self.memory else None

    @property
    def why_no_step(self) -> str:
        """Why the step is not known; "" where it is."""
        return "" if self.step else "not simulated without a link"


def outcome(run: Run) -> Outcome:
    """Memory, step and timeline of a run, by arithmetic; its card does not matter, so that one is dragged at no cost.

    >>> outcome(RunSpec(model="gpt-20m", batch_size=2, sequence_length=128, link="150MB/s")).step.words
    '919 ms, 65 % hidden'
    """
    return _outcome(_on_any_card(run), _version_of(run))


def run_of(run: Run) -> RunSpec | None:
    """The run itself, or that of one rank which a plan of a model of one's own is made from; None for other plans."""
    return run.of if isinstance(run, OwnPlan) else run if isinstance(run, RunSpec) else None


def recorded_model() -> Any:
    """The module that records a model of one's own; it imports torch."""
    from fsdplab.sessions import recorded_model as module

    return module


def _version_of(run: Run) -> str:
    """What tells that the file of a model of one's own was edited."""
    of = run_of(run)
    return source_of(of.model).digest if of and of.own_model else ""


def _on_any_card(run: Run) -> Run:
    if isinstance(run, PlanSpec):
        return replace(run, gpu=replace(run.gpu, memory_bytes=_ROOMY))
    return replace(run, card=None)


@lru_cache(maxsize=512)
def _outcome(run: Run, version: str) -> Outcome:
    work = _work_of(run)
    queues = run.link_queues if isinstance(run, RunSpec) else 1
    step, blocks = _step_of([*simulate_work(work, communicators=queues).logs]) if work else (None, None)
    if isinstance(run, PlanSpec):
        plan = run.plan if isinstance(run, OwnPlan) else plan_of(run)
        memory = {name: round(nbytes) for name, nbytes in plan.memory.peak.by_category.items()}
        return Outcome(memory, sum(bytes_by_axis(plan.traffic).values()), step, blocks)
    found = _predicted(replace(run, link="1GB/s") if run.link else run, version)  # alike behind any link
    return Outcome(found.by_category, found.bytes_per_step, step, blocks, found.why_not)


@lru_cache(maxsize=256)
def _predicted(run: RunSpec, version: str) -> Prediction:
    return predict(run)


def _work_of(run: Run) -> StepWork | None:
    """What a step of the run computes and sends; None for a run that the steady card does not show."""
    if isinstance(run, OwnPlan):
        return run.work
    if isinstance(run, PlanSpec):
        return work_of(run)
    if run.own_model:
        return recorded_model().steady_work(run) if run.link else None
    return None if why_not_steady(run) else work_of(steady_plan_of(run), 1.0).shared(streams=False)


def _step_of(logs: list[RankLog]) -> tuple[Step, dict[str, list[list[Any]]]]:
    """The parts of a simulated step of its first rank, and the blocks of its timeline, in ms."""
    tables = tables_of(logs[:1], 1, {})
    (row,) = tables["breakdown"]
    alone, hidden, exposed, other = (
        row[f"{name}_ns"] / 1e9 for name in ("compute_only", "overlapped", "exposed", "other")
    )
    causes = {(each["unit"], each["phase"], each["kind"]): each["cause"] for each in tables["exposed"]}

    def between(each: Mapping[str, Any]) -> list[Any]:
        return [_ms(each["start_ns"]), _ms(each["end_ns"])]

    lanes = {lane: [each for each in tables["timeline"] if each["lane"] == lane] for lane in ("compute", "exposed")}
    blocks = {
        "compute": [[*between(each), each["unit"], each["phase"]] for each in lanes["compute"]],
        "messages": [
            [*between(each), each["unit"], each["phase"], each["kind"].replace("_", "-"), size(each["wire_bytes"]),
             _ms(each["waited_ns"]), CAUSES.get(causes.get((each["unit"], each["phase"], each["kind"]), ""), "")]
            for each in tables["ledger"]
        ],
        "exposed": [between(each) for each in lanes["exposed"]],
    }  # fmt: skip
    stepping = sum(end - start for start, end, _, phase in blocks["compute"] if phase == OPTIMIZER) / 1e3
    return Step(alone - stepping, hidden, exposed, stepping, other), blocks


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)


# ---- the crossover


def crossover(run: Run, ends: tuple[float, float]) -> tuple[float, float] | None:
    """The least bandwidth between two ends, to 1 %, at which no rank waits between two units of a forward or of a
    backward, and the seconds that remain exposed there; None where it waits at all of them.

    What remains has nothing to hide under: the first gathers of a step, the gather at the turn from forward to
    backward, and the last reductions. The run's own bandwidth does not count.

    >>> run = RunSpec(model="gpt-20m", batch_size=2, sequence_length=128, link="150MB/s")
    >>> round(crossover(run, (10e6, 10e9))[0] / 1e6, -1)
    220.0
    """
    version, run = _version_of(run), _on_any_card(run)  # runs that differ in their bandwidth alone are one
    if isinstance(run, RunSpec):
        return _crossover(replace(run, link=f"1GB/s,{parse_link(run.link or '').latency_s}s"), ends, version)
    return _crossover(at_bandwidth(run, ends[1]), ends, version)


@lru_cache(maxsize=256)
def _crossover(run: Run, ends: tuple[float, float], version: str) -> tuple[float, float] | None:
    work = _work_of(run)
    assert work is not None, "a run without a step has no crossover"
    program = program_of(work)
    # of the steady card's link all is reached
    plan, reached = (steady_plan_of(run), LINK_EFFICIENCY) if isinstance(run, RunSpec) else (run, 1.0)

    def waits(bytes_per_s: float) -> tuple[float, float]:
        linked = on_links_of(at_bandwidth(plan, bytes_per_s / reached), work)
        return _waits(simulate_program(linked, program).logs[0])

    most = ceil(log(ends[1] / ends[0], 1.01))
    rates = [ends[0] * (ends[1] / ends[0]) ** (place / most) for place in range(most + 1)]
    place = bisect_left(rates, True, key=lambda rate: not waits(rate)[0])
    return (rates[place], waits(rates[place])[1]) if place <= most else None


def _waits(log: RankLog) -> tuple[float, float]:
    """Seconds that a rank waits between two units of a pass, and at the ends of the passes."""

    def in_one_pass(before: Span, after: Span) -> bool:
        """Both are blocks of a forward, or of a backward; the root's own spans are at the turn between these."""
        return before.phase == after.phase != OPTIMIZER and ROOT not in (before.unit, after.unit)

    spans = sorted(log.computed, key=lambda span: span.start)
    gaps = [(max(0.0, after.start - before.end), in_one_pass(before, after)) for before, after in pairwise(spans)]
    between = sum(gap for gap, same in gaps if same)
    ends = spans[0].start + sum(gap for gap, same in gaps if not same)
    return (between if between > 1e-6 * log.end else 0.0), ends
