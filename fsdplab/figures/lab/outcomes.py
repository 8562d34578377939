"""What a run takes, before anything runs: memory, step and timeline, and from which bandwidth on its messages hide.

Memory of a run on this machine is played allocation by allocation (sessions.prediction), its step is that of the
steady card; runs on GPUs are the planner's. All of it is arithmetic, and each run's outcome is kept, so a control is
answered within some milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, log
from typing import Any

from fsdplab.common.sizes import percent, seconds, size
from fsdplab.planning.links import parse_link
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY, bytes_by_axis, sent_by_a_node
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
from .messages import Blocks, Computed, Sent

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
        # seconds of communication
        sent = self.hidden + self.exposed
        if not sent:
            return seconds(self.total)
        return f"{seconds(self.total)}, {percent(self.hidden / sent)} hidden"


@dataclass(frozen=True)
class Outcome:
    """What a run takes: bytes by category at the peak, bytes that a rank sends, and its step with the blocks of a
    timeline. None where it is not known, with the reason. Of several nodes also the bytes that a node sends over its
    network.
    """

    memory: Mapping[str, int] | None
    sent: int | None
    step: Step | None
    blocks: Blocks | None = None
    why_no_memory: str = ""
    why_no_step: str = ""
    sent_by_a_node: int = 0

    @property
    def peak(self) -> int | None:
        """The sum of the categories."""
        return sum(self.memory.values()) if self.memory else None


def outcome(run: Run) -> Outcome:
    """Memory, step and timeline of a run, by arithmetic; its card does not matter, so that one is dragged at no cost.

    >>> outcome(RunSpec(model="gpt-20m", batch_size=2, sequence_length=128, link="150MB/s")).step.words
    '919 ms, 65 % hidden'
    """
    return _outcome(_on_any_card(run), _version_of(run))


def run_of(run: Run) -> RunSpec | None:
    """The run itself, or that of one rank which a plan of a model of one's own is made from; None for other plans."""
    if isinstance(run, OwnPlan):
        return run.of
    return run if isinstance(run, RunSpec) else None


def recorded_model() -> Any:
    """The module that records a model of one's own; it imports torch."""
    from fsdplab.sessions import recorded_model as module

    return module


def _version_of(run: Run) -> str:
    """What tells that the file of a model of one's own was edited."""
    spec = run_of(run)
    if spec is None or not spec.own_model:
        return ""
    return source_of(spec.model).digest


def _on_any_card(run: Run) -> Run:
    if isinstance(run, PlanSpec):
        return replace(run, gpu=replace(run.gpu, memory_bytes=_ROOMY))
    return replace(run, card=None)


@lru_cache(maxsize=512)
def _outcome(run: Run, version: str) -> Outcome:
    step, blocks = _simulated(run)
    if isinstance(run, PlanSpec):
        # a plan of a model of one's own is made from a recording of its micro-batch
        plan = run.plan if isinstance(run, OwnPlan) else plan_of(run)
        memory = {name: round(nbytes) for name, nbytes in plan.memory.peak.by_category.items()}
        # over all axes of the mesh
        sent = sum(bytes_by_axis(plan.traffic).values())
        return Outcome(memory, sent, step, blocks, sent_by_a_node=sent_by_a_node(run, plan.traffic))
    if run.link:
        run = replace(run, link="1GB/s")  # memory and messages are alike behind any link: one prediction for all
    predicted = _predicted(run, version)
    why_no_step = "" if step else _why_not_simulated(run)
    return Outcome(predicted.by_category, predicted.bytes_per_step, step, blocks, predicted.why_not, why_no_step)


def _why_not_simulated(run: RunSpec) -> str:
    if run.emulate:
        return "not simulated in the wind tunnel"
    if run.link is None:
        return "not simulated without a link"
    return f"not simulated in units {run.units}, only in blocks"


@lru_cache(maxsize=256)
def _predicted(run: RunSpec, version: str) -> Prediction:
    return predict(run)


def _work_of(run: Run) -> StepWork | None:
    """What a step of the run computes and sends; None for a run that the steady card does not show."""
    if isinstance(run, OwnPlan):
        return run.work
    if isinstance(run, PlanSpec):
        return work_of(run)
    if run.own_model and run.link:
        return recorded_model().steady_work(run)
    if run.own_model or why_not_steady(run):
        return None
    # 1.0: the steady card computes at its whole rate; it has no streams, as CPU ranks have none
    return work_of(steady_plan_of(run), 1.0).shared(streams=False)


def _simulated(run: Run) -> tuple[Step, Blocks] | tuple[None, None]:
    """The parts of a simulated step of its first rank, and the blocks of its timeline; None where it is not known."""
    work = _work_of(run)
    if work is None:
        return None, None
    # communicators whose messages go side by side; plans have one
    queues = run.link_queues if isinstance(run, RunSpec) else 1
    # no rank is slower than others, so that one stands for all
    first_rank = [*simulate_work(work, communicators=queues).logs][:1]
    tables = tables_of(first_rank, 1, {})
    blocks = _blocks_of(tables)
    # the breakdown counts it as computing; the bar has a part of its own for it
    optimizer_ms = sum(block.end - block.start for block in blocks["compute"] if block.phase == OPTIMIZER)
    optimizer_s = optimizer_ms / 1e3
    (row,) = tables["breakdown"]
    step = Step(
        computing=row["compute_only_ns"] / 1e9 - optimizer_s,
        hidden=row["overlapped_ns"] / 1e9,
        exposed=row["exposed_ns"] / 1e9,
        optimizer=optimizer_s,
        other=row["other_ns"] / 1e9,
    )
    return step, blocks


def _blocks_of(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Blocks:
    # (unit, phase, kind) -> why such messages are exposed
    causes = {(row["unit"], row["phase"], row["kind"]): row["cause"] for row in tables["exposed"]}
    blocks = Blocks(compute=[], messages=[], exposed=[])
    for row in tables["ledger"]:
        unit, phase, kind = row["unit"], row["phase"], row["kind"]
        cause = CAUSES.get(causes.get((unit, phase, kind), ""), "")
        start, end, waited = _ms(row["start_ns"]), _ms(row["end_ns"]), _ms(row["waited_ns"])
        sent = Sent(start, end, unit, phase, kind.replace("_", "-"), size(row["wire_bytes"]), waited, cause)
        blocks["messages"].append(sent)
    for row in tables["timeline"]:
        start, end = _ms(row["start_ns"]), _ms(row["end_ns"])
        if row["lane"] == "compute":
            blocks["compute"].append(Computed(start, end, row["unit"], row["phase"]))
        elif row["lane"] == "exposed":
            blocks["exposed"].append((start, end))
    return blocks


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
    if isinstance(run, RunSpec):
        plan, reached = steady_plan_of(run), LINK_EFFICIENCY  # of the steady card's link all is reached
    else:
        plan, reached = run, 1.0

    def waits(bytes_per_s: float) -> tuple[float, float]:
        # plans reach 84 % of a link's rate: the steady card's is made larger, so that it carries all of `bytes_per_s`
        linked = on_links_of(at_bandwidth(plan, bytes_per_s / reached), work)
        return _waits(simulate_program(linked, program).logs[0])

    slowest, fastest = ends
    # rates 1 % apart on a logarithmic scale: 10 MB/s to 10 GB/s are 695 steps
    steps = ceil(log(fastest / slowest, 1.01))
    rates = [slowest * (fastest / slowest) ** (step / steps) for step in range(steps + 1)]
    # bisection: a rank that does not wait at one rate waits at no higher one
    least = bisect_left(rates, True, key=lambda rate: not waits(rate)[0])
    if least > steps:
        return None
    return rates[least], waits(rates[least])[1]


def _waits(log: RankLog) -> tuple[float, float]:
    """Seconds that a rank waits between two units of a pass, and at the ends of the passes."""
    spans = sorted(log.computed, key=lambda span: span.start)
    gaps_in_passes: list[float] = []
    gaps_at_ends: list[float] = []
    # what is no computing between two spans is waiting for a message
    for before, after in pairwise(spans):
        gaps = gaps_in_passes if _in_one_pass(before, after) else gaps_at_ends
        gaps.append(max(0.0, after.start - before.end))
    # before the first span the rank waits for the first all-gather
    in_passes, at_ends = sum(gaps_in_passes), spans[0].start + sum(gaps_at_ends)
    if in_passes <= 1e-6 * log.end:
        return 0.0, at_ends  # they are rounding errors
    return in_passes, at_ends


def _in_one_pass(before: Span, after: Span) -> bool:
    """Whether both are blocks of a forward, or of a backward; the root's own spans are at the turn between these."""
    if ROOT in (before.unit, after.unit):
        return False
    return before.phase == after.phase != OPTIMIZER
