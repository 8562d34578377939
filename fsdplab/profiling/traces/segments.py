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

    def __init__(self, found: Events, steps: Sequence[Window]) -> None:
        self._unit_times, self._units = _unit_changes(found.ranges)
        starts = np.concatenate([EMPTY[:, 0], *(busy[:, 0] for busy in found.host_busy.values())])
        self._backward = _backward(found, starts)
        stepping = [(each.start, each.end) for each in found.ranges if each.label == "optimizer"]
        optimizer = [(_after_a_closure(self._backward, start, end), end) for start, end in stepping]
        self._optimizer = union(optimizer, _after(self._backward, steps))

    @cached_property
    def changes(self) -> np.ndarray:
        """Where the unit or the phase changes."""
        return np.unique(np.concatenate([self._unit_times, self._backward.ravel(), self._optimizer.ravel()]))

    def units_at(self, instants: Sequence[int] | np.ndarray) -> list[str]:
        """The unit at each instant; "" outside of all units, and where no engine marks them."""
        return [self._units[at] for at in np.asarray(np.searchsorted(self._unit_times, instants, side="right"))]

    def phases_at(self, instants: Sequence[int] | np.ndarray) -> list[str]:
        """forward, backward or optimizer."""
        answer = np.where(covered(self._optimizer, instants), 2, np.where(covered(self._backward, instants), 1, 0))
        return [PHASES[index] for index in answer]


def _unit_changes(ranges: Sequence[Range]) -> tuple[np.ndarray, list[str]]:
    """The instants at which the unit changes, and the units before the first, between them and after the last."""
    marks = [(each.end, True, each.unit) for each in ranges if each.label in _ENTER]
    marks += [(each.start, False, each.unit) for each in ranges if each.label in _LEAVE]
    stack, times, units = [], [], [""]
    for time, enter, unit in sorted(marks):
        if enter:
            stack.append(unit)
        elif unit in stack:
            del stack[len(stack) - 1 - stack[::-1].index(unit)]
        times.append(time)
        units.append(stack[-1] if stack else "")
    return np.array(times, dtype=np.int64), units


def _backward(found: Events, compute_starts: np.ndarray) -> Intervals:
    """Autograd's ranges, each up to the next computing or step's end: the host waits for reductions in between."""
    marked = [(each.start, each.end) for each in found.ranges if each.label.startswith(_OF_BACKWARD)]
    pieces = union(found.spans(Kind.AUTOGRAD), marked)
    if not len(pieces):
        return pieces
    ends = [each.start for each in found.ranges if each.label == "optimizer"] + [end for _, _, end in found.steps]
    marks = np.sort(np.append(compute_starts, np.array(ends, dtype=np.int64)))
    following = np.searchsorted(marks, pieces[:, 1], side="left")
    limit = np.append(marks, max(found.last, pieces[-1, 1]))[following]
    return union(np.stack([pieces[:, 0], np.maximum(limit, pieces[:, 1])], axis=1))


def _after_a_closure(backward: Intervals, start: int, end: int) -> int:
    """Where an optimizer's step begins to update: behind the backward of a closure that was given to it."""
    inside = backward[(backward[:, 0] > start) & (backward[:, 1] < end)]
    return int(inside[-1, 1]) if len(inside) else start


def _after(backward: Intervals, steps: Sequence[Window]) -> Intervals:
    """From the end of each step's last backward to the end of the step."""
    bounds = pairs([step[1:] for step in steps])
    last = np.append(_NEVER, backward[:, 1])[np.searchsorted(backward[:, 1], bounds[:, 1], side="right")]
    within = (bounds[:, 0] < last) & (last < bounds[:, 1])
    return np.stack([last, bounds[:, 1]], axis=1)[within]


class Nest:
    """The ranges of one thread as they contain each other; the ranges of a thread never cross.

    >>> nest = Nest([Range("a", "", 0, 9, 1), Range("b", "", 2, 4, 1)])
    >>> [each.label for each in nest.around(3)], [each.label for each in nest.around(5)]
    (['b', 'a'], ['a'])
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = sorted(ranges, key=lambda each: (each.start, -each.end))
        self._starts = [each.start for each in self._ranges]
        self._parents: list[int] = []
        stack: list[int] = []
        for index, each in enumerate(self._ranges):
            while stack and self._ranges[stack[-1]].end < each.end:
                stack.pop()
            self._parents.append(stack[-1] if stack else -1)
            stack.append(index)

    def around(self, instant: int) -> list[Range]:
        """The ranges that hold an instant, innermost first."""
        index = bisect_right(self._starts, instant) - 1
        found = []
        while index >= 0:
            if instant < self._ranges[index].end or self._ranges[index].start == instant:
                found.append(self._ranges[index])
            index = self._parents[index]
        return found


def nests(ranges: Iterable[Range]) -> dict[int, Nest]:
    """One `Nest` a thread."""
    return {thread: Nest(members) for thread, members in grouped(ranges, attrgetter("thread")).items()}
