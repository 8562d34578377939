"""Gathers and reduces through flat buffers: shards or gradients are packed into one, sent, and unpacked. NCCL's way.

What gloo does differently is in `gloo.py`, what users bring along in `torch_api/custom_collectives.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average, half
from fsdplab.engine.core.buffers import UnshardedBuffer, pack, unpack
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.pending import Pending, Step
from fsdplab.engine.core.transport import CollectiveLabel, Gradients, SendShard, Transport
from fsdplab.engine.transport.streams import CudaStream, HostStream, Job, comm_stream

Reduction = tuple[Callable[[bool], Any], Step, torch.Tensor]  # issue, complete, buffer to keep


class StagedTransport(Transport):
    """Gathers and reduces through flat buffers, over one process group, for tensors on one device."""

    _gathers_in_place = False  # whether this rank's shard must lie where the gather ends
    _overflows_in_float16 = True  # so that a part of the division comes before a reduce-scatter

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self.device = device
        self._reduce_group = group
        self.streams = device if compat.has_streams(device) else None
        self._gather_stream = self._stream("gather")
        self._reduce_stream = self._stream("reduce")
        self._all_reduce_stream = self._stream("all_reduce")

    def _stream(self, role: str) -> HostStream | CudaStream:
        """Return what runs the collectives of one role: a stream of the device, or the host."""
        if self.streams is None:
            return HostStream()
        return comm_stream(self.device, role)

    def all_gather(self, shard: SendShard, whole: UnshardedBuffer, label: CollectiveLabel) -> Pending:
        """Gather every rank's shard, and unpack them into `whole` once somebody waits: until then its memory is free.

        A shard that has to be made (cast, or brought from the host) is made where its gather ends.
        """
        layout = whole.layout
        numel = shard.nbytes // shard.dtype.itemsize
        staging = self._staging(self.ranks * numel, shard.dtype, "gather")  # [ranks * shard elements]
        events.tag("communication_buffers", staging, label.unit)
        written = None  # what to wait for before the shard is sent
        if shard.resident is not None and not self._gathers_in_place:
            send = shard.resident.view(shard.dtype)
        else:  # in its own place in the result: rank 1 of 2 writes the second half of `staging`
            first = self.rank * numel
            send = staging[first : first + numel]
            written = shard.write(send.view(torch.uint8))

        def issue(asynchronous: bool) -> Any:
            with events.span("all_gather", label.unit):
                return self._gather(staging, send, asynchronous)

        def copy_out() -> None:
            # On whoever waits: `whole` takes its memory here, not while the gather is under way.
            with events.span("all_gather_copy_out", label.unit):
                unpack(staging, whole)

        departure = self.depart(label, "all_gather", layout.total_bytes, layout.padding_bytes, shard.dtype)
        job = Job(issue, lambda: None, departure, (staging, send), written, copy_out)
        return self._gather_stream.run(job)

    def reduce_scatter(
        self,
        layout: Layout,
        gradients: Gradients,  # [rows, *others] each, whole; None: this rank has none
        output: torch.Tensor,  # [shard elements], in the dtype that is sent
        label: CollectiveLabel,
        average: Average,
    ) -> Pending:
        """Average every rank's `gradients` (None where one is missing), and leave this rank's shard in `output`."""
        before = 1.0  # what is divided by before the sum, which could overflow
        if output.dtype is torch.float16 and self._overflows_in_float16:
            before = half(average.factor)
        send = self._staging(self.ranks * output.numel(), output.dtype, "scatter")
        events.tag("communication_buffers", send, label.unit)
        # Packed now, on the caller's stream; the side stream sends once that is done.
        with events.span("post_backward_reduce", label.unit):
            pack(layout, gradients, send)
            if before != 1.0:
                send.div_(before)
            # One row a rank, [ranks, shard elements]: each shard has a mark for every parameter with elements.
            average.mark(send.view(self.ranks, -1))
        issue, sum_up, received = self._reduction(send, output, average.after(before))
        departure = self.depart(label, "reduce_scatter", layout.total_bytes, layout.padding_bytes, output.dtype)
        sum_up = events.span("reduce_scatter", label.unit)(sum_up)
        job = Job(issue, sum_up, departure, (send, received, output))
        return self._reduce_stream.run(job)

    def all_reduce(
        self,
        buffer: torch.Tensor,  # [shard elements], this rank's sum over the shards
        label: CollectiveLabel,
        average: Average,
        padding: int = 0,  # bytes of `buffer` that hold no gradient
        after: Pending | None = None,  # the work on another stream that fills `buffer`
    ) -> Pending:
        """Average `buffer` over all ranks in place."""
        before = 1.0  # what is divided by before the sum, which could overflow
        if buffer.dtype is torch.float16:
            before = half(average.factor)

        def issue(asynchronous: bool) -> Any:
            with events.span("all_reduce", label.unit):
                if before != 1.0:
                    average.keeping().carry([buffer], buffer, lambda: buffer.div_(before))
                return dist.all_reduce(buffer, group=self.group, async_op=asynchronous)

        departure = self.depart(label, "all_reduce", buffer.nbytes, padding, buffer.dtype)
        finish = average.after(before).finish_once(buffer)
        # `after`: on streams this begins where the reduce-scatter ends, without the host.
        job = Job(issue, finish, departure, (buffer,), after)
        return self._all_reduce_stream.run(job)

    def separate_reductions(self, enable: bool) -> None:
        """Reduce over a communicator of its own, or over the group again; collective over the group.

        NCCL runs the operations of one communicator one after the other. On the host there is nothing to separate.
        """
        if isinstance(self._reduce_stream, HostStream):
            return
        self._reduce_group = reduction_group(self.group) if enable else self.group

    def _staging(self, numel: int, dtype: torch.dtype, role: str) -> torch.Tensor:
        """Return memory for a "gather" or a "scatter" of `numel` elements."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _gather(
        self,
        staging: torch.Tensor,  # [ranks * shard elements], rank after rank
        send: torch.Tensor,  # [shard elements], this rank's
        asynchronous: bool,
    ) -> Any:
        """Issue the all-gather of `send`, [elements of a shard], into `staging`."""
        return compat.all_gather_single(staging, send, group=self.group, async_op=asynchronous)

    def _reduction(
        self,
        send: torch.Tensor,  # [ranks * shard elements], rank after rank
        output: torch.Tensor,  # [shard elements], this rank's part of the average
        average: Average,
    ) -> Reduction:
        """Return how to sum `send`, [ranks * elements of a shard], into `output`, [elements of a shard]."""

        def issue(asynchronous: bool) -> Any:
            return compat.reduce_scatter_single(output, send, group=self._reduce_group, async_op=asynchronous)

        return issue, average.finish_once(output), send


_reduction_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def reduction_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the one group of the same ranks for their reductions; making it is collective over `group`."""
    if group not in _reduction_groups or _reduction_groups[group] not in compat.groups_alive():
        members = dist.get_process_group_ranks(group)
        _reduction_groups[group] = dist.new_group(members, use_local_synchronization=True)
    return _reduction_groups[group]
