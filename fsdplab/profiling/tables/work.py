"""The named work of one trace: operators of the host, and what its device did, each with its step and its unit.

The overlap analysis keeps no names, so that traces of a gigabyte fit. The tables need them: the file of one rank is
read a second time here, and names are kept once each. Work of a device belongs to the step and the unit that launched
it; an operator to those around its start.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdplab.profiling.intervals import union
from fsdplab.profiling.traces.chrome import TraceError, nanoseconds, without_collection
from fsdplab.profiling.traces.classify import CATEGORIES, Thread, TraceEvents, correlation_of, judge, read_events
from fsdplab.profiling.traces.comm_kernels import CommKernels
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.steps import known, launches_of

OPERATOR, KERNEL, COMMUNICATION, COPY = "operator", "kernel", "communication", "copy"
KINDS = (OPERATOR, KERNEL, COMMUNICATION, COPY)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Work:
    """All named work of the profiled steps of a trace, one element each; times in the trace's own ns.

    `own_ns` is the time without what ran inside (operators nest; work of a device does not). `launch` is when the host
    launched it; an operator's start, or where the trace does not say. `lane` is the stream, or the thread. `steps`:
    how many there are.
    """

    path: Path
    names: Sequence[str]
    units: Sequence[str]
    kind: np.ndarray
    name: np.ndarray
    unit: np.ndarray
    start: np.ndarray
    end: np.ndarray
    own_ns: np.ndarray
    launch: np.ndarray
    correlation: np.ndarray
    lane: np.ndarray
    lanes: Sequence[str]
    steps: int
    found: TraceEvents

    def of_kind(self, *kinds: str) -> np.ndarray:
        """Which elements are of these kinds."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in kinds])


def named_work(path: str | Path, comm_patterns: Sequence[str] = ()) -> Work:
    """Read a trace's named work inside its profiled steps (all of it where it marks none); raises TraceError."""
    log = _Log(comm_patterns)
    with without_collection():
        found = read_events(path, comm_patterns, log.take)
    if not log.computed_on(found.compute_threads()).any():
        raise TraceError(f"{path} has no operators and no work of a device, so there is nothing to list.")
    return _in_steps(log, found)


class _Log:
    """Names and times, as they are read."""

    def __init__(self, comm_patterns: Sequence[str]) -> None:
        self._comm_kernels = CommKernels(comm_patterns)
        self._threads: dict[Thread, int] = {}
        self.thread = array("q")
        self.names: dict[str, int] = {}
        self.lanes: dict[str, int] = {}
        self._kinds: dict[tuple[str, str], int] = {}
        self.kind, self.name, self.lane = array("q"), array("q"), array("q")
        self.start, self.end, self.correlation = array("q"), array("q"), array("q")

    def take(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X":
            return
        name, category = event.get("name"), CATEGORIES.get(event.get("cat", ""), event.get("cat"))
        if not isinstance(name, str) or not isinstance(category, str):
            return
        kind = self._kinds.get((name, category))
        if kind is None:
            kind = self._kinds[name, category] = self._judged(name, category)
        if kind < 0:
            return
        thread = event["pid"], event["tid"]
        self.thread.append(self._threads.setdefault(thread, len(self._threads)))
        start = nanoseconds(event["ts"])
        self.kind.append(kind)
        self.name.append(self.names.setdefault(name, len(self.names)))
        lane = f"stream {event['tid']}" if kind else f"thread {event['tid']}"
        self.lane.append(self.lanes.setdefault(lane, len(self.lanes)))
        self.start.append(start)
        self.end.append(start + max(0, nanoseconds(event.get("dur", 0))))
        self.correlation.append(correlation_of(event) if kind else -1)

    def computed_on(self, threads: Sequence[Thread]) -> np.ndarray:
        """Which of the work counts: all of a device's, and of the host what ran on the threads that compute."""
        computing = np.array([self._threads[each] for each in threads if each in self._threads], dtype=np.int64)
        on_device = np.array(self.kind, dtype=np.int64) > 0
        return on_device | np.isin(np.array(self.thread, dtype=np.int64), computing)

    def _judged(self, name: str, category: str) -> int:
        if category == "cpu_op":
            return KINDS.index(OPERATOR) if judge(name, category) == "operator" else -1
        if category not in _ON_DEVICE:
            return -1
        if category != "kernel":
            return KINDS.index(COPY)
        return KINDS.index(KERNEL if self._comm_kernels.kind(name) is None else COMMUNICATION)


def _in_steps(log: _Log, found: TraceEvents) -> Work:
    counts = log.computed_on(found.compute_threads())
    columns = (log.kind, log.start, log.end, log.lane, log.correlation, log.name)
    kind, start, end, lane, correlation, name = (np.array(each, dtype=np.int64)[counts] for each in columns)
    launched = launches_of(found, correlation)
    told = (kind > 0) & known(launched)
    launch = np.where(told, launched, start)
    threads = [union(found.operators[thread].pairs()) for thread in found.compute_threads()]
    bounds = np.array([step[1:] for step in found.steps], dtype=np.int64).reshape(-1, 2)
    kept = _inside(launch, bounds) if len(bounds) else np.ones(len(start), dtype=bool)
    units = Segments(found, threads, found.steps).units_at(launch[kept])
    numbers: dict[str, int] = {}
    unit = np.array([numbers.setdefault(each, len(numbers)) for each in units], dtype=np.int64)
    own = _own(kind, lane, start, end)
    return Work(
        found.path, list(log.names), list(numbers), kind[kept], name[kept], unit,
        start[kept], end[kept], own[kept], launch[kept], correlation[kept], lane[kept], list(log.lanes),
        max(1, len(found.steps)), found,
    )  # fmt: skip


def _inside(instants: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    at = np.searchsorted(bounds[:, 0], instants, side="right") - 1
    return (at >= 0) & (instants <= bounds[at, 1])


def _own(kind: np.ndarray, lane: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Durations, of operators without the operators inside them on the same thread."""
    own = end - start
    operators = np.flatnonzero(kind == 0)
    order = operators[np.lexsort((-end[operators], start[operators], lane[operators]))]
    stack: list[int] = []
    for index in order.tolist():
        while stack and (lane[stack[-1]] != lane[index] or end[stack[-1]] <= start[index]):
            stack.pop()
        if stack:
            own[stack[-1]] -= min(end[index], end[stack[-1]]) - start[index]
        stack.append(index)
    return own
