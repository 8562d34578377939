"""A memory timeline: the allocated bytes at each instant by category, and the peak.

Pure: a list of storages that were there at the beginning, a list of allocator events and a list of tags go in, a
`MemoryTimeline` comes out. Measuring is done by recorder.py, so tiny hand-written traces test the accounting exactly.

The category of a block comes from, in this order: a tag of its owner, its own record (the profiler range it was
allocated in, or the object that owns it), a hint (a collective used it). All other blocks are `activations` when
allocated before the last backward ended, and `other` when allocated before the step or later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fsdplab.common.names import CATEGORIES
from fsdplab.profiling.memory.block_lifetimes import (
    LONG_AGO,
    NEVER,
    AllocatorEvent,
    Block,
    BlockLifetimes,
    Storage,
    lifetimes_of,
)

if TYPE_CHECKING:
    from fsdplab.engine.events import Tag  # which imports torch

MAX_POINTS = 500
# profiler and clock agree within microseconds; a busy machine may stop a thread between the two readings
TOLERANCE_NS = 200_000


class AccountingError(AssertionError):
    """The categories of a timeline do not add up to its total, or something in it is negative."""


@dataclass(frozen=True)
class MemoryTimeline:
    """The bytes of one step, in time order. Measured, except where the engine that was measured emulates.

    `points` are rows `{"time_ns": since the beginning, <category>: bytes, ...}`, at most 500 and always with the peak
    among them; `totals` are their sums, counted apart. `resident_growth` is how far the process's resident memory rose
    above its value at the beginning (bytes; None where the system does not tell). `allocated_peak` and `reserved_peak`
    are the CUDA allocator's own figures.
    """

    points: list[dict[str, int]]
    totals: list[int]
    peak: dict[str, int]
    peak_total: int
    peak_time_ns: int
    baseline_total: int
    unit_names_gathered_at_peak: list[str]
    unknown_frees: int
    unseen_frees: int
    found_late: int
    start_ns: int = 0
    resident_growth: int | None = None
    allocated_peak: int | None = None
    reserved_peak: int | None = None

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
        rows = [*zip(self.points, self.totals), ({"time_ns": self.peak_time_ns, **self.peak}, self.peak_total)]
        for row, total in rows:
            parts = {category: row[category] for category in CATEGORIES}
            if sum(parts.values()) != total or min(parts.values()) < 0:
                raise AccountingError(
                    f"memory at {row['time_ns']} ns does not add up: the categories {parts} sum to"
                    f" {sum(parts.values())}, the allocator's running total is {total}; report this with the trace, the"
                    " timeline cannot be used"
                )
        if rows[-1] not in rows[:-1] or self.peak_total != max(self.totals):
            raise AccountingError(
                f"the peak of {self.peak_total} bytes is not the highest point of the timeline ({max(self.totals)})"
            )


def build_timeline(
    baseline: Iterable[Storage],
    events: Iterable[AllocatorEvent],
    *,
    tags: Sequence[Tag] = (),
    hints: Sequence[Tag] = (),
    start_ns: int = 0,
    work_end_ns: int = NEVER,
    **measured: int | None,
) -> MemoryTimeline:
    """The timeline of a step whose last backward ended at `work_end_ns`; `measured` fills the fields of the same name.

    Tags from before `start_ns` apply to baseline storages of exactly their size (an older block at the address differs
    in that). A later tag that fits nothing names memory the profiler cannot see (a shared arena, a buffer made in C++):
    it is counted from the beginning.

    >>> events = [AllocatorEvent(5, 900, 40), AllocatorEvent(7, 900, -40)]
    >>> tags = [Tag("whole_gradients", 900, 40, 6, "a")]
    >>> build_timeline([Storage(8, 100, "parameter_slices")], events, tags=tags).peak_total
    140
    """
    baseline, events = list(baseline), list(events)
    strays = _strays(lifetimes_of(baseline, events, start_ns), [*tags, *hints], start_ns)
    lifetimes = lifetimes_of([*baseline, *strays], events, start_ns)
    _name(lifetimes, tags, hints, start_ns, work_end_ns)
    held = _by_category(lifetimes)
    peak = int(np.argmax(lifetimes.totals))
    # one row at the time of the peak
    kept = [i for i in downsample(lifetimes.totals) if i == peak or lifetimes.times[i] != lifetimes.times[peak]]
    return MemoryTimeline(
        points=[_row(lifetimes.times[i] - start_ns, held[i]) for i in kept],
        totals=[lifetimes.totals[i] for i in kept],
        peak=_row(0, held[peak], timed=False),
        peak_total=lifetimes.totals[peak],
        peak_time_ns=lifetimes.times[peak] - start_ns,
        baseline_total=lifetimes.totals[0],
        unit_names_gathered_at_peak=_gathered(lifetimes.blocks, peak),
        unknown_frees=lifetimes.unknown_frees,
        unseen_frees=lifetimes.unseen_frees,
        found_late=len(strays),
        start_ns=start_ns,
        **measured,
    )


def downsample(totals: Sequence[int], limit: int = MAX_POINTS) -> list[int]:
    """At most `limit` indices in order: first, last, the (first) peak, and the lowest and highest of each of equal
    windows.
    """
    if len(totals) <= limit:
        return list(range(len(totals)))
    values = np.asarray(totals)
    kept = {0, len(values) - 1, int(values.argmax())}
    for window in np.array_split(np.arange(len(values)), (limit - len(kept)) // 2):
        kept |= {int(window[values[window].argmin()]), int(window[values[window].argmax()])}
    return sorted(kept)


class _Directory:
    """Finds the block of a tag."""

    def __init__(self, blocks: Iterable[Block], start_ns: int) -> None:
        self._start_ns = start_ns
        self._at: dict[int, list[Block]] = {}
        self._resident = [block for block in blocks if block.born_ns == LONG_AGO]
        for block in blocks:
            self._at.setdefault(block.pointer, []).append(block)

    def find(self, tag: Tag) -> Block | None:
        """The block alive at the tag's address and time; failing that the nearest in time within the tolerance."""
        candidates = self._at.get(tag.pointer, ())
        if tag.time_ns < self._start_ns:
            return next((b for b in candidates if b.born_ns == LONG_AGO and b.nbytes == tag.nbytes), None)
        near = [block for block in candidates if _distance(block, tag.time_ns) <= TOLERANCE_NS] or self._around(tag)
        return min(near, key=lambda block: (_distance(block, tag.time_ns), -block.born_ns), default=None)

    def _around(self, tag: Tag) -> list[Block]:
        return [
            b for b in self._resident if b.pointer < tag.pointer < b.pointer + b.nbytes and tag.time_ns <= b.died_ns
        ]


def _distance(block: Block, time_ns: int) -> int:
    return max(block.born_ns - time_ns, time_ns - block.died_ns, 0)


def _strays(lifetimes: BlockLifetimes, tags: Iterable[Tag], start_ns: int) -> list[Storage]:
    directory = _Directory(lifetimes.blocks, start_ns)
    strays: dict[int, Storage] = {}
    for tag in tags:
        if tag.time_ns >= start_ns and tag.pointer and tag.nbytes and directory.find(tag) is None:
            known = strays.get(tag.pointer)
            strays[tag.pointer] = Storage(tag.pointer, max(tag.nbytes, known.nbytes if known else 0))
    return list(strays.values())


def _name(
    lifetimes: BlockLifetimes, tags: Sequence[Tag], hints: Sequence[Tag], start_ns: int, work_end_ns: int
) -> None:
    directory = _Directory(lifetimes.blocks, start_ns)
    for hint in hints:
        block = directory.find(hint)
        if block is not None and not block.category:
            block.category, block.unit = hint.category, hint.unit
    for tag in tags:
        block = directory.find(tag)
        if block is not None:
            block.category, block.unit = tag.category, tag.unit
    for block in lifetimes.blocks:
        if not block.category:
            block.category = "activations" if LONG_AGO < block.born_ns <= work_end_ns else "other"


def _by_category(lifetimes: BlockLifetimes) -> np.ndarray:
    changes: np.ndarray = np.zeros((len(lifetimes.times), len(CATEGORIES)), dtype=np.int64)
    for block in lifetimes.blocks:
        column = CATEGORIES.index(block.category)
        changes[block.born, column] += block.nbytes
        if block.died != NEVER:
            changes[block.died, column] -= block.nbytes
    return changes.cumsum(axis=0)


def _row(time_ns: int, held: np.ndarray, timed: bool = True) -> dict[str, int]:
    row = {"time_ns": time_ns} if timed else {}
    return row | {category: int(nbytes) for category, nbytes in zip(CATEGORIES, held)}


def _gathered(blocks: Iterable[Block], instant: int) -> list[str]:
    alive = (b for b in blocks if b.category == "gathered_parameters" and b.born <= instant < b.died)
    return list(dict.fromkeys(block.unit for block in alive if block.unit))
