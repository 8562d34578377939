"""Allocates memory that the rank's peers read where it lies: one file without a name a rank and group.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from mmap import PAGESIZE as PAGE
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdplab.engine.core.buffers import ShardStorage

_SEGMENT = 64 << 20  # bytes of address space by which an arena grows at least; pages that nobody uses take no memory
_READ_WRITE, _SHARED, _FAILED = 1 | 2, 1, ctypes.c_void_p(-1).value  # PROT_READ | PROT_WRITE, MAP_SHARED, MAP_FAILED
COOKIE = 16  # bytes at the beginning of an arena's header
T = TypeVar("T")
Memory = ctypes.Array[ctypes.c_uint8]
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, looked up when an arena is made: Windows has none, and macOS one without `fallocate`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


class Place(ctypes.Structure):
    """Where bytes lie in an arena's file, and in which of its segments: what peers are told."""

    # from the beginning of the file: the bytes, and the segment; then how long the segment is
    _fields_ = (("offset", ctypes.c_uint64), ("segment", ctypes.c_uint64), ("length", ctypes.c_uint64))


def _mapped(descriptor: int, start: int, length: int) -> Memory:
    """Map bytes [start, start + length) of a file, while anybody holds them or a tensor over them; `OSError` where the
    system does not map them.
    """
    address = _libc().mmap(None, length, _READ_WRITE, _SHARED, descriptor, start)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {length} bytes of shared memory: {os.strerror(number)}")
    memory = (ctypes.c_uint8 * length).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, length).atexit = False
    return memory


class SharedFile:
    """A file without a name as memory of this process, its owner's or a peer's. `header` is its beginning, of so many
    bytes. Segments are mapped when they are first read, and no tensor is kept, so that a peer's memory is not counted
    as ours.
    """

    def __init__(self, descriptor: int, header: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._segments: dict[int, Memory] = {}  # by where they begin
        self.header = _mapped(descriptor, 0, pages(header))

    def part(self, place: Place, nbytes: int) -> torch.Tensor:
        """Return `nbytes` bytes at `place`, [nbytes] (uint8); `OSError` where the system does not map them."""
        start = place.segment
        segment = self._segments.get(start)
        if segment is None:
            segment = self._segments[start] = _mapped(self.descriptor, start, place.length)
        return torch.frombuffer(segment, dtype=torch.uint8, count=nbytes, offset=place.offset - start)


class Arena(SharedFile):
    """This rank's own memory for one group. Its header is for counters, and is never handed out.

    Other processes may map it, and nothing is left of it whatever kills whom. Raises `OSError` where the system gives
    no memory.
    """

    def __init__(self, header: int) -> None:
        self._size = pages(header)
        self._free: list[tuple[int, int]] = []  # (start, length) of what may be handed out, by start
        self._given_back: deque[tuple[int, int]] = deque()  # the same, from finalizers: these take no lock
        self._lock = threading.Lock()
        self._closed = False
        super().__init__(os.memfd_create("fsdplab-arena"), header)
        os.posix_fallocate(self.descriptor, 0, self._size)
        self._grow_for(_SEGMENT)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` zeroed bytes, a storage of their own; their range is free again with the last tensor over it.

        The pages are taken from the system now: where there are none, this is an error here and no signal later.
        """
        length = pages(nbytes)
        with self._lock:
            start = self._take(length)
        try:
            os.posix_fallocate(self.descriptor, start, length)
            # A range lies in the last segment that begins before it: one from 70 MiB on in that from 64 MiB on, say.
            segment = max(begin for begin in tuple(self._segments) if begin <= start)
            first = start - segment
            part = memoryview(self._segments[segment])[first : first + nbytes]
        except BaseException:
            self._give_back(start, length, os.getpid())
            raise
        # Tensors over the range hold `part`, which ends with the last of them.
        weakref.finalize(part, self._give_back, start, length, os.getpid()).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)

    def place_of(
        self,
        tensor: torch.Tensor,  # any shape, contiguous
    ) -> Place | None:
        """Return where `tensor` lies in this arena; None where it lies elsewhere."""
        address = tensor.data_ptr()
        for start, segment in self._segments.items():
            offset = address - ctypes.addressof(segment)
            if 0 <= offset < len(segment):
                return Place(start + offset, start, len(segment))
        return None

    def close(self) -> None:
        """Publish nothing more: what peers have not read yet must stay until they let go of the file."""
        self._closed = True

    def _take(self, length: int) -> int:
        """Take the first free range that is long enough, in a new segment if none is; return its start."""
        while self._given_back:
            self._add_free(*self._given_back.popleft())
        while True:
            for index, (start, free) in enumerate(self._free):
                if free < length:
                    continue
                rest = []
                if free > length:
                    rest = [(start + length, free - length)]
                self._free[index : index + 1] = rest
                return start
            self._grow_for(length)

    def _grow_for(self, length: int) -> None:
        """Add a segment, zeroed: longer the more there are, and only as long as asked for where that is refused."""
        # 64 MiB at first, later half of what there is: a large model needs few segments.
        try:
            self._grow(max(length, _SEGMENT, self._size // 2 // PAGE * PAGE))
        except OSError:
            self._grow(length)

    def _grow(self, length: int) -> None:
        """Add a segment of `length` bytes behind the last."""
        start = self._size  # the file ends here so far
        os.ftruncate(self.descriptor, start + length)
        self._segments[start] = _mapped(self.descriptor, start, length)
        self._size += length
        self._add_free(start, length)

    def _add_free(self, start: int, length: int) -> None:
        """Put a range among the free ones, joined with its neighbours in the same segment."""
        joined: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (start, length)]):
            follows_last = joined and begin == sum(joined[-1])  # (start, length): their sum is where it ends
            # Segments are mapped apart, so no range may reach from one into the next.
            if follows_last and begin not in self._segments:
                first, length_before = joined[-1]
                joined[-1] = first, length_before + size
            else:
                joined.append((begin, size))
        self._free = joined

    def _give_back(self, start: int, length: int, process: int) -> None:
        """Give a range back that nobody uses any more. A forked child that lets go of its copy leaves the memory alone;
        a range whose pages the system does not take back is not used again, because it is not zero.
        """
        is_owner = not self._closed and process == os.getpid()
        if is_owner and _libc().fallocate(self.descriptor, _PUNCH_HOLE, start, length) == 0:
            self._given_back.append((start, length))


class SharedStorage(ShardStorage):
    """Host memory of an arena; where that gives none, ordinary memory, from which a gather copies."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(torch.device("cpu"))
        self._arena = arena

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        """Return zeroed bytes of the arena, [nbytes] (uint8), or of ordinary memory where it has none."""
        if nbytes:
            with suppress(OSError):
                return self._arena.allocate(nbytes)
        return super().make(nbytes, unit)


def pages(nbytes: int) -> int:
    """Round `nbytes` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


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
        """Return the handle of a process; a new one where a number is used again."""
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
    """Return what must be equal for two ranks to share memory (boot, launcher's node, namespaces); None: impossible.

    Two network namespaces count as two machines: whoever separates them means their ranks to use the network.
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
    """What a rank's peers open its arena with."""

    process: int
    machine: tuple[str, ...]
    descriptor: int
    cookie: bytes


class PeerMemory:
    """This rank's arena (`own`), and those of all ranks by rank, with the processes that they belong to.

    Every member of `group` must make it, with headers of so many bytes. A rank tells its peers which descriptor of
    which process its arena is, and a number drawn for it that stands at its beginning: what a peer opens is the file
    that was meant, also where descriptors are used again, and where ranks are threads of one process. Raises
    `SharingRefused` on all ranks where one of them may not share, or not all are on one machine.
    """

    def __init__(self, group: dist.ProcessGroup, header: int) -> None:
        handles = _from_all(group, "got no memory to share", lambda: self._offer(header))
        machines = {handle.machine for handle in handles}
        if len(machines) > 1:
            raise SharingRefused(f"got {len(machines)} machines")
        open_all = lambda: self._open(handles, group.rank(), header)  # noqa: E731
        _from_all(group, "may not open its peers' memory", open_all)  # nobody goes on before everybody has

    def _offer(self, header: int) -> ArenaHandle:
        """Make this rank's arena; return what its peers open it with."""
        machine = machine_of_this_rank()
        if machine is None:
            raise OSError("it is not on an x86-64 Linux, or has no descriptor left")
        self.own = Arena(header)
        cookie = os.urandom(COOKIE)
        ctypes.memmove(self.own.header, cookie, COOKIE)
        return ArenaHandle(os.getpid(), machine, self.own.descriptor, cookie)

    def _open(self, handles: list[ArenaHandle], rank: int, header: int) -> None:
        """Open the arenas of all peers."""
        arenas = []
        for peer, handle in enumerate(handles):
            arena = self.own if peer == rank else _opened(handle, header)
            arenas.append(arena)
        self.arenas = arenas
        self.processes = [Process.of(handle.process) for handle in handles]


def _opened(handle: ArenaHandle, header: int) -> SharedFile:
    """Open the arena of a peer; raise where its descriptor names another file by now."""
    # Through /proc this process gets a descriptor of its own for the peer's file, which has no name.
    arena = SharedFile(os.open(f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_RDWR), header)
    if bytes(memoryview(arena.header)[:COOKIE]) != handle.cookie:
        raise OSError(errno.ESTALE, f"descriptor {handle.descriptor} of process {handle.process} is another file")
    return arena


def _from_all(group: dist.ProcessGroup, failure: str, act: Callable[[], T]) -> list[T]:
    """Return what `act` returns on every rank; `SharingRefused` on all of them where the system refuses it to one."""
    answer: Any
    try:
        answer = act()
    except OSError as error:
        # An error is sent as an answer, since peers wait for one.
        answer = SharingRefused(f"rank {group.rank()} {failure}: {error}")
    answers = [answer] * group.size()
    dist.all_gather_object(answers, answer, group=group)
    for answer in answers:
        if isinstance(answer, SharingRefused):
            raise answer
    return answers
