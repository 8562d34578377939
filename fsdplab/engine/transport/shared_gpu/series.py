"""Operations of one kind among ranks that open each other's memory: slots in turn, and who waits for whom.

Every rank owns an arena of a few equal slots that its peers have opened. Operations are numbered alike on all ranks,
and number s uses slot s modulo the number of slots:

    claim     wait until every peer is done with operation s - slots; the slot may be written
    publish   raise `ready` to s
    read      wait until a peer's `ready` is s; its slot may be read
    done      raise `done` to s

Each line is work in the order of a stream, not of the host: a `Fabric` queues it on the GPU, where the host never
waits. Only when a larger slot is needed than ever before (the first step) do the hosts meet, to open new arenas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.transport.shared_gpu.timelines import DONE, READY, Timelines
from fsdplab.engine.transport.shared_gpu.watchdog import Watchdog
from fsdplab.engine.transport.shared_memory.slots import Slots

_GRAIN = 2 << 20  # bytes: an arena is whole pages of the GPU, which is what a peer opens
_NOTE = 256  # bytes that are told where an arena lies


class Fabric(Protocol):
    """What operations need of the memory and the streams of a device; all of it happens in the order of the current
    stream.
    """

    unseen: bool  # whether waiters may be freed while the host sleeps elsewhere

    def adopt(self, timelines: Timelines) -> None:
        """Make the words reachable for `signal` and `wait`."""

    def signal(self, timelines: Timelines, kind: int, number: int) -> None:
        """Raise this rank's words once all that was queued before is complete."""

    def wait(self, timelines: Timelines, rank: int, kind: int, number: int, check: Callable[[], None]) -> None:
        """Let what is queued after this begin when a rank's word is `number`; a host that waits itself calls `check`
        now and then.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of memory that peers may open; it lives until `free`."""

    def export(self, arena: torch.Tensor) -> bytes:
        """What a peer needs to open an arena."""

    def open(self, process: int, told: bytes, nbytes: int) -> Callable[[], torch.Tensor]:
        """A peer's arena; call the result for its bytes, and give it to `close` when nothing uses them any more."""

    def close(self, opened: Callable[[], torch.Tensor]) -> None:
        """Let go of a peer's arena."""

    def free(self, arena: torch.Tensor) -> None:
        """Give an own arena back, which no peer has open."""

    def synchronize(self) -> None:
        """Return once all that was queued is complete."""


class Series:
    """Numbered operations over `count` slots of every rank of `group`; every member must make it."""

    watchdog: Watchdog | None = None  # one that is to live as long as this

    def __init__(self, group: dist.ProcessGroup, fabric: Fabric, count: int) -> None:
        self._fabric, self.count, self._capacity = fabric, count, 0
        self._timelines, self._meetings = Timelines(group), Slots(group, 2)
        self.rank, self.ranks, self.processes = self._timelines.rank, self._timelines.ranks, self._timelines.processes
        self._own: torch.Tensor | None = None
        self._theirs: dict[int, Callable[[], torch.Tensor]] = {}
        self._check: Callable[[], None] = lambda: None
        fabric.adopt(self._timelines)

    def claim(self, nbytes: int, label: str) -> tuple[int, torch.Tensor]:
        """The next operation's number, and this rank's slot for it (bytes), which may be written; all ranks must claim
        alike.

        Raises `PeerLost` where a rank is missing, `RuntimeError` where ranks are out of step.
        """
        self._check()
        number = self._timelines.claim(nbytes, label)
        if nbytes > self._capacity or self._own is None:
            self._grow(nbytes, f"operation {number}, {label}")
        for peer in self._peers():
            if number > self.count:
                self._wait(peer, DONE, number - self.count)
        return number, self._slot(self._own, number, nbytes)

    def publish(self, number: int) -> None:
        """This rank's slot holds operation `number`."""
        self._fabric.signal(self._timelines, READY, number)

    def read(self, peer: int, number: int, nbytes: int) -> torch.Tensor:
        """What `peer` wrote for operation `number` (bytes), to be read by what is queued next."""
        if peer == self.rank:
            return self._slot(self._own, number, nbytes)
        self._wait(peer, READY, number)
        return self._slot(self._theirs[peer](), number, nbytes)

    def done(self, number: int) -> None:
        """This rank has read everything of operation `number`."""
        self._fabric.signal(self._timelines, DONE, number)

    def announce(self) -> None:
        """Tag this rank's arena as communication buffers."""
        if self._own is not None:
            events.tag("communication_buffers", self._own, "")

    @property
    def arena_bytes(self) -> int:
        """Bytes of this rank's arena: on a GPU they are the driver's, outside the caching allocator and its figures."""
        return self.count * self._capacity

    def _wait(self, peer: int, kind: int, number: int) -> None:
        if not self._timelines.reached(peer, kind, number):  # what a host sees in the word is complete
            self._fabric.wait(self._timelines, peer, kind, number, self._check)
        self._check()  # the word was freed, perhaps

    def _slot(self, arena: torch.Tensor, number: int, nbytes: int) -> torch.Tensor:
        start = number % self.count * self._capacity
        return arena[start : start + nbytes]

    def _peers(self) -> list[int]:
        """The other ranks, the next one first: ranks do not all read the same owner at once."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def _grow(self, nbytes: int, label: str) -> None:
        """Open larger arenas. Every rank comes here at the same operation, so all that uses the old ones is queued by
        now.
        """
        try:
            self._meet(f"before {label}", b"")
        finally:
            # all have said what they come for; a rank that came for something else may have left over it
            self._timelines.compare()
        self._fabric.synchronize()
        for opened in self._theirs.values():
            self._fabric.close(opened)
        self._theirs.clear()
        self._meet(f"between arenas, {label}", b"")
        if self._own is not None:
            self._fabric.free(self._own)
        self._capacity = max(1, -(-nbytes // _GRAIN)) * _GRAIN
        self._own = self._fabric.allocate(self.arena_bytes)
        told = self._meet(f"for arenas, {label}", self._fabric.export(self._own))
        for peer in self._peers():
            self._theirs[peer] = self._fabric.open(self.processes[peer], told[peer], self.arena_bytes)
        self.announce()

    def _meet(self, label: str, message: bytes) -> list[bytes]:
        """Return when every rank's host is here, with everybody's message; errors as those of `Slots`."""
        number, note = self._meetings.claim(_NOTE, label)
        note.copy_(torch.frombuffer(bytearray(message.ljust(_NOTE, b"\0")), dtype=torch.uint8))
        self._meetings.publish(number)
        told = [bytes(self._meetings.read(peer, number, _NOTE).tolist()) for peer in range(self.ranks)]
        self._meetings.done(number)
        return told


def moving(kind: str, nbytes: int) -> torch.profiler.record_function:
    """A range around the launches of an operation of `nbytes` in all:
    a trace knows by it what the GPU's work is for.
    """
    return torch.profiler.record_function(f"shared_gpu:{kind} ({nbytes} bytes)")


def watched(group: dist.ProcessGroup, fabric: Fabric, every: Sequence[Series]) -> Watchdog:
    """A watchdog over `every` series: their claims raise what it finds."""
    timelines = [(series._timelines, series.count) for series in every]
    watchdog = Watchdog(timelines, compat.seconds_before_giving_up(group), interrupt=fabric.unseen)
    for series in every:
        series._check = watchdog.check
    return watchdog
