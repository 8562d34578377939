"""The named work of one trace: operators of the host, and what its device did, each with its step and its unit.

Work of a device belongs to the step and the unit that launched it; an operator to those around its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdplab.profiling.intervals import union
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.events import Events, Kind, known
from fsdplab.profiling.traces.segments import Segments

OPERATOR, KERNEL, COMMUNICATION, COPY = "operator", "kernel", "communication", "copy"
KINDS = (OPERATOR, KERNEL, COMMUNICATION, COPY)
_KIND_OF = {
    Kind.OPERATOR: OPERATOR, Kind.KERNEL: KERNEL, Kind.COMM: COMMUNICATION, Kind.CARRIED: COMMUNICATION,
    Kind.COPY: COPY,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """All named work of the profiled steps of a trace (all of it where it marks none), one element each.

    `rows` are rows of `found`. `own_ns` is the time without what ran inside (operators nest; work of a device does
    not). `unit` indexes `units`. `steps`: how many there are.
    """

    found: Events
    rows: np.ndarray
    kind: np.ndarray
    unit: np.ndarray
    units: Sequence[str]
    own_ns: np.ndarray
    steps: int

    def of_kind(self, *kinds: str) -> np.ndarray:
        """Which elements are of these kinds."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in kinds])


def work_of(found: Events) -> Work:
    """The named work of events that have been read; TraceError where there is none."""
    rows = found.rows(*_KIND_OF)
    kinds = np.array([KINDS.index(_KIND_OF[kind]) if kind in _KIND_OF else -1 for kind in Kind])[found.kind[rows]]
    counts = (kinds > 0) | np.isin(found.thread[rows], found.compute_threads)
    rows, kinds = rows[counts], kinds[counts]
    if not len(rows):
        raise TraceError(f"{found.path} has no operators and no work of a device, so there is nothing to list.")
    own, launched = _own(found, rows, kinds), found.launch_starts(rows)
    begun = np.where((kinds > 0) & known(launched), launched, found.start[rows])
    bounds = np.array([step[1:] for step in found.steps], dtype=np.int64).reshape(-1, 2)
    kept = _inside(begun, bounds) if len(bounds) else np.ones(len(rows), dtype=bool)
    operators = rows[kinds == 0]
    threads = [union(found.spans_of(operators[found.thread[operators] == each])) for each in found.compute_threads]
    numbers: dict[str, int] = {}
    units = Segments(found, threads, found.steps).units_at(begun[kept])
    unit = np.array([numbers.setdefault(each, len(numbers)) for each in units], dtype=np.int64)
    return Work(found, rows[kept], kinds[kept], unit, list(numbers), own[kept], max(1, len(found.steps)))


def _inside(instants: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    at = np.searchsorted(bounds[:, 0], instants, side="right") - 1
    return (at >= 0) & (instants <= bounds[at, 1])


def _own(found: Events, rows: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Durations, of operators without the operators inside them on the same thread."""
    start, end, thread = found.start[rows], found.end[rows], found.thread[rows]
    own = end - start
    operators = np.flatnonzero(kinds == 0)
    stack: list[int] = []
    for index in operators[np.lexsort((-end[operators], start[operators], thread[operators]))].tolist():
        while stack and (thread[stack[-1]] != thread[index] or end[stack[-1]] <= start[index]):
            stack.pop()
        if stack:
            own[stack[-1]] -= min(end[index], end[stack[-1]]) - start[index]
        stack.append(index)
    return own
