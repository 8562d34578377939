"""The rehearsal of `shared_gpu` on CPU ranks: host memory in place of a GPU's, a thread in place of a stream.

The same operations, the same slots and words, the same watchdog, with real processes that may really die: what a
machine without a GPU can try of the transport, it tries here. For training on CPUs `shm` is the faster one.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from fsdplab.engine import events
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import Note
from fsdplab.engine.transport.shared_gpu.timelines import Timelines
from fsdplab.engine.transport.shared_memory.arenas import SharedFile

_SPINS, _NAP_S = 200, 50e-6  # looks at a word before the first nap, and the nap


class HostFabric:
    """Words and arenas in host memory; whoever signals or waits does so itself, at once."""

    unseen = False

    def __init__(self) -> None:
        self._arenas: dict[int, SharedFile] = {}

    def adopt(self, timelines: Timelines) -> None:
        """Hosts reach the words as they are."""

    def signal(self, timelines: Timelines, kind: int, number: int) -> None:
        """Raise this rank's words."""
        timelines.set(kind, number)

    def wait(self, timelines: Timelines, rank: int, kind: int, number: int, check: Callable[[], None]) -> None:
        """Return once the word is there; `check` may raise."""
        looks = 0
        while not timelines.reached(rank, kind, number):
            check()
            looks += 1
            if looks > _SPINS:
                time.sleep(_NAP_S)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Anonymous shared memory."""
        arena = SharedFile()
        made = arena.grow(nbytes).part(0, nbytes)
        self._arenas[made.data_ptr()] = arena
        return made

    def export(self, arena: torch.Tensor) -> bytes:
        """The descriptor of the arena in this process."""
        return self._arenas[arena.data_ptr()].descriptor.to_bytes(8, "little")

    def open(self, process: int, told: bytes, nbytes: int) -> Callable[[], torch.Tensor]:
        """Map a peer's arena; a tensor only while somebody holds it, so that its memory is not counted as ours."""
        descriptor = os.open(f"/proc/{process}/fd/{int.from_bytes(told[:8], 'little')}", os.O_RDWR)
        try:
            shared = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        return lambda: torch.frombuffer(shared, dtype=torch.uint8)

    def close(self, opened: Callable[[], torch.Tensor]) -> None:
        """The mapping goes with its last user."""

    def free(self, arena: torch.Tensor) -> None:
        """Forget an arena; its memory goes with its last user."""
        del self._arenas[arena.data_ptr()]

    def synchronize(self) -> None:
        """Nothing is queued behind the caller's back: operations of a series run in one thread, one after the other."""


class ThreadStream:
    """A stream made of a thread: work runs in order, beside the caller, who waits for it on the host."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[int]] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        threading.Thread(target=_serve, args=(self._jobs,), name=f"fsdplab {name}", daemon=True).start()

    def run(
        self,
        issue: Callable[[bool], Any],
        complete: Callable[[], object],
        note: Note,
        *buffers: object,
        after: Pending | None = None,
    ) -> Pending:
        """Queue the work; waiting for it raises what it raised."""
        start, done = time.time_ns(), Future[int]()

        def work() -> None:
            issue(False)
            complete()

        self._jobs.put((work, done))

        def finish() -> None:
            awaited = time.time_ns()
            end = done.result()
            if events.listening():
                events.emit(note(start, end, time.time_ns() - awaited))

        return Pending(finish, *buffers, on_drop=done.exception)


def _serve(jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[int]] | None]) -> None:
    """Run jobs; after one that raised, all raise the same: what they build on is missing."""
    broken: BaseException | None = None
    while (job := jobs.get()) is not None:
        work, done = job
        if broken is None:
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                broken = error
        done.set_exception(broken) if broken is not None else done.set_result(time.time_ns())
        del job, work, done
