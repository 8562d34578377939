"""Gathers and reduces among ranks that share a machine: shards are read straight out of their owner's memory.

No sockets and no staging: a gather copies each peer's shard from where it rests (or, where it is cast or cut out on the
way, from the peer's buffer) into the place where the forward reads it; a reduction packs what peers need into a buffer
once, and every rank sums its own shard out of all buffers, in rank order, in float32, so results carry the same bits in
every run and at every number of ranks.

A collective is an operation over the slots of its group, completed in steps by whoever waits for it. A step that was
interrupted is tried again; one that cannot be (a sum in place) breaks the slots instead. Whoever drops an operation
without waiting has given it up: this rank will not read it, and says so to its peers. What peers may still read of this
rank stays where it is until they have said the same.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average
from fsdplab.engine.core.buffers import ShardStorage, UnshardedBuffer, pack, pack_part, unpack_from
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import CollectiveLabel, Departure, Gradients, SendShard, Transport, Unseen
from fsdplab.engine.transport.gloo import announce
from fsdplab.engine.transport.shared_memory.arena import SharedStorage
from fsdplab.engine.transport.shared_memory.slots import Broken, Buffers, GivenUp, Slots

_BUFFERS = 2  # of each kind: the next operation may begin while peers still read the last
_UNDER_WAY = 16  # operations that may be: a rank that has not completed the one before so many completes it first
_REMEDY = (
    "call reset_iter_state() on the model on every rank and begin the step again, or build the model again on every"
    " rank"
)
Write = Callable[[int, torch.Tensor], None]  # writes the part of a peer into memory that it can read
_COMPLETES = {"all_gather": "all_gather_copy_out"}  # the profiler range of a wait, where it is not the kind's own


@dataclass(frozen=True)
class Step:
    """A part of completing an operation; `repeatable` says whether it may be run again after it was interrupted."""

    run: Callable[[], None]
    repeatable: bool = True


class Operation:
    """An operation as its own rank sees it: claimed, published, completed or given up."""

    def __init__(self, slots: Slots, nbytes: int, kind: str, unit: str, departure: Departure) -> None:
        self.name = f"{kind} of {unit}"  # in errors; all ranks must give it the same
        self.number = slots.claim(nbytes, self.name)
        self.steps: list[Step] = []  # that are to come; each is removed once it is done
        self.steps_for_wait = 0  # how many of the last steps `advance` leaves to `complete`
        self._slots = slots
        self._epoch = slots.epoch  # in another one it cannot be completed any more
        self._span = _COMPLETES.get(kind, kind)
        self._unit = unit
        self._departure = departure
        self._waited_ns = 0
        self._published = False
        self._complete = False
        self._lost: GivenUp | None = None  # raised again where somebody waits again

    def leave(self) -> None:
        """Note that it is published next."""
        self._published = True
        self._departure.leave()

    def advance(self) -> None:
        """Run the steps that peers wait for."""
        self._go_on(self.steps_for_wait, f"{self._span}_sum")

    def complete(self) -> None:
        """Run what is left of the steps, then let the peers go on; nothing happens the second time."""
        if not self._complete:
            now = self._go_on(0, self._span)
            self._complete = True
            self._departure.moved(self._departure.issue_ns, now, self._waited_ns)

    def arrive(self) -> None:
        """Complete it, and return when its result may be used."""
        awaited = time.time_ns()
        self.complete()
        self._departure.arrive(awaited)

    def give_up(self) -> None:
        """Drop it: this rank will not read it. Peers are told where they know of it."""
        self.steps.clear()
        if self._published:
            self._slots.done(self.number)

    def _go_on(self, until: int, span: str) -> int:
        """Run steps until `until` of them are to come; return the time (ns) at which they were done."""
        awaited = time.time_ns()
        with events.span(span, self._unit):
            self._check()
            try:
                while len(self.steps) > until:
                    self._run(self.steps[0])
            except GivenUp as error:  # by a peer: nobody can complete it, so this rank is done with it too
                self._lost = error
                self._slots.done(self.number)
                raise
            # This rank has read all of it: peers may use their slots and buffers again.
            if not self.steps:
                self._slots.done(self.number)
        now = time.time_ns()
        self._waited_ns += now - awaited
        return now

    def _check(self) -> None:
        """Raise where it can no longer be completed."""
        if self.steps:
            self._slots.check()
        if self._lost is not None:
            raise self._lost
        if self.steps and self._epoch != self._slots.epoch:
            raise Broken(f"{self.name} was given up when all ranks began anew: {_REMEDY}")

    def _run(self, step: Step) -> None:
        """Run the first step, and forget it once it is done."""
        with nullcontext() if step.repeatable else self._slots.unrepeatable(f"completing {self.name}"):
            step.run()
            del self.steps[0]


class PendingOperation(Pending):
    """An operation under way, for whoever waits for it."""

    __slots__ = ("_operation",)

    def __init__(
        self,
        operation: Operation,
        source: torch.Tensor,  # [bytes] (uint8), what peers read
    ) -> None:
        super().__init__(operation.arrive, source, early=operation.advance, on_drop=operation.give_up)
        self._operation = operation

    def complete(self) -> None:
        """Complete the operation and let its memory go; whoever waits later waits for an emulated link alone."""
        try:
            self._operation.complete()
            self._buffers = ()
        except GivenUp:
            pass  # nobody here needs it now; whoever waits for it after all is told


class Staging(Buffers):
    """Memory that holds what is sent, where that is not the shard at rest: buffers that operations of one kind take in
    turn, every step from the first buffer on.

    So each buffer holds the same messages in all steps. Were the turn kept, an odd number of messages would bring the
    largest one to each of two buffers.
    """

    def __init__(self, slots: Slots, count: int) -> None:
        super().__init__(slots, count)
        self.users = [0] * count  # the last operation that each was published for
        self.turn = 0

    def take(self, number: int) -> None:
        """Operation `number` uses the buffer whose turn it is."""
        self.users[self.turn] = number
        self.turn = (self.turn + 1) % len(self.users)


class Operations:
    """The operations of this rank in `group`; every member must make it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.slots = Slots(group, _UNDER_WAY, _REMEDY)
        self.storage = SharedStorage(self.slots.arena)
        self._live: weakref.WeakValueDictionary[int, PendingOperation] = weakref.WeakValueDictionary()
        self._in_place: dict[int, torch.Tensor] = {}  # what peers may be reading that is not in a buffer
        self._stagings: list[Staging] = []
        weakref.finalize(self, self.slots.arena.close).atexit = False  # before what is in place goes, or in a buffer

    def staging(self, count: int) -> Staging:
        """Make buffers for operations of one kind."""
        self._stagings.append(Staging(self.slots, count))
        return self._stagings[-1]

    def claim(self, nbytes: int, kind: str, unit: str, departure: Departure) -> Operation:
        """Begin the next operation; all ranks must claim it for the same kind, unit and size."""
        # Operation 17 takes the slot of operation 1, which must be over on this rank.
        self._complete(self.slots.sequence + 1 - _UNDER_WAY)
        operation = Operation(self.slots, nbytes, kind, unit, departure)
        self._let_go()
        return operation

    def stage(self, staging: Staging, nbytes: int, name: str) -> torch.Tensor:
        """Return a buffer, [nbytes], for the operation that was claimed last, once nobody needs what it held."""
        # The last operation that used this buffer: completed here first, then read by all peers.
        user = staging.users[staging.turn]
        self._complete(user)
        self.slots.await_read(user)
        return staging.get(staging.turn, nbytes, name)

    def publish(
        self,
        operation: Operation,
        source: torch.Tensor,  # [bytes] (uint8), a buffer of `staging` or memory of the arena
        staging: Staging | None,  # None: peers read memory that is no buffer
        steps: Sequence[Step],
        steps_for_wait: int = 0,  # how many of the last steps must not be done early
    ) -> Pending:
        """Let peers read `source`; return what to wait for, which runs `steps` to complete the operation on this rank.

        Where its slot is needed it is completed sooner, and whoever waits later finds it done.
        """
        operation.steps = list(steps)
        operation.steps_for_wait = steps_for_wait
        pending = PendingOperation(operation, source)
        with self.slots.unrepeatable(f"telling its peers of {operation.name}"):
            self._live[operation.number] = pending
            if staging is None:
                self._in_place[operation.number] = source
            else:
                staging.take(operation.number)
            operation.leave()
            self.slots.publish(operation.number, source)
        return pending

    def await_peers(self) -> None:
        """Return once this rank has completed, and every peer has read, all that was to be read in place so far; the
        next operations take their buffers from the first on.
        """
        for number in sorted(self._in_place):
            # This rank's own reading comes first: peers may be waiting for that too.
            self._complete(number)
            self.slots.await_read(number)
        self._let_go()
        for staging in self._stagings:
            staging.turn = 0

    def recover(self, wanted: bool) -> None:
        """Begin anew with all ranks if `wanted`, once all want it; else nobody waits."""
        if wanted:
            self.slots.recover()
            for pending in list(self._live.values()):
                pending.lost = True
            self._live.clear()
            self._in_place.clear()

    def _complete(self, number: int) -> None:
        """Complete operation `number`, if it is under way."""
        pending = self._live.get(number)
        if pending is not None:
            pending.complete()

    def _let_go(self) -> None:
        """Forget what lies in place and was read by all peers."""
        for number in sorted(self._in_place):
            if not self.slots.is_read(number):
                return
            del self._in_place[number]


@dataclass(frozen=True)
class PendingReduction:
    """A reduction under way: the buffer that peers read, and the bytes between its parts."""

    number: int  # of the operation
    buffer: torch.Tensor
    stride: int

    def part(
        self,
        buffer: torch.Tensor,  # [bytes] (uint8), of rank `owner`
        owner: int,
        reader: int,
        like: torch.Tensor,  # [elements], of the length and dtype of the part
    ) -> torch.Tensor:
        """Return what `owner` wrote into its `buffer` for `reader`.

        A buffer has no part for its owner: on 3 ranks that of rank 1 has those of ranks 0 and 2.
        """
        index = reader
        if reader > owner:
            index -= 1
        first = index * self.stride
        return buffer[first : first + like.nbytes].view(like.dtype)

    def last(
        self,
        buffer: torch.Tensor,  # [bytes] (uint8), of any rank
        like: torch.Tensor,  # [elements], of the length and dtype of the sum
    ) -> torch.Tensor:
        """Return what an owner put behind the parts of its `buffer`: its sum."""
        return buffer[-self.stride :][: like.nbytes].view(like.dtype)


class SharedTransport(Transport):
    """Gathers and reduces among ranks of one machine through shared memory; the group is used for set-up only."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._operations = Operations(group)
        self._slots = self._operations.slots
        self._gathers = self._operations.staging(_BUFFERS)
        self._reductions = self._operations.staging(_BUFFERS)
        self._exchanges = self._operations.staging(_BUFFERS + 1)  # an all-reduce ends one unit later than it sums
        self._flags = self._operations.staging(_BUFFERS)
        self._announced = compat.silent_group(self.rank, self.ranks)

    def announce_buffers(self) -> None:
        """Tag this rank's buffers."""
        self._gathers.announce()
        self._reductions.announce()

    def storage(self, device: torch.device) -> ShardStorage:
        """Return memory that peers read in place."""
        return self._operations.storage

    def await_peers(self) -> None:
        """Return once every peer has read this rank's shards: their owner may write to them again."""
        self._operations.await_peers()

    def recover(self) -> None:
        """Begin anew with all ranks where one has failed in the middle; else nobody waits."""
        self.leave_step(unfinished=False)

    def leave_step(self, unfinished: bool) -> None:
        """Begin anew with all ranks where one has failed in the middle, or this one has left a step unfinished."""
        self._operations.recover(unfinished or self._slots.broken)

    def largest(
        self,
        flags: torch.Tensor,  # [units] (uint8), reduced in place
    ) -> torch.Tensor:
        """Return the largest of all ranks' `flags`."""
        operation = self._operations.claim(flags.nbytes, "comparison", "shards", Unseen())
        published = self._operations.stage(self._flags, flags.nbytes, operation.name)
        published.copy_(flags)
        peers = [peer for peer in self._slots.nearest_first if peer != self.rank]

        def read() -> None:  # repeatable, though in place: the largest stays the largest
            for peer in peers:
                theirs = self._slots.read(peer, operation.number, flags.nbytes)
                torch.maximum(flags, theirs, out=flags)

        pending = self._operations.publish(operation, published, self._flags, [Step(read)])
        pending.wait()
        return flags

    def meet(self) -> None:
        """Return once all ranks have come here; raise where one has left a step and waits for all to begin anew.

        A rank that went on to a collective of the process group would wait there for one that waits here.
        """
        operation = self._operations.claim(0, "meeting", "ranks", Unseen())
        peers = [peer for peer in self._slots.nearest_first if peer != self.rank]

        def come() -> None:
            for peer in peers:
                self._slots.await_written(peer, operation.number)

        nothing = torch.empty(0, dtype=torch.uint8)
        self._operations.publish(operation, nothing, None, [Step(come)]).wait()

    def all_gather(self, shard: SendShard, whole: UnshardedBuffer, label: CollectiveLabel) -> Pending:
        """Publish this rank's shard, or where it rests; on waiting, copy every rank's shard into `whole`.

        The memory is taken now: what is gathered ahead costs as much as it does where collectives have buffers.
        """
        layout = whole.layout
        nbytes = shard.nbytes
        whole.tensor  # noqa: B018 - takes its memory
        departure = self.depart(label, "all_gather", layout.total_bytes, layout.padding_bytes, shard.dtype)
        staging = None  # peers read the shard where it rests
        if shard.resident is None or nbytes == 0:  # a shard without bytes lies nowhere
            staging = self._gathers
        with events.span("all_gather", label.unit):
            operation = self._operations.claim(nbytes, "all_gather", label.unit, departure)
            source = self._source(operation, shard, staging)
            announce("all_gather", self._announced, lambda: _gather_buffers(shard, self.ranks))

        number = operation.number

        def read() -> None:
            # This rank's own shard first, then those of the next ranks, each copied to its rows in the whole.
            for peer in self._slots.nearest_first:
                part = source
                if peer != self.rank:
                    part = self._slots.read(peer, number, nbytes)
                unpack_from(peer, part, whole)

        return self._operations.publish(operation, source, staging, [Step(read)])

    def _source(self, operation: Operation, shard: SendShard, staging: Staging | None) -> torch.Tensor:
        """Return what peers will read: the shard where it rests, or a copy of it."""
        if staging is not None:
            source = self._operations.stage(staging, shard.nbytes, operation.name)
        elif shard.resident is not None and self._slots.arena.place_of(shard.resident) is not None:
            return shard.resident
        else:  # the arena refused to hold it; buffers in turn are for gathers that no rank has in place
            source = self._slots.allocate(shard.nbytes, operation.name)
        shard.write(source)
        return source

    def reduce_scatter(
        self,
        layout: Layout,
        gradients: Gradients,  # [rows, *others] each, whole; None: this rank has none
        output: torch.Tensor,  # [shard elements], in the dtype that is sent
        label: CollectiveLabel,
        average: Average,
    ) -> Pending:
        """Publish what peers need of the gradients; on waiting, average this rank's shard over the ranks."""
        departure = self.depart(label, "reduce_scatter", layout.total_bytes, layout.padding_bytes, output.dtype)

        def write(
            peer: int,
            target: torch.Tensor,  # [shard elements], written in place
        ) -> None:
            pack_part(layout, gradients, peer, target)
            average.mark(target)

        def shown() -> tuple[torch.Tensor, torch.Tensor]:
            return _reduce_buffers(layout, gradients, output)

        # Parts of every rank are as long as this rank's, and only this rank's is written: so one tensor stands for all.
        parts = [output] * self.ranks
        return self._reduce("reduce_scatter", label, departure, write, parts, average, shown)

    def all_reduce(
        self,
        buffer: torch.Tensor,  # [shard elements], averaged in place
        label: CollectiveLabel,
        average: Average,
        padding: int = 0,  # bytes of `buffer` that hold no gradient
        after: Pending | None = None,
    ) -> Pending:
        """Publish what peers need of `buffer`; on waiting, sum one nth of it and gather the others' sums."""
        pieces = buffer.tensor_split(self.ranks)  # of 7 elements on 3 ranks: 3, 2 and 2

        def write(
            peer: int,
            target: torch.Tensor,  # [elements of the part of `peer`], written in place
        ) -> None:
            if peer != self.rank:  # this rank's own part is where its sum will be
                target.copy_(pieces[peer])

        average_of_part = self._parts(buffer, average)[self.rank]
        return self._all_reduce(write, buffer, label, average_of_part, padding)

    def all_reduce_packed(
        self,
        layout: Layout,
        gradients: Gradients,  # [rows, *others] each, whole; None: this rank has none
        output: torch.Tensor,  # [shard elements], one shard being everything here
        label: CollectiveLabel,
        average: Average,
    ) -> Pending:
        """Do as `pack` and `all_reduce`, in one pass over the gradients."""
        firsts = _firsts(output, self.ranks)
        averages = self._parts(output, average)

        def write(
            peer: int,
            target: torch.Tensor,  # [elements of the part of `peer`], written in place
        ) -> None:
            pack_part(layout, gradients, 0, target, firsts[peer])  # of the only shard, that of rank 0
            averages[peer].mark(target)

        return self._all_reduce(write, output, label, averages[self.rank], layout.padding_bytes)

    def _parts(
        self,
        buffer: torch.Tensor,  # [elements]
        average: Average,
    ) -> list[Average]:
        """Return how each rank averages the part of `buffer` that it sums."""
        bounds = [*_firsts(buffer, self.ranks), buffer.numel()]  # of 7 elements on 3 ranks: 0, 3, 5, 7
        return [average.of_part(first, end - first) for first, end in itertools.pairwise(bounds)]

    def _all_reduce(
        self,
        write: Write,  # writes the part of a peer
        buffer: torch.Tensor,  # [elements], where the average will be
        label: CollectiveLabel,
        average: Average,  # of this rank's part
        padding: int,
    ) -> Pending:
        """Reduce-scatter and all-gather `buffer`, of which `write` publishes a peer's part."""
        departure = self.depart(label, "all_reduce", buffer.nbytes, padding, buffer.dtype)
        parts = buffer.tensor_split(self.ranks)

        def shown() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.empty_like(buffer), buffer

        return self._reduce("all_reduce", label, departure, write, parts, average, shown)

    def _reduce(
        self,
        kind: str,
        label: CollectiveLabel,
        departure: Departure,
        write: Write,  # writes the part of a peer
        parts: Sequence[torch.Tensor],  # [elements] each: what each rank sums; the sum of this rank is left in its own
        average: Average,
        shown: Callable[[], tuple[torch.Tensor, torch.Tensor]],  # output and source, for whoever watches
    ) -> Pending:
        """Publish every peer's part; on waiting, sum this rank's part as soon as all peers have published theirs.

        Each peer's part is written to a buffer, and this rank's own to where its sum will be. In an all-reduce peers
        find the sum behind the parts of the buffer when they come for it. All steps may be done early, except that
        this rank collects the sums of its peers.
        """
        is_all_reduce = kind == "all_reduce"
        staging = self._reductions
        span = "post_backward_reduce"
        count = self.ranks - 1  # parts in the buffer: one for each peer
        if is_all_reduce:
            staging = self._exchanges
            span = "all_reduce"
            count = self.ranks  # and behind them the sum that this rank makes
        stride = parts[0].nbytes  # the first part is the longest
        with events.span(span, label.unit):
            operation = self._operations.claim(count * stride, kind, label.unit, departure)
            buffer = self._operations.stage(staging, count * stride, operation.name)
            sent = PendingReduction(operation.number, buffer, stride)
            for peer in self._slots.nearest_first:
                target = parts[peer]
                if peer != self.rank:
                    target = sent.part(buffer, self.rank, peer, parts[peer])
                write(peer, target)
            announce(kind, self._announced, shown)

        output = parts[self.rank]
        # What whoever waits does. A sum in place cannot be done twice, so an interrupt there breaks the slots.
        steps = [
            Step(lambda: self._await_peers(sent)),
            Step(lambda: self._sum(sent, output, average), repeatable=False),
        ]
        steps_for_wait = 0
        if is_all_reduce:
            steps.append(Step(lambda: self._share(sent, output)))
            steps.append(Step(lambda: self._collect(sent, parts)))
            steps_for_wait = 1  # the last: it waits for the sums of peers
        return self._operations.publish(operation, buffer, staging, steps, steps_for_wait)

    def _read(self, sent: PendingReduction, peer: int) -> torch.Tensor:
        """Return the buffer of a peer, [bytes] (uint8)."""
        return self._slots.read(peer, sent.number, sent.buffer.nbytes)

    def _await_peers(self, sent: PendingReduction) -> None:
        """Wait until all peers have published their parts."""
        for peer in self._slots.nearest_first:
            self._slots.await_written(peer, sent.number)

    def _sum(
        self,
        sent: PendingReduction,
        output: torch.Tensor,  # [elements of this rank's part]
        average: Average,
    ) -> None:
        """Turn `output`, which holds this rank's own part, into the average over all ranks, summed in rank order.

        The sum begins with `output`, in place. That is in rank order too: the sum of the ranks before this one, plus
        this one's part, are two terms, which have the same sum in either order.
        """
        parts = []
        for peer in range(self.ranks):
            part = output
            if peer != self.rank:
                part = sent.part(self._read(sent, peer), peer, self.rank, output)
            parts.append(part)
        before = parts[: self.rank]
        after = parts[self.rank + 1 :]
        if len(before) > 1:  # rank 2 of 4 adds the sum of 0 and 1 to its own part, then 3
            wide = torch.promote_types(output.dtype, torch.float32)
            before = [sum(before[1:], start=before[0].to(wide))]
        average.sum_up([output, *before, *after], output)

    def _share(
        self,
        sent: PendingReduction,
        total: torch.Tensor,  # [elements of this rank's part]
    ) -> None:
        """Put this rank's sum behind the parts of its buffer, where nobody reads before it says so."""
        sent.last(sent.buffer, total).copy_(total)
        self._slots.summed(sent.number)

    def _collect(
        self,
        sent: PendingReduction,
        parts: Sequence[torch.Tensor],  # [elements] each, one a rank; those of peers are written
    ) -> None:
        """Copy the sums of all peers into their places."""
        for peer in self._slots.nearest_first:
            if peer != self.rank:
                self._slots.await_summed(peer, sent.number)
                parts[peer].copy_(sent.last(self._read(sent, peer), parts[peer]))


def _gather_buffers(shard: SendShard, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat output and source that a gather would have, were there any staging."""
    source = shard.made(torch.device("cpu"))
    return source.new_empty(ranks * source.numel()), source


def _reduce_buffers(
    layout: Layout,
    gradients: Gradients,  # [rows, *others] each, whole; None: missing
    output: torch.Tensor,  # [shard elements], for its dtype and length
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat output and source that a reduce-scatter would have."""
    source = output.new_empty(layout.ranks * output.numel())
    pack(layout, gradients, source)
    return torch.empty_like(output), source


def _firsts(
    buffer: torch.Tensor,  # [elements]
    ranks: int,
) -> list[int]:
    """Return the number of elements before each rank's part of `buffer`."""
    return [piece.storage_offset() - buffer.storage_offset() for piece in buffer.tensor_split(ranks)]
