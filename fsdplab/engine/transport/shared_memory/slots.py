"""Shared memory between the ranks of one machine: slots that one rank writes and its peers read.

The operations of a group are numbered alike on all ranks; number s uses slot s modulo the number of slots. Two words a
slot order everything: `ready` (its owner has published operation s, and says what it is and where it lies) and `done`
(this rank has read everybody's operation s, or will not). A slot is written again, and what it named is given up, only
when every peer is done with what it held: a fast rank that gathers ahead overwrites nothing unread. Waiting sleeps in
the kernel and ends with an error when the awaited rank died.

A number is taken when its operation is published: whatever is interrupted before that can be tried again. What cannot
be tried again (ranks out of step, a peer that is gone, a sum half made) breaks the slots for all ranks: everybody's
next use says so, until all ranks come to `recover` and begin anew behind the last number that any of them has used.
"""

from __future__ import annotations

import ctypes
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.transport.shared_memory.arena import PAGE, Place, Segment, opened

_LINE = 64  # bytes
_LABEL = 64  # bytes of a label
_REASON = struct.Struct("640s")
_BROKEN, _STOPPED, _STOPPED_AT, _REASON_AT, _SLOTS_AT = (line * _LINE for line in (1, 2, 3, 4, 16))  # 0: the cookie
_SLOT = 4 * _LINE
_WHAT = struct.Struct(f"<5Q16x{_LABEL}s")  # an operation's number and size, a place, and in the next line its label
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the x86-64 system call and its operations, for memory shared between processes
# how long a sleeper sleeps at most (seconds, nanoseconds): then it looks whether the awaited rank lives
_POLL = (ctypes.c_long * 2)(0, 50_000_000)
_NEW_GROUP = "destroy the process group on every rank and make a new one"
_NOWHERE = Place(0, 0, 0)


@cache
def _call() -> Callable[..., int]:
    """The C library's `syscall`, looked up when it is first needed: Windows has none."""
    return ctypes.CDLL(None, use_errno=True).syscall


class Word:
    """A number that only grows; whoever waits for it sleeps in the kernel (futex)."""

    def __init__(self, memory: ctypes.Array[ctypes.c_uint8], offset: int) -> None:
        self._value = ctypes.c_uint64.from_buffer(memory, offset)
        self._low = ctypes.byref(self._value)  # a futex is 32 bits; little-endian, so these are the lower ones

    @property
    def value(self) -> int:
        return self._value.value

    def raise_to(self, number: int) -> None:
        """Store, unless it is there already, and wake whoever sleeps on it."""
        if self._value.value < number:
            self._value.value = number
            _call()(_FUTEX, self._low, _WAKE, ctypes.c_int(2**31 - 1), None, None, 0)

    def sleep(self, seen: int) -> None:
        """Sleep until it is no longer `seen`, or for a while."""
        _call()(_FUTEX, self._low, _WAIT, ctypes.c_uint32(seen % 2**32), ctypes.byref(_POLL), None, 0)


class Described(NamedTuple):
    """What a slot's operation is."""

    number: int
    nbytes: int
    label: str

    @classmethod
    def of(cls, number: int, nbytes: int, label: str) -> Described:
        """With the label as long as peers read it."""
        return cls(number, nbytes, label.encode()[:_LABEL].decode(errors="ignore"))


class Words:
    """The words of one rank over `count` slots, in the header of its arena; it alone writes them.

    Some are the rank's (in which epoch it is broken, or has stopped and where), four lines belong to each slot: `ready`
    with what the slot's operation is, its label, `done`, and `summed`. A word is 64 bits in a cache line of its own and
    only grows. Plain stores are ordered on x86-64 only, so sharing is offered there and nowhere else.
    """

    def __init__(self, header: Segment, count: int) -> None:
        self._memory = header.memory
        self.broken, self.stopped = Word(self._memory, _BROKEN), Word(self._memory, _STOPPED)
        self.ready, self.done, self.summed = (
            [Word(self._memory, _SLOTS_AT + slot * _SLOT + line * _LINE) for slot in range(count)] for line in (0, 2, 3)
        )

    @staticmethod
    def nbytes(count: int) -> int:
        """Bytes of a header for `count` slots."""
        return _SLOTS_AT + count * _SLOT

    def describe(self, slot: int, what: Described, place: Place) -> None:
        """Say what the slot is about to hold, and where it lies; `ready` is raised after it."""
        at = _SLOTS_AT + slot * _SLOT + 8
        _WHAT.pack_into(self._memory, at, what.number, what.nbytes, *place, what.label.encode())

    def described(self, slot: int) -> tuple[Described, Place]:
        """What `describe` said."""
        number, nbytes, *place, label = _WHAT.unpack_from(self._memory, _SLOTS_AT + slot * _SLOT + 8)
        return Described(number, nbytes, _text(label)), Place(*place)

    def stop(self, epoch: int, sequence: int) -> None:
        """Say at which operation this rank has stopped in `epoch`; kept until it stops in the one after the next."""
        struct.pack_into("<Q", self._memory, _STOPPED_AT + epoch % 2 * 8, sequence)
        self.stopped.raise_to(epoch)

    def stopped_at(self, epoch: int) -> int:
        """What `stop` said."""
        return int(struct.unpack_from("<Q", self._memory, _STOPPED_AT + epoch % 2 * 8)[0])

    @property
    def reason(self) -> str:
        """Why this rank is broken."""
        return _text(*_REASON.unpack_from(self._memory, _REASON_AT))

    @reason.setter
    def reason(self, text: str) -> None:
        _REASON.pack_into(self._memory, _REASON_AT, text.encode()[: _REASON.size])


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")


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
        self.rank, self.ranks, self.count = group.rank(), group.size(), count
        self.sequence, self.epoch, self._over = 0, 1, 0  # `_over`: the last epoch in which this rank has stopped
        self._patience_s, self._remedy = compat.seconds_before_giving_up(group), remedy
        memory = opened(group, Words.nbytes(count))
        self.arena, self._arenas = memory.own, memory.arenas
        # this rank, then the next ones: ranks do not all read the same owner at once
        self.nearest_first = [(self.rank + step) % self.ranks for step in range(self.ranks)]
        self._processes = memory.processes
        self._words = [Words(arena.header, count) for arena in memory.arenas]
        weakref.finalize(self, self.arena.close).atexit = False
        self._claimed = [Described(0, 0, "")] * count

    # ---- what the owner of a slot does

    def claim(self, nbytes: int, label: str) -> int:
        """The next operation's number. `label` says what it is; all ranks must claim it for the same label and size."""
        self.check()
        number = self.sequence + 1
        self.await_read(number - self.count)
        self._claimed[number % self.count] = Described.of(number, nbytes, label)
        return number

    def allocate(self, nbytes: int, label: str) -> torch.Tensor:
        """Memory of the arena for an operation; where there is none, all ranks fail."""
        try:
            return self.arena.allocate(nbytes)
        except OSError as error:
            self._no_memory(f"{nbytes} bytes to share for {label or 'an operation'}", error)

    def publish(self, number: int, source: torch.Tensor) -> None:
        """Peers may read `source`, which lies in the arena, as operation `number`."""
        slot = number % self.count
        with self.unrepeatable("telling its peers of an operation"):
            place = self.arena.place_of(source) if source.numel() else None
            self._words[self.rank].describe(slot, self._claimed[slot], place or _NOWHERE)
            self.sequence = number
            self._words[self.rank].ready[slot].raise_to(number)

    def await_read(self, number: int) -> None:
        """Return once every peer is done with operation `number`."""
        for peer, words in enumerate(self._words if number > 0 else ()):
            self._await(words.done[number % self.count], number, peer, "finish reading")

    def is_read(self, number: int) -> bool:
        """Whether every peer is done with operation `number`."""
        return all(words.done[number % self.count].value >= number for words in self._words)

    # ---- what its readers do

    def read(self, peer: int, number: int, nbytes: int) -> torch.Tensor:
        """What `peer` published as operation `number` (bytes), once it has; an error if it died or does something
        else.
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
        (theirs, place), ours = self._words[peer].described(slot), self._claimed[slot]
        if theirs != ours:
            self._fail(
                f"ranks are out of step: as operation {number} rank {self.rank} runs {ours.label or 'one'}"
                f" ({ours.nbytes} bytes), rank {peer} runs {theirs.label or 'another'} ({theirs.nbytes} bytes); every"
                " rank must run the same units in the same order, so look for one that is skipped on some ranks"
            )
        return place

    def done(self, number: int) -> None:
        """This rank has read everything of operation `number`, or will not; to say it again changes nothing."""
        self._words[self.rank].done[number % self.count].raise_to(number)

    def summed(self, number: int) -> None:
        """This rank has written the second half of operation `number`."""
        self._words[self.rank].summed[number % self.count].raise_to(number)

    def await_summed(self, peer: int, number: int) -> None:
        """Return once `peer` has written the second half; `GivenUp` where it has dropped the operation."""
        words, slot = self._words[peer], number % self.count

        def check() -> None:
            if words.done[slot].value >= number > words.summed[slot].value:
                raise GivenUp(
                    f"rank {peer} has dropped operation {number} ({self._claimed[slot].label}), for which rank"
                    f" {self.rank} waits; every rank must complete it, or none: {self._remedy}"
                )

        self._await(words.summed[slot], number, peer, "sum its part of", check)

    # ---- trouble

    def check(self) -> None:
        """`Broken` where a rank is, or this one has stopped for good."""
        if self._over >= self.epoch:
            raise Broken(f"rank {self.rank} has left its step unfinished and not begun anew: {self._remedy}")
        if self.broken:
            told = [f"rank {rank}: {words.reason}" for rank, words in enumerate(self._words) if words.reason]
            raise Broken(f"these ranks cannot go on sharing memory ({'; '.join(told)}): {self._remedy}")

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
        own, self._over = self._words[self.rank], self.epoch
        for word in own.done:
            word.raise_to(self.sequence)
        own.stop(self.epoch, self.sequence)
        for peer, words in enumerate(self._words):
            if words.stopped.value < self.epoch:
                self._sleep_until(words.stopped, self.epoch, peer, "begin anew", lambda: None)
        last = max(words.stopped_at(self.epoch) for words in self._words)
        for word in (*own.ready, *own.done, *own.summed):
            word.raise_to(last)
        own.reason = ""
        self.sequence, self.epoch = last, self.epoch + 1

    def _await(self, word: Word, number: int, peer: int, what: str, check: Callable[[], None] = lambda: None) -> None:
        """Return once a word of `peer` is `number`; `check` raises where it never will be."""
        if word.value >= number:
            return

        def both() -> None:
            self.check()
            check()
            if self._words[peer].stopped.value >= self.epoch and word.value < number:
                raise Broken(
                    f"rank {self.rank} waited for rank {peer} to {what} operation {number}"
                    f" ({self._claimed[number % self.count].label}), but rank {peer} has left its step unfinished and"
                    f" begins anew: {self._remedy}"
                )

        self._sleep_until(word, number, peer, f"{what} operation {number}", both)

    def _sleep_until(self, word: Word, number: int, peer: int, what: str, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._patience_s
        while (seen := word.value) < number:
            check()
            word.sleep(seen)
            if word.value < number and self._processes[peer].ended():
                self._fail(
                    f"rank {self.rank} waited for rank {peer} to {what}, but rank {peer} has died; look for its own"
                    " error in its log"
                )
            if time.monotonic() > deadline:
                label = self._claimed[number % self.count].label or "unnamed"
                self._fail(
                    f"rank {self.rank} waited {self._patience_s:.0f} s for rank {peer} to {what} ({label}); rank {peer}"
                    " lives but has not come to it"
                )

    def _no_memory(self, what: str, error: OSError) -> NoReturn:
        self._fail(
            f"rank {self.rank} got no memory {what} ({error}): raise the limits of the process (ulimit -f, -v) or of"
            " its container, or use transport='gloo' on every rank",
            error,
        )

    def _fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        self._break(reason)
        raise RuntimeError(reason) from cause

    def _break(self, reason: str) -> None:
        own = self._words[self.rank]
        if own.broken.value < self.epoch:
            own.reason = reason
            own.broken.raise_to(self.epoch)


class Buffers:
    """Memory of the arena that operations of one kind use in turn."""

    def __init__(self, slots: Slots, count: int) -> None:
        self._slots = slots
        self._memory = [torch.empty(0, dtype=torch.uint8)] * count

    def get(self, index: int, nbytes: int, label: str) -> torch.Tensor:
        """Buffer `index` (bytes), whose last contents nobody needs."""
        if nbytes > len(self._memory[index]):
            self._memory[index] = torch.empty(0, dtype=torch.uint8)  # gone before the larger one comes
            self._memory[index] = self._slots.allocate(-(-nbytes // PAGE) * PAGE, label)
            self.announce()
        return self._memory[index][:nbytes]

    def announce(self) -> None:
        """Tag the memory as communication buffers."""
        for buffer in self._memory:
            events.tag("communication_buffers", buffer, "")
