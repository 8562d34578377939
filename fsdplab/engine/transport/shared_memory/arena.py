"""Memory of one rank that its peers read where it lies: one file without a name a rank and group.

A shard that is gathered as it is need not be copied first: it rests in its owner's arena, and an all-gather says only
where. An arena is one `memfd`, so a group takes one descriptor of each rank however many units it has. The file grows
by segments, mapped once each; ranges of whole pages are handed out, and when the last tensor over one is gone, its
pages go back to the system and the range is used again. Peers map a segment when they first read from it.

Mappings are made with the C library: Python's `mmap` would keep a descriptor for each.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cache
from mmap import PAGESIZE as PAGE
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdplab.engine.core.buffers import ShardStorage

_SEGMENT = 64 << 20  # bytes of address space by which an arena grows at least; pages that nobody uses take no memory
_READ_WRITE, _SHARED, _FAILED = 1 | 2, 1, ctypes.c_void_p(-1).value  # PROT_READ | PROT_WRITE, MAP_SHARED, MAP_FAILED
COOKIE = 16  # bytes at the beginning of an arena's header
T = TypeVar("T")
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


@cache
def _libc() -> ctypes.CDLL:
    """The C library, looked up when an arena is made: Windows has none, and macOS one without `fallocate`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


class Place(NamedTuple):
    """Where bytes lie in an arena's file, and in which of its segments: what peers are told."""

    offset: int
    segment: int  # where it begins
    length: int  # of the segment


@dataclass(frozen=True)
class Segment:
    """A part of a file as memory of this process: mapped while anybody holds `memory` or a tensor over it."""

    start: int
    memory: ctypes.Array[ctypes.c_uint8]

    @classmethod
    def mapped(cls, descriptor: int, start: int, length: int) -> Segment:
        """Bytes [start, start + length) of the file; `OSError` where the system does not map them."""
        address = _libc().mmap(None, length, _READ_WRITE, _SHARED, descriptor, start)
        if address == _FAILED:
            raise _error(f"mapping {length} bytes of shared memory")
        memory = (ctypes.c_uint8 * length).from_address(address)
        weakref.finalize(memory, _libc().munmap, address, length).atexit = False
        return cls(start, memory)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes from `offset` of the file on."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=offset - self.start)


class SharedFile:
    """A file without a name as memory of this process, its owner's or a peer's. `header` is its beginning, of so many
    bytes. Segments are mapped when they are first read, and no tensor is kept, so that a peer's memory is not counted
    as ours.
    """

    def __init__(self, descriptor: int, header: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._segments: dict[int, Segment] = {}
        self.header = Segment.mapped(descriptor, 0, _pages(header))

    def part(self, place: Place, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes at `place`; `OSError` where the system does not map them."""
        segment = self._segments.get(place.segment)
        if segment is None:
            segment = self._segments[place.segment] = Segment.mapped(self.descriptor, place.segment, place.length)
        return segment.part(place.offset, nbytes)


class Arena(SharedFile):
    """This rank's own memory for one group. Its header is for counters, and is never handed out.

    Other processes may map it, and nothing is left of it whatever kills whom. Raises `OSError` where the system gives
    no memory.
    """

    def __init__(self, header: int) -> None:
        self._size = _pages(header)
        self._free: list[tuple[int, int]] = []  # (start, length) of what may be handed out, by start
        self._given_back: deque[tuple[int, int]] = deque()  # the same, from finalizers: these take no lock
        self._lock = threading.Lock()
        self._closed = False
        super().__init__(os.memfd_create("fsdplab-arena"), header)
        os.posix_fallocate(self.descriptor, 0, self._size)
        self._add_free(*self._grow_for(_SEGMENT))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` zeroed bytes, a storage of their own; the range is free again when the last tensor over it is gone.

        The pages are taken from the system now: where there are none, this is an error here and no signal later.
        """
        length = _pages(nbytes)
        with self._lock:
            start = self._take(length)
        try:
            os.posix_fallocate(self.descriptor, start, length)
            segment = next(each for each in self._segments.values() if 0 <= start - each.start < len(each.memory))
            first = start - segment.start
            part = memoryview(segment.memory)[first : first + nbytes]
        except BaseException:
            self._give_back(start, length, os.getpid())
            raise
        weakref.finalize(part, self._give_back, start, length, os.getpid()).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where `tensor` lies in this arena; None where it lies elsewhere."""
        for segment in self._segments.values():
            offset = tensor.data_ptr() - segment.address
            if 0 <= offset < len(segment.memory):
                return Place(segment.start + offset, segment.start, len(segment.memory))
        return None

    def close(self) -> None:
        """Nothing more is published: what peers have not read yet must stay until they let go of the file."""
        self._closed = True

    def _take(self, length: int) -> int:
        """The start of a range that is now taken: the first that is long enough, in a new segment if none is."""
        while self._given_back:
            self._add_free(*self._given_back.popleft())
        while True:
            for index, (start, free) in enumerate(self._free):
                if free >= length:
                    self._free[index : index + 1] = [(start + length, free - length)] if free > length else []
                    return start
            self._add_free(*self._grow_for(length))

    def _grow_for(self, length: int) -> tuple[int, int]:
        """Start and length of a new segment, zeroed: longer the more there are already, and only as long as asked for
        where that is refused.
        """
        try:
            return self._grow(max(length, _SEGMENT, self._size // 2 // PAGE * PAGE))
        except OSError:
            return self._grow(length)

    def _grow(self, length: int) -> tuple[int, int]:
        start = self._size
        os.ftruncate(self.descriptor, start + length)
        self._segments[start] = Segment.mapped(self.descriptor, start, length)
        self._size += length
        return start, length

    def _add_free(self, start: int, length: int) -> None:
        """Put a range among the free ones, joined with its neighbours in the same segment."""
        joined: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (start, length)]):
            if joined and begin == sum(joined[-1]) and begin not in self._segments:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((begin, size))
        self._free = joined

    def _give_back(self, start: int, length: int, process: int) -> None:
        """Nobody uses a range any more. A forked child that lets go of its copy leaves the memory alone; a range whose
        pages the system does not take back is not used again, because it is not zero.
        """
        ours = not self._closed and process == os.getpid()
        if ours and _libc().fallocate(self.descriptor, _PUNCH_HOLE, start, length) == 0:
            self._given_back.append((start, length))


class SharedStorage(ShardStorage):
    """Host memory of an arena; where that gives none, ordinary memory, from which a gather copies."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(torch.device("cpu"))
        self._arena = arena

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        if nbytes == 0:
            return super().make(nbytes, unit)
        try:
            return self._arena.allocate(nbytes)
        except OSError:
            return super().make(nbytes, unit)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


# ---- the ranks of one machine open each other's arenas: all of them do, or none


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


def machine_of_this_rank() -> tuple[str, ...] | None:
    """What must be equal for two ranks to share memory: boot, launcher's node, and namespaces; None where impossible.

    Network namespaces share memory, but a link shaped between them must not be bypassed, so they count as machines.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not hasattr(os, "pidfd_open"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user"))
    except OSError:  # no /proc, or no descriptor left: peers wait for an answer, so this is one
        return None
    return boot, os.environ.get("GROUP_RANK", "0"), str(os.getuid()), *spaces


@dataclass(frozen=True)
class ArenaHandle:
    """What a rank's peers open its arena with, or why it has none."""

    process: int
    machine: tuple[str, ...] | None
    descriptor: int = -1
    cookie: bytes = b""
    refused: str = ""


@dataclass(frozen=True)
class PeerMemory:
    """This rank's arena and those of all ranks, by rank, with the processes that they belong to."""

    own: Arena
    arenas: list[SharedFile]
    processes: list[Process]


def opened(group: dist.ProcessGroup, header: int) -> PeerMemory:
    """An arena of this rank with a header of that many bytes, and its peers'; every member of `group` must call it.

    A rank tells its peers which descriptor of which process its arena is, and a number drawn for it that stands at its
    beginning: what a peer opens is the file that was meant, also where descriptors are used again, and where ranks are
    threads of one process. Raises `SharingRefused` on all ranks where one of them may not share, or not all are on one
    machine.
    """
    arena, mine = _own(header)
    handles = _from_all(group, mine)
    _refuse_together([each.refused for each in handles])
    machines = {each.machine for each in handles}
    if len(machines) > 1:
        raise SharingRefused(f"got {len(machines)} machines")
    assert arena is not None
    arenas: list[SharedFile] = []
    processes: list[Process] = []
    refused = ""
    try:
        for rank, each in enumerate(handles):
            arenas.append(arena if rank == group.rank() else _peers(each, header))
            processes.append(Process.of(each.process))
    except OSError as error:
        refused = f"may not open its peers' memory: {error}"
    _refuse_together(_from_all(group, refused))  # also: everybody has opened everything
    return PeerMemory(arena, arenas, processes)


def _own(header: int) -> tuple[Arena | None, ArenaHandle]:
    process, machine = os.getpid(), machine_of_this_rank()
    if machine is None:
        return None, ArenaHandle(process, None, refused="is not on an x86-64 Linux, or has no descriptor left")
    try:
        arena = Arena(header)
    except OSError as error:
        return None, ArenaHandle(process, machine, refused=f"got no memory to share: {error}")
    cookie = os.urandom(COOKIE)
    ctypes.memmove(arena.header.memory, cookie, COOKIE)
    return arena, ArenaHandle(process, machine, arena.descriptor, cookie)


def _peers(handle: ArenaHandle, header: int) -> SharedFile:
    arena = SharedFile(os.open(f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_RDWR), header)
    if bytes(memoryview(arena.header.memory)[:COOKIE]) != handle.cookie:
        raise OSError(errno.ESTALE, f"descriptor {handle.descriptor} of process {handle.process} is another file")
    return arena


def _from_all(group: dist.ProcessGroup, mine: T) -> list[T]:
    answers = [mine] * group.size()
    dist.all_gather_object(answers, mine, group=group)
    return answers


def _refuse_together(answers: list[str]) -> None:
    for rank, answer in enumerate(answers):
        if answer:
            raise SharingRefused(f"rank {rank} {answer}")
