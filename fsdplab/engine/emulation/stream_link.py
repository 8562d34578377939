"""Emulates a link between CUDA ranks: a collective's stream waits first, as long as the link would have carried it.

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

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fsdplab.engine.core.transport import Departure, Row

Hold = Callable[[int], None]  # have the current stream wait for that many nanoseconds; the host does not


class StreamTransfer(Departure):
    """A collective whose stream waits for the link before it is issued."""

    def __init__(self, row: Row, nanoseconds: int, channel: StreamChannel) -> None:
        super().__init__(row)
        self._nanoseconds, self._channel = nanoseconds, channel

    def leave(self) -> None:
        """Have the current stream wait as long as the free link takes."""
        self._channel.hold(self._nanoseconds)

    def moved(self, start_ns: int, end_ns: int, waited_ns: int | None) -> None:
        """Write the row with the time at which the link took the collective up, which is later than its issue while
        another one passes.

        A transfer of 5 ns that was ready at 3, behind one that was taken up at 0 and took 4: from 4 on.
        """
        start = max(start_ns, self._channel.free_ns)
        self._channel.free_ns = start + self._nanoseconds
        super().moved(start, end_ns, waited_ns)


class StreamChannel:
    """One link on streams: `carry` gives the row and the nanoseconds of a transfer, `hold` has a stream wait for it."""

    def __init__(self, carry: Callable[[Row], tuple[Row, int]], hold: Hold) -> None:
        self._carry, self.hold = carry, hold
        self.free_ns = 0

    def depart(self, row: Row) -> StreamTransfer:
        """Make the transfer of a collective that is issued now."""
        return StreamTransfer(*self._carry(row), self)


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
        # The link takes it up when the current stream has come to it and the transfer before it is over; the current
        # stream goes on after the sleep.
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
    """Return the driver's library, whose function has a stream call the host."""
    driver = ctypes.CDLL(library)
    driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3  # stream, function, its argument
    driver.cuLaunchHostFunc.restype = ctypes.c_int
    return driver


@cache
def sleep_function() -> int:
    """The address of libc's `usleep`: its one argument, a number, fits where a host function gets its pointer."""
    return ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0
