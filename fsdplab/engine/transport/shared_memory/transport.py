"""The transport of ranks that share a machine: slices are read straight out of their owner's memory.

No sockets and no staging: a gather copies each peer's slice from where it rests (or, where it is cast or cut out on the
way, from the peer's slot) into the place where the forward reads it; a reduction packs what peers need into this rank's
slot once, and every rank sums its own slice out of all slots, in rank order, in float32, so results carry the same bits
in every run and at every number of ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.gathered import Gathered
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.packing import halves, pack, pack_range, pack_rank, scaled_copy, unpack_from
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.shard_storage import ShardStorage
from fsdplab.engine.core.transport import Gradients, Note, Outgoing, Stamp, Transport
from fsdplab.engine.transport.gloo import announce
from fsdplab.engine.transport.shared_memory.arenas import SharedStorage
from fsdplab.engine.transport.shared_memory.slots import Slots

_GATHERS, _REDUCTIONS = 2, 2  # slots: the next operation may begin while peers still read the last
_PLACES = 8  # gathers of slices that are read in place: they take no memory, so more may be in flight


@dataclass(frozen=True)
class Sent:
    """A reduction under way: its number, and the bytes between the parts of a slot."""

    number: int
    stride: int


class Operations:
    """Operations of one kind over slots of their own; of the latest, this rank may have yet to complete some."""

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        self.slots = Slots(group, count)
        self._latest: deque[Pending] = deque(maxlen=count)

    def claim(self, nbytes: int, label: str = "") -> tuple[int, torch.Tensor]:
        """As `Slots.claim`."""
        self._make_room()
        return self.slots.claim(nbytes, label)

    def claim_place(self, nbytes: int, label: str, place: tuple[int, int]) -> int:
        """As `Slots.claim_place`."""
        self._make_room()
        return self.slots.claim_place(nbytes, label, place)

    def _make_room(self) -> None:
        """Complete the oldest where every slot is taken; whoever waits for it later finds it done."""
        if len(self._latest) == self._latest.maxlen:
            self._latest[0].wait()

    def publish(self, number: int, pending: Pending) -> Pending:
        """This rank's slot holds operation `number`, which `pending` completes."""
        self._latest.append(pending)
        self.slots.publish(number)
        return pending

    def settle(self) -> None:
        """Return once this rank has completed, and every peer has read, all that was published so far."""
        for pending in list(self._latest):
            pending.wait()
        self.slots.wait_until_read()


class SharedTransport(Transport):
    """Gathers and reduces among ranks of one machine through shared memory;
    the group itself is used for set-up only.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._gathers, self._reductions = Operations(group, _GATHERS), Operations(group, _REDUCTIONS)
        self._places, self._storage = Operations(group, _PLACES), SharedStorage()
        self._announced = compat.silent_group(self.rank, self.ranks)

    def announce_buffers(self) -> None:
        """Tag this rank's slots."""
        self._gathers.slots.announce()
        self._reductions.slots.announce()

    def storage(self, device: torch.device) -> ShardStorage:
        """Memory that peers read in place."""
        return self._storage

    def settle(self) -> None:
        """Return once every peer has read this rank's slices: their owner may write to them again."""
        self._places.settle()

    def all_gather(self, outgoing: Outgoing, whole: Gathered, stamp: Stamp) -> Pending:
        """Publish this rank's slice, or where it rests; on waiting, copy every rank's slice into `whole`.

        The memory is taken now: what is gathered ahead costs as much as it does where collectives have buffers.
        """
        layout, _ = whole.layout, whole.tensor
        note = self.note(stamp, "all_gather", layout.total_bytes, layout.padding_bytes, outgoing.dtype)
        start, label, nbytes = time.time_ns(), f"all_gather of {stamp.unit}", outgoing.nbytes
        resident = outgoing.resident
        arena = self._storage.arena_under(resident)
        operations = self._gathers if arena is None else self._places
        slots = operations.slots
        with events.span("all_gather", stamp.unit):
            if arena is None:
                number, slot = operations.claim(nbytes, label)
                outgoing.write(slot)
                read = lambda peer: slots.read(peer, number, nbytes)  # noqa: E731
            else:
                number = operations.claim_place(nbytes, label, arena.place)
                read = lambda peer: arena.of(peer, slots.processes[peer], slots.place_of(peer, number))  # noqa: E731
            announce("all_gather", self._announced, lambda: _gather_buffers(outgoing, self.ranks))

        def finish() -> None:
            awaited = time.time_ns()
            with events.span("all_gather_copy_out", stamp.unit):
                for peer in self._nearest_first():
                    unpack_from(peer, resident if arena and peer == self.rank else read(peer), whole)
                slots.done(number)
            _emit(note, start, awaited)

        return operations.publish(number, Pending(finish, resident))

    def reduce_scatter(
        self, layout: Layout, gradients: Gradients, output: torch.Tensor, stamp: Stamp, divide: float
    ) -> Pending:
        """Publish what peers need of the gradients; on waiting, sum this rank's slice over the ranks and divide."""
        note = self.note(stamp, "reduce_scatter", layout.total_bytes, layout.padding_bytes, output.dtype)
        start, (before, after) = time.time_ns(), halves(divide)

        def write(peer: int, target: torch.Tensor) -> None:
            pack_rank(layout, gradients, peer, target, before)

        with events.span("post_backward_reduce", stamp.unit):
            sent = self._send(write, [output] * self.ranks, f"reduce_scatter of {stamp.unit}")
            announce("reduce_scatter", self._announced, lambda: _reduce_buffers(layout, gradients, output))

        def finish() -> None:
            awaited = time.time_ns()
            with events.span("reduce_scatter", stamp.unit):
                self._sum(sent, output, after)
            _emit(note, start, awaited)

        return self._reductions.publish(sent.number, Pending(finish, output))

    def all_reduce(
        self, buffer: torch.Tensor, stamp: Stamp, divide: float, padding: int = 0, after: Pending | None = None
    ) -> Pending:
        """Publish what peers need of `buffer`; on waiting, sum one nth of it and gather the others' sums."""
        pieces = buffer.tensor_split(self.ranks)
        before, then = halves(divide)

        def write(peer: int, target: torch.Tensor) -> None:
            scaled_copy(pieces[peer], target, before)

        return self._all_reduce(write, buffer, stamp, then, padding)

    def all_reduce_packed(
        self, layout: Layout, gradients: Gradients, output: torch.Tensor, stamp: Stamp, divide: float
    ) -> Pending:
        """As `pack` and `all_reduce`, in one pass over the gradients."""
        pieces = output.tensor_split(self.ranks)
        firsts = [sum(piece.numel() for piece in pieces[:peer]) for peer in range(self.ranks)]
        before, after = halves(divide)

        def write(peer: int, target: torch.Tensor) -> None:
            pack_range(layout, gradients, firsts[peer], target, before)

        return self._all_reduce(write, output, stamp, after, layout.padding_bytes)

    def _all_reduce(
        self,
        write: Callable[[int, torch.Tensor], None],
        buffer: torch.Tensor,
        stamp: Stamp,
        divide: float,
        padding: int,
    ) -> Pending:
        note = self.note(stamp, "all_reduce", buffer.nbytes, padding, buffer.dtype)
        start, pieces = time.time_ns(), buffer.tensor_split(self.ranks)
        with events.span("all_reduce", stamp.unit):
            sent = self._send(write, pieces, f"all_reduce of {stamp.unit}")
            announce("all_reduce", self._announced, lambda: (torch.empty_like(buffer), buffer))

        def finish() -> None:
            awaited = time.time_ns()
            with events.span("all_reduce", stamp.unit):
                self._sum(sent, pieces[self.rank], divide)
                self._share(pieces)
            _emit(note, start, awaited)

        return self._reductions.publish(sent.number, Pending(finish, buffer))

    def _send(self, write: Callable[[int, torch.Tensor], None], parts: Sequence[torch.Tensor], label: str) -> Sent:
        """Have every peer's part written to this rank's slot, and this rank's own where its sum will be."""
        stride = parts[0].nbytes  # of the first, which is the longest
        number, slot = self._reductions.claim((self.ranks - 1) * stride, label)
        for peer in self._nearest_first():
            place = parts[peer] if peer == self.rank else self._part(slot, self.rank, peer, stride, parts[peer])
            write(peer, place)
        return Sent(number, stride)

    def _part(self, slot: torch.Tensor, owner: int, reader: int, stride: int, like: torch.Tensor) -> torch.Tensor:
        """What `owner` wrote for `reader`: a slot has no part for its owner."""
        first = (reader - (reader > owner)) * stride
        return slot[first : first + like.nbytes].view(like.dtype)

    def _sum(self, sent: Sent, output: torch.Tensor, divide: float) -> None:
        """`output`, which holds this rank's own part, becomes the sum over all ranks, in rank order, divided."""

        def part(peer: int) -> torch.Tensor:
            written = self._reductions.slots.read(peer, sent.number, (self.ranks - 1) * sent.stride)
            return self._part(written, peer, self.rank, sent.stride, output)

        wide = torch.promote_types(output.dtype, torch.float32)
        total = output.to(wide)  # `output` itself, where it is wide enough
        if self.rank:
            earlier = part(0).to(wide)
            for peer in range(1, self.rank):
                earlier = earlier + part(peer)
            total.add_(earlier)  # the sum of the ranks before this one, plus this one's: two terms, in either order
        for peer in range(self.rank + 1, self.ranks):
            total.add_(part(peer))
        self._reductions.slots.done(sent.number)
        if divide != 1.0:
            total.div_(divide)
        if total is not output:
            output.copy_(total)

    def _share(self, pieces: Sequence[torch.Tensor]) -> None:
        number, slot = self._gathers.claim(pieces[0].nbytes)
        mine = pieces[self.rank]
        slot[: mine.nbytes].copy_(mine.view(torch.uint8))
        self._gathers.publish(number, Pending(lambda: None))
        for peer in self._nearest_first():
            if peer != self.rank:
                source = self._gathers.slots.read(peer, number, pieces[peer].nbytes)
                pieces[peer].copy_(source.view(pieces[peer].dtype))
        self._gathers.slots.done(number)

    def _nearest_first(self) -> list[int]:
        """This rank, then the next ones: ranks do not all read the same owner at once."""
        return [(self.rank + step) % self.ranks for step in range(self.ranks)]


def _gather_buffers(outgoing: Outgoing, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The flat output and source that a gather would have, were there any staging."""
    source = outgoing.made(torch.device("cpu"))
    return source.new_empty(ranks * source.numel()), source


def _reduce_buffers(layout: Layout, gradients: Gradients, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    source = output.new_empty(layout.ranks * output.numel())
    pack(layout, gradients, source)
    return torch.empty_like(output), source


def _emit(note: Note, start: int, awaited: int) -> None:
    if events.listening():
        now = time.time_ns()
        events.emit(note(start, now, now - awaited))
