"""An emulated link: any transport behind a network of a chosen bandwidth and latency, per mesh axis.

On one machine bytes move at memory speed, so sharding looks free. Behind a link a collective is done no earlier than

    max(link free, last rank's issue) + latency x steps + wire bytes / bandwidth        (ring: Patarasuk and Yuan 2009)

and whoever needs it sooner sleeps. Waiting costs no CPU, so overlap becomes visible, and repeatable, on two cores. A
link carries its collectives one after the other, as one communicator does; with two queues gathers and reductions
travel independently, each at full bandwidth (two communicators on a network that one of them does not fill).

All ranks compute the same times: each writes when it issued its k-th collective to a board in shared memory that its
peers read. On CUDA streams wait, not hosts, and there is one queue (`stream_link.py`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import compat, events
from fsdplab.engine.core.gathered import Gathered
from fsdplab.engine.core.hooks import units_under
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import CollectiveLabel, Gradients, Note, SendShard, Transport
from fsdplab.engine.emulation.stream_link import on_streams, runs_on_streams
from fsdplab.engine.transport.shared_memory.peers import SharingRefused
from fsdplab.engine.transport.shared_memory.process_group import SharedMemoryGroup
from fsdplab.engine.transport.shared_memory.slots import Slots, machine_of_this_rank

_RING = 1024  # issues that the board remembers: far more than can be in flight
_SYNC_S = 20e-6  # how long to sleep while a peer's note has not arrived


@dataclass(frozen=True)
class Link:
    """Bandwidth in bytes/s, latency in seconds per step of the ring; `queues` = 2 separates gathers from reductions.

    A ring of n ranks takes n - 1 steps for an all-gather or a reduce-scatter, twice as many for an all-reduce.

    >>> Link(bytes_per_s=1e9, latency_s=1e-5).transfer_ns(wire_bytes=1_000_000, steps=1)
    1010000
    """

    bytes_per_s: float
    latency_s: float = 0.0
    queues: int = 1

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0 or self.queues not in (1, 2):
            raise ValueError(
                f"a link needs a bandwidth above 0, a latency of at least 0 and 1 or 2 queues; got {self.bytes_per_s}"
                f" bytes/s, {self.latency_s} s and {self.queues}"
            )

    def transfer_ns(self, wire_bytes: int, steps: int) -> int:
        """Nanoseconds that `wire_bytes` take in `steps` steps on the free link."""
        return round(1e9 * (self.latency_s * steps + wire_bytes / self.bytes_per_s))

    def collective(self, kind: str, logical_bytes: int, ranks: int) -> tuple[int, int]:
        """Wire bytes, and nanoseconds on the free link, of a collective of `ranks` ranks.

        >>> Link(1e9).collective("all_gather", 4_000, 4)
        (3000, 3000)
        """
        rounds = 2 if kind == "all_reduce" else 1
        wire_bytes = rounds * logical_bytes * (ranks - 1) // ranks
        return wire_bytes, self.transfer_ns(wire_bytes, rounds * (ranks - 1))


class Board:
    """When each rank issued its k-th collective. Without shared memory a rank knows its own issues only, and takes them
    for all.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = group.size()
        self._mine = torch.zeros(2 * _RING, dtype=torch.int64)
        self._all: Sequence[torch.Tensor] = [self._mine]
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, machine_of_this_rank(), group=group)
        if None not in told and len(set(told)) == 1:
            try:
                self._share(Slots(group, 1))
            except SharingRefused:
                pass  # the class says what this means

    def _share(self, slots: Slots) -> None:
        number, mine = slots.claim(self._mine.nbytes, "the board of an emulated link")
        self._mine = mine.view(torch.int64).zero_()
        slots.publish(number)
        self._all = [slots.read(peer, number, self._mine.nbytes).view(torch.int64) for peer in range(self.ranks)]
        self._slots = slots  # the operation is never completed, so nobody writes over it

    def write(self, number: int, now_ns: int) -> None:
        """This rank issues its collective `number` now."""
        place = 2 * (number % _RING)
        self._mine[place + 1] = now_ns
        self._mine[place] = number

    def last_issue(self, number: int) -> int:
        """When the last rank issued collective `number`; every rank must be known to have done so."""
        return max(self._issue(notes, number) for notes in self._all)

    def _issue(self, notes: torch.Tensor, number: int) -> int:
        place, deadline = 2 * (number % _RING), time.monotonic() + 60
        while (seen := int(notes[place])) != number:
            if seen > number or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the emulated link lost collective {number}: a peer is at {seen}; ranks must run the same"
                    " collectives in the same order"
                )
            time.sleep(_SYNC_S)
        return int(notes[place + 1])


class Queue:
    """Collectives that pass a link one after the other."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._issued, self._resolved, self._free_ns = 0, 0, 0
        self._durations: dict[int, int] = {}
        self._times: dict[int, tuple[int, int, int]] = {}

    def enter(self, duration_ns: int) -> int:
        """Join the queue now, to be carried for that long; the number under which `times` answers."""
        self._issued += 1
        self._durations[self._issued] = duration_ns
        self._board.write(self._issued, time.time_ns())
        return self._issued

    def times(self, number: int) -> tuple[int, int, int]:
        """When the last rank issued collective `number`, the link took it up, and delivered it (ns); all ranks must
        have issued it.
        """
        while self._resolved < number:
            self._resolved += 1
            issued = self._board.last_issue(self._resolved)
            start = max(self._free_ns, issued)
            self._free_ns = start + self._durations.pop(self._resolved)
            self._times[self._resolved] = issued, start, self._free_ns
        return self._times.pop(number)


class Channel:
    """A rank's end of one emulated link: its queues. `ranks`: how many the group is taken to have, if not those that it
    has.
    """

    def __init__(self, link: Link, group: dist.ProcessGroup, ranks: int | None = None) -> None:
        self.link, self.ranks = link, ranks or group.size()
        self._queues = [Queue(Board(group)) for _ in range(link.queues)]

    def enter(self, event: events.Collective) -> Transfer:
        """A collective sets out."""
        queue = self._queues[0 if event.kind == "all_gather" else -1]
        wire, duration_ns = self.link.collective(event.kind, event.logical_bytes, self.ranks)
        return Transfer(queue, queue.enter(duration_ns), replace(event, wire_bytes=wire))

    def enter_for_torch(self, kind: str, outputs: Sequence[torch.Tensor]) -> Transfer:
        """A collective of an engine that knows no units sets out; `outputs` are what this rank receives."""
        given = sum(output.nbytes for output in outputs)
        logical = given * (self.ranks if kind == "reduce_scatter" else 1)
        phase = "backward" if compat.inside_backward() else "forward"
        dtype = str(outputs[0].dtype).removeprefix("torch.") if outputs else ""
        return self.enter(events.Collective("", phase, kind, logical, 0, 0, dtype, 0, 0, issue_ns=time.time_ns()))


@dataclass
class Transfer:
    """One collective on its way over a link."""

    queue: Queue
    number: int
    event: events.Collective | None = None

    def arrive(self, awaited_ns: int, unit: str) -> None:
        """Sleep until the link has delivered, then write the ledger; the host has waited since `awaited_ns`."""
        issued, start, end = self.queue.times(self.number)
        remaining = end - time.time_ns()
        if remaining > 0:
            with events.span("link", unit):
                time.sleep(remaining / 1e9)
        if self.event is not None and events.listening():
            waited = max(0, end - max(issued, awaited_ns))  # until then the host waited for a peer, not for the link
            events.emit(replace(self.event, start_ns=start, end_ns=end, emulated=True, waited_ns=waited))

    def announce(self) -> int:
        """Write the ledger now that all ranks have issued, and return when the link delivers (ns); how long anybody
        waits is not known.
        """
        _, start, end = self.queue.times(self.number)
        if self.event is not None and events.listening():
            events.emit(replace(self.event, start_ns=start, end_ns=end, emulated=True))
        return end


class _Behind(Transport):
    """What a transport does differently behind a link; mixed into the transport's own class."""

    _kind: type[Transport]  # that class
    _channel: Channel
    _transfer: Transfer | None = None

    def note(self, label: CollectiveLabel, kind: str, logical: int, padding: int, dtype: torch.dtype) -> Note:
        """The transport asks for its note right before it issues: the collective joins the queue."""
        event = super().note(label, kind, logical, padding, dtype)(0, 0, None)
        assert event is not None, "a link in front of a link"
        self._transfer = self._channel.enter(event)
        return lambda start, end, waited: None  # `arrive` writes it

    def _carried(self, pending: Pending, unit: str) -> Pending:
        transfer, self._transfer = self._transfer, None
        if transfer is None:  # it was carried further in already
            return pending

        def finish() -> None:
            awaited = time.time_ns()
            pending.wait()
            transfer.arrive(awaited, unit)

        return Pending(finish, pending, on_drop=pending.abandon)

    def all_gather(self, shard: SendShard, whole: Gathered, label: CollectiveLabel) -> Pending:
        return self._carried(self._kind.all_gather(self, shard, whole, label), label.unit)

    def reduce_scatter(
        self, layout: Layout, gradients: Gradients, output: torch.Tensor, label: CollectiveLabel, divide: float
    ) -> Pending:
        return self._carried(self._kind.reduce_scatter(self, layout, gradients, output, label, divide), label.unit)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        label: CollectiveLabel,
        divide: float,
        padding: int = 0,
        after: Pending | None = None,
    ) -> Pending:
        return self._carried(self._kind.all_reduce(self, buffer, label, divide, padding, after), label.unit)

    def all_reduce_packed(
        self, layout: Layout, gradients: Gradients, output: torch.Tensor, label: CollectiveLabel, divide: float
    ) -> Pending:
        return self._carried(super().all_reduce_packed(layout, gradients, output, label, divide), label.unit)


@cache
def _behind(kind: type[Transport]) -> type[Transport]:
    return type(f"{kind.__name__}BehindLink", (_Behind, kind), {"_kind": kind})


def behind(transport: Transport, link: Link, ranks: int | None = None) -> Transport:
    """`transport` with `link` in front of it, in place of one that was there; its other users are not slowed.
    Collective over its group.

    With `ranks`, collectives take as long as those of so many ranks do: a group of one can imitate a larger one. Raises
    `ValueError` for two queues on CUDA.
    """
    plain: Transport = getattr(transport, "_plain", transport)
    made: Transport
    if runs_on_streams(plain):
        if link.queues != 1:
            raise ValueError(
                "a link between CUDA ranks has one queue (the driver runs its waits one after the other), got"
                f" {link.queues}; give queues=1"
            )
        count = ranks or plain.ranks
        made = on_streams(plain, lambda kind, logical: link.collective(kind, logical, count))
    else:
        made = copy.copy(plain)
        made.__class__ = _behind(type(plain))
        assert isinstance(made, _Behind)
        made._channel = Channel(link, plain.group, ranks)
    made._plain = plain
    return made


def emulate(model: nn.Module, *, shard: Link | None = None, replicate: Link | None = None) -> None:
    """Put links between the ranks of a sharded model: `shard` where slices are gathered and reduced, `replicate`
    between replicas.

    None takes a link away. Call it between steps, on all ranks. Under no_shard the ranks are replicas of each other,
    and `shard` is the link between them. Raises `ValueError` on devices other than CPU and CUDA.
    """
    made: dict[int, Transport] = {}

    def moved(transport: Transport | None, link: Link | None) -> Transport | None:
        if transport is None:
            return None
        if id(transport) not in made:
            made[id(transport)] = _replaced(transport, link)
        return made[id(transport)]

    for unit in units_under(model, True):
        if unit.memory.config.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"an emulated link works between CPU or CUDA ranks, got {unit.memory.config.device}; run on one of"
                " these, or without a link"
            )
        alone = unit.memory.config.shard is None
        unit.memory.config = replace(
            unit.memory.config,
            shard=moved(unit.memory.config.shard, shard),
            replicate=moved(unit.memory.config.replicate, shard if alone else replicate),
        )


def emulate_group(group: SharedMemoryGroup, link: Link | None) -> None:
    """Put a link between the ranks of a shared-memory process group, for torch's own engines; None takes it away.
    Collective.
    """
    group.put_behind(None if link is None else Channel(link, group.gloo))


def _replaced(transport: Transport, link: Link | None) -> Transport:
    return getattr(transport, "_plain", transport) if link is None else behind(transport, link)
