"""Waits for collectives: on the host (gloo's threads move the bytes meanwhile) or on a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import events
from fsdplab.engine.core.pending import Pending, Step
from fsdplab.engine.core.transport import Departure


@dataclass(frozen=True)
class Job:
    """A collective to run on a stream, after what the caller's stream has been given so far."""

    issue: Callable[[bool], Any]  # asynchronously or not
    complete: Step  # what is done after it, where it ran
    departure: Departure
    buffers: tuple[object, ...]  # that live until somebody has waited
    after: Pending | None = None  # work of another stream (with an event), where to begin after that is enough
    on_wait: Step = lambda: None  # what whoever waits does with the result


class HostStream:
    """Work that the host waits for: gloo's own threads move the bytes meanwhile."""

    def run(self, job: Job) -> Pending:
        """Issue now; wait and complete when somebody needs the result. Who waits again after an interrupt goes on where
        that was.
        """
        start = time.time_ns()
        job.departure.leave()
        work = job.issue(True)
        done: list[int] = []  # when the bytes were moved, as soon as a thread of the backend tells
        if events.listening() and isinstance(work, dist.Work):
            future = _future(work)
            if future is not None:
                future.then(lambda _: done.append(time.time_ns()))

        def move() -> None:
            awaited = time.time_ns()
            if work is not None:  # a collective of the user's own may be done already
                work.wait()
            now = time.time_ns()
            # `done` is earlier than `now` where the bytes had arrived before anybody waited.
            job.departure.moved(start, done[0] if done else now, now - awaited)

        steps = [move, job.complete, job.on_wait]

        def finish() -> None:
            awaited = time.time_ns()
            while steps:
                steps[0]()
                del steps[0]  # only now: a step that was interrupted is run again
            job.departure.arrive(awaited)

        return Pending(finish, *job.buffers, on_drop=lambda: None)  # the work itself holds what it reads and writes


def _future(work: dist.Work) -> torch.futures.Future | None:
    """Return what tells when a collective is done; works of groups written in Python need not have it."""
    try:
        return work.get_future()
    except RuntimeError:  # "Work::getFuture not implemented"
        return None


class CudaStream:
    """Work on a side stream, ordered by events; the host never waits.

    Every buffer is allocated and freed on the compute stream. The side stream starts after the compute stream's present
    work, and the compute stream waits for the side stream before it uses or frees a buffer, so the caching allocator's
    own rule is enough and memory is deterministic: no `record_stream`.
    """

    def __init__(self, stream: torch.cuda.Stream, clock: DeviceClock) -> None:
        self._stream = stream
        self._clock = clock

    def run(self, job: Job) -> Pending:
        """Enqueue everything on the side stream; waiting is an event that the current stream waits for."""
        timed = events.listening()
        start = torch.cuda.Event(enable_timing=timed)
        end = torch.cuda.Event(enable_timing=timed)
        # After a reduce-scatter, or a copy from the host, its event is enough. Else the side stream waits for all that
        # the current stream was given so far: packing, say.
        if job.after is not None and job.after.event is not None:
            self._stream.wait_event(job.after.event)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            start.record()
            job.departure.leave()
            job.issue(False)  # blocks this side stream alone
            job.complete()
            end.record()
        wait = _StreamWait(self._stream.device, end, timed)
        if timed:  # the row is written at the end of the step, when the device is idle and the times can be read
            begun = self._clock.when(start)
            ended = self._clock.when(end)
            events.defer(lambda: job.departure.moved(begun(), ended(), wait.nanoseconds()))

        def finish() -> None:
            wait()
            job.on_wait()

        return Pending(finish, *job.buffers, on_drop=wait, event=end)


class _StreamWait:
    """Has the current stream wait for `end` once it is called, and tells how long it waited where that is timed."""

    def __init__(self, device: torch.device, end: torch.cuda.Event, timed: bool) -> None:
        self._device, self._end, self._timed = device, end, timed
        self._around: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def __call__(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if not self._timed:
            stream.wait_event(self._end)
            return
        # The time between these two events is how long the stream stood still.
        self._around = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._around[0].record(stream)
        stream.wait_event(self._end)
        self._around[1].record(stream)

    def nanoseconds(self) -> int:
        """Return how long the stream stood still, once the device is idle; 0 where nobody has waited yet."""
        if self._around is None:
            return 0
        return _nanoseconds(*self._around)


@cache
def comm_stream(device: torch.device, role: str) -> CudaStream:
    """Return the high-priority stream of a device and role (gather, reduce, all_reduce), shared by all units."""
    with torch.cuda.device(device):
        return CudaStream(torch.cuda.Stream(device, priority=-1), device_clock(device))


class DeviceClock:
    """When events of one device happened, as `time.time_ns()`.

    CUDA gives the time between two events in milliseconds of float32, so times that count from an event an hour ago
    come in steps of 0.25 ms, and the clocks of device and host drift apart. Times count back from an event that is
    recorded once the device is idle instead: 2 s before it they come in steps of 0.12 us, and all are off by the same
    few microseconds, half of what the host takes to see that event.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked, self._covered = 0, 0  # how many events were asked for; how many of them the last zero is after
        self._zero: torch.cuda.Event | None = None
        self._zero_ns = 0

    def when(self, event: torch.cuda.Event) -> Callable[[], int]:
        """Return what tells, once the device is idle, when `event`, which is recorded already, happened."""
        self._asked += 1
        number = self._asked

        def happened() -> int:
            if self._zero is None or number > self._covered:
                self._set_zero()
            return self._zero_ns - _nanoseconds(event, self._zero)

        return happened

    def _set_zero(self) -> None:
        """Record a new event to count back from, and note when the host sees it."""
        with torch.cuda.device(self._device):
            self._zero = torch.cuda.Event(enable_timing=True)
            before = time.time_ns()
            self._zero.record()
            self._zero.synchronize()
            after = time.time_ns()
            self._zero_ns = (before + after) // 2  # it happened between the two
            self._covered = self._asked


def _nanoseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    """Return the time between two events of a device that is idle now."""
    return int(start.elapsed_time(end) * 1e6)


@cache
def device_clock(device: torch.device) -> DeviceClock:
    """Return the one clock of all streams of a device."""
    return DeviceClock(device)
