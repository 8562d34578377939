"""The blocks of memory that an allocator's events describe: one table, from each allocation to its free.

An allocator's log is never complete. Addresses are reused; storages allocated before profiling are freed without a
size; a few are freed on threads that the profiler does not see. The rules are few:

- a storage that lies inside another one is the same memory, and is counted once;
- a new block over the address of a live one proves that the old one is gone (an unseen free, counted);
- a free of an address where nothing lives changes nothing (an unknown free, counted).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import numpy as np

LONG_AGO = -(2**62)
NEVER = 2**62


@dataclass(frozen=True)
class AllocatorEvent:
    """An allocation of `nbytes`, or a free where `nbytes` is negative; an empty category is unknown.

    A storage that was there when profiling began is an allocation at `LONG_AGO`; `gone_ns` is when it was seen to be
    freed, of which the allocator may report nothing.
    """

    time_ns: int
    pointer: int
    nbytes: int
    category: str = ""
    unit: str = ""
    gone_ns: int = NEVER


@dataclass(frozen=True)
class Blocks:
    """The blocks in the order of their allocations: n of them, over m events after the beginning.

    `pointer`, `nbytes`, `born` and `died` are int64[n]. Of these the last two are moments, which index `times`,
    int64[m + 2]: LONG_AGO, the time of each event, NEVER. `totals` are the m + 1 sums of bytes after each but the last.
    """

    allocations: list[AllocatorEvent]
    pointer: np.ndarray
    nbytes: np.ndarray
    born: np.ndarray
    died: np.ndarray
    times: np.ndarray
    totals: list[int]
    unknown_frees: int
    unseen_frees: int


def blocks_of(events: Iterable[AllocatorEvent]) -> Blocks:
    """The blocks of an allocator's events; events of the same time keep the order in which they are given.

    >>> blocks_of([AllocatorEvent(LONG_AGO, 8, 100), AllocatorEvent(5, 900, 40), AllocatorEvent(7, 900, -40)]).totals
    [100, 140, 100]
    """
    events = list(events)
    baseline = united(event for event in events if event.time_ns == LONG_AGO)
    moments = [(storage.gone_ns, storage) for storage in baseline if storage.gone_ns != NEVER]
    moments += [(event.time_ns, event) for event in events if event.time_ns > LONG_AGO]
    moments.sort(key=lambda moment: moment[0])
    heap = _Heap(baseline)
    totals = [heap.live_bytes]
    for moment, (_, event) in enumerate(moments, start=1):
        heap.apply(event, moment)
        totals.append(heap.live_bytes)
    spans = [(each.pointer, each.nbytes) for each in heap.allocations]
    lives = [(born, heap.died.get(index, len(totals))) for index, born in enumerate(heap.born)]
    pointer, nbytes = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    born, died = np.array(lives, dtype=np.int64).reshape(-1, 2).T
    times = np.array([LONG_AGO, *(time_ns for time_ns, _ in moments), NEVER])
    return Blocks(heap.allocations, pointer, nbytes, born, died, times, totals, heap.unknown_frees, heap.unseen_frees)


def without_kept(events: Iterable[AllocatorEvent], addresses: Container[int]) -> list[AllocatorEvent]:
    """The events but for the last allocation at each of the addresses, whose memory is still in use.

    >>> without_kept([AllocatorEvent(5, 900, 40), AllocatorEvent(7, 900, -40), AllocatorEvent(9, 900, 50)], {900})
    [AllocatorEvent(time_ns=5, pointer=900, nbytes=40, ...), AllocatorEvent(time_ns=7, pointer=900, nbytes=-40, ...)]
    """
    events = list(events)
    last = {
        event.pointer: index for index, event in enumerate(events) if event.nbytes > 0 and event.pointer in addresses
    }
    return [event for index, event in enumerate(events) if last.get(event.pointer) != index]


def united(storages: Iterable[AllocatorEvent]) -> list[AllocatorEvent]:
    """Storages with shared memory counted once: what lies inside or across the end of another is joined to it.

    >>> spans = [(100, 50), (120, 10), (140, 20), (200, 5)]
    >>> [storage.nbytes for storage in united(AllocatorEvent(LONG_AGO, *span) for span in spans)]
    [60, 5]
    """
    joined: list[AllocatorEvent] = []
    for storage in sorted(storages, key=lambda s: (s.pointer, -s.nbytes)):
        last = joined[-1] if joined else None
        if last is None or storage.pointer >= last.pointer + last.nbytes:
            joined.append(storage)
            continue
        nbytes = max(last.nbytes, storage.pointer + storage.nbytes - last.pointer)
        named = last if last.category else storage
        joined[-1] = replace(last, nbytes=nbytes, category=named.category, unit=named.unit)
    return joined


class _Heap:
    """All blocks so far with the moments of their begin and end, and of those alive the index by start address."""

    def __init__(self, baseline: Iterable[AllocatorEvent]) -> None:
        self.allocations: list[AllocatorEvent] = []
        self.born: list[int] = []
        self.died: dict[int, int] = {}
        self.live_bytes = self.unknown_frees = self.unseen_frees = 0
        self._at: dict[int, int] = {}
        self._starts: list[int] = []  # the keys of `_at`, sorted
        for storage in baseline:
            self._put(storage, 0)

    def apply(self, event: AllocatorEvent, moment: int) -> None:
        index = self._at.get(event.pointer)
        if event.time_ns == LONG_AGO:  # it is gone, and if something else is at its address by now, that stays
            if index is not None and self.born[index] == 0:
                self._free(event.pointer, moment)
        elif event.nbytes > 0:
            self._put(event, moment)
        elif event.nbytes < 0 and index is not None:
            self._free(event.pointer, moment)
        elif event.nbytes < 0:
            self.unknown_frees += 1

    def _put(self, new: AllocatorEvent, moment: int) -> None:
        first = max(bisect_right(self._starts, new.pointer) - 1, 0)
        for start in self._starts[first : bisect_left(self._starts, new.pointer + new.nbytes)]:
            if start + self.allocations[self._at[start]].nbytes > new.pointer:
                self._free(start, moment)
                self.unseen_frees += 1
        insort(self._starts, new.pointer)
        self._at[new.pointer] = len(self.allocations)
        self.allocations.append(new)
        self.born.append(moment)
        self.live_bytes += new.nbytes

    def _free(self, start: int, moment: int) -> None:
        index = self._at.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        self.died[index] = moment
        self.live_bytes -= self.allocations[index].nbytes
