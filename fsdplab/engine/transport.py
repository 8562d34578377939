"""Collectives, and who waits for them where.

A unit hands over its layout, its slice and the buffers to fill; the transport decides about staging, issues the
collective and returns a `Pending`. `Transport` stages through flat buffers; as it stands here it is NCCL's. What gloo
and shared memory do differently is in `gloo.py` and `shared.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import compat, events
from .home import Home
from .lanes import HostLane, Note, stream_lane
from .layout import Layout
from .packing import half, pack, unpack
from .pending import Pending

Reduction = tuple[Callable[[bool], Any], Callable[[], object], torch.Tensor]  # issue, complete, buffer to keep


@dataclass(frozen=True)
class Stamp:
    """On whose behalf a collective runs: what the ledger writes beside it."""

    unit: str
    phase: str


@dataclass(frozen=True)
class Outgoing:
    """This rank's slice, `nbytes` in the dtype that travels.

    `write` puts it into memory (bytes) of the transport's choice; `tensor` gives it as a tensor. `resident` is the slice
    at rest (bytes), where that is what travels.
    """

    nbytes: int
    dtype: torch.dtype
    write: Callable[[torch.Tensor], object]
    tensor: Callable[[], torch.Tensor]
    resident: torch.Tensor | None = None

    @classmethod
    def of(cls, slice_: torch.Tensor) -> Outgoing:
        """A slice that lies ready in a tensor."""
        write = lambda target: target.copy_(slice_.view(torch.uint8))  # noqa: E731
        return cls(slice_.nbytes, slice_.dtype, write, lambda: slice_)


class Transport:
    """Gathers and reduces over one process group for tensors on one device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._reduce_group = group
        self.rank, self.ranks = group.rank(), group.size()
        host = device.type == "cpu"
        self._gather_lane = HostLane() if host else stream_lane(device, "gather")
        self._reduce_lane = HostLane() if host else stream_lane(device, "reduce")

    def home(self, device: torch.device) -> Home:
        """Where slices rest that no offload policy sends elsewhere."""
        return Home(device)

    def settle(self) -> None:
        """Return once peers have read what they read in place; nothing is, here."""

    def announce_buffers(self) -> None:
        """Tag buffers that outlive a collective, for whoever subscribed since they were made; staging does not."""

    def all_gather(self, layout: Layout, outgoing: Outgoing, whole: torch.Tensor, stamp: Stamp) -> Pending:
        """Fill `whole` (bytes, parameter-major) from every rank's slice."""
        send = outgoing.tensor()
        staging = self._staging(send, self.ranks * send.numel(), "gather")
        events.tag("communication_buffers", staging, stamp.unit)

        def issue(asynchronous: bool) -> Any:
            with events.span("all_gather", stamp.unit):
                return self._gather(staging, send, asynchronous)

        def complete() -> None:
            with events.span("all_gather_copy_out", stamp.unit):
                unpack(layout, staging, whole)

        note = self._note(stamp, "all_gather", layout.total_bytes, layout.padding_bytes, send.dtype)
        return self._gather_lane.run(issue, complete, note, staging, send, whole)

    def reduce_scatter(
        self, layout: Layout, gradients: Sequence[torch.Tensor | None], output: torch.Tensor, stamp: Stamp, divide: float
    ) -> Pending:
        """Sum every rank's `gradients` (None counts as zeros), divide, and leave this rank's slice in `output`."""
        send = self._staging(output, self.ranks * output.numel(), "scatter")
        events.tag("communication_buffers", send, stamp.unit)
        with events.span("post_backward_reduce", stamp.unit):
            pack(layout, gradients, send)
        issue, sum_up, received = self._reduction(send, output, divide)
        note = self._note(stamp, "reduce_scatter", layout.total_bytes, layout.padding_bytes, output.dtype)
        return self._reduce_lane.run(issue, events.span("reduce_scatter", stamp.unit)(sum_up), note, send, received, output)

    def all_reduce(self, buffer: torch.Tensor, stamp: Stamp, divide: float, padding: int = 0) -> Pending:
        """Sum `buffer` over all ranks in place and divide."""

        def issue(asynchronous: bool) -> Any:
            with events.span("all_reduce", stamp.unit):
                return dist.all_reduce(buffer, group=self.group, async_op=asynchronous)

        note = self._note(stamp, "all_reduce", buffer.nbytes, padding, buffer.dtype)
        return self._reduce_lane.run(issue, lambda: buffer.div_(divide), note, buffer)

    def separate_reductions(self, enable: bool) -> None:
        """Reduce over a communicator of its own, or over the group again; collective over the group.

        NCCL runs the operations of one communicator one after the other. On the host there is nothing to separate.
        """
        if isinstance(self._reduce_lane, HostLane):
            return
        if enable and self._reduce_group is self.group:
            members = dist.get_process_group_ranks(self.group)
            self._reduce_group = dist.new_group(members, use_local_synchronization=True)
        elif not enable:
            self._reduce_group = self.group

    def _staging(self, like: torch.Tensor, numel: int, role: str) -> torch.Tensor:
        """Memory for a "gather" or a "scatter" of `numel` elements."""
        return like.new_empty(numel)

    def _gather(self, staging: torch.Tensor, send: torch.Tensor, asynchronous: bool) -> Any:
        return compat.all_gather_single(staging, send, group=self.group, async_op=asynchronous)

    def all_reduce_packed(
        self, layout: Layout, gradients: Sequence[torch.Tensor | None], output: torch.Tensor, stamp: Stamp, divide: float
    ) -> Pending:
        """Pack `gradients` (None counts as zeros) into `output`, sum it over all ranks in place, and divide."""
        pack(layout, gradients, output)
        return self.all_reduce(output, stamp, divide, layout.padding_bytes)

    def _reduction(self, send: torch.Tensor, output: torch.Tensor, divide: float) -> Reduction:
        before = half(divide) if output.dtype is torch.float16 else 1.0  # a sum of many float16 values would overflow

        def issue(asynchronous: bool) -> Any:
            if before != 1.0:
                send.div_(before)
            return compat.reduce_scatter_single(output, send, group=self._reduce_group, async_op=asynchronous)

        return issue, lambda: output.div_(divide / before), send

    def _note(self, stamp: Stamp, kind: str, logical: int, padding: int, dtype: torch.dtype) -> Note:
        name = str(dtype).removeprefix("torch.")
        rounds = 2 if kind == "all_reduce" else 1
        wire = rounds * logical * (self.ranks - 1) // self.ranks
        return lambda start, end, waited: events.Collective(
            stamp.unit, stamp.phase, kind, logical, wire, padding, name, start, end, waited_ns=waited
        )
