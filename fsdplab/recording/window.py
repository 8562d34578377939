"""Measures a few steps in the middle of a job: the memory of one by category, and a trace of the next ones.

Everything here happens between two steps. What is measured is written when it is complete, so that a job which dies
afterwards, however it does, leaves a whole record.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fsdplab.common.files import write_whole
from fsdplab.engine import events
from fsdplab.profiling import MemoryRecorder, TagLog
from fsdplab.profiling.profiler import prepare_profiler
from fsdplab.recording.batches import Batches
from fsdplab.recording.interpreter import Interpreter
from fsdplab.recording.observed import Observed, is_compiled
from fsdplab.recording.replicas import values_of
from fsdplab.recording.rows import Place, StepRows, Taken
from fsdplab.recording.scales import Scales
from fsdplab.recording.settings import Settings
from fsdplab.recording.subject import LAB, Subject, subject_of, together
from fsdplab.recording.untrained import untrained
from fsdplab.sessions.trace_tables import MEMORY_TRACE, TRACE, leave_analysis
from fsdplab.sessions.worker import profiler
from fsdplab.sessions.worker.core_share import CoreTime, core_time, waited_s
from fsdplab.sessions.worker.environment import capture_environment


class _Sent:
    """Counts what this rank sends through the lab's engine, which alone says so itself: collectives and their bytes."""

    def __init__(self) -> None:
        self.collectives = 0
        self.wire_bytes = 0

    def on_event(self, event: events.Event) -> None:
        """Count a collective."""
        if isinstance(event, events.Collective):
            self.collectives += 1
            self.wire_bytes += event.wire_bytes


class _Dropped(Exception):
    """What was being measured is of no use."""


class Window:
    """Measures the steps of `settings` on this rank; `between` is called after every step and before the next.

    `give_up` ends the recording for a reason: for what is measured where no method of the window is called.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        rows: StepRows,
        optimizers: Sequence[Any],
        model: torch.nn.Module | None,
        tags: TagLog | None,
        give_up: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._place = place
        self._rows = rows
        self._optimizers = optimizers
        self._model = model
        self._tags = tags
        self._give_up = give_up
        self._warmup = 1 if place.device.type == "cuda" else 0
        self._memory_step = settings.memory_step(self._warmup)
        self._open = ExitStack()
        self._subject: Subject | None = None
        self._memory: MemoryRecorder | None = None
        self._profiler: profiler.StepProfiler | None = None
        self._is_starting = False
        self._ended = -1  # the step that has ended last
        self._units = profiler.UnitStateLog(place.rank)
        self._sent: _Sent | None = None
        self._observed: Observed | None = None
        self._batches: Batches | None = None
        self.autocast = ""  # the type in which autocast computes, "" where it does not
        self.scales = Scales()
        self._core_waits: list[float | None] = []  # of the profiled steps
        self._reading: CoreTime | None = None
        self._interpreter = Interpreter()
        self._first_reading = (time.perf_counter(), core_time())
        self._cpu_share: float | None = None

    def between(self, ended: int, seconds: float, evaluated: bool) -> None:
        """Begin or end what is measured, after step `ended`, which took `seconds`, and before the next one."""
        self._ended = ended
        # the step before the profiled ones gives the first reading, each later one a difference
        if self._settings.first - 1 <= ended < self._settings.end:
            self._note_core_wait()
        if evaluated and self._memory_step <= ended < self._settings.end:
            self._rows.note(f"step {ended}, which was measured, holds an evaluation")
        if self._memory is not None:
            self._end_memory(self._memory)
            self.scales.read(ended)
        if self._profiler is not None:
            if ended == self._settings.end - 1:
                self._hear_all()
                self._open.close()
            self._profiler.step_done(seconds)
            if ended == self._settings.end - 1:
                self._end_profile(self._profiler)
        # the next step is the one whose memory is measured
        if ended + 1 == self._memory_step:
            self._if_no_other_profiles(self._begin_memory)
        # on a GPU the profiler begins one step earlier
        if ended + 1 == self._settings.first - self._warmup and self._subject is not None:
            self._if_no_other_profiles(self._begin_profile)

    def before_backward(self) -> None:
        """Look at what is there when the loop calls `backward`."""
        if self._memory is not None and self._observed is not None:
            self._observed.before_backward()

    def before_update(self, optimizer: Any) -> None:
        """Look at what is there when an optimizer is about to step."""
        if self._memory is not None and self._observed is not None:
            self._observed.gradients.before_update(optimizer)

    def loop_goes_on(self, taken: Taken) -> None:
        """Note that the loop's own code runs again, in the step after that which has ended last."""
        if self._batches is not None:
            self._batches.loop_goes_on(taken, self._ended + 1)

    def drop(self, why: str) -> None:
        """Measure nothing more, for a reason that is noted; nothing is said where nothing is being measured."""
        # our own profiler calls the same hook when it starts
        if self._is_starting or (self._memory is None and self._profiler is None):
            return
        self._rows.note(why.format(step=self._ended + 1))
        self._is_starting = True
        self._open.__exit__(_Dropped, _Dropped(), None)
        if self._profiler is not None:
            self._profiler.stop()
        self._memory = self._profiler = self._subject = None
        self._end_batches()
        self._is_starting = False

    def close(self) -> None:
        """Measure nothing more."""
        self._end_batches()
        self._open.__exit__(_Dropped, _Dropped(), None)
        if self._profiler is not None:
            self._profiler.stop()

    def _if_no_other_profiles(self, begin: Callable[[], None]) -> None:
        """Call `begin`, unless a profiler of the job's own runs: ours would see nothing."""
        if torch.autograd._profiler_enabled():
            step = self._ended + 1
            self._rows.note(
                f"a profiler of the job's own ran in step {step}, so this step and the next are not measured"
            )
            self._subject = None
            return
        self._is_starting = True
        begin()
        self._is_starting = False

    def _begin_memory(self) -> None:
        prepare_profiler(self._place.device)
        self._cpu_share = self._share_of_a_core()
        subject = subject_of(self._optimizers, self._model)
        self._subject = subject
        mailbox, rank = self._settings.mailbox, self._place.rank
        for note in subject.notes:
            self._rows.note(note)
        if rank == 0:
            self._write("environment", _environment(self._place.device))
        # before the step: of a job that dies in it the record says at least what it trained
        self._write("subject", subject.as_spec())
        self._observed = Observed(subject.model, self._optimizers, self._place)
        self._observed.begin()
        self._open.callback(events.subscribe(self._units.on_event))
        self._units.step = self._memory_step
        self._memory = MemoryRecorder(
            model=subject.model,
            optimizer=together(self._optimizers),
            engine=subject.engine,
            device=self._place.device,
            tags=self._tags,
            save_trace=mailbox.of(rank, MEMORY_TRACE),
            unfinished=mailbox.folder,
        )
        self._open.enter_context(self._memory)
        self._open.enter_context(ended_with_the_profile())
        # the analysis finds the step by this range
        self._open.enter_context(record_function(f"{profiler.RANGE}{self._memory_step}"))

    def _end_memory(self, memory: MemoryRecorder) -> None:
        self._is_starting = True
        self._memory = None
        self._units.step = None
        if self._observed is not None:
            self._observed.end()
        self._hear_all()
        self._open.close()
        self._is_starting = False
        if self._tags is not None:
            self._tags.close()
        self._write("memory", profiler.written_memory(memory.timeline, self._place.rank, self._memory_step))

    def _begin_profile(self) -> None:
        steps = self._settings.end - self._settings.first
        self._profiler = profiler.StepProfiler(steps, self._warmup, self._place.device)
        self._profiler.begin(None)
        # other engines' bytes are read from their traces
        if self._subject is not None and self._subject.engine == LAB:
            self._sent = _Sent()
            self._open.callback(events.subscribe(self._sent.on_event))
        self._open.enter_context(ended_with_the_profile())
        # a hook would have a compiled model compiled again
        if self._subject is not None and not is_compiled(self._subject.model):
            self._batches = Batches(self._subject.model, self._give_up)

    def _end_batches(self) -> Batches | None:
        """Look at no more batches; return what has looked at them, if anything has."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.end()
        return batches

    def _end_profile(self, ended: profiler.StepProfiler) -> None:
        mailbox, rank = self._settings.mailbox, self._place.rank
        profiled = ended.save(mailbox.of(rank, TRACE), mailbox.folder)
        for kind in (TRACE, MEMORY_TRACE):
            # a job has no ledger: its collectives are read from the traces
            leave_analysis(mailbox, rank, kind, [])
        sent = None
        if self._sent is not None:
            # the count began with the profiler, so its warm-up steps are in it
            steps = self._settings.end - self._settings.first + self._warmup
            sent = [round(self._sent.wire_bytes / steps), round(self._sent.collectives / steps)]
        self.scales.read(self._ended)
        checksums = {}
        batches = self._end_batches()
        if batches is not None:
            checksums = batches.checksums()
        observed, copies, without_gradient = {}, {}, {}
        if self._subject is not None:
            copies = values_of(self._subject.model)
            without_gradient = untrained(self._subject.model, self._optimizers)
        if self._observed is not None:
            observed = self._observed.as_report(self.autocast) | self.scales.as_report()
        content = {
            "profiled_s": profiled,
            "life": self._units.rows,
            "sent": sent,
            "observed": observed,
            "core_wait_s": self._core_waits,
            "cpu_share": self._cpu_share,
            "batches": checksums,
            "interpreter": self._interpreter.as_report(),
            "copies": copies,
            "untrained": without_gradient,
        }
        self._observed = None
        self._write("result", content)
        self._profiler = self._subject = self._sent = None

    def _hear_all(self) -> None:
        """Let the engine announce what it knows only once the device is done."""
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)
        events.flush()

    def _note_core_wait(self) -> None:
        """Note how long the profiled step that has ended lacked a core; the step before them begins the count."""
        before, self._reading = self._reading, core_time()
        self._interpreter.note(self._reading.threads)
        if before is not None:
            self._core_waits.append(waited_s(before, self._reading, torch.get_num_threads()))

    def _share_of_a_core(self) -> float | None:
        """Return the part of the steps before the measured ones in which this rank had a core when it wanted one."""
        began, before = self._first_reading
        waited = waited_s(before, core_time(), torch.get_num_threads())
        if waited is None:
            return None
        # 1 s without a core in 10 s: 0.9
        share = 1 - waited / (time.perf_counter() - began)
        return max(0.0, share)

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        self._rows.write()
        write_whole(self._settings.mailbox.of(self._place.rank, kind), json.dumps(content) + "\n")


def _environment(device: torch.device) -> dict[str, Any]:
    environment = capture_environment(device.type)
    if dist.is_available() and dist.is_initialized() and "nccl" not in dist.get_backend():
        # what the job's ranks really use, where GPUs' ranks usually have NCCL
        environment["backend"] = dist.get_backend()
    return environment


@contextmanager
def ended_with_the_profile() -> Iterator[None]:
    """End the ranges of the job's own (`record_function`) that this thread begins inside and has not ended by the end;
    their own end does nothing then. A profile runs inside.

    The end of such a range writes into the profile under which it began, which is gone by then: torch crashes, at once
    or at the end of the process.
    """
    begun: dict[int, record_function] = {}
    enter, leave = record_function.__enter__, record_function.__exit__
    thread = threading.get_ident()

    def entering(self: record_function) -> record_function:
        if threading.get_ident() == thread:
            begun[id(self)] = self
        return enter(self)

    def leaving(self: record_function, *error: Any) -> None:
        begun.pop(id(self), None)
        leave(self, *error)

    record_function.__enter__, record_function.__exit__ = entering, leaving
    try:
        yield
    finally:
        record_function.__enter__, record_function.__exit__ = enter, leave
        # the innermost range first, as they would have ended
        for span in reversed(begun.values()):
            leave(span, None, None, None)
            span.run_callbacks_on_exit = False
