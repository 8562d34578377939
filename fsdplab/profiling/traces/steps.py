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
    computing: Intervals  # sorted and disjoint
    collectives: list[Collective]
    counted: list[bool]  # of each collective
    kernels: np.ndarray  # rows of the events; none on the CPU


def steps_of(
    events: Events,
    collectives: Sequence[Collective],
    ranges: Sequence[Window],  # the host's ranges, one a step
    host_computing: Intervals,  # when the host computed: what computes where there is no GPU
    whole: bool,  # whether all of the trace is one step
) -> tuple[list[Step], NoStep]:
    """The steps by launch on a GPU, where the trace tells who launched what; else by the clock."""
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
    # a collective is looked at only where it reaches into the window, since a trace has thousands of them
    reach = pairs([(collective.first, collective.last) for collective in collectives])
    steps: list[Step] = []
    for window in ranges:
        near = np.flatnonzero((reach[:, 0] < window.end) & (reach[:, 1] > window.start))
        of_step: list[Collective] = []
        counted: list[bool] = []
        for index in near.tolist():
            collective = collectives[index]
            if _runs_in(collective, window):
                of_step.append(collective)
                # one that began in the step before was counted there
                counted.append(not steps or collective.first >= steps[-1].window.end)
        computing_in_step = within(computing, window.start, window.end)
        kernels_in_step = _running(events, kernels, window)
        steps.append(Step(window, computing_in_step, of_step, counted, kernels_in_step))
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
        # of each kernel and of each copy the index of its range
        self._kernel_steps = _launched_in(events.of_launch(events.start, self._kernels), ranges)
        self._copy_steps = _launched_in(events.of_launch(events.start, self._copies), ranges)

        # a list for each range, and a last one, at -1, for what belongs to none
        self.collectives: list[list[Collective]] = [[] for _ in range(len(ranges) + 1)]
        issues = np.array([collective.issue for collective in collectives], dtype=np.int64)
        indices = _launched_in(issues, ranges).tolist()
        for collective, index in zip(collectives, indices):
            if not collective.issued:  # its instant of issue is a guess
                index = -1
            self.collectives[index].append(collective)

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
    work = [launched.work(index) for index in range(len(ranges))]  # of each range, when the device worked for it
    of_none = launched.work(-1)
    working = [index for index, of_step in enumerate(work) if len(of_step)]

    # What the device still had to do when the first step came to it: work of no step that began before the step's own
    # kernels. A copy of the step may run beside it; what is launched unseen later on is not older.
    earlier = EMPTY
    if working:
        own = launched.work_without_copies(working[0])
        if len(own):
            earlier = of_none[of_none[:, 0] < own[0, 0]]
    busy_until = ranges[0].start
    to_cut: list[Intervals] = []
    if len(earlier):
        busy_until = int(earlier[-1, 1])
        to_cut.append(earlier)

    # What the device was still doing is cut like a step before the first one, and then forgotten.
    to_cut += [work[index] for index in working]
    bounds = device_windows(to_cut)
    bounds = bounds[len(to_cut) - len(working) :]
    on_device: dict[int, tuple[int, int]] = {}
    for index, (start, end) in zip(working, bounds):
        if start < end:  # all of a step's work may lie beyond its cuts
            on_device[index] = start, end

    steps = []
    windows = wall_windows(on_device, ranges, busy_until)
    for index, window in zip(on_device, windows):
        kernels = _running(events, launched.kernels(index), window)
        computing = within(union(events.spans_of(kernels)), window.start, window.end)
        of_step = launched.collectives[index]
        counted = [True] * len(of_step)  # what one range launched is no other's
        steps.append(Step(window, computing, of_step, counted, kernels))

    # of no step: what no range launched, and what of a step's work lies beyond its cuts
    beyond: list[Intervals] = []
    empty: list[int] = []
    for index, window in enumerate(ranges):
        on_device_in = on_device.get(index, (0, 0))  # an empty one where all of the work is beyond
        beyond.append(subtract(work[index], [on_device_in]))
        if index not in on_device:
            empty.append(window.number)
    of_no_step = union(of_none, *beyond)
    of_device = union(of_none, *work)
    return steps, NoStep(size(of_no_step), size(of_device), tuple(empty))


def _running(events: Events, rows: np.ndarray, window: Window) -> np.ndarray:
    """The rows that run in a window."""
    return rows[(events.end[rows] > window.start) & (events.start[rows] < window.end)]


def pieces_of(collectives: Sequence[Collective]) -> Intervals:
    """All pieces of all collectives as one array of intervals, which may overlap."""
    spans: list[tuple[int, int]] = []
    for collective in collectives:
        for piece in collective.pieces:
            spans.append((piece.start, piece.end))
    return pairs(spans)


def _launched_in(launches: np.ndarray, ranges: Sequence[Window]) -> np.ndarray:
    """The index of the range in which each launch lies; -1 for none. The ranges are in order of their starts."""
    begins, ends = pairs([(window.start, window.end) for window in ranges]).T
    # ranges do not overlap, so only the last one that began can hold a launch; -1 where none had begun
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
            first = max(begun, start)
            last = max(begun, min(until, end))
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
    # when each step begins, also those without device work, since they end the step before
    begins = []
    for index, (_, begin, _) in enumerate(steps):
        reached = max(begin, busy_until)  # when the device had come to the step's range
        first, last = device.get(index, (reached, busy_until))
        begins.append(min(first, reached))
        busy_until = last

    windows = []
    for index, (_, last) in device.items():
        number, _, end = steps[index]
        # a step lasts to the begin of the next one, where that one was profiled
        until = max(end, last)
        if index + 1 < len(steps) and steps[index + 1][0] == number + 1:
            until = begins[index + 1]
        windows.append(Window(number, begins[index], until))
    return windows


def _cut(earlier: Intervals, later: Intervals, first: int, last: int) -> int:
    """The instant from `first` to `last` with the least work of `earlier` after it and of `later` before it.

    Earlier work from 0 to 10, later from 8 to 9 and from 11 to 20: cut at 8, 2 ns of the earlier are outside, cut at
    10, 1 ns of the later.
    """
    # the least lies at an edge: between two edges the sum rises or falls all the way
    edges = np.concatenate([earlier.ravel(), later.ravel(), [first, last]])
    edges = np.unique(edges[(edges >= first) & (edges <= last)])
    earlier_after: np.ndarray = size(earlier) - before(earlier, edges)
    later_before = before(later, edges)
    cut = int(np.argmin(earlier_after + later_before))
    return int(edges[cut])


def all_device_work(events: Events, collectives: Sequence[Collective]) -> Intervals:
    """When the device did anything at all: kernels, copies, communication."""
    if not events.on_gpu:
        return EMPTY
    return union(events.spans(Kind.KERNEL, *COPIES), pieces_of(collectives))
