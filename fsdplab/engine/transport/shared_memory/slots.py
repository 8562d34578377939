"""Synchronises the ranks of one machine: slots of shared memory that one rank writes and its peers read.

The operations of a group are numbered alike on all ranks; number s uses slot s modulo the number of slots. Two words a
slot order everything: `ready` (its owner has published operation s, and says what it is and where it lies) and `done`
(this rank has read everybody's operation s, or will not). A slot is written again, and what it named is given up, only
when every peer is done with what it held: a fast rank that gathers ahead overwrites nothing unread. Waiting sleeps in
the kernel and ends with an error when the awaited rank died, or ended normally with fewer steps than this one.

A number is taken when its operation is published: whatever is interrupted before that can be tried again. What cannot
be tried again (ranks out of step, a peer that is gone, a sum half made) breaks the slots for all ranks: everybody's
next use says so, until all ranks come to `recover` and begin anew behind the last number that any of them has used.
"""

from __future__ import annotations

import ctypes
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.util import Finalize
from typing import NoReturn

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.transport.shared_memory.arena import COOKIE, Memory, PeerMemory, Place, pages

_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the x86-64 system call and its operations, for memory shared between processes
# how long a sleeper sleeps at most (seconds, nanoseconds): then it looks whether the awaited rank lives
_POLL = (ctypes.c_long * 2)(0, 50_000_000)
_NEW_GROUP = "destroy the process group on every rank and make a new one"
_NOWHERE = Place()
_LINE, _LABEL, _REASON = 64, 80, 648  # bytes of a cache line, a label and a reason


@cache
def _call() -> Callable[..., int]:
    """Return the C library's `syscall`, looked up when it is first needed: Windows has none."""
    return ctypes.CDLL(None, use_errno=True).syscall


class Word(ctypes.Structure):
    """A number that only grows; whoever waits for it sleeps in the kernel (futex)."""

    _fields_ = (("value", ctypes.c_uint64),)
    value: int

    def raise_to(self, number: int) -> None:
        """Store, unless it is there already, and wake whoever sleeps on it."""
        if self.value < number:
            self.value = number
            _call()(_FUTEX, ctypes.byref(self), _WAKE, ctypes.c_int(2**31 - 1), None, None, 0)

    def sleep(self, seen: int) -> None:
        """Sleep until it is no longer `seen`, or for a while."""
        # a futex is 32 bits; little-endian, so these are the lower ones
        _call()(_FUTEX, ctypes.byref(self), _WAIT, ctypes.c_uint32(seen % 2**32), ctypes.byref(_POLL), None, 0)


class Claim(ctypes.Structure):
    """What a slot's operation is."""

    _fields_ = (("number", ctypes.c_uint64), ("nbytes", ctypes.c_uint64), ("_label", ctypes.c_char * _LABEL))

    @property
    def label(self) -> str:
        """As much of the label as fits."""
        return str(self._label, errors="ignore")


class State(ctypes.Structure):
    """How a rank is: in which epoch it is broken, and why; in which it has stopped, and at which operation, kept until
    it stops in the epoch after the next; whether it has left the group for good, and not by an error.
    """

    _fields_ = (
        ("cookie", ctypes.c_uint8 * COOKIE),
        ("broken", Word),
        ("stopped", Word),
        ("stopped_at", ctypes.c_uint64 * 2),
        ("has_left", Word),
        ("reason", ctypes.c_char * _REASON),
    )


class Slot(ctypes.Structure):
    """What a rank says of a slot: `ready` and what it holds, `done`, `summed`. Each begins a cache line."""

    _fields_ = (
        # the first two cache lines: 8 + 24 + 96 bytes
        ("ready", Word),
        ("place", Place),
        ("claim", Claim),
        # a cache line each: 8 bytes, and as many as fill it
        ("done", Word),
        ("_done", ctypes.c_uint8 * (_LINE - 8)),
        ("summed", Word),
        ("_summed", ctypes.c_uint8 * (_LINE - 8)),
    )


class Words:
    """What one rank, and it alone, writes into the header of its arena, of `count` slots.

    Words only grow. Plain stores are ordered on x86-64 only, so sharing is offered there and nowhere else.
    """

    def __init__(self, header: Memory, count: int) -> None:
        self.state = State.from_buffer(header)
        self.slots = list((Slot * count).from_buffer(header, ctypes.sizeof(State)))
        self.broken, self.stopped = self.state.broken, self.state.stopped
        # looked up once: ctypes makes a new object each time
        self.ready, self.done, self.summed = zip(*((slot.ready, slot.done, slot.summed) for slot in self.slots))


class Broken(RuntimeError):
    """A rank has failed in the middle of something that cannot be repeated; says which, why, and what to do."""


class GivenUp(RuntimeError):
    """A peer has dropped an operation that this rank wants to complete."""


class Slots:
    """The shared slots of all ranks of `group`; `remedy` says what ends the trouble when they are broken.

    An operation takes the slot of the one `count` before it, which must be `done` by then. Built over the group itself:
    every member must call it. Raises `SharingRefused` on all ranks where the system does not let one of them share.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, remedy: str = _NEW_GROUP) -> None:
        self.rank = group.rank()
        self.ranks = group.size()
        self.count = count
        self.sequence = 0  # the number of the operation that this rank published last
        self.epoch = 1  # how often all ranks have begun
        self._over = 0  # the last epoch in which this rank has stopped
        self._patience_s = compat.seconds_before_giving_up(group)
        self._remedy = remedy
        memory = PeerMemory(group, ctypes.sizeof(State) + count * ctypes.sizeof(Slot))
        self.arena, self._arenas = memory.own, memory.arenas
        # this rank, then the next ones: ranks do not all read the same owner at once
        self.nearest_first = [(self.rank + step) % self.ranks for step in range(self.ranks)]
        self._processes = memory.processes
        self._words = [Words(arena.header, count) for arena in memory.arenas]
        weakref.finalize(self, self.arena.close).atexit = False
        self._claimed = [Claim()] * count  # by slot: what this rank takes its operation to be
        # when the group is destroyed, or the process ends; one that is killed says nothing
        Finalize(self, _leave, args=(self._words[self.rank].state,), exitpriority=0)

    # ---- what the owner of a slot does

    def claim(self, nbytes: int, label: str) -> int:
        """Return the next operation's number; all ranks must claim it for the same `label` and size."""
        self.check()
        number = self.sequence + 1
        self.await_read(number - self.count)
        # Only noted: `publish` takes the number, so whatever is interrupted before that can be claimed again.
        self._claimed[number % self.count] = Claim(number, nbytes, label.encode()[:_LABEL])
        return number

    def allocate(self, nbytes: int, label: str) -> torch.Tensor:
        """Return memory of the arena for an operation; where there is none, all ranks fail."""
        try:
            return self.arena.allocate(nbytes)
        except OSError as error:
            self._no_memory(f"{nbytes} bytes to share for {label or 'an operation'}", error)

    def publish(
        self,
        number: int,
        source: torch.Tensor,  # [bytes] (uint8), in this rank's arena
    ) -> None:
        """Let peers read `source`, which lies in the arena, as operation `number`."""
        slot = number % self.count
        with self.unrepeatable("telling its peers of an operation"):
            # Without bytes there is nothing to map: peers read an empty tensor.
            place = None
            if source.numel():
                place = self.arena.place_of(source)
            words = self._words[self.rank]
            words.slots[slot].place = place or _NOWHERE
            words.slots[slot].claim = self._claimed[slot]
            self.sequence = number
            words.ready[slot].raise_to(number)  # last: who sees this number sees what was written before it

    def await_read(self, number: int) -> None:
        """Return once every peer is done with operation `number`."""
        if number <= 0:  # there was none
            return
        for peer, words in enumerate(self._words):
            self._await(words.done[number % self.count], number, peer, "finish reading")

    def is_read(self, number: int) -> bool:
        """Whether every peer is done with operation `number`."""
        return all(words.done[number % self.count].value >= number for words in self._words)

    # ---- what its readers do

    def read(self, peer: int, number: int, nbytes: int) -> torch.Tensor:
        """Return what `peer` published as operation `number`, [nbytes], once it has.

        Raises where the peer died, or does something else.
        """
        place = self.await_written(peer, number)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            return self._arenas[peer].part(place, nbytes)
        except OSError as error:
            self._no_memory(f"to map {nbytes} bytes of rank {peer}", error)

    def await_written(self, peer: int, number: int) -> Place:
        """Return where operation `number` of `peer` lies, once it has published it; errors as those of `read`."""
        slot = number % self.count
        self._await(self._words[peer].ready[slot], number, peer, "write")
        published = self._words[peer].slots[slot]
        claim, claim_of_peer = self._claimed[slot], published.claim
        if bytes(claim_of_peer) != bytes(claim):
            self._fail(
                f"ranks are out of step: as operation {number} rank {self.rank} runs {claim.label or 'one'}"
                f" ({claim.nbytes} bytes), rank {peer} runs {claim_of_peer.label or 'another'}"
                f" ({claim_of_peer.nbytes} bytes); every"
                " rank must run the same units in the same order, so look for one that is skipped on some ranks"
            )
        return published.place

    def done(self, number: int) -> None:
        """Tell that this rank has read everything of operation `number`, or will not; may be called again."""
        self._words[self.rank].done[number % self.count].raise_to(number)

    def summed(self, number: int) -> None:
        """Tell that this rank has written the second half of operation `number`."""
        self._words[self.rank].summed[number % self.count].raise_to(number)

    def await_summed(self, peer: int, number: int) -> None:
        """Return once `peer` has written the second half; `GivenUp` where it has dropped the operation."""
        self._await(self._words[peer].summed[number % self.count], number, peer, "sum its part of")

    # ---- trouble

    def check(self) -> None:
        """Raise `Broken` where a rank is, or this one has stopped for good."""
        if self._over >= self.epoch:
            raise Broken(f"rank {self.rank} has left its step unfinished and not begun anew: {self._remedy}")
        if self.broken:
            reasons = []
            for rank, words in enumerate(self._words):
                reason = words.state.reason.decode(errors="ignore")
                if reason:
                    reasons.append(f"rank {rank}: {reason}")
            raise Broken(f"these ranks cannot go on sharing memory ({'; '.join(reasons)}): {self._remedy}")

    @contextmanager
    def unrepeatable(self, what: str) -> Iterator[None]:
        """Inside, whatever is raised breaks the slots for all ranks."""
        try:
            yield
        except BaseException as error:
            self._break(f"{what} was interrupted by {type(error).__name__}")
            raise

    @property
    def broken(self) -> bool:
        """Whether a rank is."""
        return any(words.broken.value >= self.epoch for words in self._words)

    def recover(self) -> None:
        """Wait until all ranks have come here, and begin anew.

        No operation of before can be completed then. Who has one to read may do so first; who waits for one that this
        rank has not published is told. A wait that is interrupted here can be tried again.
        """
        words_of_this_rank = self._words[self.rank]
        self._over = self.epoch
        for word in words_of_this_rank.done:  # it will read nothing of before
            word.raise_to(self.sequence)
        # Two places in turn: a peer may read that of this epoch while this rank stops in the next.
        words_of_this_rank.state.stopped_at[self.epoch % 2] = self.sequence
        words_of_this_rank.stopped.raise_to(self.epoch)
        for peer, words in enumerate(self._words):
            if words.stopped.value < self.epoch:
                self._sleep_until(words.stopped, self.epoch, peer, "begin anew", lambda: None)
        # Ranks stopped at 7 and at 9: all go on with operation 10, as if 8 and 9 were over on every rank.
        last = max(words.state.stopped_at[self.epoch % 2] for words in self._words)
        for word in (*words_of_this_rank.ready, *words_of_this_rank.done, *words_of_this_rank.summed):
            word.raise_to(last)
        words_of_this_rank.state.reason = b""
        self.sequence = last
        self.epoch += 1

    def _await(self, word: Word, number: int, peer: int, what: str) -> None:
        """Return once a word of `peer` is `number`; raise where it never will be."""
        # The peer was faster: nothing sleeps.
        if word.value >= number:
            return
        words = self._words[peer]
        what = f"{what} operation {number}"
        label = self._claimed[number % self.count].label
        if label:
            what = f"{what} ({label})"

        def check() -> None:
            self.check()
            # `word` is read again, last: the peer may have raised it since, and may then well have gone on.
            if words.done[number % self.count].value >= number > word.value:
                raise GivenUp(
                    f"rank {self.rank} waits for rank {peer} to {what}, but rank {peer} has dropped it; every rank must"
                    f" complete it, or none: {self._remedy}"
                )
            if words.stopped.value >= self.epoch and word.value < number:
                raise Broken(
                    f"rank {self.rank} waited for rank {peer} to {what}, but rank {peer} has left its step unfinished"
                    f" and begins anew: {self._remedy}"
                )

        self._sleep_until(word, number, peer, what, check)

    def _sleep_until(self, word: Word, number: int, peer: int, what: str, check: Callable[[], None]) -> None:
        """Sleep until a word of `peer` is `number`; between naps, see whether `check` raises or the peer is gone."""
        waited = f"rank {self.rank} waited for rank {peer} to {what}"
        deadline = time.monotonic() + self._patience_s
        while (seen := word.value) < number:
            check()
            word.sleep(seen)
            if word.value < number:
                gone = self._how_gone(peer)
                if gone and word.value < number:  # it may have raised the word just before it ended
                    self._fail(f"{waited}, but rank {peer} {gone}")
            if time.monotonic() > deadline:
                self._fail(f"{waited}; after {self._patience_s:.0f} s rank {peer} lives but has not come to it")

    def _how_gone(self, peer: int) -> str:
        """Return what became of `peer` and what to do; "" while it may still come."""
        if self._words[peer].state.has_left.value:
            return (
                "has ended normally: it ran fewer steps or batches than this rank; give every rank as many"
                " (DistributedSampler does), or stop all ranks when one has no more; sys.exit ends a rank so too"
            )
        if self._processes[peer].ended():
            return "has died; look for its own error in its log"
        return ""

    def _no_memory(self, what: str, error: OSError) -> NoReturn:
        """Break the slots: this rank has no memory for what its peers wait for."""
        self._fail(
            f"rank {self.rank} got no memory {what} ({error}): raise the limits of the process (ulimit -f, -v) or of"
            " its container, or use transport='gloo' on every rank",
            error,
        )

    def _fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Break the slots for all ranks, and raise `reason` here."""
        self._break(reason)
        raise RuntimeError(reason) from cause

    def _break(self, reason: str) -> None:
        """Break the slots for all ranks; the first reason is kept."""
        words = self._words[self.rank]
        if words.broken.value < self.epoch:
            words.state.reason = reason.encode()[:_REASON]
            words.broken.raise_to(self.epoch)


def _leave(state: State) -> None:
    """Tell peers that this rank has left in good order: no exception ends its process."""
    if sys.exc_info()[1] is None and getattr(sys, "last_value", None) is None:
        state.has_left.raise_to(1)


class Buffers:
    """Memory of the arena that operations of one kind use in turn."""

    def __init__(self, slots: Slots, count: int) -> None:
        self._slots = slots
        self._memory = [torch.empty(0, dtype=torch.uint8)] * count

    def get(self, index: int, nbytes: int, label: str) -> torch.Tensor:
        """Return buffer `index`, [nbytes], whose last contents nobody needs."""
        if nbytes > len(self._memory[index]):
            self._memory[index] = torch.empty(0, dtype=torch.uint8)  # gone before the larger one comes
            self._memory[index] = self._slots.allocate(pages(nbytes), label)
            self.announce()
        return self._memory[index][:nbytes]

    def announce(self) -> None:
        """Tag the memory as communication buffers."""
        for buffer in self._memory:
            events.tag("communication_buffers", buffer, "")
