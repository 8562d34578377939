"""The ranks of one machine open each other's arenas: all of them do, or none.

A rank tells its peers which descriptor of which process its arena is, and a number drawn for it that stands at its
beginning: what a peer opens is the file that was meant, also where descriptors are used again, and where ranks are
threads of one process. Whatever fails on one rank before all have opened everything is refused on all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from fsdplab.engine.transport.shared_memory.arenas import Arena, PeerArena

COOKIE = 16  # bytes at the beginning of an arena's header


class SharingRefused(RuntimeError):
    """The system does not let a rank make memory to share, or open its peers' (a hardened container, say)."""


class Process:
    """Tells when a process has ended; one handle a process, whoever asks. This process never has."""

    _known: weakref.WeakValueDictionary[tuple[int, int], Process] = weakref.WeakValueDictionary()

    def __init__(self, number: int) -> None:
        self._handle: int | None = None
        if number != os.getpid():
            self._handle = os.pidfd_open(number)
            weakref.finalize(self, os.close, self._handle)

    @classmethod
    def of(cls, number: int) -> Process:
        """The handle of a process; a new one where a number is used again."""
        key = os.getpid(), number  # what a forked child inherits is its parent's view
        known = cls._known.get(key)
        if known is None or known.ended():
            known = cls._known[key] = cls(number)
        return known

    def ended(self) -> bool:
        """Whether it has; `select` would refuse handles above 1,023."""
        if self._handle is None:
            return False
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))


@dataclass(frozen=True)
class ArenaHandle:
    """A rank's handle to its arena, which its peers open, or why it has none."""

    process: int
    descriptor: int = -1
    cookie: bytes = b""
    refused: str = ""


@dataclass(frozen=True)
class PeerMemory:
    """This rank's arena and those of all ranks, by rank, with the processes that they belong to."""

    own: Arena
    arenas: list[Arena | PeerArena]
    numbers: list[int]
    processes: list[Process]


def opened(group: dist.ProcessGroup, header: int) -> PeerMemory:
    """An arena of this rank with a header of that many bytes, and its peers'; every member of `group` must call it.

    Raises `SharingRefused` on all ranks where one of them may not.
    """
    arena, mine = _own(header)
    told: list[ArenaHandle] = [mine] * group.size()
    dist.all_gather_object(told, mine, group=group)
    _refuse_together([each.refused for each in told])
    assert arena is not None
    arenas: list[Arena | PeerArena] = []
    processes: list[Process] = []
    refused = ""
    try:
        for rank, each in enumerate(told):
            arenas.append(arena if rank == group.rank() else _peers(each, header))
            processes.append(Process.of(each.process))
    except OSError as error:
        refused = f"may not open its peers' memory: {error}"
    answers = [refused] * group.size()
    dist.all_gather_object(answers, refused, group=group)  # also: everybody has opened everything
    _refuse_together(answers)
    return PeerMemory(arena, arenas, [each.process for each in told], processes)


def _own(header: int) -> tuple[Arena | None, ArenaHandle]:
    try:
        arena = Arena(header)
    except OSError as error:
        return None, ArenaHandle(os.getpid(), refused=f"got no memory to share: {error}")
    cookie = os.urandom(COOKIE)
    ctypes.memmove(arena.header.memory, cookie, COOKIE)
    return arena, ArenaHandle(os.getpid(), arena.descriptor, cookie)


def _peers(told: ArenaHandle, header: int) -> PeerArena:
    arena = PeerArena(os.open(f"/proc/{told.process}/fd/{told.descriptor}", os.O_RDWR), header)
    if bytes(memoryview(arena.header.memory)[:COOKIE]) != told.cookie:
        raise OSError(errno.ESTALE, f"descriptor {told.descriptor} of process {told.process} is another file")
    return arena


def _refuse_together(answers: list[str]) -> None:
    for rank, answer in enumerate(answers):
        if answer:
            raise SharingRefused(f"rank {rank} {answer}")
