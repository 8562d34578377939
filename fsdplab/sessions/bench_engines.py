"""Times several engines in one run (`bench`), step by step in turn, so that a slow machine slows all of them alike.

An absolute time says more about the machine than about an engine. So the engines share their ranks and take turns; the
report has the median of each and ratios between medians. It also has two limits: `alone`, the same training without
communication, and the lower bound for a perfect sharded engine: forward + backward + one nth of the optimizer's step.

    main(FOLDER)      what each rank runs, called by launch/program.py
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.common.files import write_whole
from fsdplab.common.temporary import temporary_folder
from fsdplab.engine import events
from fsdplab.records import Spread
from fsdplab.sessions.launch.launcher import once_more, run_ranks
from fsdplab.sessions.launch.mailbox import Mailbox, Tail
from fsdplab.sessions.launch.stacks import of_exception, of_own_code
from fsdplab.sessions.run_and_record import check_code, reachable
from fsdplab.sessions.spec import EngineChoice, RunSpec, SpecError
from fsdplab.sessions.spec.rules import check_same
from fsdplab.sessions.stopped import stops_in_one_line
from fsdplab.sessions.worker.emulated_network import EmulatedNetwork
from fsdplab.sessions.worker.engines import (
    TrainingSetup,
    build,
    in_bf16,
    micro_batches,
    optimizer_of,
    units_of,
    workload_of,
)
from fsdplab.sessions.worker.environment import nccl_variables
from fsdplab.sessions.worker.rank_process import RankContext, rank_process
from fsdplab.workloads.compiled import compile_modules

ALONE = "alone"
WARMUP_ROUNDS = 2


@dataclass(frozen=True)
class Timing:
    """One engine's steps, in seconds: the slowest rank's time of each timed round.

    `optimizing` is how long its optimizer's step took in each, on the rank where that took longest. `blocked` is how
    long the host was blocked for collectives in each of them (the emulated clock's, behind a link), `communicating` how
    long those took: both of the rank that was blocked longest, by the ledger; empty for engines that keep none.
    """

    engine: str
    strategy: str
    seconds: tuple[float, ...]
    loss: float
    prefetch: int = 1
    blocked: tuple[float, ...] = ()
    communicating: tuple[float, ...] = ()
    optimizing: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.seconds)

    @property
    def overlap(self) -> float | None:
        """The part of communication that was hidden, 0 to 1, in the median round."""
        # a round that communicates for 40 ms and is blocked for 10 of them hides 0.75
        parts = [1 - blocked / total for blocked, total in zip(self.blocked, self.communicating) if total]
        if not parts:
            return None
        return statistics.median(parts)


@dataclass(frozen=True)
class Bench:
    """The measurements of one interleaved run; `floors` (lower bounds) are forward + backward + optimizer / n, in
    seconds: of the slowest rank in each round, as an engine's steps are.
    """

    spec: RunSpec
    timings: tuple[Timing, ...]
    floors: tuple[float, ...]

    @property
    def floor(self) -> float:
        """The median floor in seconds."""
        return statistics.median(self.floors)

    def beside_floor(self, timing: Timing) -> Spread:
        """Return the spread of steps over the floor of their own round: what slows a whole round down cancels out."""
        return Spread.of([step / floor for step, floor in zip(timing.seconds, self.floors)])

    def ratio(self, timing: Timing, engine: str) -> float | None:
        """Return the median of `timing` over that of the first row of `engine`; None if it took no part."""
        # an engine may have several rows, of other strategies: the first stands for it
        for other in self.timings:
            if other.engine == engine:
                return timing.median / other.median
        return None


@stops_in_one_line
def bench(
    specs: Sequence[RunSpec],
    *,
    rounds: int = 10,
    on_round: Callable[[int, int], None] | None = None,
    on_look: Callable[[], None] = lambda: None,
) -> Bench:
    """Time `specs` (same model, data and ranks) in turn for `rounds` rounds; raises SpecError, or RanksFailed as `run`
    does. `on_look()` is called about twenty times a second.
    """
    _check(specs, rounds)
    check_code(specs[0])
    return once_more(lambda: _bench_once(specs, rounds, on_round, on_look))


def _bench_once(
    specs: Sequence[RunSpec], rounds: int, on_round: Callable[[int, int], None] | None, on_look: Callable[[], None]
) -> Bench:
    folder = temporary_folder("bench")
    mailbox = Mailbox(folder)
    request = {"specs": [reachable(spec) for spec in specs], "rounds": rounds}
    write_whole(folder / "bench.json", json.dumps(request))
    steps = Tail(mailbox.of(0, "steps"))
    reported = 0

    def look() -> None:
        nonlocal reported
        on_look()
        for _ in steps.lines():
            reported += 1
            if on_round is not None:
                on_round(reported, rounds + WARMUP_ROUNDS)

    try:
        program = ["-m", "fsdplab.sessions.bench_engines", str(folder)]
        run_ranks(
            program,
            mailbox,
            world_size=specs[0].world_size,
            time_limit=specs[0].time_limit,
            start=specs[0].start,
            on_look=look,
        )
        results = [*mailbox.reports("result").values()]
    finally:
        shutil.rmtree(folder)
    return _joined(specs, results)


def _check(specs: Sequence[RunSpec], rounds: int) -> None:
    if not specs or rounds < 1:
        raise SpecError(f"a bench needs at least one engine and one round; got {len(specs)} and {rounds}")
    may_differ = ("engine", "strategy", "transport", "prefetch")
    # all other fields must agree: the same work on the same network
    equal = [field.name for field in fields(RunSpec) if field.name not in may_differ]
    check_same("engines of a bench", specs, equal)
    if len({spec.backend for spec in specs if spec.engine != "lab"}) > 1:
        raise SpecError("engines of a bench share one process group; give all but the lab's own the same transport")
    if any(spec.emulate for spec in specs):
        raise SpecError("a bench has no wind tunnel, whose link depends on the run; give a link")
    if any(spec.engine == "twin" for spec in specs):
        raise SpecError("the twin replays all ranks in one process and cannot take turns with engines; leave it out")


def _joined(specs: Sequence[RunSpec], results: Sequence[dict[str, Any]]) -> Bench:
    """Join the results of all ranks: a round is as slow as its slowest rank."""
    # the limit comes first, as among the `setups` of `main`
    names = [(ALONE, ALONE, 1)]
    names += [(spec.engine, spec.strategy, spec.prefetch) for spec in specs]
    timings = []
    for index, (engine, strategy, prefetch) in enumerate(names):
        # (seconds blocked, seconds of communication) of the rank that was blocked longest, a pair a round
        waits = _slowest([result["waits"][index] for result in results])
        timing = Timing(
            engine,
            strategy,
            seconds=_slowest([result["seconds"][index] for result in results]),
            loss=results[0]["losses"][index],
            prefetch=prefetch,
            blocked=tuple(blocked for blocked, _ in waits),
            communicating=tuple(communicating for _, communicating in waits),
            optimizing=_slowest([result["optimizing"][index] for result in results]),
        )
        timings.append(timing)
    floors = _slowest([_least(result["parts"], specs[0].world_size) for result in results])
    return Bench(specs[0], tuple(timings), floors)


def _slowest(by_rank: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Return the largest value of each round: [[1, 5], [2, 4]] -> (2, 5)."""
    return tuple(max(of_round) for of_round in zip(*by_rank))


def _least(parts: dict[str, list[float]], ranks: int) -> list[float]:
    """Return the seconds of one rank's rounds without communication, with one nth of the optimizer's step."""
    # 80 ms of computing and an optimizer's step of 20 ms on 2 ranks: 90 ms
    return [compute + optimizer / ranks for compute, optimizer in zip(parts["compute"], parts["optimizer"])]


class Alone:
    """Trains the same without any communication: every rank on its own."""

    def __init__(self, spec: RunSpec, context: RankContext) -> None:
        workload = workload_of(spec)
        model = workload.build(context.device, spec.seed)
        self._loss_of = workload.seeded_loss
        if spec.compile == "blocks":
            compile_modules(units_of(spec, model, workload).modules or [model])
        self.model = _autocast(spec, model)
        self.optimizer = optimizer_of(spec, self.model, workload, engine=ALONE)
        self.parts: dict[str, list[float]] = {"compute": [], "optimizer": []}

    def train_step(self, batches_by_rank: Sequence[Sequence[Any]]) -> float:
        """Train one step of this rank alone; record the times of computing and of the optimizer."""
        (batches,) = batches_by_rank
        start = time.perf_counter()
        total = 0.0
        for batch in batches:
            # as in `one_step`: the mean over micro-batches, without an engine around it
            loss = self._loss_of(self.model, batch) / len(batches)
            loss.backward()
            total += loss.item()
        computed = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.parts["compute"].append(computed - start)
        self.parts["optimizer"].append(time.perf_counter() - computed)
        return total


def _autocast(spec: EngineChoice, model: nn.Module) -> nn.Module:
    """Let a rank alone compute with bfloat16 parameters in bf16: the least that any engine could do."""
    if spec.precision != "bf16":
        return model
    model.register_forward_pre_hook(lambda _, args, kwargs: in_bf16(args, kwargs), with_kwargs=True)
    return model.to(torch.bfloat16)


def main(folder: str) -> None:
    """Take turns, as one rank of the bench that FOLDER/bench.json describes."""
    request = json.loads(Path(folder, "bench.json").read_text())
    specs = [RunSpec(**settings) for settings in request["specs"]]
    os.environ |= nccl_variables(specs[0])
    backend = specs[0].backend
    if any(spec.backend == "shm" for spec in specs):  # the lab's engine works on either
        backend = "shm"
    traceback_of = of_own_code if specs[0].own_model else of_exception
    with rank_process(folder, backend, specs[0].device_type, traceback_of=traceback_of) as context:
        context.heartbeat.enter("build")
        # every engine's model stays in memory for the whole bench, beside the one that trains alone
        alone = Alone(specs[0], context)
        engines = [build(spec, context) for spec in specs]
        setups: list[TrainingSetup | Alone] = [alone, *engines]
        for spec, setup in zip(specs, engines):
            EmulatedNetwork(spec, context).begin(setup)
        watches = [_OptimizerWatch(setup.optimizer) for setup in setups]
        seconds, losses, waits = _take_turns(setups, specs[0], context, request["rounds"])
        parts = {name: values[WARMUP_ROUNDS:] for name, values in alone.parts.items()}
        optimizing = [watch.seconds[WARMUP_ROUNDS:] for watch in watches]
        result = {"seconds": seconds, "losses": losses, "waits": waits, "parts": parts, "optimizing": optimizing}
        context.write("result", result)


class _OptimizerWatch:
    """Measures the seconds of each step of an optimizer; none for a wrapper that is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.seconds: list[float] = []
        if isinstance(optimizer, torch.optim.Optimizer):
            # minus the time of the start here, plus the time of the end there: the duration
            optimizer.register_step_pre_hook(lambda *_: self.seconds.append(-time.perf_counter()))
            optimizer.register_step_post_hook(self._ended)

    def _ended(self, *_: Any) -> None:
        # the step has only launched its kernels
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[-1] += time.perf_counter()


class _Waits:
    """Adds up the seconds that the host was blocked, and that collectives took, since the last `take`."""

    def __init__(self) -> None:
        self._rows: list[tuple[int | None, int]] = []

    def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Collective):
            self._rows.append((event.waited_ns, event.end_ns - event.start_ns))

    def take(self) -> tuple[float, float] | None:
        """Return the seconds since the last call; None without a ledger."""
        rows, self._rows = self._rows, []
        # one collective without a waiting time, and the sum would be too small to say anything
        waits = [waited for waited, _ in rows if waited is not None]
        if not rows or len(waits) < len(rows):
            return None
        return sum(waits) / 1e9, sum(lasted for _, lasted in rows) / 1e9


def _take_turns(
    setups: Sequence[TrainingSetup | Alone], spec: RunSpec, context: RankContext, rounds: int
) -> tuple[list[list[float]], list[float], list[list[tuple[float, float]]]]:
    seconds: list[list[float]] = [[] for _ in setups]
    waits: list[list[tuple[float, float]]] = [[] for _ in setups]
    wait_log = _Waits()
    workload = workload_of(spec)
    unsubscribe = events.subscribe(wait_log.on_event)
    losses = [0.0 for _ in setups]
    for step in range(WARMUP_ROUNDS + rounds):
        batches = [micro_batches(spec, workload, step, context.rank, context.device)]
        # three engines: step 0 in the order 0 1 2, step 1 in 1 2 0
        for turn in range(len(setups)):
            index = (turn + step) % len(setups)  # no engine always follows the same one
            context.heartbeat.enter("bench", step)
            # ranks come out of the engine before at different times: no engine's time includes that wait
            dist.barrier()
            start = time.perf_counter()
            losses[index] = setups[index].train_step(batches)
            if step >= WARMUP_ROUNDS:
                seconds[index].append(time.perf_counter() - start)
            waited = wait_log.take()
            if waited is not None and step >= WARMUP_ROUNDS:
                waits[index].append(waited)
        context.append("steps", {"round": step})
    unsubscribe()
    return seconds, losses, waits
