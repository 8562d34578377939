"""Timeline semaphores: how far each rank has come, in memory that all ranks and their GPUs see.

A timeline is a word that only grows. A rank raises its `ready` to s when its slot holds operation s, and its `done` to
s when it has read everybody's; whoever needs that waits until the word is at least s. Nobody resets anything, so a wait
that is queued before its signal, or long after it, means the same (an event of CUDA that was not recorded yet would not
block).

A rank raises one word for each rank that reads it, so that a reader's watchdog can free its own waiters and nobody
else's: who is freed must know it before, or would take for complete what is not.

The words lie in host memory without a name, one page a rank, mapped by all ranks. A GPU reads and writes them there
too, and so can a host whose GPU is stuck: a waiter is freed by an ordinary store, which needs no queue that might be
blocked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdplab.engine.transport.shared_memory.slots import Slots

READY, DONE = 0, 1
_LINE = 64  # bytes: a word or a note each
_NOTES = 64  # operations that are remembered: far more than can be in flight
_LABEL = 48
_FREED = 1 << 30  # how far a freed word lies beyond what was waited for


class Timelines:
    """The words of every rank of `group` for one series of operations; every member must make it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._slots = Slots(group, 1)  # its one operation is never completed, so nobody writes over the words
        self.rank, self.ranks, self.processes = self._slots.rank, self._slots.ranks, self._slots.processes
        self._lines = 2 * self.ranks + 1  # words of both kinds, and one that hosts write: who was missing, plus one
        nbytes = (self._lines + _NOTES) * _LINE
        number, own = self._slots.claim(nbytes, "the timelines of a transport")
        own.zero_()
        self._slots.publish(number)
        self._pages = [self._slots.read(peer, number, nbytes) for peer in range(self.ranks)]
        self.claimed, self._compared = 0, [0] * self.ranks

    @property
    def pages(self) -> Sequence[torch.Tensor]:
        """Every rank's words and notes (bytes), for a device that wants to map them; each begins at a page of the
        system.
        """
        return self._pages

    def offset(self, kind: int, reader: int) -> int:
        """Where in a page the word of a kind (`READY`, `DONE`) for a reader lies, in bytes."""
        return (kind * self.ranks + reader) * _LINE

    def done(self) -> int:
        """The last operation that this rank has completed."""
        return self._word(self.rank, DONE).value

    def set(self, kind: int, number: int) -> None:
        """Raise this rank's words, one a reader; what this host wrote before is seen before them (x86-64)."""
        for reader in range(self.ranks):
            self._word(self.rank, kind, reader).value = number

    def reached(self, rank: int, kind: int, number: int) -> bool:
        """Whether this rank's waiter for `number` may go on, because the word is there or was freed: `(int)(word -
        number) >= 0`.
        """
        return (self._word(rank, kind).value - number) % (1 << 32) < 1 << 31

    def free(self, rank: int) -> None:
        """Let go what waits on this rank for `rank`, now or later."""
        for kind in (READY, DONE):
            self._word(rank, kind).value = (self.claimed + _FREED) % (1 << 32)

    def claim(self, nbytes: int, label: str) -> int:
        """The next operation's number; peers are told what it is, and what they have told is compared."""
        self.claimed = number = self.claimed + 1
        self._describe(number, nbytes, label)
        self.compare()
        return number

    def compare(self) -> None:
        """RuntimeError if a peer has told something else about an operation that both have come to."""
        for peer in range(self.ranks):
            self._compare(peer, self.claimed)

    def _describe(self, number: int, nbytes: int, label: str) -> None:
        start = self._note(self.rank, number)
        text, told = label.encode()[:_LABEL].ljust(_LABEL, b"\0"), ctypes.c_uint32.from_address(start)
        told.value = 0  # whoever reads the old note meanwhile finds that it has gone
        ctypes.memmove(start + 4, nbytes.to_bytes(8, "little") + text, 8 + _LABEL)
        told.value = number

    def _compare(self, peer: int, number: int) -> None:
        for each in range(self._compared[peer] + 1, number + 1):
            seen = ctypes.c_uint32.from_address(self._note(peer, each)).value
            if seen < each:  # its host has not come to it, or writes it right now
                return
            self._compared[peer] = each
            ours, theirs = self.described(self.rank, each), self.described(peer, each)
            if ours is not None and theirs is not None and theirs != ours:
                raise RuntimeError(
                    f"ranks are out of step: as operation {each} rank {self.rank} runs {ours[1] or 'one'} ({ours[0]}"
                    f" bytes), rank {peer} runs {theirs[1] or 'another'} ({theirs[0]} bytes); every rank must run the"
                    " same units in the same order, so look for one that is skipped on some ranks"
                )

    def described(self, rank: int, number: int) -> tuple[int, str] | None:
        """Bytes and label of a rank's recent operation; None where it has not come to it, or has long left it."""
        start = self._note(rank, number)
        before = ctypes.c_uint32.from_address(start).value
        told = ctypes.string_at(start + 4, 8 + _LABEL)
        if not before == number == ctypes.c_uint32.from_address(start).value:
            return None
        return int.from_bytes(told[:8], "little"), told[8:].rstrip(b"\0").decode(errors="ignore")

    @property
    def gave_up(self) -> dict[int, int]:
        """Ranks that have given up, and the rank that was missing."""
        told = {rank: self._missing(rank).value for rank in range(self.ranks)}
        return {rank: missing - 1 for rank, missing in told.items() if missing}

    def give_up(self, missing: int) -> None:
        """Tell the peers that `missing` is missing."""
        self._missing(self.rank).value = missing + 1

    def _note(self, rank: int, number: int) -> int:
        return self._pages[rank].data_ptr() + (self._lines + number % _NOTES) * _LINE

    def _word(self, rank: int, kind: int, reader: int | None = None) -> ctypes.c_uint32:
        """A word of `rank`, the one for this rank if nothing else is said."""
        return ctypes.c_uint32.from_address(
            self._pages[rank].data_ptr() + self.offset(kind, self.rank if reader is None else reader)
        )

    def _missing(self, rank: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._pages[rank].data_ptr() + (self._lines - 1) * _LINE)
