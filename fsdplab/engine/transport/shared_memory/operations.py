"""What one rank has under way over the shared slots of its group: operations that it has published and not completed.

An operation is completed in steps by whoever waits for it, and a step that was interrupted is tried again; one that
cannot be (a sum in place) breaks the slots instead. Whoever drops an operation without waiting has given it up: this
rank will not read it, and says so to its peers. What peers may still read of this rank stays where it is until they
have said the same.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from fsdplab.engine import events
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import CollectiveLabel, Departure
from fsdplab.engine.transport.shared_memory.arenas import PAGE, SharedStorage
from fsdplab.engine.transport.shared_memory.slots import Broken, GivenUp, Slots

_UNDER_WAY = 16  # operations that may be: a rank that has not completed the one before so many completes it first
_REMEDY = (
    "call reset_iter_state() on the model on every rank and begin the step again, or build the model again on every"
    " rank"
)


class Step:
    """A part of completing an operation; `repeatable` says whether it may be run again after it was interrupted."""

    def __init__(self, run: Callable[[], None], repeatable: bool = True) -> None:
        self.run, self.repeatable = run, repeatable


class Operation:
    """An operation as its own rank sees it: claimed, published, completed or given up."""

    def __init__(self, slots: Slots, number: int, label: str) -> None:
        self.number, self.label, self._slots, self._epoch = number, label, slots, slots.epoch
        self.steps: list[Step] = []
        self.kept = 0  # steps that `advance` leaves to `complete`
        self.complete = self._published = False
        self._lost: GivenUp | None = None

    def publish(self, source: torch.Tensor) -> None:
        """Let peers read `source` as this operation."""
        self._published = True
        self._slots.publish(self.number, source)

    def advance(self) -> None:
        """Run the steps that peers wait for."""
        self._go_on(self.kept)

    def finish(self) -> None:
        """Run what is left of the steps, then let the peers go on."""
        self._go_on(0)
        self._slots.done(self.number)
        self.complete = True

    def _go_on(self, left: int) -> None:
        if self.steps:
            self._slots.check()
        if self._lost is not None:
            raise self._lost
        if self.steps and self._epoch != self._slots.epoch:
            raise Broken(f"{self.label} was given up when all ranks began anew: {_REMEDY}")
        try:
            self._run(left)
        except GivenUp as error:
            self._lost = error
            self._slots.done(self.number)
            raise

    def _run(self, left: int) -> None:
        while len(self.steps) > left:
            step = self.steps[0]
            if step.repeatable:
                step.run()
                del self.steps[0]
            else:
                with self._slots.unrepeatable(f"completing {self.label}"):
                    step.run()
                    del self.steps[0]

    def give_up(self) -> None:
        """This rank will not read it; nothing to say where peers were told nothing."""
        self.steps.clear()
        if self._published:
            self._slots.done(self.number)


class Completion:
    """What a wait adds to an operation: profiler ranges, its row of the ledger, and the arrival behind a link."""

    def __init__(self, span: str, label: CollectiveLabel, departure: Departure, start: int) -> None:
        self._span, self._label, self._departure, self._start = span, label, departure, start
        self._waited = 0

    def advance(self, operation: Operation) -> None:
        """Run the operation's early steps."""
        self._timed(f"{self._span}_sum", operation.advance)

    def complete(self, operation: Operation) -> None:
        """Run all that is left of it; nothing happens the second time."""
        if not operation.complete:
            now = self._timed(self._span, operation.finish)
            self._departure.moved(self._start, now, self._waited)

    def arrive(self, operation: Operation) -> None:
        """Complete it, and return when its result may be used."""
        awaited = time.time_ns()
        self.complete(operation)
        self._departure.arrive(awaited)

    def _timed(self, span: str, run: Callable[[], None]) -> int:
        awaited = time.time_ns()
        with events.span(span, self._label.unit):
            run()
        now = time.time_ns()
        self._waited += now - awaited
        return now


class SharedPending(Pending):
    """An operation under way on this rank."""

    __slots__ = ("_complete",)

    def __init__(self, operation: Operation, completion: Completion, source: torch.Tensor) -> None:
        self._complete = partial(completion.complete, operation)
        early, finish = partial(completion.advance, operation), partial(completion.arrive, operation)
        super().__init__(finish, source, early=early, on_drop=operation.give_up)

    def complete(self) -> None:
        """Complete the operation and let its memory go; whoever waits later waits for an emulated link alone."""
        self._complete()
        self._buffers = ()


class Staging:
    """Memory that holds what travels, where that is not the slice at rest: buffers that operations of one kind take in
    turn.
    """

    def __init__(self, buffers: int) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * buffers
        self.users = [0] * buffers  # the last operation that each was published for
        self.turn = 0

    def take(self, number: int) -> None:
        """Operation `number` uses the buffer whose turn it is."""
        self.users[self.turn % len(self.users)] = number
        self.turn += 1

    def announce(self) -> None:
        """Tag the memory as communication buffers."""
        for buffer in self.buffers:
            events.tag("communication_buffers", buffer, "")


class Operations:
    """The operations of this rank in `group`; every member must make it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.slots = Slots(group, _UNDER_WAY, _REMEDY)
        self.storage = SharedStorage(self.slots.arena)
        self._live: weakref.WeakValueDictionary[int, SharedPending] = weakref.WeakValueDictionary()
        self._in_place: dict[int, torch.Tensor] = {}  # what peers may be reading that is not in a buffer
        self._stagings: list[Staging] = []
        weakref.finalize(self, self.slots.arena.close).atexit = False  # before what is in place goes, or in a buffer

    def staging(self, buffers: int) -> Staging:
        """Buffers for operations of one kind."""
        self._stagings.append(Staging(buffers))
        return self._stagings[-1]

    def claim(self, nbytes: int, label: str) -> Operation:
        """The next operation; all ranks must claim it for the same label and size."""
        self._complete(self.slots.sequence + 1 - _UNDER_WAY)
        number = self.slots.claim_number(nbytes, label)
        self._let_go()
        return Operation(self.slots, number, label)

    def stage(self, staging: Staging, nbytes: int, label: str) -> torch.Tensor:
        """A buffer (bytes) for the operation that was claimed last, once nobody needs what it held."""
        turn = staging.turn % len(staging.buffers)
        self._complete(staging.users[turn])
        self.slots.await_read(staging.users[turn])
        if nbytes > len(staging.buffers[turn]):
            staging.buffers[turn] = torch.empty(0, dtype=torch.uint8)  # gone before the larger one comes
            staging.buffers[turn] = self.slots.allocate(-(-nbytes // PAGE) * PAGE, label)
            staging.announce()
        return staging.buffers[turn][:nbytes]

    def publish(
        self,
        operation: Operation,
        source: torch.Tensor,
        staging: Staging | None,
        steps: Sequence[Step],
        completion: Completion,
    ) -> Pending:
        """Peers may read `source`, a buffer of `staging` or memory of the arena; on waiting, `steps` complete the
        operation on this rank, as `completion` says. Where its slot is needed that happens sooner, and whoever waits
        later finds it done.
        """
        operation.steps = list(steps)
        pending = SharedPending(operation, completion, source)
        with self.slots.unrepeatable(f"telling its peers of {operation.label}"):
            self._live[operation.number] = pending
            if staging is None:
                self._in_place[operation.number] = source
            else:
                staging.take(operation.number)
            operation.publish(source)
        return pending

    def settle(self) -> None:
        """Return once this rank has completed, and every peer has read, all that was to be read in place so far."""
        for number in sorted(self._in_place):
            self._complete(number)
            self.slots.await_read(number)
        self._let_go()

    def recover(self, wanted: bool) -> None:
        """Where it is wanted, wait until all ranks want it, and begin anew."""
        if wanted:
            self.slots.recover()
            for pending in list(self._live.values()):
                pending.lost = True
            self._live.clear()
            self._in_place.clear()

    def _complete(self, number: int) -> None:
        pending = self._live.get(number)
        if pending is not None:
            try:
                pending.complete()
            except GivenUp:
                pass  # nobody here needs it now; whoever waits for it after all is told

    def _let_go(self) -> None:
        for number in sorted(self._in_place):
            if not self.slots.is_read(number):
                return
            del self._in_place[number]
