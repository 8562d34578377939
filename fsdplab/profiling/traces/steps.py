"""What belongs to which step: by the clock where the host itself works, by launch on a GPU.

A step lasts from its begin to the begin of the next one. On the CPU, and for GPU traces without correlation numbers, it
is the `ProfilerStep` range of the host. On a GPU a host that runs ahead has left this range long before the device
begins with what was launched in it. So there a step's work is what its range launched, found by correlation number; it
begins once its range has begun and the device is done with the step before, and the last step ends with its range or
its last work. Time in which the device waits for a loader between two steps is therefore time of a step.

Where the work of two steps overlaps (a copy for the next batch on a stream of its own), it is cut at the instant that
leaves the least work outside of its own step, so no nanosecond is in two steps. The first step is cut likewise against
what the device still had to do when the profiler began. Work launched outside of every step, before the trace began, or
left beyond a cut belongs to no step; it is summed up, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, before, pairs, size, subtract, union, within
from fsdplab.profiling.traces.collectives import Collective
from fsdplab.profiling.traces.events import Events, Kind

HostStep = tuple[int, int, int]  # number, start, end of the host's range


@dataclass(frozen=True)
class Window:
    """A step: its number, its begin and its end, in the trace's own ns."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class NoStep:
    """Device work that belongs to no step, and the steps without any: `ns` of `device_ns` of work in the trace.

    `by_launch` is False where the trace has no correlation numbers; then steps are the host's ranges, and the GPU's
    work in them may be another step's. `step_ranges` is False where it has no steps; then all of it counts as one.
    """

    ns: int = 0
    device_ns: int = 0
    empty_steps: tuple[int, ...] = field(default=())
    by_launch: bool = True
    step_ranges: bool = True

    @property
    def share(self) -> float:
        """The part of all device work, 0 to 1."""
        return self.ns / self.device_ns if self.device_ns else 0.0

    def sentences(self) -> list[str]:
        """What a reader must know: `["2.1 ms of device work (4 %) belong to no profiled step: ..."]`; [] if nothing."""
        found = []
        if not self.step_ranges:
            found.append(
                "the trace has no ProfilerStep ranges, so all of it counts as one step: call prof.step() behind each"
                " step of the training"
            )
        if not self.by_launch:
            found.append(
                "the trace has no correlation numbers: steps are the host's ranges, and a GPU that runs behind its host"
                " does other steps' work in them"
            )
        if self.ns:
            found.append(
                f"{self.ns / 1e6:.3g} ms of device work ({self.share:.1%}) belong to no profiled step: launched outside"
                " of every ProfilerStep range, before the trace began, or beside another step"
            )
        if self.empty_steps:
            found.append(f"no device work was launched in steps {', '.join(map(str, self.empty_steps))}: left out")
        return found


class Steps(Protocol):
    """The steps of a trace, and what belongs to each (by its index in `windows`)."""

    windows: list[Window]
    no_step: NoStep

    def computing(self, index: int) -> Intervals:
        """When the step computed, inside its window."""

    def collectives(self, index: int) -> list[Collective]:
        """The step's collectives, in order of issue."""

    def lists(self, index: int, each: Collective) -> bool:
        """Whether one of the step's collectives is counted in it, and in no other."""

    def kernels(self, index: int) -> np.ndarray:
        """Which computing kernels are the step's, as rows of the events."""


class ByWindow:
    """Steps are ranges of the host: everything that runs in a range belongs to it."""

    def __init__(
        self,
        found: Events,
        computing: Intervals,
        collectives: Sequence[Collective],
        steps: Sequence[HostStep],
        no_step: NoStep,
    ) -> None:
        self.windows = [Window(*step) for step in steps]
        self.no_step = no_step
        self._computing, self._collectives, self._found = computing, collectives, found
        self._kernels = found.rows(Kind.KERNEL)
        self._reach = np.array([(each.first, each.last) for each in collectives], dtype=np.int64).reshape(-1, 2)

    def computing(self, index: int) -> Intervals:
        """The part of all computing in the window."""
        window = self.windows[index]
        return within(self._computing, window.start, window.end)

    def collectives(self, index: int) -> list[Collective]:
        """Those with a piece in the window."""
        start, end = self.windows[index].start, self.windows[index].end
        near = np.flatnonzero((self._reach[:, 0] < end) & (self._reach[:, 1] > start)).tolist()
        return [
            self._collectives[at]
            for at in near
            if any(piece.start < end and piece.end > start for piece in self._collectives[at].pieces)
        ]

    def lists(self, index: int, each: Collective) -> bool:
        """Whether no earlier step has it: gloo's range may end late, in the next step, and its bytes count once."""
        return index == 0 or each.first >= self.windows[index - 1].end

    def kernels(self, index: int) -> np.ndarray:
        """Those that run in the window."""
        return _running(self._found, self._kernels, self.windows[index])


class ByLaunch:
    """Steps are what the host's ranges launched."""

    def __init__(self, found: Events, collectives: Sequence[Collective], steps: Sequence[HostStep]) -> None:
        self._found, copies = found, found.rows(Kind.COPY)
        self._kernels = found.rows(Kind.KERNEL)
        self._kernel_steps = _steps_of(found.launch_starts(self._kernels), steps)
        copy_steps = _steps_of(found.launch_starts(copies), steps)
        self._members: list[list[Collective]] = [[] for _ in range(len(steps) + 1)]
        issues = np.array([each.issue for each in collectives], dtype=np.int64)
        for each, step in zip(collectives, _steps_of(issues, steps).tolist()):
            self._members[step if each.issued else -1].append(each)

        def work_of(index: int) -> Intervals:
            mine = [self._kernels[self._kernel_steps == index], copies[copy_steps == index]]
            return union(*map(found.spans_of, mine), pieces_of(self._members[index]))

        own, of_none = [work_of(index) for index in range(len(steps))], work_of(-1)
        self._index = [index for index, work in enumerate(own) if len(work)]
        earlier = self._earlier(of_none)
        bounds = _windows_after(earlier, [own[index] for index in self._index])
        kept = {index: bound for index, bound in zip(self._index, bounds) if bound[0] < bound[1]}
        self._index = list(kept)
        self.windows = wall_windows(kept, steps, int(earlier[-1, 1]) if len(earlier) else steps[0][1])
        self.no_step = _no_step(own, of_none, kept, steps)

    def _earlier(self, of_none: Intervals) -> Intervals:
        """What the device still had to do when the first step came to it: work of no step that began before the step's
        own kernels. A copy of the step may run beside it; what is launched unseen later on is not older.
        """
        if not self._index:
            return EMPTY
        first = self._index[0]
        kernels = self._kernels[self._kernel_steps == first]
        work = union(self._found.spans_of(kernels), pieces_of(self._members[first]))
        return of_none[of_none[:, 0] < work[0, 0]] if len(work) else EMPTY

    def computing(self, index: int) -> Intervals:
        """The step's own kernels."""
        window = self.windows[index]
        return within(union(self._found.spans_of(self.kernels(index))), window.start, window.end)

    def collectives(self, index: int) -> list[Collective]:
        """Those that the step launched."""
        return self._members[self._index[index]]

    def lists(self, index: int, each: Collective) -> bool:
        """Every collective has one step."""
        return True

    def kernels(self, index: int) -> np.ndarray:
        """Those that the step launched, and that ran in its window."""
        mine = self._kernels[self._kernel_steps == self._index[index]]
        return _running(self._found, mine, self.windows[index])


def _running(found: Events, rows: np.ndarray, window: Window) -> np.ndarray:
    """The rows that run in a window."""
    return rows[(found.end[rows] > window.start) & (found.start[rows] < window.end)]


def shows_launches(found: Events) -> bool:
    """Whether the trace says of any device work who launched it."""
    return bool((found.launched_by >= 0).any())


def pieces_of(collectives: Sequence[Collective]) -> Intervals:
    """All pieces of all collectives as one array of intervals, which may overlap."""
    return pairs([(piece.start, piece.end) for each in collectives for piece in each.pieces])


def _steps_of(launches: np.ndarray, steps: Sequence[HostStep]) -> np.ndarray:
    """The index of the step in whose range each launch lies; -1 for none. The ranges are in order of their starts."""
    bounds = np.array([step[1:] for step in steps], dtype=np.int64).reshape(-1, 2)
    at = np.searchsorted(bounds[:, 0], launches, side="right") - 1
    return np.where((at >= 0) & (launches <= bounds[at, 1]), at, -1)


def device_windows(own: Sequence[Intervals]) -> list[tuple[int, int]]:
    """From the first start to the last end of each step's work, cut where two steps overlap; each set is sorted,
    disjoint and not empty.

    >>> device_windows([np.array([[0, 10]]), np.array([[8, 9], [11, 20]])])     # one nanosecond is left outside
    [(0, 10), (10, 20)]
    """
    bounds = [(int(each[0, 0]), int(each[-1, 1])) for each in own]
    for index in range(1, len(bounds)):
        (begun, until), (start, end) = bounds[index - 1], bounds[index]
        if start < until:
            cut = _cut(own[index - 1], own[index], max(begun, start), max(begun, min(until, end)))
            bounds[index - 1], bounds[index] = (begun, cut), (cut, max(cut, end))
    return bounds


def wall_windows(device: dict[int, tuple[int, int]], steps: Sequence[HostStep], busy_until: int) -> list[Window]:
    """The steps with device work, from begin to begin. `device`: when each worked on the device, by its index in
    `steps`; `busy_until`: when the device was done with what came before.

    >>> wall_windows({0: (5, 30), 1: (105, 130)}, [(7, 0, 100), (8, 100, 200)], 0)    # a loader takes 70 of 100
    [Window(number=7, start=0, end=100), Window(number=8, start=100, end=200)]
    """
    begins = []
    for index, (_, begin, _) in enumerate(steps):
        first, last = device.get(index, (max(begin, busy_until), busy_until))
        begins.append(min(first, max(begin, busy_until)))
        busy_until = last
    windows = []
    for index, (_, last) in device.items():
        number, _, end = steps[index]
        follows = index + 1 < len(steps) and steps[index + 1][0] == number + 1
        windows.append(Window(number, begins[index], begins[index + 1] if follows else max(end, last)))
    return windows


def _windows_after(earlier: Intervals, own: Sequence[Intervals]) -> list[tuple[int, int]]:
    """The windows, the first one cut against what the device still had to do when profiling began."""
    return device_windows([earlier, *own])[1:] if len(earlier) and len(own) else device_windows(own)


def _cut(earlier: Intervals, later: Intervals, first: int, last: int) -> int:
    """The instant from `first` to `last` with the least work of `earlier` after it and of `later` before it."""
    edges = np.concatenate([earlier.ravel(), later.ravel(), [first, last]])
    edges = np.unique(edges[(edges >= first) & (edges <= last)])
    outside = size(earlier) - before(earlier, edges) + before(later, edges)
    return int(edges[int(np.argmin(outside))])


def _no_step(
    own: Sequence[Intervals], of_none: Intervals, windows: dict[int, tuple[int, int]], steps: Sequence[HostStep]
) -> NoStep:
    beyond = [subtract(work, [windows.get(index, (0, 0))]) for index, work in enumerate(own)]
    return NoStep(
        size(union(of_none, *beyond)),
        size(union(of_none, *own)),
        tuple(step[0] for index, step in enumerate(steps) if index not in windows),
    )


def all_device_work(found: Events, collectives: Sequence[Collective]) -> Intervals:
    """When the device did anything at all: kernels, copies, communication."""
    return union(found.spans(Kind.KERNEL, Kind.COPY), pieces_of(collectives)) if found.on_gpu else EMPTY
