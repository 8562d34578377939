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
from fsdplab.profiling.traces.collective import Collective
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
        sentences = []
        if not self.step_ranges:
            sentences.append(
                "the trace has no ProfilerStep ranges, so all of it counts as one step: give the profiler a schedule"
                " (torch.profiler.schedule), and call prof.step() behind each step of the training"
            )
        if not self.by_launch:
            sentences.append(
                "the trace has no correlation numbers: steps are the host's ranges, and a GPU that runs behind its host"
                " does other steps' work in them"
            )
        if self.ns:
            sentences.append(
                f"{self.ns / 1e6:.3g} ms of device work ({self.ns / self.device_ns:.1%}) belong to no profiled step:"
                " launched outside of every ProfilerStep range, before the trace began, or beside another step"
            )
        if self.empty_steps:
            steps = ", ".join(map(str, self.empty_steps))
            sentences.append(f"no device work was launched in steps {steps}: left out")
        return sentences


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
    events: Events, collectives: Sequence[Collective], ranges: Sequence[Window], host_computing: Intervals, whole: bool
) -> tuple[list[Step], NoStep]:
    """The steps by launch on a GPU, where the trace tells who launched what; else by the clock. `whole`: all is one."""
    if not events.on_gpu:
        return _by_clock(events, host_computing, collectives, ranges), NoStep()
    shows_launches = bool((events.launched_by >= 0).any())
    if shows_launches and not whole:
        return _by_launch(events, collectives, ranges)
    computing = union(events.spans(Kind.KERNEL))
    return _by_clock(events, computing, collectives, ranges), NoStep(by_launch=shows_launches or whole)


def _by_clock(
    events: Events, computing: Intervals, collectives: Sequence[Collective], ranges: Sequence[Window]
) -> list[Step]:
    """Give each range everything that runs in it. A collective with pieces in two steps (gloo's range may end late) is
    counted in the first.
    """
    kernels = events.rows(Kind.KERNEL)
    reach = pairs([(collective.first, collective.last) for collective in collectives])
    steps: list[Step] = []
    for window in ranges:
        near = np.flatnonzero((reach[:, 0] < window.end) & (reach[:, 1] > window.start))
        of_step = [collectives[index] for index in near.tolist() if _runs_in(collectives[index], window)]
        counted = [not steps or collective.first >= steps[-1].window.end for collective in of_step]
        computing_in_step = within(computing, window.start, window.end)
        steps.append(Step(window, computing_in_step, of_step, counted, _running(events, kernels, window)))
    return steps


def _runs_in(collective: Collective, window: Window) -> bool:
    """Whether a piece of a collective runs in a window, and not only its whole around it."""
    return any(piece.start < window.end and piece.end > window.start for piece in collective.pieces)


class _Launched:
    """What each range of the host launched: kernels and copies as rows of the events, and collectives.

    A range is known by its index; -1 is for what no range launched, or nobody that the trace shows.
    """

    def __init__(self, events: Events, collectives: Sequence[Collective], ranges: Sequence[Window]) -> None:
        self._events = events
        self._kernels = events.rows(Kind.KERNEL)
        self._copies = events.rows(*COPIES)
        self._kernel_steps = _launched_in(events.of_launch(events.start, self._kernels), ranges)
        self._copy_steps = _launched_in(events.of_launch(events.start, self._copies), ranges)
        self.collectives: list[list[Collective]] = [[] for _ in range(len(ranges) + 1)]
        issues = np.array([collective.issue for collective in collectives], dtype=np.int64)
        for collective, index in zip(collectives, _launched_in(issues, ranges).tolist()):
            self.collectives[index if collective.issued else -1].append(collective)

    def kernels(self, index: int) -> np.ndarray:
        """The kernels that a range launched, as rows of the events."""
        return self._kernels[self._kernel_steps == index]

    def work(self, index: int) -> Intervals:
        """When the device worked for a range."""
        copies = self._copies[self._copy_steps == index]
        return union(self.work_without_copies(index), self._events.spans_of(copies))

    def work_without_copies(self, index: int) -> Intervals:
        """When the device computed or communicated for a range."""
        kernels = self._events.spans_of(self.kernels(index))
        return union(kernels, pieces_of(self.collectives[index]))


def _by_launch(
    events: Events, collectives: Sequence[Collective], ranges: Sequence[Window]
) -> tuple[list[Step], NoStep]:
    """Give each range's step what the range launched."""
    launched = _Launched(events, collectives, ranges)
    work = [launched.work(index) for index in range(len(ranges))]
    of_none = launched.work(-1)
    working = [index for index, of_step in enumerate(work) if len(of_step)]

    # What the device still had to do when the first step came to it: work of no step that began before the step's own
    # kernels. A copy of the step may run beside it; what is launched unseen later on is not older.
    earlier = EMPTY
    if working:
        own = launched.work_without_copies(working[0])
        if len(own):
            earlier = of_none[of_none[:, 0] < own[0, 0]]
    busy_until = int(earlier[-1, 1]) if len(earlier) else ranges[0].start

    # What the device was still doing is cut like a step before the first one, and then forgotten.
    to_cut = [earlier] if len(earlier) else []
    to_cut += [work[index] for index in working]
    bounds = device_windows(to_cut)[len(to_cut) - len(working) :]
    on_device = {index: (start, end) for index, (start, end) in zip(working, bounds) if start < end}
    steps = []
    for index, window in zip(on_device, wall_windows(on_device, ranges, busy_until)):
        kernels = _running(events, launched.kernels(index), window)
        computing = within(union(events.spans_of(kernels)), window.start, window.end)
        of_step = launched.collectives[index]
        steps.append(Step(window, computing, of_step, [True] * len(of_step), kernels))

    # of no step: what no range launched, and what of a step's work lies beyond its cuts
    beyond = [subtract(of_step, [on_device.get(index, (0, 0))]) for index, of_step in enumerate(work)]
    empty = tuple(window.number for index, window in enumerate(ranges) if index not in on_device)
    return steps, NoStep(size(union(of_none, *beyond)), size(union(of_none, *work)), empty)


def _running(events: Events, rows: np.ndarray, window: Window) -> np.ndarray:
    """The rows that run in a window."""
    return rows[(events.end[rows] > window.start) & (events.start[rows] < window.end)]


def pieces_of(collectives: Sequence[Collective]) -> Intervals:
    """All pieces of all collectives as one array of intervals, which may overlap."""
    return pairs([(piece.start, piece.end) for collective in collectives for piece in collective.pieces])


def _launched_in(launches: np.ndarray, ranges: Sequence[Window]) -> np.ndarray:
    """The index of the range in which each launch lies; -1 for none. The ranges are in order of their starts."""
    begins, ends = pairs([(window.start, window.end) for window in ranges]).T
    last_begun = np.searchsorted(begins, launches, side="right") - 1
    is_inside = (last_begun >= 0) & (launches <= ends[last_begun])
    return np.where(is_inside, last_begun, -1)


def device_windows(own: Sequence[Intervals]) -> list[tuple[int, int]]:
    """From the first start to the last end of each step's work, cut where two steps overlap; each set is sorted,
    disjoint and not empty.

    >>> device_windows([np.array([[0, 10]]), np.array([[8, 9], [11, 20]])])     # one nanosecond is left outside
    [(0, 10), (10, 20)]
    """
    bounds = [(int(work[0, 0]), int(work[-1, 1])) for work in own]
    for index in range(1, len(bounds)):
        begun, until = bounds[index - 1]
        start, end = bounds[index]
        if start < until:
            # the cut lies where both work, or at the earlier one's begin where that lies later
            first, last = max(begun, start), max(begun, min(until, end))
            cut = _cut(own[index - 1], own[index], first, last)
            bounds[index - 1] = begun, cut
            bounds[index] = cut, max(cut, end)
    return bounds


def wall_windows(device: dict[int, tuple[int, int]], steps: Sequence[Window], busy_until: int) -> list[Window]:
    """The steps with device work, from begin to begin. `device`: when each worked on the device, by its index in
    `steps`; `busy_until`: when the device was done with what came before.

    >>> wall_windows({0: (5, 30), 1: (105, 130)}, [(7, 0, 100), (8, 100, 200)], 0)    # a loader takes 70 of 100
    [Window(number=7, start=0, end=100), Window(number=8, start=100, end=200)]
    """
    begins = []
    for index, (_, begin, _) in enumerate(steps):
        reached = max(begin, busy_until)  # when the device had come to the step's range
        first, last = device.get(index, (reached, busy_until))
        begins.append(min(first, reached))
        busy_until = last
    windows = []
    for index, (_, last) in device.items():
        number, _, end = steps[index]
        follows = index + 1 < len(steps) and steps[index + 1][0] == number + 1
        until = begins[index + 1] if follows else max(end, last)
        windows.append(Window(number, begins[index], until))
    return windows


def _cut(earlier: Intervals, later: Intervals, first: int, last: int) -> int:
    """The instant from `first` to `last` with the least work of `earlier` after it and of `later` before it."""
    edges = np.concatenate([earlier.ravel(), later.ravel(), [first, last]])
    edges = np.unique(edges[(edges >= first) & (edges <= last)])
    # the least lies at an edge: between two edges the sum rises or falls all the way
    outside = size(earlier) - before(earlier, edges) + before(later, edges)
    return int(edges[int(np.argmin(outside))])


def all_device_work(events: Events, collectives: Sequence[Collective]) -> Intervals:
    """When the device did anything at all: kernels, copies, communication."""
    if not events.on_gpu:
        return EMPTY
    return union(events.spans(Kind.KERNEL, *COPIES), pieces_of(collectives))
