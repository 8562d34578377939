"""Memory of one rank that its peers read where it lies: one file without a name a rank and group.

A slice that is gathered as it is need not be copied first: it rests in its owner's arena, and an all-gather says only
where. An arena is one `memfd`, so a group takes one descriptor of each rank however many units it has. The file grows
by segments, mapped once each; ranges of whole pages are handed out, and when the last tensor over one is gone, its
pages go back to the system and the range is used again. Peers map a segment when they first read from it.

Mappings are made with the C library: Python's `mmap` would keep a descriptor for each.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from mmap import PAGESIZE as PAGE
from typing import NamedTuple

import torch

from fsdplab.engine.core.shard_storage import ShardStorage

_SEGMENT = 64 << 20  # bytes of address space by which an arena grows at least; pages that nobody uses take no memory
_READ_WRITE, _SHARED, _FAILED = 1 | 2, 1, ctypes.c_void_p(-1).value  # PROT_READ | PROT_WRITE, MAP_SHARED, MAP_FAILED
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


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
        address = _libc.mmap(None, length, _READ_WRITE, _SHARED, descriptor, start)
        if address == _FAILED:
            raise _error(f"mapping {length} bytes of shared memory")
        memory = (ctypes.c_uint8 * length).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, length).atexit = False
        return cls(start, memory)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes from `offset` of the file on."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=offset - self.start)

    def holds(self, address: int) -> bool:
        """Whether `address` lies in it."""
        return self.address <= address < self.address + len(self.memory)


class SharedFile:
    """Memory without a name that other processes may map, and nothing is left of whatever kills whom.

    It grows by segments. Raises `OSError` where the system gives no memory.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("fsdplab-arena")
        weakref.finalize(self, os.close, self.descriptor)
        self._size = 0
        self._segments: list[Segment] = []

    def grow(self, length: int) -> Segment:
        """Another `length` bytes, zeroed; they take memory where they are used."""
        os.ftruncate(self.descriptor, self._size + length)
        segment = Segment.mapped(self.descriptor, self._size, length)
        self._segments.append(segment)
        self._size += length
        return segment


class Arena(SharedFile):
    """This rank's own memory for one group. `header` is its beginning, for counters, and is never handed out."""

    def __init__(self, header: int) -> None:
        super().__init__()
        self._free: list[tuple[int, int]] = []  # (start, length) of what may be handed out, by start
        self._given_back: deque[tuple[int, int]] = deque()  # the same, from finalizers: these take no lock
        self._lock = threading.Lock()
        self._closed = False
        self.header = self.grow(_pages(header))
        os.posix_fallocate(self.descriptor, 0, _pages(header))
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
            segment = next(each for each in self._segments if 0 <= start - each.start < len(each.memory))
            first = start - segment.start
            part = memoryview(segment.memory)[first : first + nbytes]
        except BaseException:
            self._give_back(start, length, os.getpid())
            raise
        weakref.finalize(part, self._give_back, start, length, os.getpid()).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where `tensor` lies in this arena; None where it lies elsewhere."""
        address = tensor.data_ptr()
        for segment in self._segments:
            if segment.holds(address):
                return Place(segment.start + address - segment.address, segment.start, len(segment.memory))
        return None

    def part(self, place: Place, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes at `place`, which somebody else holds."""
        segment = next(each for each in self._segments if each.start == place.segment)
        return segment.part(place.offset, nbytes)

    def close(self) -> None:
        """Nothing more is published: what peers have not read yet must stay until they let go of the file."""
        self._closed = True

    @property
    def bytes_in_use(self) -> int:
        """What the file takes of the machine's memory."""
        return os.fstat(self.descriptor).st_blocks * 512

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
        """A new segment, larger the more there are already; only as long as asked for where that is refused."""
        try:
            segment = self.grow(max(length, _SEGMENT, self._size // 2 // PAGE * PAGE))
        except OSError:
            segment = self.grow(length)
        return segment.start, len(segment.memory)

    def _add_free(self, start: int, length: int) -> None:
        """Put a range among the free ones, joined with its neighbours in the same segment."""
        borders = {segment.start for segment in self._segments}
        joined: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (start, length)]):
            if joined and begin == sum(joined[-1]) and begin not in borders:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((begin, size))
        self._free = joined

    def _give_back(self, start: int, length: int, process: int) -> None:
        """Nobody uses a range any more. A forked child that lets go of its copy leaves the memory alone; a range whose
        pages the system does not take back is not used again, because it is not zero.
        """
        if (
            not self._closed
            and process == os.getpid()
            and _libc.fallocate(self.descriptor, _PUNCH_HOLE, start, length) == 0
        ):
            self._given_back.append((start, length))


class PeerArena:
    """A peer's arena: its segments are mapped when they are first read, and no tensor is kept, so that a peer's memory
    is not counted as ours.
    """

    def __init__(self, descriptor: int, header: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._segments: dict[int, Segment] = {}
        self.header = Segment.mapped(descriptor, 0, _pages(header))

    def part(self, place: Place, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes at `place`."""
        segment = self._segments.get(place.segment)
        if segment is None:
            segment = self._segments[place.segment] = Segment.mapped(self._descriptor, place.segment, place.length)
        return segment.part(place.offset, nbytes)


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
