"""A memory timeline: the allocated bytes at each instant by category, and the peak.

Pure: allocator events and tags go in, a `MemoryTimeline` comes out. Measuring is done by recorder.py, so tiny
hand-written traces test the accounting exactly.

The category of a block comes from, in this order: a tag of its owner, its own record (the profiler range it was
allocated in, or the object that owns it), a hint (a collective used it). All other blocks are `activations` when
allocated before the last backward ended, and `other` when allocated before the step or later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fsdplab.common.errors import UserError
from fsdplab.common.names import CATEGORIES
from fsdplab.common.thinning import downsample

if TYPE_CHECKING:
    from fsdplab.engine.events import Tag  # which imports torch

# profiler and clock agree within microseconds; a busy machine may stop a thread between the two readings
TOLERANCE_NS = 200_000
LONG_AGO = -(2**62)
NEVER = 2**62


class AccountingError(UserError, AssertionError):
    """The categories of a timeline do not add up to its total, or something in it is negative."""


@dataclass(frozen=True)
class MemoryTimeline:
    """The bytes of one step, in time order. Measured, except where the engine that was measured emulates.

    `points` are rows `{"time_ns": since the beginning, <category>: bytes, ...}`, at most 500 and always with the peak
    among them; `totals` are their sums, counted apart. `resident_growth` is how far the process's resident memory rose
    above its value at the beginning (bytes; None where the system does not tell). `allocated_peak` and `reserved_peak`
    are the CUDA allocator's own figures. `workspaces` are the bytes that cuBLAS kept besides, which
    `allocated_peak` counts and `totals` do not: they are the library's, whatever is trained.
    """

    points: list[dict[str, int]]
    totals: list[int]
    peak: dict[str, int]  # category -> bytes
    peak_total: int
    peak_time_ns: int  # since the beginning
    baseline_total: int  # bytes at the beginning
    unit_names_gathered_at_peak: list[str]
    unknown_frees: int  # of addresses where nothing lived
    unseen_frees: int  # of blocks that another one was put over
    found_late: int  # storages that only a tag or a hint names
    start_ns: int = 0
    resident_growth: int | None = None
    allocated_peak: int | None = None
    reserved_peak: int | None = None
    workspaces: int | None = None

    @property
    def growth(self) -> int:
        """The growth of the total since the beginning, which `resident_growth` cross-checks."""
        return self.peak_total - self.baseline_total

    @property
    def other_share(self) -> float:
        """The part of the peak without a category, from 0 to 1."""
        return self.peak["other"] / self.peak_total if self.peak_total else 0.0

    def check(self) -> None:
        """Raise `AccountingError` unless at every point the categories sum to the total and nothing is negative."""
        peak = ({"time_ns": self.peak_time_ns, **self.peak}, self.peak_total)
        points = list(zip(self.points, self.totals))
        for row, total in [*points, peak]:
            parts = {category: row[category] for category in CATEGORIES}
            if sum(parts.values()) != total or min(parts.values()) < 0:
                raise AccountingError(
                    f"memory at {row['time_ns']} ns does not add up: the categories {parts} sum to"
                    f" {sum(parts.values())}, the allocator's running total is {total}; report this with the trace, the"
                    " timeline cannot be used"
                )
        if peak not in points or self.peak_total != max(self.totals):
            raise AccountingError(
                f"the peak of {self.peak_total} bytes is not the highest point of the timeline ({max(self.totals)})"
            )


def build_timeline(
    events: Iterable[AllocatorEvent],
    *,
    tags: Sequence[Tag] = (),
    hints: Sequence[Tag] = (),
    start_ns: int = 0,
    work_end_ns: int = NEVER,
    **measured: int | None,
) -> MemoryTimeline:
    """The timeline of a step whose last backward ended at `work_end_ns`; `measured` fills the fields of the same name.

    Tags from before `start_ns` apply to storages of the beginning of exactly their size (an older block at the address
    differs in that). A later tag that fits nothing names memory the profiler cannot see (a shared arena, a buffer made
    in C++): it is counted from the beginning.

    >>> events = [AllocatorEvent(LONG_AGO, 8, 100), AllocatorEvent(5, 900, 40), AllocatorEvent(7, 900, -40)]
    >>> build_timeline(events, tags=[Tag("unsharded_gradients", 900, 40, 6, "a")]).peak_total
    140
    """
    # the blocks, with what no event shows; what each of them is; and so the bytes at each moment
    events = list(events)
    strays = _strays(blocks_of(events), [*tags, *hints], start_ns)
    blocks = blocks_of([*events, *strays])
    names = _names(blocks, tags, hints, start_ns, work_end_ns)
    by_category = _by_category(blocks, names)
    times = blocks.times.clip(start_ns).tolist()  # what happened before lies at the beginning
    peak = int(np.argmax(blocks.totals))

    points: list[dict[str, int]] = []
    totals: list[int] = []
    for moment in downsample(blocks.totals):
        if moment == peak or times[moment] != times[peak]:  # one row at the time of the peak
            held = dict(zip(CATEGORIES, by_category[moment].tolist()))
            points.append({"time_ns": times[moment] - start_ns, **held})
            totals.append(blocks.totals[moment])
    return MemoryTimeline(
        points=points,
        totals=totals,
        peak=dict(zip(CATEGORIES, by_category[peak].tolist())),
        peak_total=blocks.totals[peak],
        peak_time_ns=times[peak] - start_ns,
        baseline_total=blocks.totals[0],
        unit_names_gathered_at_peak=_gathered_at(peak, blocks, names),
        unknown_frees=blocks.unknown_frees,
        unseen_frees=blocks.unseen_frees,
        found_late=len(strays),
        start_ns=start_ns,
        **measured,
    )


def _gathered_at(moment: int, blocks: Blocks, names: Sequence[tuple[str, str]]) -> list[str]:
    """The units of which unsharded parameters are held at a moment, in the order of their allocations."""
    units: dict[str, None] = {}
    is_held = (blocks.born <= moment) & (moment < blocks.died)
    for index in np.flatnonzero(is_held).tolist():
        category, unit = names[index]
        if category == "unsharded_parameters" and unit:
            units[unit] = None
    return list(units)


def _strays(blocks: Blocks, tags: Sequence[Tag], start_ns: int) -> list[AllocatorEvent]:
    """The memory that tags name and no event shows, as storages of the beginning: the most bytes seen of each."""
    sizes: dict[int, int] = {}
    for tag, block in zip(tags, _meant(blocks, tags, start_ns)):
        if block is None and tag.time_ns >= start_ns and tag.pointer and tag.nbytes:
            sizes[tag.pointer] = max(tag.nbytes, sizes.get(tag.pointer, 0))
    return [AllocatorEvent(LONG_AGO, pointer, nbytes) for pointer, nbytes in sizes.items()]


def _meant(blocks: Blocks, tags: Sequence[Tag], start_ns: int) -> list[int | None]:
    """The index of the block that each tag is about, None for no block: the one alive at its address and time; failing
    that the nearest in time within the tolerance; and then the storage of the beginning that the address lies in.
    """
    born_ns = blocks.times[blocks.born]
    died_ns = blocks.times[blocks.died]
    ends = blocks.pointer + blocks.nbytes
    meant = []
    for tag in tags:
        here = np.flatnonzero(blocks.pointer == tag.pointer)
        if tag.time_ns < start_ns:
            is_of_beginning = (blocks.born[here] == 0) & (blocks.nbytes[here] == tag.nbytes)
            here = here[is_of_beginning]
        else:
            # how far each block's life is from the tag; 0 for one that lives: a tag at 95 is 5 away from a life of
            # 100 to 200, and 15 from one that ended at 80
            too_early = born_ns[here] - tag.time_ns
            too_late = tag.time_ns - died_ns[here]
            away = np.maximum(too_early, too_late).clip(0)
            nearest_first = np.lexsort((-born_ns[here], away))  # of equals the youngest
            within_tolerance = np.count_nonzero(away <= TOLERANCE_NS)
            here = here[nearest_first][:within_tolerance]
            if not here.size:
                lies_inside = (blocks.pointer < tag.pointer) & (tag.pointer < ends)
                is_alive = (blocks.born == 0) & (tag.time_ns <= died_ns)
                here = np.flatnonzero(lies_inside & is_alive)
        meant.append(int(here[0]) if here.size else None)
    return meant


def _names(
    blocks: Blocks, tags: Sequence[Tag], hints: Sequence[Tag], start_ns: int, work_end_ns: int
) -> list[tuple[str, str]]:
    """Category and unit of every block: by the last tag, else its own event, else the first hint, else its time."""
    names: dict[int | None, tuple[str, str]] = {}  # None: a tag or a hint of no block
    for index, event in enumerate(blocks.allocations):
        in_work = LONG_AGO < event.time_ns <= work_end_ns
        names[index] = ("activations" if in_work else "other", "")
    # each source replaces what the ones before it said
    hinted = zip(_meant(blocks, hints, start_ns), hints)
    for block, hint in reversed(list(hinted)):
        names[block] = (hint.category, hint.unit)
    for index, event in enumerate(blocks.allocations):
        if event.category:
            names[index] = (event.category, event.unit)
    for block, tag in zip(_meant(blocks, tags, start_ns), tags):
        names[block] = (tag.category, tag.unit)
    return [names[index] for index in range(len(blocks.allocations))]


def _by_category(blocks: Blocks, names: Sequence[tuple[str, str]]) -> np.ndarray:
    """The bytes held after each moment: a column a category."""
    changes: np.ndarray = np.zeros((len(blocks.times), len(CATEGORIES)), dtype=np.int64)
    columns = [CATEGORIES.index(category) for category, _ in names]
    np.add.at(changes, (blocks.born, columns), blocks.nbytes)
    np.subtract.at(changes, (blocks.died, columns), blocks.nbytes)
    return changes.cumsum(axis=0)


# ---- the blocks that an allocator's events describe: one table, from each allocation to its free
#
# An allocator's log is never complete. Addresses are reused; storages allocated before profiling are freed without a
# size; a few are freed on threads that the profiler does not see. The rules are few:
#
# - a storage that lies inside another one is the same memory, and is counted once;
# - a new block over the address of a live one proves that the old one is gone (an unseen free, counted);
# - a free of an address where nothing lives changes nothing (an unknown free, counted).


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

    A moment is a position in `times`: 0 is the beginning, m + 1 is never.
    """

    allocations: list[AllocatorEvent]  # n
    pointer: np.ndarray  # int64[n]
    nbytes: np.ndarray  # int64[n]
    born: np.ndarray  # int64[n], the moment of each allocation
    died: np.ndarray  # int64[n], the moment of its free
    times: np.ndarray  # int64[m + 2]: LONG_AGO, the time of each event, NEVER
    totals: list[int]  # m + 1 sums of bytes after each moment but the last
    unknown_frees: int  # of an address where nothing lived
    unseen_frees: int  # of blocks that another one was put over


def blocks_of(events: Iterable[AllocatorEvent]) -> Blocks:
    """The blocks of an allocator's events; events of the same time keep the order in which they are given.

    >>> blocks_of([AllocatorEvent(LONG_AGO, 8, 100), AllocatorEvent(5, 900, 40), AllocatorEvent(7, 900, -40)]).totals
    [100, 140, 100]
    """
    events = list(events)
    baseline = united(event for event in events if event.time_ns == LONG_AGO)
    # what happened, with its time: storages of the beginning that were seen to be gone, and all later events
    moments = [(storage.gone_ns, storage) for storage in baseline if storage.gone_ns != NEVER]
    moments += [(event.time_ns, event) for event in events if event.time_ns > LONG_AGO]
    moments.sort(key=lambda moment: moment[0])

    heap = _Heap(baseline)
    totals = [heap.live_bytes]
    for moment, (_, event) in enumerate(moments, start=1):
        heap.apply(event, moment)
        totals.append(heap.live_bytes)
    never = len(totals)  # the moment of `NEVER`
    died = [heap.died.get(index, never) for index in range(len(heap.allocations))]
    return Blocks(
        allocations=heap.allocations,
        pointer=np.array([block.pointer for block in heap.allocations], dtype=np.int64),
        nbytes=np.array([block.nbytes for block in heap.allocations], dtype=np.int64),
        born=np.array(heap.born, dtype=np.int64),
        died=np.array(died, dtype=np.int64),
        times=np.array([LONG_AGO, *(time_ns for time_ns, _ in moments), NEVER]),
        totals=totals,
        unknown_frees=heap.unknown_frees,
        unseen_frees=heap.unseen_frees,
    )


def without_kept(events: Iterable[AllocatorEvent], addresses: Container[int]) -> list[AllocatorEvent]:
    """The events but for the last allocation at each of the addresses, whose memory is still in use.

    >>> without_kept([AllocatorEvent(5, 900, 40), AllocatorEvent(7, 900, -40), AllocatorEvent(9, 900, 50)], {900})
    [AllocatorEvent(time_ns=5, pointer=900, nbytes=40, ...), AllocatorEvent(time_ns=7, pointer=900, nbytes=-40, ...)]
    """
    events = list(events)
    last: dict[int, int] = {}  # of each address the index of its last allocation
    for index, event in enumerate(events):
        if event.nbytes > 0 and event.pointer in addresses:
            last[event.pointer] = index
    return [event for index, event in enumerate(events) if last.get(event.pointer) != index]


def united(storages: Iterable[AllocatorEvent]) -> list[AllocatorEvent]:
    """Count shared memory once: what lies inside another storage or across its end is joined to it.

    >>> spans = [(100, 50), (120, 10), (140, 20), (200, 5)]
    >>> [storage.nbytes for storage in united(AllocatorEvent(LONG_AGO, *span) for span in spans)]
    [60, 5]
    """
    joined: list[AllocatorEvent] = []
    for storage in sorted(storages, key=lambda storage: (storage.pointer, -storage.nbytes)):
        last = joined[-1] if joined else None
        if last is None or storage.pointer >= last.pointer + last.nbytes:
            joined.append(storage)
            continue
        # (100, 50) and (140, 20): from 100 to 160
        nbytes = max(last.nbytes, storage.pointer + storage.nbytes - last.pointer)
        named = last if last.category else storage
        joined[-1] = replace(last, nbytes=nbytes, category=named.category, unit=named.unit)
    return joined


class _Heap:
    """All blocks so far with the moments of their begin and end, and of those alive the index by start address."""

    def __init__(self, baseline: Iterable[AllocatorEvent]) -> None:
        self.allocations: list[AllocatorEvent] = []
        self.born: list[int] = []  # of each allocation its moment
        self.died: dict[int, int] = {}  # by the index of an allocation: the moment of its free
        self.live_bytes = 0
        self.unknown_frees = 0
        self.unseen_frees = 0
        self._at: dict[int, int] = {}  # start address -> index of the block that lives there
        self._starts: list[int] = []  # the keys of `_at`, sorted
        for storage in baseline:
            self._put(storage, 0)

    def apply(self, event: AllocatorEvent, moment: int) -> None:
        """Follow an event."""
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
        """Add a block; those that it lies over are gone."""
        first = max(bisect_right(self._starts, new.pointer) - 1, 0)  # it may begin before the new one
        behind = bisect_left(self._starts, new.pointer + new.nbytes)
        for start in self._starts[first:behind]:
            if start + self.allocations[self._at[start]].nbytes > new.pointer:
                self._free(start, moment)
                self.unseen_frees += 1
        insort(self._starts, new.pointer)
        self._at[new.pointer] = len(self.allocations)
        self.allocations.append(new)
        self.born.append(moment)
        self.live_bytes += new.nbytes

    def _free(self, start: int, moment: int) -> None:
        """End the block that lives at an address."""
        index = self._at.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        self.died[index] = moment
        self.live_bytes -= self.allocations[index].nbytes
