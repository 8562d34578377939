"""`simulate(spec)`: a plan's step, event by event, as a run record that every figure draws.

Ranks that are alike are simulated once, so 10,000 ranks cost what one does, and a slow rank costs a few classes more.
The record holds a rank of each class; its summary says how many ranks each stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.common.names import CATEGORIES
from fsdplab.common.thinning import downsample
from fsdplab.engine.core.step import Schedule
from fsdplab.planning.memory import Memory, memory_of_program
from fsdplab.planning.plan_spec import AS_IN_A_RUN, PlanError, PlanSpec
from fsdplab.planning.plan_traffic import bytes_by_axis, plan_traffic
from fsdplab.planning.program import OPTIMIZER, Program, StepWork, program_of
from fsdplab.planning.step_time import work_of
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Comm, Peak, Profile, SimulatedRanks

from .accounting import STEP, Row, nanoseconds, tables_of
from .classes import rank_classes
from .network import Clock, Network
from .ranks import Rank, RankLog
from .trees import with_trees

_MOST_IN_FLIGHT = 10_000
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Simulated:
    """The logs of a step, one a class of ranks, how many events it took, and the program of every rank."""

    logs: tuple[RankLog, ...]
    operations: int
    program: Program

    @property
    def step_s(self) -> float:
        """Until the last rank has ended."""
        return max(log.end for log in self.logs)


def simulate_work(
    work: StepWork, *, communicators: int = 1, paces: Mapping[int, float] | None = None,
    schedule: Callable[[int], Schedule] = Schedule,
) -> Simulated:  # fmt: skip
    """Simulate a step of units whose costs are given; `paces` are those of slow ranks, over `shards` x `replicas`.

    `schedule` makes a rank's rule of what to gather ahead, from the prefetch depth.

    Two blocks of 1 s forward and 2 s backward without communication take 6 s, and the optimizer's time.
    """
    return simulate_program(work, program_of(work, schedule), communicators, paces)


def simulate_program(
    work: StepWork, program: Program, communicators: int = 1, paces: Mapping[int, float] | None = None
) -> Simulated:
    """Simulate a step whose operations are given: one program serves every link and every amount of compute."""
    clock = Clock()
    network = Network(clock, communicators)
    classes = rank_classes(work.shards, work.replicas, paces or {})
    ranks = [Rank(index, each, work, program, clock, network) for index, each in enumerate(classes)]
    for rank in ranks:
        clock.at(0.0, rank.go_on)
    clock.run()
    return Simulated(tuple(rank.log for rank in ranks), clock.operations, program)


def simulate(
    spec: PlanSpec, *, communicators: int = 1, in_flight: int = 1, paces: Mapping[int, float] | None = None,
    trees: bool = False, efficiency: float | None = None, folder: str | Path | None = None,
    schedule: Callable[[int], Schedule] = Schedule, streams: bool = True,
) -> RunRecord:  # fmt: skip
    """A record of one simulated step of `spec`, not saved: `.save()` writes it to `folder`.

    `communicators`: 2 lets reductions and gathers share the link at once; `in_flight`: reductions under way, as
    `set_reduce_scatter_max_input_buffers` sets; `paces`: GPU -> by how much its compute takes longer (1.5). The ranks
    of a tensor- or context-parallel group go at the pace of their slowest. `trees`: all-reduces take trees where these
    are faster than rings. `schedule`: another rule than the engine's of what to gather ahead. `streams`: False for
    ranks on a CPU, whose host issues an all-reduce over replicas only when its reduce-scatter is complete. Raises
    PlanError.

    >>> from fsdplab.planning.planner import plan_spec
    >>> found = simulate(plan_spec("llama-3.1-8b", "h100", gpus=8))
    >>> found.provenance["step_time_s"], found.summary.simulated.ranks
    ('simulated', {0: 8})
    """
    _check(spec, communicators, in_flight, paces or {})
    work = work_of(spec, efficiency, in_flight).shared(streams=streams)
    work = with_trees(work) if trees else work
    group_paces = _group_paces(spec, paces or {})
    found = simulate_work(work, communicators=communicators, paces=group_paces, schedule=schedule)
    dtypes = {"all_gather": spec.param_dtype, "ring": spec.param_dtype}
    reduced = dict.fromkeys(("reduce_scatter", "all_reduce"), spec.reduce_dtype)
    names = {kind: _DTYPES[dtype] for kind, dtype in (dtypes | reduced).items()}
    tables = tables_of(list(found.logs), spec.tensor_parallel, names)
    step = {"step": STEP, "loss": None, "tokens": spec.tokens * spec.grad_accum, "loading_s": None}
    tables["steps"] = [
        {"rank": log.rank.first * spec.tensor_parallel, "step_time_s": log.end, **step} for log in found.logs
    ]
    memory = memory_of_program(found.program, spec)
    tables["memory"] = [
        {"rank": log.rank.first * spec.tensor_parallel, "step": STEP, **row}
        for log in found.logs
        for row in _memory_rows(memory, log)
    ]
    quantities = ("step_time_s", "tokens_per_s", "exposed_s", "comm", "peak_memory_bytes")
    return RunRecord(
        Path(folder or f"simulated-{spec.strategy}-{spec.gpus}-ranks"),
        spec=_spec_of(spec, communicators=communicators, in_flight=in_flight, trees=trees),
        environment={"device": "cuda", "device_name": spec.gpu.name},
        summary=_summary(spec, found, tables, memory),
        provenance=dict.fromkeys(quantities, "simulated"),
        tables=tables,
    )


def _check(spec: PlanSpec, communicators: int, in_flight: int, paces: Mapping[int, float]) -> None:
    if spec.pipeline_parallel > 1:
        raise PlanError(
            f"a step in {spec.pipeline_parallel} stages is not simulated event by event; leave --pp out, or take the"
            " closed form of fsdplab plan"
        )
    if communicators not in (1, 2):
        raise PlanError(f"communicators is {communicators!r}; expected 1, or 2 for reductions on one of their own")
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or not 1 <= in_flight <= _MOST_IN_FLIGHT:
        raise PlanError(f"in_flight is {in_flight!r}; expected a whole number from 1 to {_MOST_IN_FLIGHT:,}")
    for rank, pace in paces.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < spec.gpus:
            raise PlanError(f"a pace is given for rank {rank!r}; expected one from 0 to {spec.gpus - 1:,}")
        if not isinstance(pace, (int, float)) or isinstance(pace, bool) or not math.isfinite(pace) or pace <= 0:
            raise PlanError(
                f"the pace of rank {rank} is {pace!r}; expected a number above 0, such as 1.5 for a slow one"
            )


def _group_paces(spec: PlanSpec, paces: Mapping[int, float]) -> dict[int, float]:
    """GPU -> pace becomes rank of the shards -> pace of its tensor- and context-parallel group."""
    slowest: dict[int, float] = {}
    members = spec.tensor_parallel * spec.context_parallel
    for group in {rank // members for rank in paces}:
        pace = max(paces.get(rank, 1.0) for rank in range(group * members, (group + 1) * members))
        first = group * spec.context_parallel
        slowest |= dict.fromkeys(range(first, first + spec.context_parallel), float(pace))
    return slowest


_CHOICES = (
    "strategy", "gpus", "micro_batch", "seq", "grad_accum", "param_dtype", "checkpointing", "prefetch", "optimizer",
    "shard_size", "tensor_parallel", "context_parallel",
)  # fmt: skip


def _spec_of(spec: PlanSpec, **choices: object) -> dict[str, Any]:
    """The plan under the names that a run's spec has."""
    named = {AS_IN_A_RUN.get(name, name): getattr(spec, name) for name in _CHOICES}
    return {"engine": "lab", "model": spec.model.name, "gpu": spec.gpu.name, **named, **choices}


def _memory_rows(memory: Memory, log: RankLog) -> list[Row]:
    """The moments of the plan at the times that the simulation gives them, as many as a measured timeline has at most;
    the first of the largest is the peak.
    """
    resting, *passing, stepping = memory.moments
    timed = [(0.0, resting), *((log.passed[each.place], each) for each in passing), (log.end, stepping)]
    timed.append((log.end, resting))
    return [
        {
            "time_ns": nanoseconds(time),
            **{name: round(each.by_category[name]) for name in CATEGORIES},
            "is_peak": each is memory.peak,
        }
        for time, each in (timed[place] for place in downsample([each.total for _, each in timed]))
    ]


def _summary(spec: PlanSpec, found: Simulated, tables: Mapping[str, list[Row]], memory: Memory) -> Summary:
    worst = max(tables["breakdown"], key=lambda row: (row["exposed_ns"], -row["rank"]))
    communication = worst["overlapped_ns"] + worst["exposed_ns"]
    peak, sent, inner = memory.peak, sum(bytes_by_axis(plan_traffic(spec)).values()), spec.tensor_parallel
    log = next(log for log in found.logs if log.rank.first * inner == worst["rank"])
    stepping_s, exchange_s = (
        sum(span.end - span.start for span in spans if span.phase == OPTIMIZER) for spans in (log.computed, log.waited)
    )
    return Summary(
        step_time_s=Spread.of([found.step_s]),
        tokens_per_s=spec.step_tokens / found.step_s,
        memory_start_ns={log.rank.first * inner: 0 for log in found.logs},
        peak_memory_bytes=Peak(round(peak.total), {name: round(part) for name, part in peak.by_category.items()}),
        comm=Comm(
            bytes_per_step=sent,
            collectives_per_step=sum(row["rank"] == worst["rank"] for row in tables["ledger"]),
            **{f"{name}_s": worst[f"{name}_ns"] / 1e9 for name in ("exposed", "on_link", "copying", "waiting")},
            overlap=worst["overlapped_ns"] / communication if communication else None,
        ),
        formula_bytes_per_step=sent,
        profile=Profile(steps=1, source="simulation", optimizer_s=exchange_s + stepping_s, exchange_s=exchange_s),
        simulated=SimulatedRanks(
            {log.rank.first * inner: log.rank.count * inner for log in found.logs}, found.operations
        ),
    )
