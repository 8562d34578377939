"""The unit that the host worked on and the phase of the step, at any instant of a trace.

Engines mark where a unit's forward and backward begin and end; the innermost unit counts. The phase needs no marks:
autograd's ranges are the backward, an optimizer's step and the time after a step's last backward are the optimizer's,
everything else is forward. Of an optimizer's step that is given a closure, as Lightning's are, what follows the
closure's backward counts. A GPU kernel belongs to the unit and phase of its launch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np

from fsdplab.common.rows import grouped
from fsdplab.profiling.intervals import EMPTY, Intervals, covered, pairs, union
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Range, Window

PHASES = ("forward", "backward", "optimizer")
_OF_BACKWARD = ("pre_backward", "post_backward", "root_post_backward_callback", "backward_prefetch")
_NEVER = -(2**62)  # the end of a backward that did not end before
_ENTER = {"pre_forward", "pre_backward"}
_LEAVE = {"post_forward", "post_backward", "post_backward_accumulate", "post_backward_reshard", "post_backward_reduce"}


class Segments:
    """The unit and the phase at instants on the trace's own clock, and the instants at which they change."""

    def __init__(self, events: Events, steps: Sequence[Window]) -> None:
        self._unit_times, self._units = _unit_changes(events.ranges)
        # of computing, on all threads: where the host goes on after a wait
        starts = [EMPTY[:, 0]]
        for busy in events.host_busy.values():
            starts.append(busy[:, 0])
        self._backward = _backward(events, np.concatenate(starts))

        optimizer = []
        for labelled in events.ranges:
            if labelled.label == "optimizer":
                start = _after_a_closure(self._backward, labelled.start, labelled.end)
                optimizer.append((start, labelled.end))
        self._optimizer = union(optimizer, _after_backward(self._backward, steps))

    @cached_property
    def changes(self) -> np.ndarray:
        """Where the unit or the phase changes."""
        changes_of_phase = [self._backward.ravel(), self._optimizer.ravel()]  # starts and ends alike
        return np.unique(np.concatenate([self._unit_times, *changes_of_phase]))

    def units_at(self, instants: Sequence[int] | np.ndarray) -> list[str]:
        """The unit at each instant; "" outside of all units, and where no engine marks them."""
        # how many changes came before, which is the place of the unit since the last of them
        passed = np.asarray(np.searchsorted(self._unit_times, instants, side="right"))
        return [self._units[number] for number in passed]

    def phases_at(self, instants: Sequence[int] | np.ndarray) -> list[str]:
        """forward, backward or optimizer."""
        backward = covered(self._backward, instants)
        optimizer = covered(self._optimizer, instants)
        positions = np.where(optimizer, 2, np.where(backward, 1, 0))
        return [PHASES[position] for position in positions]


def _unit_changes(ranges: Sequence[Range]) -> tuple[np.ndarray, list[str]]:
    """The instants at which the unit changes, and the units before the first, between them and after the last.

    Block 0 entered at 10 and left at 90, with the root's norm inside from 40 to 50: the changes are at 10, 40, 50 and
    90, and the units "", block 0, norm, block 0 and "".
    """
    marks: list[tuple[int, bool, str]] = []  # when, whether the unit is entered or left, and the unit
    for labelled in ranges:
        if labelled.label in _ENTER:
            marks.append((labelled.end, True, labelled.unit))
        if labelled.label in _LEAVE:
            marks.append((labelled.start, False, labelled.unit))
    entered: list[str] = []  # the units that are open, the innermost one last
    times: list[int] = []
    units = [""]
    for time, enters, unit in sorted(marks):  # at one instant a unit is left before the next one is entered
        if enters:
            entered.append(unit)
        elif unit in entered:  # a trace may begin inside a unit, and then it is left only
            _remove_last(entered, unit)
        times.append(time)
        units.append(entered[-1] if entered else "")
    return np.array(times, dtype=np.int64), units


def _remove_last(entered: list[str], unit: str) -> None:
    """Leave a unit that was entered last of all of its name; others may have been entered inside it."""
    place = len(entered) - 1 - entered[::-1].index(unit)
    del entered[place]


def _backward(events: Events, compute_starts: np.ndarray) -> Intervals:
    """Autograd's ranges, each up to the next computing or step's end: the host waits for reductions in between.

    Ranges from 100 to 200 and 260 to 300, with computing that starts at 250 and 400: backward lasts from 100 to 250,
    and from 260 to 400.
    """
    marked: list[tuple[int, int]] = []
    ends: list[int] = []
    for labelled in events.ranges:
        if labelled.label.startswith(_OF_BACKWARD):
            marked.append((labelled.start, labelled.end))
        if labelled.label == "optimizer":
            ends.append(labelled.start)
    pieces = union(events.spans(Kind.AUTOGRAD), marked)
    if not len(pieces):
        return pieces
    ends += [window.end for window in events.steps]
    # each range goes on to the first limit at or behind its end
    limits = np.sort(np.append(compute_starts, np.array(ends, dtype=np.int64)))
    following = np.searchsorted(limits, pieces[:, 1], side="left")
    # behind the last limit it goes on to the end of the trace
    last = max(events.last, int(pieces[-1, 1]))
    until = np.append(limits, last)[following]
    extended_ends = np.maximum(until, pieces[:, 1])
    return union(np.stack([pieces[:, 0], extended_ends], axis=1))


def _after_a_closure(backward: Intervals, start: int, end: int) -> int:
    """Where an optimizer's step begins to update: behind the backward of a closure that was given to it."""
    inside = backward[(backward[:, 0] > start) & (backward[:, 1] < end)]
    if not len(inside):
        return start
    return int(inside[-1, 1])


def _after_backward(backward: Intervals, steps: Sequence[Window]) -> Intervals:
    """From the end of each step's last backward to the end of the step; nothing for a step without a backward.

    Steps from 0 to 100 and 100 to 200, with one backward from 40 to 80: from 80 to 100 only.
    """
    begins, ends = pairs([(step.start, step.end) for step in steps]).T
    # of each step the last backward that ended by its end, which may be that of an earlier step
    ended = np.searchsorted(backward[:, 1], ends, side="right")
    last_end = np.append(_NEVER, backward[:, 1])[ended]
    is_within = (begins < last_end) & (last_end < ends)
    return np.stack([last_end, ends], axis=1)[is_within]


class Nest:
    """The ranges of one thread as they contain each other; the ranges of a thread never cross.

    >>> nest = Nest([Range("a", "", 0, 9, 1), Range("b", "", 2, 4, 1)])
    >>> [each.label for each in nest.around(3)], [each.label for each in nest.around(5)]
    (['b', 'a'], ['a'])
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = sorted(ranges, key=lambda inner: (inner.start, -inner.end))
        self._starts = [inner.start for inner in self._ranges]
        self._parents: list[int] = []  # of each range the index of the one around it, -1 for none
        open_ranges: list[int] = []
        for index, inner in enumerate(self._ranges):
            # an open range that ends earlier cannot hold it, nor anything that starts later
            while open_ranges and self._ranges[open_ranges[-1]].end < inner.end:
                open_ranges.pop()
            self._parents.append(open_ranges[-1] if open_ranges else -1)
            open_ranges.append(index)

    def around(self, instant: int) -> list[Range]:
        """The ranges that hold an instant, innermost first."""
        # from the last range that started, outwards: it may have ended, and the one around it may not
        index = bisect_right(self._starts, instant) - 1
        around = []
        while index >= 0:
            outer = self._ranges[index]
            if instant < outer.end or outer.start == instant:  # an empty range holds its own instant
                around.append(outer)
            index = self._parents[index]
        return around


def nests(ranges: Iterable[Range]) -> dict[int, Nest]:
    """One `Nest` a thread."""
    by_thread = grouped(ranges, attrgetter("thread"))
    return {thread: Nest(members) for thread, members in by_thread.items()}
