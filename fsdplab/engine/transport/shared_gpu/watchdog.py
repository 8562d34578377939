"""A thread that looks after ranks whose GPUs wait for each other: it frees the waiters when a rank is missing.

A GPU that waits for a word in memory waits for ever, and so does the host that then synchronises with it. When a rank
has ended before it did what others wait for, or has not moved for as long as the group is patient, the watchdog frees
what waits for it, tells the other ranks who is missing, and keeps the reason: the next call of the transport raises it.
What the freed GPU computes meanwhile is worthless, and a host that sleeps in a synchronisation makes no such call, so
where waiters are freed behind the host's back the main thread is interrupted with the same error.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence

from fsdplab.engine.transport.shared_gpu.timelines import DONE, READY, Timelines

_LOOK_EVERY_S = 0.05


class PeerLost(RuntimeError):
    """A rank that others wait for has ended or does not move."""


class Watchdog:
    """Watches `timelines` (with the slots of each: how far an operation's memory may lag) until it is deleted or
    stopped.

    `interrupt` says whether the main thread is interrupted when waiters were freed. `handles` are the processes of the
    other ranks; `failure` is the reason, once there is one.
    """

    def __init__(self, timelines: Sequence[tuple[Timelines, int]], patience_s: float, interrupt: bool) -> None:
        first = timelines[0][0]
        self.rank, self.ranks, self.failure = first.rank, first.ranks, ""
        self._timelines, self._patience_s, self._interrupt = timelines, patience_s, interrupt
        self._moved = [(0, time.monotonic())] * len(timelines)
        self.handles = {os.pidfd_open(pid): rank for rank, pid in enumerate(first.processes) if rank != self.rank}
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        arguments = weakref.ref(self), self._stop, tuple(self.handles)
        threading.Thread(target=_watch, args=arguments, name="fsdplab watchdog", daemon=True).start()

    def check(self) -> None:
        """Raise `PeerLost` if a rank is missing."""
        if self.failure:
            if self._interrupt:
                _raise_in_main_thread("")  # it is raised here, and need not come twice
            raise PeerLost(self.failure)

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    def look(self, ended: Sequence[int]) -> None:
        """Once: `ended` are the handles of processes that have ended."""
        if self.failure:
            self._free()
            return
        for handle in ended:
            self._look_at(self.handles[handle])
        for timelines, _ in self._timelines:
            for rank, missing in timelines.gave_up.items():
                if rank != self.rank:
                    self._fail(
                        missing,
                        f"rank {missing} has died or stands still, as rank {rank} noticed; look for its own error in"
                        " its log",
                    )
        for index in range(len(self._timelines)):
            self._look_for_progress(index)

    def _look_at(self, rank: int) -> None:
        """A rank has ended: that matters if this one waits for what it did not do."""
        for timelines, count in self._timelines:
            if (what := owed(timelines, count, rank)) is not None:
                self._fail(
                    rank,
                    f"rank {self.rank} waited for rank {rank} to {what}, but rank {rank} has died; look for its own"
                    " error in its log",
                )

    def _look_for_progress(self, index: int) -> None:
        timelines, count = self._timelines[index]
        done, now = timelines.done(), time.monotonic()
        if done != self._moved[index][0] or done == timelines.claimed:
            self._moved[index] = done, now
            return
        if now - self._moved[index][1] < self._patience_s:
            return
        for rank in range(self.ranks):
            if rank != self.rank and (what := owed(timelines, count, rank)) is not None:
                told = f"rank {self.rank} waited {self._patience_s:.0f} s for rank {rank} to {what}"
                self._fail(rank, f"{told}; rank {rank} lives but has not come to it")

    def _fail(self, missing: int, why: str) -> None:
        if self.failure:
            return
        if self._interrupt:  # before the waiters are freed: what they return must not be used
            _raise_in_main_thread(why)
        self.failure = why
        for timelines, _ in self._timelines:
            timelines.give_up(missing)
        self._free()

    def _free(self) -> None:
        for timelines, _ in self._timelines:
            for rank in range(self.ranks):
                if rank != self.rank:
                    timelines.free(rank)


def owed(timelines: Timelines, count: int, peer: int) -> str | None:
    """The operation of this rank that `peer` keeps waiting, as a text; None where there is none.

    Example: "write operation 12 (all_gather of blocks.3)".
    """
    first, last = timelines.done() + 1, timelines.claimed
    for number in range(first, last + 1):
        told = timelines.described(timelines.rank, number)
        name = f"operation {number}" + (f" ({told[1]})" if told and told[1] else "")
        if number > count and not timelines.reached(peer, DONE, number - count):
            return f"finish reading operation {number - count}"
        if not timelines.reached(peer, READY, number):
            return f"write {name}"
    return None


def _watch(reference: weakref.ref[Watchdog], stop: threading.Event, handles: Sequence[int]) -> None:
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while not stop.is_set():
        ended = [handle for handle, _ in poll.poll(1000 * _LOOK_EVERY_S)]
        if (watchdog := reference()) is None:
            break
        watchdog.look(ended)
        del watchdog
        if ended:  # they stay so, and the poll returns at once
            stop.wait(_LOOK_EVERY_S)
    for handle in handles:
        os.close(handle)


def _raise_in_main_thread(why: str) -> None:
    """Raise `PeerLost(why)` in the main thread when it next runs Python; "" takes back what it has not raised yet."""
    lost = type(
        "PeerLost", (PeerLost,), {"__init__": lambda self: PeerLost.__init__(self, why), "__module__": __name__}
    )
    target = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(lost) if why else ctypes.py_object())
