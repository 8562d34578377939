"""Lifetimes of memory blocks, from an allocator's events.

Pure functions over lists, because an allocator's log is never complete. Addresses are reused; storages allocated before
profiling are freed without a size; a few are freed on threads that the profiler does not see. The rules are few:

- a storage that lies inside another one is the same memory, and is counted once;
- a new block over the address of a live one proves that the old one is gone (an unseen free, counted);
- a free of an address where nothing lifetimes changes nothing (an unknown free, counted).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace

LONG_AGO = -(2**62)
NEVER = 2**62


@dataclass(frozen=True)
class Storage:
    """Memory that was alive when profiling began; `gone_ns`: when it was freed, if that was seen."""

    pointer: int
    nbytes: int
    category: str = ""
    unit: str = ""
    gone_ns: int | None = None


@dataclass(frozen=True)
class AllocatorEvent:
    """One event of an allocator: `nbytes` is positive for an allocation and negative for a free; an empty category is
    unknown.
    """

    time_ns: int
    pointer: int
    nbytes: int
    category: str = ""
    unit: str = ""


@dataclass
class Block:
    """Memory from allocation to free. `born` and `died` index `BlockLifetimes.times`; 0 is the start of profiling."""

    pointer: int
    nbytes: int
    category: str
    unit: str
    born: int = 0
    born_ns: int = LONG_AGO
    died: int = NEVER
    died_ns: int = NEVER


@dataclass(frozen=True)
class BlockLifetimes:
    """All blocks; the time of every event, and the bytes allocated after it."""

    blocks: list[Block]
    times: list[int]
    totals: list[int]
    unknown_frees: int
    unseen_frees: int


class _Heap:
    """The blocks alive now, in order of address."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.live_bytes = self.unknown_frees = self.unseen_frees = 0
        self._starts: list[int] = []
        self._at: dict[int, Block] = {}

    def put(self, block: Block) -> None:
        for old in self._under(block):
            self.end(old, block.born, block.born_ns)
            self.unseen_frees += 1
        insort(self._starts, block.pointer)
        self._at[block.pointer] = block
        self.blocks.append(block)
        self.live_bytes += block.nbytes

    def free(self, pointer: int, instant: int, time_ns: int) -> None:
        block = self._at.get(pointer)
        if block is None:
            self.unknown_frees += 1
        else:
            self.end(block, instant, time_ns)

    def end(self, block: Block, instant: int, time_ns: int) -> None:
        if self._at.get(block.pointer) is not block:
            return
        block.died, block.died_ns = instant, time_ns
        del self._at[block.pointer]
        del self._starts[bisect_left(self._starts, block.pointer)]
        self.live_bytes -= block.nbytes

    def _under(self, block: Block) -> list[Block]:
        first = bisect_right(self._starts, block.pointer) - 1
        if first < 0 or not _overlap(self._at[self._starts[first]], block):
            first += 1
        last = bisect_left(self._starts, block.pointer + block.nbytes)
        return [self._at[start] for start in self._starts[first:last]]


def _overlap(old: Block, new: Block) -> bool:
    return old.pointer + old.nbytes > new.pointer


def united(storages: Iterable[Storage]) -> list[Storage]:
    """Storages with shared memory counted once: what lies inside or across the end of another is joined to it.

    >>> united([Storage(100, 50), Storage(120, 10), Storage(140, 20), Storage(200, 5)])[0].nbytes
    60
    """
    joined: list[Storage] = []
    for storage in sorted(storages, key=lambda s: (s.pointer, -s.nbytes)):
        last = joined[-1] if joined else None
        if last is None or storage.pointer >= last.pointer + last.nbytes:
            joined.append(storage)
            continue
        nbytes = max(last.nbytes, storage.pointer + storage.nbytes - last.pointer)
        named = last if last.category else storage
        joined[-1] = replace(last, nbytes=nbytes, category=named.category, unit=named.unit)
    return joined


def lifetimes_of(baseline: Iterable[Storage], events: Iterable[AllocatorEvent], start_ns: int) -> BlockLifetimes:
    """The lifetimes of all blocks; events of the same time keep the order in which they are given.

    >>> lifetimes_of([Storage(8, 100)], [AllocatorEvent(5, 900, 40), AllocatorEvent(7, 900, -40)], start_ns=0).totals
    [100, 140, 100]
    """
    heap = _Heap()
    departures: list[tuple[int, Block | AllocatorEvent]] = []
    for storage in united(baseline):
        block = Block(storage.pointer, storage.nbytes, storage.category, storage.unit)
        heap.put(block)
        if storage.gone_ns is not None:
            departures.append((storage.gone_ns, block))
    moments = sorted(departures + [(event.time_ns, event) for event in events], key=lambda moment: moment[0])
    times, totals = [start_ns], [heap.live_bytes]
    for instant, (time_ns, what) in enumerate(moments, start=1):
        _apply(heap, what, instant, time_ns)
        times.append(max(start_ns, time_ns))
        totals.append(heap.live_bytes)
    return BlockLifetimes(heap.blocks, times, totals, heap.unknown_frees, heap.unseen_frees)


def _apply(heap: _Heap, what: Block | AllocatorEvent, instant: int, time_ns: int) -> None:
    if isinstance(what, Block):
        heap.end(what, instant, time_ns)
    elif what.nbytes < 0:
        heap.free(what.pointer, instant, time_ns)
    elif what.nbytes:
        heap.put(Block(what.pointer, what.nbytes, what.category, what.unit, instant, time_ns))
