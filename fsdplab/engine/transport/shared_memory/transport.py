"""The transport of ranks that share a machine: slices are read straight out of their owner's memory.

No sockets and no staging: a gather copies each peer's slice from where it rests (or, where it is cast or cut out on the
way, from the peer's buffer) into the place where the forward reads it; a reduction packs what peers need into a buffer
once, and every rank sums its own slice out of all buffers, in rank order, in float32, so results carry the same bits in
every run and at every number of ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average
from fsdplab.engine.core.gathered import Gathered
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.packing import pack, unpack_from
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.shard_storage import ShardStorage
from fsdplab.engine.core.transport import CollectiveLabel, Gradients, SendShard, Transport
from fsdplab.engine.transport.gloo import announce
from fsdplab.engine.transport.shared_memory.operations import Completion, Operation, Operations, Staging, Step
from fsdplab.engine.transport.shared_memory.packing import pack_range, pack_rank, power_of_two

_BUFFERS = 2  # of each kind: the next operation may begin while peers still read the last


@dataclass(frozen=True)
class PendingReduction:
    """A reduction under way: the buffer that peers read, and the bytes between its parts."""

    operation: Operation
    buffer: torch.Tensor
    stride: int


class SharedTransport(Transport):
    """Gathers and reduces among ranks of one machine through shared memory;
    the group itself is used for set-up only.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._operations = Operations(group)
        self._slots = self._operations.slots
        self._gathers, self._reductions = (self._operations.staging(_BUFFERS) for _ in range(2))
        self._exchanges = self._operations.staging(_BUFFERS + 1)  # an all-reduce ends one unit later than it sums
        self._announced = compat.silent_group(self.rank, self.ranks)

    def announce_buffers(self) -> None:
        """Tag this rank's buffers."""
        self._gathers.announce()
        self._reductions.announce()

    def storage(self, device: torch.device) -> ShardStorage:
        """Memory that peers read in place."""
        return self._operations.storage

    def settle(self) -> None:
        """Return once every peer has read this rank's slices: their owner may write to them again."""
        self._operations.settle()

    def recover(self) -> None:
        """Begin anew with all ranks where one has failed in the middle; else nobody waits."""
        self._operations.recover(self._slots.broken)

    def leave_step(self, unfinished: bool) -> None:
        """Begin anew with all ranks where one has failed in the middle, or this one has left a step unfinished."""
        self._operations.recover(unfinished or self._slots.broken)

    def all_gather(self, shard: SendShard, whole: Gathered, label: CollectiveLabel) -> Pending:
        """Publish this rank's slice, or where it rests; on waiting, copy every rank's slice into `whole`.

        The memory is taken now: what is gathered ahead costs as much as it does where collectives have buffers.
        """
        layout, _ = whole.layout, whole.tensor
        departure = self.depart(label, "all_gather", layout.total_bytes, layout.padding_bytes, shard.dtype)
        start, nbytes = time.time_ns(), shard.nbytes
        staging = self._gathers if shard.resident is None or nbytes == 0 else None
        with events.span("all_gather", label.unit):
            operation = self._operations.claim(nbytes, f"all_gather of {label.unit}")
            mine = self._source(operation, shard, staging)
            announce("all_gather", self._announced, lambda: _gather_buffers(shard, self.ranks))

        def read() -> None:
            for peer in self._nearest_first():
                part = mine if peer == self.rank else self._slots.read(peer, operation.number, nbytes)
                unpack_from(peer, part, whole)

        completion = Completion("all_gather_copy_out", label, departure, start)
        return self._operations.publish(operation, mine, staging, [Step(read)], completion)

    def _source(self, operation: Operation, shard: SendShard, staging: Staging | None) -> torch.Tensor:
        """What peers will read: the slice where it rests, or a copy of it."""
        resident, nbytes = shard.resident, shard.nbytes
        if staging is not None:
            source = self._operations.stage(staging, nbytes, operation.label)
        elif resident is not None and self._slots.arena.place_of(resident) is not None:
            return resident
        else:  # the arena refused to hold it; buffers in turn are for gathers that no rank has in place
            source = self._slots.allocate(nbytes, operation.label)
        shard.write(source)
        return source

    def reduce_scatter(
        self, layout: Layout, gradients: Gradients, output: torch.Tensor, label: CollectiveLabel, average: Average
    ) -> Pending:
        """Publish what peers need of the gradients; on waiting, average this rank's slice over the ranks."""
        departure = self.depart(label, "reduce_scatter", layout.total_bytes, layout.padding_bytes, output.dtype)
        start, before = time.time_ns(), _before(gradients, output.dtype, average.factor)

        def write(peer: int, target: torch.Tensor) -> None:
            pack_rank(layout, gradients, peer, target, 1.0 / before)
            average.mark(target)

        with events.span("post_backward_reduce", label.unit):
            parts = [output] * self.ranks
            sent = self._send(write, parts, f"reduce_scatter of {label.unit}", self.ranks - 1, self._reductions)
            announce("reduce_scatter", self._announced, lambda: _reduce_buffers(layout, gradients, output))
        completion = Completion("reduce_scatter", label, departure, start)
        return self._reducing(sent, output, average.after(before), [], completion)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        label: CollectiveLabel,
        average: Average,
        padding: int = 0,
        after: Pending | None = None,
    ) -> Pending:
        """Publish what peers need of `buffer`; on waiting, sum one nth of it and gather the others' sums."""
        pieces = buffer.tensor_split(self.ranks)
        before, parts = power_of_two(average.factor), self._parts(buffer, average)

        def write(peer: int, target: torch.Tensor) -> None:
            source = pieces[peer]
            if before == 1.0:
                target.copy_(source)
            else:
                parts[peer].carry(source, target, lambda: torch.mul(source, 1.0 / before, out=target))

        return self._all_reduce(write, buffer, label, parts[self.rank].after(before), padding)

    def all_reduce_packed(
        self, layout: Layout, gradients: Gradients, output: torch.Tensor, label: CollectiveLabel, average: Average
    ) -> Pending:
        """As `pack` and `all_reduce`, in one pass over the gradients."""
        firsts = _firsts(output, self.ranks)
        before, parts = _before(gradients, output.dtype, average.factor), self._parts(output, average)

        def write(peer: int, target: torch.Tensor) -> None:
            pack_range(layout, gradients, firsts[peer], target, 1.0 / before)
            parts[peer].mark(target)

        return self._all_reduce(write, output, label, parts[self.rank].after(before), layout.padding_bytes)

    def _parts(self, buffer: torch.Tensor, average: Average) -> list[Average]:
        """How each rank averages the part of `buffer` that it sums."""
        ends = [*_firsts(buffer, self.ranks), buffer.numel()]
        return [average.of_part(first, end - first) for first, end in itertools.pairwise(ends)]

    def _all_reduce(
        self,
        write: Callable[[int, torch.Tensor], None],
        buffer: torch.Tensor,
        label: CollectiveLabel,
        average: Average,
        padding: int,
    ) -> Pending:
        departure = self.depart(label, "all_reduce", buffer.nbytes, padding, buffer.dtype)
        start, pieces = time.time_ns(), buffer.tensor_split(self.ranks)
        with events.span("all_reduce", label.unit):
            sent = self._send(write, pieces, f"all_reduce of {label.unit}", self.ranks, self._exchanges)
            announce("all_reduce", self._announced, lambda: (torch.empty_like(buffer), buffer))
        exchange = [Step(lambda: self._share(sent, pieces)), Step(lambda: self._collect(sent, pieces))]
        completion = Completion("all_reduce", label, departure, start)
        return self._reducing(sent, pieces[self.rank], average, exchange, completion)

    def _reducing(
        self,
        sent: PendingReduction,
        output: torch.Tensor,
        average: Average,
        further: Sequence[Step],
        completion: Completion,
    ) -> Pending:
        """Publish; on waiting, sum this rank's part as soon as all peers' are there, then do what is `further`: all but
        the last of it may be done early, and then peers find this rank's sum when they come for it.
        """
        steps = [
            Step(lambda: self._await_peers(sent)),
            Step(lambda: self._sum(sent, output, average), repeatable=False),
            *further,
        ]
        sent.operation.kept = 1 if further else 0
        staging = self._exchanges if further else self._reductions
        return self._operations.publish(sent.operation, sent.buffer, staging, steps, completion)

    def _send(
        self,
        write: Callable[[int, torch.Tensor], None],
        parts: Sequence[torch.Tensor],
        label: str,
        count: int,
        staging: Staging,
    ) -> PendingReduction:
        """Have every peer's part written to a buffer for `count` parts, and this rank's own where its sum will be."""
        stride = parts[0].nbytes  # of the first, which is the longest
        operation = self._operations.claim(count * stride, label)
        sent = PendingReduction(operation, self._operations.stage(staging, count * stride, label), stride)
        for peer in self._nearest_first():
            place = parts[peer] if peer == self.rank else self._part(sent, sent.buffer, self.rank, peer, parts[peer])
            write(peer, place)
        return sent

    def _part(
        self, sent: PendingReduction, buffer: torch.Tensor, owner: int, reader: int, like: torch.Tensor
    ) -> torch.Tensor:
        """What `owner` wrote for `reader`: a buffer has no part for its owner."""
        first = (reader - (reader > owner)) * sent.stride
        return buffer[first : first + like.nbytes].view(like.dtype)

    def _read(self, sent: PendingReduction, peer: int) -> torch.Tensor:
        """The buffer of a peer."""
        return self._slots.read(peer, sent.operation.number, sent.buffer.nbytes)

    def _await_peers(self, sent: PendingReduction) -> None:
        for peer in self._nearest_first():
            self._slots.await_written(peer, sent.operation.number)

    def _sum(self, sent: PendingReduction, output: torch.Tensor, average: Average) -> None:
        """`output`, which holds this rank's own part, becomes the average over all ranks, summed in rank order."""

        def part(peer: int) -> torch.Tensor:
            return self._part(sent, self._read(sent, peer), peer, self.rank, output)

        wide = torch.promote_types(output.dtype, torch.float32)
        total = output.to(wide)  # `output` itself, where it is wide enough
        if self.rank:
            earlier = part(0).to(wide)
            for peer in range(1, self.rank):
                earlier = earlier + part(peer)
            total.add_(earlier)  # the sum of the ranks before this one, plus this one's: two terms, in either order
        for peer in range(self.rank + 1, self.ranks):
            total.add_(part(peer))
        average.finish(total, output)

    def _share(self, sent: PendingReduction, pieces: Sequence[torch.Tensor]) -> None:
        """Put this rank's sum behind the parts of its buffer, where nobody reads before it says so."""
        mine = pieces[self.rank]
        sent.buffer[-sent.stride :][: mine.nbytes].copy_(mine.view(torch.uint8))
        self._slots.summed(sent.operation.number)

    def _collect(self, sent: PendingReduction, pieces: Sequence[torch.Tensor]) -> None:
        for peer in self._nearest_first():
            if peer != self.rank:
                self._slots.await_summed(peer, sent.operation.number)
                source = self._read(sent, peer)[-sent.stride :][: pieces[peer].nbytes]
                pieces[peer].copy_(source.view(pieces[peer].dtype))

    def _nearest_first(self) -> list[int]:
        """This rank, then the next ones: ranks do not all read the same owner at once."""
        return [(self.rank + step) % self.ranks for step in range(self.ranks)]


def _gather_buffers(shard: SendShard, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The flat output and source that a gather would have, were there any staging."""
    source = shard.made(torch.device("cpu"))
    return source.new_empty(ranks * source.numel()), source


def _reduce_buffers(layout: Layout, gradients: Gradients, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    source = output.new_empty(layout.ranks * output.numel())
    pack(layout, gradients, source)
    return torch.empty_like(output), source


def _firsts(buffer: torch.Tensor, ranks: int) -> list[int]:
    """The number of elements before each rank's part of `buffer`."""
    return [piece.storage_offset() - buffer.storage_offset() for piece in buffer.tensor_split(ranks)]


def _before(gradients: Gradients, dtype: torch.dtype, divide: float) -> float:
    """As `power_of_two`; gradients that are cast as they are packed are divided after the sum, which takes one nth of a
    pass and rounds nothing twice.
    """
    cast = any(gradient is not None and gradient.dtype != dtype for gradient in gradients)
    return 1.0 if cast else power_of_two(divide)
