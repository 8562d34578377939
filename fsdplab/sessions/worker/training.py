"""Runs the work of each rank: build, train, measure, report.

    main(FOLDER)      called by launch/program.py

The steps, in order: one that makes the optimizer's state, one whose memory is measured, further warm-up, the timed
ones, and those under the profiler. In a comparison the run may wait for its turn before each timed step and before the
profiled ones. Nothing is added between ranks: no barrier, and on CUDA one synchronisation a step, at its end, where
reading the loss needs it anyway.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from fsdplab.engine import events
from fsdplab.profiling import MemoryRecorder, MemoryTimeline, TagLog
from fsdplab.profiling.core_waits import CoreWaitLog
from fsdplab.profiling.intervals import EMPTY
from fsdplab.profiling.profiler import memory_snapshot, prepare_profiler
from fsdplab.sessions.launch.mailbox import NOT_FORKED, RANKS_STORE
from fsdplab.sessions.launch.stacks import of_exception, of_own_code
from fsdplab.sessions.launch.turns import OwnTurns
from fsdplab.sessions.spec import MEMORY_STEP, RunSpec
from fsdplab.sessions.trace_tables import MEMORY_TRACE, TRACE, leave_analysis
from fsdplab.sessions.worker import profiler
from fsdplab.sessions.worker.core_share import core_time, waited_s
from fsdplab.sessions.worker.emulated_network import EmulatedNetwork
from fsdplab.sessions.worker.engines import TrainingSetup, build, micro_batches, workload_of
from fsdplab.sessions.worker.environment import capture_environment, carrier, nccl_variables
from fsdplab.sessions.worker.rank_process import Diverged, RankContext, rank_process
from fsdplab.workloads.own.sources import source_of

Build = Callable[[RunSpec, RankContext], TrainingSetup]


def main(folder: str, build_setup: Build = build) -> None:
    """Train as the run in FOLDER/spec.json says, as one rank of it."""
    with open(f"{folder}/spec.json") as file:
        spec = RunSpec(**json.load(file))
    # NCCL reads them when the process group is formed
    os.environ |= nccl_variables(spec)
    traceback_of = of_own_code if spec.own_model else of_exception
    with rank_process(folder, spec.backend, spec.device_type, traceback_of=traceback_of) as context:
        if context.rank == 0:
            # one rank speaks for all: they run on the same machine
            context.write("environment", capture_environment(spec.device_type) | carrier(spec) | how_started())
        context.heartbeat.enter("build")
        Training(spec, context, build_setup).run()


def how_started() -> dict[str, str]:
    """Return how this rank was started, and why it was not forked, where it was to be if possible."""
    if os.environ.get(RANKS_STORE):  # only forked ranks use a file for rendezvous
        return {"start": "warm"}
    started = {"start": "torchrun"}
    not_forked = os.environ.get(NOT_FORKED)
    if not_forked:
        started["not_forked"] = not_forked
    return started


class Ledger:
    """Writes the record's table `ledger`, every collective of a run, to the rank's file after each step.

    A long run has hundreds of thousands of rows, so a rank holds those of the latest step only, and those of the steps
    for which `keep(step)` is true, which the analysis of its traces needs.
    """

    def __init__(self, context: RankContext, keep: Callable[[int], bool]) -> None:
        self._context, self._keep = context, keep
        self._unwritten: list[dict[str, Any]] = []
        self.of_step: list[dict[str, Any]] = []  # of the step that was written last
        self.kept: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Note a collective that has ended."""
        self._unwritten.append(row)

    def write(self) -> None:
        """Write the rows of a step that has ended."""
        self.of_step, self._unwritten = self._unwritten, []
        self.kept += [row for row in self.of_step if self._keep(row["step"])]
        if self.of_step:
            self._context.append("ledger", *self.of_step)


class Training:
    """Trains one rank's run, from its text to its results."""

    def __init__(self, spec: RunSpec, context: RankContext, build_setup: Build) -> None:
        self.spec = spec
        self.context = context
        if spec.memory or spec.profile:
            prepare_profiler(context.device)
        self.turns = OwnTurns(context.mailbox, context.rank, context.heartbeat)
        self.ledger = Ledger(context, self._is_traced)
        self.tags = TagLog() if spec.memory else None
        self.workload = workload_of(spec)
        self.setup = build_setup(spec, context)
        self.network = EmulatedNetwork(spec, context)
        self.unit_states = profiler.UnitStateLog(context.rank)
        self.core_waits = EMPTY
        self.profiler = None
        if spec.profile and spec.engine != "twin":
            self.profiler = profiler.StepProfiler(spec.profile, spec.profiler_warmup, context.device)

    def run(self) -> None:
        """Train all steps, and write the measurements."""
        # the engine's events fill the ledger and the table of units' states
        subscriptions = [events.subscribe(self._on_event), events.subscribe(self.unit_states.on_event)]
        self.network.begin(self.setup)
        timeline = self._warm_up()
        if timeline is not None:
            self.context.write("memory", profiler.written_memory(timeline, self.context.rank, MEMORY_STEP))
        self.network.warmed_up(self.setup)
        # from here on the link does not change, and timed steps follow
        profiled = self._timed_and_profiled_steps()
        for unsubscribe in subscriptions:
            unsubscribe()
        self.ledger.write()
        result = {"life": self.unit_states.rows, "profiled_s": profiled, "link": self.network.as_dict()}
        self.context.write("result", result)
        if profiled:
            mailbox, rank = self.context.mailbox, self.context.rank
            leave_analysis(mailbox, rank, TRACE, self.ledger.kept, self.core_waits)
            leave_analysis(mailbox, rank, MEMORY_TRACE, self.ledger.kept, EMPTY)

    def _is_traced(self, step: int) -> bool:
        if not self.spec.profile:
            return False
        # the measured step, and those after the timed ones, are under the profiler
        return step == MEMORY_STEP or step >= self.spec.untimed + self.spec.steps

    def _warm_up(self) -> MemoryTimeline | None:
        timeline = None
        for step in range(self.spec.untimed):
            if step == MEMORY_STEP and self.spec.memory:
                timeline = self._measured_step(step)
                continue
            seconds = self._step(step, timed=False)
            # steps after the warm-up that are not timed yet: the wind tunnel calibrates on them
            if step >= self.spec.warmup:
                self.network.note_step(step, seconds, self.ledger.of_step)
        return timeline

    def _timed_and_profiled_steps(self) -> list[float]:
        """Train the timed steps, each in its turn, and then the profiled ones; return the seconds of these."""
        for step in range(self.spec.untimed, self.spec.untimed + self.spec.steps):
            self.turns.wait()
            self._step(step, timed=True)
        self.turns.wait()
        return self._profiled_steps()

    def _profiled_steps(self) -> list[float]:
        """Train under the profiler, save its trace, and return the seconds of the steps in it. The twin only trains:
        its losses are compared.
        """
        first = self.spec.untimed + self.spec.steps
        if self.profiler is None:
            for step in range(first, self.spec.total_steps):
                self._step(step, timed=False)
            return []
        network = self.network.as_dict() or {}
        self.profiler.begin(network.get("name"))
        waits = CoreWaitLog()
        with ExitStack() as after:
            if self.spec.engine == "lab":
                after.callback(events.watch_edges(waits.note))
            for step in range(first, self.spec.total_steps):
                # the profiler drops its own warm-up steps, so their units are not noted either
                if step >= first + self.spec.profiler_warmup:
                    self.unit_states.step = step
                self.profiler.step_done(self._step(step, timed=False))
        self.unit_states.step = None
        self.core_waits = waits.close()
        return self.profiler.save(self.context.mailbox.of(self.context.rank, TRACE))

    def _step(self, step: int, timed: bool, around: AbstractContextManager[Any] = nullcontext()) -> float:
        self.context.heartbeat.enter("data", step)
        # drawing batches is loading time, reported apart and no part of the step
        asked = time.perf_counter()
        batches = self._batches(step)
        if step == 0:
            self._tell_of_the_model(batches)
        loading = time.perf_counter() - asked
        # memory and snapshots are recorded around training alone
        with around:
            # two readings around the step say how long the rank lacked a core in it
            before = core_time()
            start = time.perf_counter()
            loss = self.setup.train_step(batches)
            seconds = time.perf_counter() - start
            after = core_time()
        # the device is done, as the loss was read: times of its kernels are known now
        events.flush()
        self.ledger.write()
        tokens = self._sum(self.workload.tokens, batches)
        row = {
            "rank": self.context.rank,
            "step": step,
            "loss": loss,
            "step_time_s": seconds if timed else None,
            "tokens": tokens,
            "loading_s": loading,
            "cpu_s": after.cpu_s - before.cpu_s,
            "core_wait_s": waited_s(before, after, torch.get_num_threads()),
        }
        self.context.append("steps", row)
        # after its row, so that the record has the step that diverged
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss}; {self._remedy}")
        return seconds

    def _tell_of_the_model(self, batches: Sequence[Sequence[Any]]) -> None:
        """Write what a user's own model turned out to be, for the record."""
        if not self.spec.own_model:
            return
        source = source_of(self.spec.model)
        workload = {
            "name": source.name,
            "kind": source.kind,
            "digest": source.digest,
            **self.setup.facts,
            "samples": self._sum(self.workload.samples, batches),
        }
        self.context.write("workload", workload)

    def _sum(self, count: Callable[[Any], int | None], batches_by_rank: Sequence[Sequence[Any]]) -> int | None:
        """Sum a count over all batches; None where it is not known of one."""
        total = 0
        for batches in batches_by_rank:
            for batch in batches:
                counted = count(batch)
                if counted is None:
                    return None
                total += counted
        return total

    @property
    def _remedy(self) -> str:
        if self.spec.own_model:
            return "give a smaller learning rate, or look for what is not finite in the model, its loss or this batch"
        return f"give a smaller learning_rate than {self.spec.learning_rate:g}"

    def _measured_step(self, step: int) -> MemoryTimeline:
        """Train a step while its memory is recorded."""
        trace, snapshot = None, None
        if self.spec.profile:
            trace = self.context.mailbox.of(self.context.rank, MEMORY_TRACE)
            # torch's own snapshot of the allocator; there is one on CUDA alone
            snapshot = self.context.mailbox.of(self.context.rank, "snapshot.pickle.gz")
        recorder = MemoryRecorder(
            model=self.setup.model,
            optimizer=self.setup.optimizer,
            engine=self.spec.engine,
            device=self.context.device,
            tags=self.tags,
            ignore=self.workload.data(),
            offloaded=self.spec.offload != "none",
            save_trace=trace,
        )
        around = ExitStack()
        around.enter_context(memory_snapshot(snapshot, self.context.device))
        around.enter_context(recorder)
        around.enter_context(torch.profiler.record_function(f"{profiler.RANGE}{step}"))
        self.unit_states.step = step
        self._step(step, timed=False, around=around)
        self.unit_states.step = None
        if self.tags is not None:
            self.tags.close()
        return recorder.timeline

    def _batches(self, step: int) -> list[list[Any]]:
        """Draw the micro-batches of each rank that this process plays."""
        ranks: Sequence[int] = [self.context.rank]
        if self.spec.engine == "twin":
            # the twin sees the batches of all ranks in one process
            ranks = range(self.spec.world_size)
        return [micro_batches(self.spec, self.workload, step, rank, self.context.device) for rank in ranks]

    def _on_event(self, event: events.Event) -> None:
        if not isinstance(event, events.Collective):
            return
        self.context.heartbeat.complete(f"{event.kind} of {event.unit or 'the root'} in {event.phase}")
        self.ledger.add({"rank": self.context.rank, "step": self.context.heartbeat.step, **vars(event)})
