"""The transport of ranks that share a machine: slices are read straight out of their owner's memory.

No sockets and no staging: a gather copies each peer's slice from where it rests (or, where it is cast or cut out on the
way, from the peer's slot) into the place where the forward reads it; a reduction packs gradients into this rank's slot once, and every rank sums its own slice out of all slots, in rank
order, in float32, so results carry the same bits in every run and at every number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from . import compat, events
from .arenas import SharedHome
from .gloo import announce, sum_in_rank_order
from .home import Home
from .layout import Layout
from .pending import Pending
from .slots import Slots
from .transport import Outgoing, Stamp, Transport, pack, unpack_from

_GATHERS, _REDUCTIONS = 2, 2  # slots: the next operation may begin while peers still read the last
_PLACES = 8  # gathers of slices that are read in place: they take no memory, so more may be in flight


class SharedTransport(Transport):
    """Gathers and reduces among ranks of one machine through shared memory; the group itself is used for set-up only."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._gathers, self._reductions = Slots(group, _GATHERS), Slots(group, _REDUCTIONS)
        self._places, self._home = Slots(group, _PLACES), SharedHome()
        self._announced = compat.silent_group(self.rank, self.ranks)

    def announce_buffers(self) -> None:
        """Tag this rank's slots."""
        self._gathers.announce()
        self._reductions.announce()

    def home(self, device: torch.device) -> Home:
        """Memory that peers read in place."""
        return self._home

    def settle(self) -> None:
        """Return once every peer has read this rank's slices: their owner may write to them again."""
        self._places.settle()

    def all_gather(self, layout: Layout, outgoing: Outgoing, whole: torch.Tensor, stamp: Stamp) -> Pending:
        """Publish this rank's slice, or where it rests; on waiting, copy every rank's slice into `whole`."""
        note = self._note(stamp, "all_gather", layout.total_bytes, layout.padding_bytes, outgoing.dtype)
        start, label, nbytes = time.time_ns(), f"all_gather of {stamp.unit}", outgoing.nbytes
        arena = self._home.arena_under(outgoing.resident)
        with events.span("all_gather", stamp.unit):
            if arena is not None:
                slots, number = self._places, self._places.claim_place(nbytes, label, arena.place)
                read = lambda peer: arena.of(peer, slots.processes[peer], slots.place_of(peer, number))  # noqa: E731
            else:
                slots, (number, slot) = self._gathers, self._gathers.claim(nbytes, label)
                outgoing.write(slot)
                read = lambda peer: slots.read(peer, number, nbytes)  # noqa: E731
            announce("all_gather", self._announced)

        def finish() -> None:
            with events.span("all_gather_copy_out", stamp.unit):
                for peer in self._nearest_first():
                    unpack_from(layout, peer, outgoing.resident if arena and peer == self.rank else read(peer), whole)
                slots.done(number)
            _emit(note, start)

        return self._publish(slots, number, finish, outgoing, whole)

    def reduce_scatter(
        self, layout: Layout, gradients: Sequence[torch.Tensor | None], output: torch.Tensor, stamp: Stamp, divide: float
    ) -> Pending:
        """Publish all gradients; on waiting, sum this rank's slice over the ranks and divide."""
        note = self._note(stamp, "reduce_scatter", layout.total_bytes, layout.padding_bytes, output.dtype)
        start, total = time.time_ns(), layout.total_bytes
        with events.span("post_backward_reduce", stamp.unit):
            number, slot = self._reductions.claim(total, f"reduce_scatter of {stamp.unit}")
            pack(layout, gradients, slot.view(output.dtype))
            announce("reduce_scatter", self._announced)

        def finish() -> None:
            with events.span("reduce_scatter", stamp.unit):
                self._sum(number, total, self.rank * output.numel(), output, divide)
            _emit(note, start)

        return self._publish(self._reductions, number, finish, output)

    def all_reduce(self, buffer: torch.Tensor, stamp: Stamp, divide: float, padding: int = 0) -> Pending:
        """Publish `buffer`; on waiting, sum one nth of it and gather the others' sums."""
        note = self._note(stamp, "all_reduce", buffer.nbytes, padding, buffer.dtype)
        start, pieces = time.time_ns(), buffer.tensor_split(self.ranks)
        with events.span("all_reduce", stamp.unit):
            number, slot = self._reductions.claim(buffer.nbytes, f"all_reduce of {stamp.unit}")
            slot.view(buffer.dtype).copy_(buffer)
            announce("all_reduce", self._announced)

        def finish() -> None:
            with events.span("all_reduce", stamp.unit):
                before = sum(piece.numel() for piece in pieces[: self.rank])
                self._sum(number, buffer.nbytes, before, pieces[self.rank], divide)
                self._share(pieces)
            _emit(note, start)

        return self._publish(self._reductions, number, finish, buffer)

    def _publish(self, slots: Slots, number: int, finish: Callable[[], None], *buffers: object) -> Pending:
        pending = Pending(finish, *buffers)
        slots.publish(number, pending.wait)
        return pending

    def _sum(self, number: int, nbytes: int, first: int, output: torch.Tensor, divide: float) -> None:
        """Sum elements [first, first + len(output)) of what every rank wrote for reduction `number`."""
        last = first + output.numel()
        slots = (self._reductions.read(peer, number, nbytes) for peer in range(self.ranks))
        sum_in_rank_order((slot.view(output.dtype)[first:last] for slot in slots), output, divide)
        self._reductions.done(number)

    def _share(self, pieces: Sequence[torch.Tensor]) -> None:
        number, slot = self._gathers.claim(pieces[0].nbytes)
        mine = pieces[self.rank]
        slot[: mine.nbytes].copy_(mine.view(torch.uint8))
        self._gathers.publish(number, lambda: None)
        for peer in self._nearest_first():
            if peer != self.rank:
                source = self._gathers.read(peer, number, pieces[peer].nbytes)
                pieces[peer].copy_(source.view(pieces[peer].dtype))
        self._gathers.done(number)

    def _nearest_first(self) -> list[int]:
        """This rank, then the next ones: ranks do not all read the same owner at once."""
        return [(self.rank + step) % self.ranks for step in range(self.ranks)]


def _emit(note: Callable[[int, int], events.Event], start: int) -> None:
    if events.listening():
        events.emit(note(start, time.time_ns()))
