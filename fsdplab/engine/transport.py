"""Collectives, and who waits for them where.

A unit hands over its layout, its slice and the buffers to fill; the transport decides about staging, issues the
collective and returns a `Pending`. Two things vary, and each is one small class: the lane (does the host wait, or a
stream?) and the reduce-scatter (gloo's own is a whole all-reduce, twice the bytes; an all-to-all and a local sum in
float32, in rank order, moves the textbook's bytes and gives the same bits in every run).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from . import compat, events
from .layout import Layout
from .pending import Pending

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Note = Callable[[int, int], events.Event]


@dataclass(frozen=True)
class Stamp:
    """On whose behalf a collective runs: what the ledger writes beside it."""

    unit: str
    phase: str


class HostLane:
    """Work that the host waits for: gloo's own threads move the bytes meanwhile."""

    def run(self, issue: Callable[[bool], Any], complete: Callable[[], None], note: Note, *buffers: object) -> Pending:
        """Issue now; wait, note the times and `complete` when somebody needs the result."""
        start = time.time_ns()
        work = issue(True)
        done: list[int] = []
        if events.listening():
            work.get_future().then(lambda _: done.append(time.time_ns()))

        def finish() -> None:
            work.wait()
            if events.listening():
                events.emit(note(start, done[0] if done else time.time_ns()))
            complete()

        return Pending(finish, *buffers)


class StreamLane:
    """Work on a side stream, ordered by events; the host never waits.

    Every buffer is allocated and freed on the compute stream. The side stream starts after the compute stream's present
    work, and the compute stream waits for the side stream before it uses or frees a buffer, so the caching allocator's
    own rule is enough and memory is deterministic: no `record_stream`.
    """

    def __init__(self, stream: torch.cuda.Stream, clock: tuple[torch.cuda.Event, int]) -> None:
        self._stream = stream
        self._clock = clock

    def run(self, issue: Callable[[bool], Any], complete: Callable[[], None], note: Note, *buffers: object) -> Pending:
        """Enqueue everything on the side stream; waiting is an event that the current stream waits for."""
        timed = events.listening()
        start, end = (torch.cuda.Event(enable_timing=timed) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            start.record()
            issue(False)
            complete()
            end.record()
        if timed:
            events.defer(lambda: note(self._time_ns(start), self._time_ns(end)))
        return Pending(lambda: torch.cuda.current_stream(self._stream.device).wait_event(end), *buffers)

    def _time_ns(self, event: torch.cuda.Event) -> int:
        zero, zero_ns = self._clock
        return zero_ns + int(zero.elapsed_time(event) * 1e6)


@lru_cache(maxsize=None)
def _stream_lane(device: torch.device, role: str) -> StreamLane:
    """One high-priority stream per device and role (gather, reduce), shared by all units."""
    with torch.cuda.device(device):
        zero = torch.cuda.Event(enable_timing=True)
        zero.record()
        zero.synchronize()
        return StreamLane(torch.cuda.Stream(device, priority=-1), (zero, time.time_ns()))


class Transport:
    """Gathers and reduces over one process group for tensors on one device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.ranks = group.size()
        self._gloo = device.type == "cpu"
        self._gather_lane = HostLane() if self._gloo else _stream_lane(device, "gather")
        self._reduce_lane = HostLane() if self._gloo else _stream_lane(device, "reduce")

    def all_gather(self, layout: Layout, send: torch.Tensor, whole: torch.Tensor, stamp: Stamp) -> Pending:
        """Fill `whole` (bytes, parameter-major) from every rank's `send` (one slice, in the dtype that travels)."""
        staging = send.new_empty(self.ranks * send.numel())
        events.tag("communication_buffers", staging, stamp.unit)

        def issue(asynchronous: bool) -> Any:
            with events.span("all_gather", stamp.unit):
                return compat.all_gather_single(staging, send, group=self.group, async_op=asynchronous)

        def complete() -> None:
            with events.span("all_gather_copy_out", stamp.unit):
                unpack(layout, staging, whole)

        note = self._note(stamp, "all_gather", layout.total_bytes, layout.padding_bytes, _name(send.dtype))
        return self._gather_lane.run(issue, complete, note, staging, send, whole)

    def reduce_scatter(
        self, layout: Layout, gradients: Sequence[torch.Tensor | None], output: torch.Tensor, stamp: Stamp, divide: float
    ) -> Pending:
        """Sum every rank's `gradients` (None counts as zeros), divide, and leave this rank's slice in `output`."""
        send = output.new_empty(self.ranks * output.numel())
        events.tag("communication_buffers", send, stamp.unit)
        with events.span("post_backward_reduce", stamp.unit):
            pack(layout, gradients, send)
        issue, complete, received = (self._exchange if self._gloo else self._reduce)(send, output, divide)
        note = self._note(stamp, "reduce_scatter", layout.total_bytes, layout.padding_bytes, _name(output.dtype))
        return self._reduce_lane.run(issue, complete, note, send, received, output)

    def all_reduce(self, layout: Layout, buffer: torch.Tensor, stamp: Stamp, divide: float) -> Pending:
        """Sum `buffer` over all ranks in place and divide."""

        def issue(asynchronous: bool) -> Any:
            with events.span("all_reduce", stamp.unit):
                return dist.all_reduce(buffer, group=self.group, async_op=asynchronous)

        note = self._note(stamp, "all_reduce", layout.total_bytes, layout.padding_bytes, _name(buffer.dtype))
        return self._reduce_lane.run(issue, lambda: buffer.div_(divide), note, buffer)

    def _reduce(self, send: torch.Tensor, output: torch.Tensor, divide: float) -> tuple[Any, Any, torch.Tensor]:
        def issue(asynchronous: bool) -> Any:
            return compat.reduce_scatter_single(output, send, group=self.group, async_op=asynchronous)

        return issue, lambda: output.div_(divide), send

    def _exchange(self, send: torch.Tensor, output: torch.Tensor, divide: float) -> tuple[Any, Any, torch.Tensor]:
        received = torch.empty_like(send)

        def issue(asynchronous: bool) -> Any:
            return dist.all_to_all_single(received, send, group=self.group, async_op=asynchronous)

        return issue, lambda: sum_in_rank_order(received.view(self.ranks, -1), output, divide), received

    def _note(self, stamp: Stamp, kind: str, logical: int, padding: int, dtype: str) -> Note:
        rounds = 2 if kind == "all_reduce" else 1
        wire = rounds * logical * (self.ranks - 1) // self.ranks
        return lambda start, end: events.Collective(
            stamp.unit, stamp.phase, kind, logical, wire, padding, dtype, start, end
        )


def sum_in_rank_order(parts: torch.Tensor, output: torch.Tensor, divide: float) -> None:
    """`output = (parts[0] + parts[1] + ...) / divide` in float32, always in that order; `parts` is [ranks, slice]."""
    total = output.copy_(parts[0]) if output.dtype == torch.float32 else parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    total.div_(divide)
    if total is not output:
        output.copy_(total)


def unpack(layout: Layout, staging: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy n slices (rank-major bytes) into the whole (parameter-major bytes)."""
    word, n = layout.word, layout.ranks
    source = staging.view(_WORDS[word]).view(n, -1)  # [ranks, slice]
    target = whole.view(_WORDS[word])
    for slot in layout.slots:
        offset, length = slot.offset // word, slot.chunk_bytes // word
        target[n * offset : n * (offset + length)].view(n, length).copy_(source[:, offset : offset + length])


def pack(layout: Layout, gradients: Sequence[torch.Tensor | None], send: torch.Tensor) -> None:
    """Copy whole gradients into n slices (rank-major), casting to `send`'s dtype; padding and None become zeros."""
    n, size = layout.ranks, send.element_size()
    target = send.view(n, -1)  # [ranks, slice]
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        columns = target[:, slot.offset // size : (slot.offset + slot.chunk_bytes) // size]  # [ranks, chunk]
        if gradient is None:
            columns.zero_()
        elif slot.rows == n * slot.chunk:
            columns.copy_(gradient.reshape(n, -1))
        else:
            _pack_uneven(slot.rows, slot.chunk, gradient, columns)


def _pack_uneven(rows: int, chunk: int, gradient: torch.Tensor, columns: torch.Tensor) -> None:
    flat, row = gradient.reshape(-1), gradient.numel() // max(rows, 1)
    for rank, column in enumerate(columns):
        part = flat[min(rank * chunk, rows) * row : min((rank + 1) * chunk, rows) * row]
        column[: part.numel()].copy_(part)
        column[part.numel() :].zero_()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
