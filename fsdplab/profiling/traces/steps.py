"""What belongs to which step: by the clock where the host itself works, by launch on a GPU.

A host that runs ahead has left its `ProfilerStep` range long before the GPU begins with what was launched in it. So on
a GPU a step is the device work that its range launched, found by correlation number, and its window goes from the first
start to the last end of that work. Where the windows of two steps overlap (a copy for the next batch on a stream of its
own), they are cut at the instant that leaves the least work outside of its own window, so no nanosecond is in two
steps. The first step is cut likewise against what the device still had to do when the profiler began. Work launched
outside of every step, before the trace began, or left beyond a cut belongs to no step; it is summed up, never dropped.

On the CPU, and for GPU traces without correlation numbers, a step is the range of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, Measure, size, subtract, union, within
from fsdplab.profiling.traces.classify import TraceEvents
from fsdplab.profiling.traces.collectives import Collective, Launches

HostStep = tuple[int, int, int]  # number, start, end of the host's range
_UNKNOWN = -(2**62)  # the launch of work that the trace does not show


@dataclass(frozen=True)
class Window:
    """A step: its number, and when it ran (on the device, where there is one), in the trace's own ns."""

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
        """Which of the trace's computing kernels are the step's, as positions in `TraceEvents.kernels`."""


class ByWindow:
    """Steps are ranges of the host: everything that runs in a range belongs to it."""

    def __init__(
        self,
        found: TraceEvents,
        computing: Intervals,
        collectives: Sequence[Collective],
        steps: Sequence[HostStep],
        no_step: NoStep,
    ) -> None:
        self.windows = [Window(*step) for step in steps]
        self.no_step = no_step
        self._computing, self._collectives, self._kernels = computing, collectives, found.kernels.pairs()
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
        window = self.windows[index]
        return np.flatnonzero((self._kernels[:, 1] > window.start) & (self._kernels[:, 0] < window.end))


class ByLaunch:
    """Steps are what the host's ranges launched."""

    def __init__(self, found: TraceEvents, collectives: Sequence[Collective], steps: Sequence[HostStep]) -> None:
        kernels, copies = found.kernels.pairs(), found.copies.pairs()
        self._kernels = kernels
        self._kernel_steps = _steps_of(launches_of(found, found.kernel_launches), steps)
        copy_steps = _steps_of(launches_of(found, found.copy_launches), steps)
        of_collectives = _steps_of(
            np.array([each.issue if each.issued else _UNKNOWN for each in collectives], dtype=np.int64), steps
        )
        self._members: list[list[Collective]] = [[] for _ in range(len(steps) + 1)]
        for each, step in zip(collectives, of_collectives.tolist()):
            self._members[step].append(each)
        own = [
            union(kernels[self._kernel_steps == index], copies[copy_steps == index], pieces_of(self._members[index]))
            for index in range(len(steps))
        ]
        of_none = union(kernels[self._kernel_steps < 0], copies[copy_steps < 0], pieces_of(self._members[-1]))
        self._index = [index for index, work in enumerate(own) if len(work)]
        bounds = _windows_after(self._earlier(of_none), [own[index] for index in self._index])
        kept = [(index, bound) for index, bound in zip(self._index, bounds) if bound[0] < bound[1]]
        self._index = [index for index, _ in kept]
        self.windows = [Window(steps[index][0], *bound) for index, bound in kept]
        self.no_step = _no_step(own, of_none, dict(kept), steps)

    def _earlier(self, of_none: Intervals) -> Intervals:
        """What the device still had to do when the first step came to it: work of no step that began before the step's
        own kernels. A copy of the step may run beside it; what is launched unseen later on is not older.
        """
        if not self._index:
            return EMPTY
        first = self._index[0]
        work = union(self._kernels[self._kernel_steps == first], pieces_of(self._members[first]))
        return of_none[of_none[:, 0] < work[0, 0]] if len(work) else EMPTY

    def computing(self, index: int) -> Intervals:
        """The step's own kernels."""
        window = self.windows[index]
        return within(union(self._kernels[self.kernels(index)]), window.start, window.end)

    def collectives(self, index: int) -> list[Collective]:
        """Those that the step launched."""
        return self._members[self._index[index]]

    def lists(self, index: int, each: Collective) -> bool:
        """Every collective has one step."""
        return True

    def kernels(self, index: int) -> np.ndarray:
        """Those that the step launched, and that ran in its window."""
        window = self.windows[index]
        ran = (self._kernels[:, 1] > window.start) & (self._kernels[:, 0] < window.end)
        return np.flatnonzero(ran & (self._kernel_steps == self._index[index]))


def shows_launches(found: TraceEvents) -> bool:
    """Whether the trace says of any device work who launched it."""
    numbers = np.array([*found.kernel_launches, *found.copy_launches], dtype=np.int64)
    of_transfers = np.array([each.launch for each in found.transfers if each.launch is not None], dtype=np.int64)
    launched = Launches(found).starts(np.concatenate([numbers, of_transfers]), _UNKNOWN)
    return bool((launched != _UNKNOWN).any())


def launches_of(found: TraceEvents, correlations: Sequence[int] | np.ndarray) -> np.ndarray:
    """When the host launched each work; a time before all others where the trace does not say."""
    return Launches(found).starts(np.array(correlations, dtype=np.int64), _UNKNOWN)


def launch_ends_of(found: TraceEvents, correlations: Sequence[int]) -> np.ndarray:
    """When the host had launched each work, as `launches_of`."""
    return Launches(found).ends(np.array(correlations, dtype=np.int64), _UNKNOWN)


def known(launches: np.ndarray) -> np.ndarray:
    """Of `launches_of`: which of them the trace shows."""
    return launches != _UNKNOWN


def pieces_of(collectives: Sequence[Collective]) -> Intervals:
    """All pieces of all collectives as one array of intervals, which may overlap."""
    pairs = [(piece.start, piece.end) for each in collectives for piece in each.pieces]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


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
        (before, until), (start, end) = bounds[index - 1], bounds[index]
        if start < until:
            cut = _cut(own[index - 1], own[index], max(before, start), max(before, min(until, end)))
            bounds[index - 1], bounds[index] = (before, cut), (cut, max(cut, end))
    return bounds


def _windows_after(earlier: Intervals, own: Sequence[Intervals]) -> list[tuple[int, int]]:
    """The windows, the first one cut against what the device still had to do when profiling began."""
    return device_windows([earlier, *own])[1:] if len(earlier) and len(own) else device_windows(own)


def _cut(before: Intervals, after: Intervals, first: int, last: int) -> int:
    """The instant from `first` to `last` with the least work of `before` after it and of `after` before it."""
    edges = np.concatenate([before.ravel(), after.ravel(), [first, last]])
    edges = np.unique(edges[(edges >= first) & (edges <= last)])
    outside = size(before) - Measure(before).until(edges) + Measure(after).until(edges)
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


def all_device_work(found: TraceEvents, collectives: Sequence[Collective]) -> Intervals:
    """When the device did anything at all: kernels, copies, communication."""
    return union(found.kernels.pairs(), found.copies.pairs(), pieces_of(collectives)) if found.on_gpu else EMPTY
