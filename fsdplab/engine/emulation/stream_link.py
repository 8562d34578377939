"""An emulated link between CUDA ranks: a collective's stream waits first, as long as the link would have carried it.

On the host whoever needs a result sleeps (`link.py`). A stream cannot sleep, and a kernel that spins would take the
multiprocessor that is to be hidden behind. So the driver calls libc's `usleep` for the stream (`cuLaunchHostFunc`): no
multiprocessor is busy, the host goes on, and no Python runs, which might wait for a lock whose owner waits for the GPU.

The wait comes before the collective, and a collective ends when its last rank has begun: so on every rank it is done no
earlier than

    max(link free, last rank ready) + latency x steps + wire bytes / bandwidth

The real transfer comes on top. One link has one queue: all its waits are on one stream of their own, in the order of
issue.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeGuard

import torch

from fsdplab.engine import events
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import Note, Transport
from fsdplab.engine.transport.streams import CommStream, CudaStream, StreamedTransport

TransferTime = Callable[[str, int], tuple[int, int]]  # kind, logical bytes -> wire bytes, nanoseconds on the free link
Hold = Callable[[int], None]  # have the current stream wait for that many nanoseconds; the host does not


class HostFunctionHold:
    """Has the current stream of `device` wait, through a stream of the link's own, which carries one transfer after the
    other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of the other streams' priority: streams of other priorities have other hardware queues, so a sleep never
        # stands before the computing.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def __call__(self, nanoseconds: int) -> None:
        """Work enqueued on the current stream from here on starts `nanoseconds` (rounded up to a microsecond) later, or
        later still.
        """
        if nanoseconds <= 0:
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        launch_sleep(self._stream.cuda_stream, -(-nanoseconds // 1000))
        current.wait_stream(self._stream)


def launch_sleep(stream: int, microseconds: int) -> None:
    """Enqueue a sleep on a CUDA stream, given by its handle; raises RuntimeError with the driver's code where it
    refuses.
    """
    code = _driver().cuLaunchHostFunc(stream, sleep_function(), microseconds)
    if code:
        raise RuntimeError(f"cuLaunchHostFunc failed with CUDA driver error {code}; run without an emulated link")


@cache
def _driver(library: str = "libcuda.so.1") -> Any:
    driver = ctypes.CDLL(library)
    driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3  # stream, function, its argument
    driver.cuLaunchHostFunc.restype = ctypes.c_int
    return driver


@cache
def sleep_function() -> int:
    """The address of libc's `usleep`: its one argument, a number, fits where a host function gets its pointer."""
    return ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0


class LinkedStream:
    """`inner`, on which a collective first passes the link."""

    def __init__(self, inner: CommStream, wire: Wire) -> None:
        self._inner, self._wire = inner, wire

    def run(
        self,
        issue: Callable[[bool], Any],
        complete: Callable[[], object],
        note: Note,
        *buffers: object,
        after: Pending | None = None,
    ) -> Pending:
        """As the stream inside, but that it waits before `issue`."""
        event = note(0, 0, None)
        assert event is not None, "a link in front of a link"
        wire_bytes, nanoseconds = self._wire.transfer(event.kind, event.logical_bytes)

        def carried(asynchronous: bool) -> Any:
            self._wire.hold(nanoseconds)
            return issue(asynchronous)

        noted = self._wire.noted(note, wire_bytes, nanoseconds)
        return self._inner.run(carried, complete, noted, *buffers, after=after)


class Wire:
    """One link: how long each transfer takes, how a stream waits for it, and until when the link is taken."""

    def __init__(self, transfer: TransferTime, hold: Hold) -> None:
        self.transfer, self.hold = transfer, hold
        self._free_ns = 0

    def noted(self, note: Note, wire_bytes: int, nanoseconds: int) -> Note:
        """`note` with the time at which the link took the collective up, which is later than its issue while another
        one passes.

        A transfer of 5 ns that was ready at 3, behind one that was taken up at 0 and took 4: from 4 on.
        """

        def emulated(start: int, end: int, waited: int | None) -> events.Collective | None:
            taken = max(start, self._free_ns)
            self._free_ns = taken + nanoseconds
            event = note(taken, end, waited)
            return event and replace(event, wire_bytes=wire_bytes, emulated=True)

        return emulated


def on_streams(transport: StreamedTransport, transfer: TransferTime, hold: Hold | None = None) -> StreamedTransport:
    """`transport` whose gathers and reductions pass one link; the other users of `transport` are not slowed.

    `hold` says how a stream waits, if not by a host function of the driver.
    """
    linked = copy.copy(transport)
    if hold is None:
        assert isinstance(transport._reduce_stream, CudaStream), "no stream to hold"
        hold = HostFunctionHold(transport._reduce_stream._stream.device)
    wire = Wire(transfer, hold)
    linked._gather_stream = LinkedStream(transport._gather_stream, wire)
    linked._reduce_stream = LinkedStream(transport._reduce_stream, wire)
    linked._all_reduce_stream = LinkedStream(transport._all_reduce_stream, wire)
    return linked


def runs_on_streams(transport: Transport) -> TypeGuard[StreamedTransport]:
    """Whether the transport's collectives run on CUDA streams, so that a stream can wait for the link."""
    return isinstance(getattr(transport, "_reduce_stream", None), CudaStream)
