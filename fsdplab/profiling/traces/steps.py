"""What belongs to which step: by the clock where the host itself works, by launch on a GPU.

A step lasts from its begin to the begin of the next one. On the CPU, and for GPU traces without correlation numbers, it
is the `ProfilerStep` range of the host. On a GPU a host that runs ahead has left this range long before the device
begins with what was launched in it. So there a step's work is what its range launched, found by correlation number; it
begins once its range has begun and the device is done with the step before, and the last step ends with its range or
its last work. Time in which the device waits for a loader between two steps is therefore time of a step.

Where the work of two steps overlaps (a copy for the next batch on a stream of its own), it is cut at the instant that
leaves the least work outside of its own step; the first step likewise against what the device still had to do when the
profiler began. Work launched outside of every step or left beyond a cut belongs to no step; it is summed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, before, pairs, size, subtract, union, within
from fsdplab.profiling.traces.collectives import Collective
from fsdplab.profiling.traces.event_kinds import COPIES, Kind
from fsdplab.profiling.traces.events import Events, Window


@dataclass(frozen=True)
class NoStep:
    """Device work that belongs to no step, and the steps without any: `ns` of `device_ns` of work in the trace.

    `by_launch` is False where the trace has no correlation numbers; then steps are the host's ranges, and the GPU's
    work in them may be another step's. `step_ranges` is False where it has no steps; then all of it counts as one.
    """

    ns: int = 0
    device_ns: int = 0
    empty_steps: tuple[int, ...] = ()
    by_launch: bool = True
    step_ranges: bool = True

    def sentences(self) -> list[str]:
        """What a reader must know: `["2.1 ms of device work (4 %) belong to no profiled step: ..."]`; [] if nothing."""
        found = []
        if not self.step_ranges:
            found.append(
                "the trace has no ProfilerStep ranges, so all of it counts as one step: give the profiler a schedule"
                " (torch.profiler.schedule), and call prof.step() behind each step of the training"
            )
        if not self.by_launch:
            found.append(
                "the trace has no correlation numbers: steps are the host's ranges, and a GPU that runs behind its host"
                " does other steps' work in them"
            )
        if self.ns:
            found.append(
                f"{self.ns / 1e6:.3g} ms of device work ({self.ns / self.device_ns:.1%}) belong to no profiled step:"
                " launched outside of every ProfilerStep range, before the trace began, or beside another step"
            )
        if self.empty_steps:
            found.append(f"no device work was launched in steps {', '.join(map(str, self.empty_steps))}: left out")
        return found


@dataclass(frozen=True, eq=False)
class Step:
    """A step and what belongs to it: when it computed (inside its window), its collectives in order of issue, which of
    them are counted in it and in no other, and its computing kernels as rows of the events.
    """

    window: Window
    computing: Intervals
    collectives: list[Collective]
    counted: list[bool]
    kernels: np.ndarray


def steps_of(
    found: Events, collectives: Sequence[Collective], ranges: Sequence[Window], host_computing: Intervals, whole: bool
) -> tuple[list[Step], NoStep]:
    """By launch on a GPU, where the trace tells who launched what; else by the clock. `whole`: all is one step."""
    shows_launches = bool((found.launched_by >= 0).any()) if found.on_gpu else False
    if shows_launches and not whole:
        return _by_launch(found, collectives, ranges)
    computing = union(found.spans(Kind.KERNEL)) if found.on_gpu else host_computing
    no_step = NoStep(by_launch=shows_launches or whole or not found.on_gpu)
    return _by_clock(found, computing, collectives, ranges), no_step


def _by_clock(
    found: Events, computing: Intervals, collectives: Sequence[Collective], ranges: Sequence[Window]
) -> list[Step]:
    """Everything that runs in a range belongs to it. A collective with pieces in two steps (gloo's range may end late)
    is counted in the first.
    """
    kernels, reach = found.rows(Kind.KERNEL), pairs([(each.first, each.last) for each in collectives])
    made: list[Step] = []
    for window in ranges:
        _, start, end = window
        near = np.flatnonzero((reach[:, 0] < end) & (reach[:, 1] > start)).tolist()
        mine = [collectives[at] for at in near if any(a < end and b > start for a, b, _ in collectives[at].pieces)]
        counted = [not made or each.first >= made[-1].window.end for each in mine]
        made.append(Step(window, within(computing, start, end), mine, counted, _running(found, kernels, window)))
    return made


def _by_launch(found: Events, collectives: Sequence[Collective], ranges: Sequence[Window]) -> tuple[list[Step], NoStep]:
    """A range's step is what it launched."""
    kernels, copies = found.rows(Kind.KERNEL), found.rows(*COPIES)
    kernel_steps, copy_steps = (_launched_in(found.of_launch(found.start, rows), ranges) for rows in (kernels, copies))
    members: list[list[Collective]] = [[] for _ in range(len(ranges) + 1)]
    issues = np.array([each.issue for each in collectives], dtype=np.int64)
    for each, index in zip(collectives, _launched_in(issues, ranges).tolist()):
        members[index if each.issued else -1].append(each)

    def without_copies(index: int) -> Intervals:
        return union(found.spans_of(kernels[kernel_steps == index]), pieces_of(members[index]))

    *own, of_none = (
        union(without_copies(index), found.spans_of(copies[copy_steps == index])) for index in [*range(len(ranges)), -1]
    )
    working = [index for index, work in enumerate(own) if len(work)]
    # What the device still had to do when the first step came to it: work of no step that began before the step's own
    # kernels. A copy of the step may run beside it; what is launched unseen later on is not older.
    begun = without_copies(working[0])[:1, 0] if working else EMPTY[:, 0]
    earlier = of_none[of_none[:, 0] < begun] if len(begun) else EMPTY
    ahead = [earlier] if len(earlier) else []
    bounds = device_windows([*ahead, *(own[index] for index in working)])[len(ahead) :]
    kept = {index: (start, end) for index, (start, end) in zip(working, bounds) if start < end}
    made = []
    windows = wall_windows(kept, ranges, int(earlier[-1, 1]) if len(earlier) else ranges[0][1])
    for index, window in zip(kept, windows):
        mine = _running(found, kernels[kernel_steps == index], window)
        computing = within(union(found.spans_of(mine)), window.start, window.end)
        made.append(Step(window, computing, members[index], [True] * len(members[index]), mine))
    beyond = [subtract(work, [kept.get(index, (0, 0))]) for index, work in enumerate(own)]
    empty = tuple(number for index, (number, *_) in enumerate(ranges) if index not in kept)
    return made, NoStep(size(union(of_none, *beyond)), size(union(of_none, *own)), empty)


def _running(found: Events, rows: np.ndarray, window: Window) -> np.ndarray:
    """The rows that run in a window."""
    return rows[(found.end[rows] > window.start) & (found.start[rows] < window.end)]


def pieces_of(collectives: Sequence[Collective]) -> Intervals:
    """All pieces of all collectives as one array of intervals, which may overlap."""
    return pairs([(piece.start, piece.end) for each in collectives for piece in each.pieces])


def _launched_in(launches: np.ndarray, ranges: Sequence[Window]) -> np.ndarray:
    """The index of the range in which each launch lies; -1 for none. The ranges are in order of their starts."""
    bounds = pairs([each[1:] for each in ranges])
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


def wall_windows(device: dict[int, tuple[int, int]], steps: Sequence[Window], busy_until: int) -> list[Window]:
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


def _cut(earlier: Intervals, later: Intervals, first: int, last: int) -> int:
    """The instant from `first` to `last` with the least work of `earlier` after it and of `later` before it."""
    edges = np.concatenate([earlier.ravel(), later.ravel(), [first, last]])
    edges = np.unique(edges[(edges >= first) & (edges <= last)])
    outside = size(earlier) - before(earlier, edges) + before(later, edges)
    return int(edges[int(np.argmin(outside))])


def all_device_work(found: Events, collectives: Sequence[Collective]) -> Intervals:
    """When the device did anything at all: kernels, copies, communication."""
    return union(found.spans(Kind.KERNEL, *COPIES), pieces_of(collectives)) if found.on_gpu else EMPTY
