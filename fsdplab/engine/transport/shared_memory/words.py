"""One rank's words in shared memory, which it alone writes and its peers read: the header of its arena.

Some are the rank's (in which epoch it is broken, or has stopped and where), four lines belong to each slot: `ready`
with what the slot's operation is, its label, `done`, and `summed`. A word is 64 bits in a cache line of its own and
only grows. Plain stores are ordered on x86-64 only, so sharing is offered there and nowhere else.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from fsdplab.engine.transport.shared_memory.arenas import Place, Segment

_LINE = 64  # bytes
_LABEL = 64  # bytes of a label
_REASON = 640  # bytes of a reason
_BROKEN, _STOPPED, _STOPPED_AT, _REASON_AT, _SLOTS_AT = (line * _LINE for line in (1, 2, 3, 4, 16))  # 0: the cookie
_SLOT = 4 * _LINE
_WHAT = struct.Struct("<5Q")  # an operation's number and size, and a place
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the x86-64 system call and its operations, for memory shared between processes
_POLL_S = 0.05  # how long a sleeper sleeps at most: then it looks whether the awaited rank lives
_call = ctypes.CDLL(None, use_errno=True).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


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
            _call(_FUTEX, self._low, _WAKE, ctypes.c_int(2**31 - 1), None, None, 0)

    def sleep(self, seen: int) -> None:
        """Sleep until it is no longer `seen`, or for a while."""
        pause = _Timespec(0, int(_POLL_S * 1e9))
        _call(_FUTEX, self._low, _WAIT, ctypes.c_uint32(seen % 2**32), ctypes.byref(pause), None, 0)


class Described(NamedTuple):
    """What a slot's operation is."""

    number: int
    nbytes: int
    label: str


class Words:
    """The words of one rank over `count` slots."""

    def __init__(self, header: Segment, count: int) -> None:
        self._memory, self._start = header.memory, header.address
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
        start = _SLOTS_AT + slot * _SLOT
        _WHAT.pack_into(self._memory, start + 8, what.number, what.nbytes, *place)
        self._write(start + _LINE, what.label, _LABEL)

    def described(self, slot: int) -> Described:
        """What `describe` said."""
        start = _SLOTS_AT + slot * _SLOT
        number, nbytes, *_ = _WHAT.unpack_from(self._memory, start + 8)
        return Described(number, nbytes, self._text(start + _LINE, _LABEL))

    def place(self, slot: int) -> Place:
        """Where the slot's operation lies."""
        return Place(*_WHAT.unpack_from(self._memory, _SLOTS_AT + slot * _SLOT + 8)[2:])

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
        return self._text(_REASON_AT, _REASON)

    @reason.setter
    def reason(self, text: str) -> None:
        self._write(_REASON_AT, text, _REASON)

    def _write(self, at: int, text: str, size: int) -> None:
        struct.pack_into(f"{size}s", self._memory, at, text.encode()[:size])

    def _text(self, at: int, size: int) -> str:
        return ctypes.string_at(self._start + at, size).rstrip(b"\0").decode(errors="ignore")


def shortened(label: str) -> str:
    """A label as peers read it."""
    return label.encode()[:_LABEL].decode(errors="ignore")
