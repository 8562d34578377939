"""Reads a snapshot of PyTorch's CUDA allocator: the file that somebody has whose job ran out of memory.

    torch.cuda.memory._record_memory_history()
    ...                                              # the job
    torch.cuda.memory._dump_snapshot("snapshot.pickle")

The file is a pickle, and a pickle can run any code. So it is read by an unpickler that resolves no class, which leaves
lists, dictionaries, numbers and text: all that a snapshot is made of. A few bytes of a pickle can also ask for many
gigabytes; the memory of this process is limited while it reads.

The docstring of `torch.cuda.memory._snapshot` describes the contents. `snapshot_memory.py` says what they mean.
"""

from __future__ import annotations

import gzip
import pickle
import reprlib
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from fsdplab.common.errors import UserError

_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"  # the first byte of a pickle since protocol 2
_LEAST_FOR_READING = 1 << 30  # bytes
_BYTES_OF_A_BYTE = 100  # of objects for a byte of the file: frames share their texts, so it is less
# what unpickling a broken or hostile file raises
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    OverflowError,
    MemoryError,
    LookupError,
    AttributeError,
    TypeError,
    RecursionError,
    zlib.error,
)


class SnapshotError(UserError):
    """A file cannot be read as a snapshot of memory."""


@dataclass(frozen=True)
class Frame:
    """One line of the stack that made an allocation."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True)
class Block:
    """A piece of a segment: `nbytes` that were asked for, and `size`, what they were rounded up to."""

    address: int
    size: int
    nbytes: int
    state: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator got from the driver, and how it is divided."""

    device: int
    size: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Event:
    """What the allocator did: `action` is alloc, free_requested, free_completed, segment_alloc, oom, ..."""

    action: str
    address: int
    nbytes: int
    frames: tuple[Frame, ...]
    time_us: int
    device_free: int | None


@dataclass(frozen=True)
class Snapshot:
    """The allocator's segments at the end, and the recorded events of each device, the oldest first."""

    segments: tuple[Segment, ...]
    events: Mapping[int, tuple[Event, ...]]


def is_snapshot(path: Path) -> bool:
    """Whether a file begins as a pickle does, also a gzipped one; a trace of PyTorch's profiler is JSON."""
    if not path.is_file():  # opening a pipe would wait for somebody who writes
        return False
    try:
        with _open(path) as file:
            return file.read(1) == _PICKLE
    except (OSError, EOFError, zlib.error):
        return False


def _open(path: Path) -> BinaryIO:
    """The file's content; the lab's own records hold gzipped snapshots."""
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
    # no `with` here: the caller closes what it is given
    return cast(BinaryIO, gzip.open(path)) if zipped else path.open("rb")


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file that `torch.cuda.memory._dump_snapshot` wrote.

    Raises SnapshotError where the file cannot be read, holds objects of a class, or is no snapshot.
    """
    try:
        with _open(path) as file, _memory_limited(path.stat().st_size):
            content = _PlainUnpickler(file, path).load()
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror or error}.") from error
    except _BROKEN as error:
        raise SnapshotError(
            f"{path} is no whole pickle ({type(error).__name__}); expected a file that"
            " torch.cuda.memory._dump_snapshot() wrote to its end."
        ) from error
    return _Reader(path, _BYTES_OF_A_BYTE * path.stat().st_size).snapshot(content)


class _PlainUnpickler(pickle.Unpickler):
    """Makes containers, numbers and text, and nothing else."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse what a snapshot has no use for, before anything is called."""
        raise SnapshotError(
            f"{self._path} asks for {module}.{name}, so it is no snapshot of memory, and nothing of it was run;"
            " expected a file that torch.cuda.memory._dump_snapshot() wrote."
        )

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse a reference to something outside of the file."""
        raise SnapshotError(f"{self._path} refers to something outside of it; expected a snapshot of memory.")


@contextmanager
def _memory_limited(file_bytes: int) -> Iterator[None]:
    """Let this process have so much more memory as the contents of a file can need, where the system can limit it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    # the first number is this process's size in pages; RLIMIT_AS limits that size, and not what is to be added
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    allowed = pages * resource.getpagesize() + _LEAST_FOR_READING + _BYTES_OF_A_BYTE * file_bytes
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    if before != resource.RLIM_INFINITY:
        allowed = min(allowed, before)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


class _Reader:
    """Turns the plain contents of a file into a snapshot; what is not as expected is named."""

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._left = most  # elements of lists; a list that is named many times is read each time
        self._stacks: dict[int, tuple[Frame, ...]] = {}

    def snapshot(self, content: object) -> Snapshot:
        """The whole file; older versions of torch wrote the list of segments alone."""
        if isinstance(content, list):
            content = {"segments": content}
        if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
            raise SnapshotError(
                f"{self._path} holds no list of segments, so it is another pickle; expected a file that"
                " torch.cuda.memory._dump_snapshot() wrote."
            )
        # one list of events a device: its place in the list is the device's number
        traces = self._list(content, "device_traces")
        segments = tuple(self._segment(segment) for segment in self._list(content, "segments"))
        events = {device: self._events(trace) for device, trace in enumerate(traces)}
        return Snapshot(segments, {device: kept for device, kept in events.items() if kept})

    def _segment(self, segment: object) -> Segment:
        fields = self._dictionary(segment, "segment")
        address = self._number(fields, "address")
        blocks = []
        for block in self._list(fields, "blocks"):
            blocks.append(self._block(self._dictionary(block, "block"), address))
            address += blocks[-1].size  # blocks lie one behind the other; older files give no addresses
        return Segment(self._number(fields, "device"), self._number(fields, "total_size"), tuple(blocks))

    def _block(self, fields: Mapping[str, Any], address: int) -> Block:
        size = self._number(fields, "size")
        asked = fields.get("requested_size", size)
        frames = fields.get("frames")
        history = fields.get("history")
        if frames is None and isinstance(history, list) and history:  # before torch 2.2
            newest = self._dictionary(history[0], "history")
            asked = newest.get("real_size", size)
            frames = newest.get("frames")
        return Block(
            address=fields.get("address") or address,
            size=size,
            nbytes=asked if isinstance(asked, int) else size,
            state=_text(fields.get("state")),
            frames=self._stack(frames),
        )

    def _events(self, trace: object) -> tuple[Event, ...]:
        entries = self._list({"device_traces": trace}, "device_traces")
        return tuple(self._event(self._dictionary(entry, "event")) for entry in entries)

    def _event(self, fields: Mapping[str, Any]) -> Event:
        free = fields.get("device_free")
        return Event(
            action=_text(fields.get("action")),
            address=self._number(fields, "addr"),
            nbytes=self._number(fields, "size"),
            frames=self._stack(fields.get("frames")),
            time_us=self._number(fields, "time_us"),
            device_free=free if isinstance(free, int) else None,
        )

    def _stack(self, frames: object) -> tuple[Frame, ...]:
        """The lines of one allocation, the innermost first; many allocations share the same list."""
        if not isinstance(frames, list):
            return ()
        # pickle gives one object for all places of the same list, so each stack is made once
        if id(frames) not in self._stacks:
            self._stacks[id(frames)] = tuple(self._frame(frame) for frame in frames)
        return self._stacks[id(frames)]

    def _frame(self, frame: object) -> Frame:
        fields = self._dictionary(frame, "frame")
        return Frame(_text(fields.get("filename")), self._number(fields, "line"), _text(fields.get("name")))

    def _number(self, fields: Mapping[str, Any], name: str) -> int:
        value = fields.get(name, 0)
        if not isinstance(value, int) or value < 0:
            raise self._unexpected(name, "a whole number", value)
        return value

    def _list(self, fields: Mapping[str, Any], name: str) -> Sequence[object]:
        value = fields.get(name, [])
        if not isinstance(value, list):
            raise self._unexpected(name, "a list", value)
        # a pickle of some bytes can name one list a million times, and lists of such lists
        self._left -= len(value)
        if self._left < 0:
            raise self._unexpected(name, "lists that are not named again and again", value)
        return value

    def _dictionary(self, value: object, name: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._unexpected(name, "a dictionary", value)
        return value

    def _unexpected(self, name: str, expected: str, value: object) -> SnapshotError:
        return SnapshotError(f"{self._path}: {name} of this snapshot is {reprlib.repr(value)}; expected {expected}.")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
