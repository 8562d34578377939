"""A trace as one table, a row an event; `event_kinds` says which event counts as what, `event_reader` fills the table.

Names and threads are numbers in the table, and each name is judged once, so that a trace of a gigabyte fits in memory.
Times are the trace's own nanoseconds; `base_ns` is added when rows of a record are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fsdplab.common.collectives import kind_of
from fsdplab.profiling.intervals import Intervals, union
from fsdplab.profiling.traces.comm_kernels import CommKernels
from fsdplab.profiling.traces.event_kinds import DEVICE_WORK, Kind

ROOT = "root"  # the root unit; "" is no unit
_ENGINE_RANGE = re.compile(r"^FSDP::(\w+?)(?: \((.*)\))?$")
_PREFETCH_RANGE = re.compile(r"^FSDP::backward_prefetch (?:for (.+)|\((.*) for .*\))$")
_UNKNOWN = -(2**62)  # the launch of work that the trace does not show


class Window(NamedTuple):
    """A step: its number, its begin and its end, in the trace's own ns."""

    number: int
    start: int
    end: int


class Range(NamedTuple):  # not a dataclass: a trace has a hundred thousand, and these are made in a third of the time
    """A named range on one thread. `label` of `FSDP::all_gather (blocks.3)` is `all_gather`, `unit` is `blocks.3`;
    `row` is its event.
    """

    label: str
    unit: str
    start: int
    end: int
    thread: int
    row: int = -1


class Transfer(NamedTuple):
    """Something that moves bytes between ranks; `row` is the event whose launch is the collective's. `kind` is what its
    own name says, "" where that says nothing.
    """

    kind: str
    start: int
    end: int
    carrier: Kind
    thread: int
    row: int
    details: Mapping[str, Any] = MappingProxyType({})


@dataclass
class Events:
    """All events that matter, in the file's order; `details` has the arguments of what moves bytes, by row, and
    `shapes` what operators were given (JSON of their `Input Dims` and `Input type`), where that was asked for.

    `first` and `last` are the earliest start and the latest end of all events, ignored ones among them.
    """

    path: Path
    metadata: dict[str, Any]
    base_ns: int
    first: int
    last: int
    kind: np.ndarray  # of each event, as the five columns after it
    start: np.ndarray
    end: np.ndarray
    name: np.ndarray  # an index of `names`
    thread: np.ndarray  # an index of `threads`
    correlation: np.ndarray  # the number that work of a device shares with its launch; -1 for none
    names: Sequence[str]
    threads: Sequence[tuple[Any, Any]]  # process and thread, as the trace names them
    details: dict[int, dict[str, Any]]
    comm_kernels: CommKernels
    shapes: dict[int, str]
    memory: np.ndarray  # of the devices' allocators: when, of which device, bytes allocated and reserved
    sequence: np.ndarray  # rows of operators and of autograd's ranges, each with its number in autograd's sequence
    modules: Sequence[Range]  # of the model, where shapes were asked for and the trace has Python's stack
    odd: tuple[str, ...] = ()  # sentences on what was left out
    unread: Mapping[str, int] = field(default_factory=dict)  # ns of the categories that nobody knows

    def rows(self, *kinds: Kind) -> np.ndarray:
        """The rows of some kinds, in order."""
        if len(kinds) == 1:
            return np.flatnonzero(self.kind == kinds[0])
        return np.flatnonzero(np.isin(self.kind, kinds))

    def spans(self, *kinds: Kind) -> Intervals:
        """Start and end of each event of some kinds; they may overlap."""
        return self.spans_of(self.rows(*kinds))

    def spans_of(self, rows: np.ndarray) -> Intervals:
        """Start and end of some rows."""
        return np.stack([self.start[rows], self.end[rows]], axis=1)

    @cached_property
    def devices(self) -> list[int]:
        """The devices that computed or communicated, by their numbers."""
        # in a trace a device is a process, whose number is the device's, and its streams are threads
        rows = self.rows(Kind.KERNEL, Kind.COMM)
        threads = set(self.thread[rows].tolist())
        processes = {self.threads[thread][0] for thread in threads}
        return sorted(number for number in processes if type(number) is int)

    def of_device(self, device: int) -> Events:
        """The same events without the work of other devices."""
        is_of_device = np.array([process == device for process, _ in self.threads])
        is_others = np.isin(self.kind, DEVICE_WORK) & ~is_of_device[self.thread]
        kind = np.where(is_others, Kind.IGNORED, self.kind).astype(self.kind.dtype)
        return replace(self, kind=kind, memory=self.memory[self.memory[:, 1] == device])

    def peaks(self, windows: Sequence[Window]) -> tuple[int | None, int | None]:
        """(bytes allocated, bytes reserved) at most in these steps, of the device that has most allocated; None where
        the profiler noted none.
        """
        # a row a note: when, of which device, bytes allocated and reserved
        times = self.memory[:, 0]
        in_steps = (times >= windows[0].start) & (times <= windows[-1].end)
        noted = self.memory[in_steps]
        if not len(noted):
            return None, None
        _, devices, allocated, _ = noted.T
        fullest_device = devices[int(allocated.argmax())]
        of_device = noted[devices == fullest_device]
        return int(of_device[:, 2].max()), int(of_device[:, 3].max()) or None

    @cached_property
    def on_gpu(self) -> bool:
        """Whether a device worked: then the host's operators only launch."""
        return bool(np.isin(self.kind, (Kind.KERNEL, Kind.COMM)).any())

    @property
    def distributed(self) -> dict[str, Any]:
        """The profiler's `distributedInfo`; {} in files that lack it."""
        info = self.metadata.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @cached_property
    def world_size(self) -> int:
        """How many ranks the job has; 1 where the trace does not say."""
        return int(self.distributed.get("world_size") or 1)

    @cached_property
    def launched_by(self) -> np.ndarray:
        """For each row the row of the host's call that launched it; -1 where the trace does not say.

        A kernel and its call have the same correlation number.
        """
        launched_by = np.full(len(self.kind), -1)
        calls = self.rows(Kind.LAUNCH, Kind.BLOCKING_LAUNCH)
        calls = calls[self.correlation[calls] >= 0]
        if not len(calls):
            return launched_by

        # in the order of their numbers, so that one search finds the calls of all work
        calls = calls[np.argsort(self.correlation[calls], kind="stable")]
        numbers_of_calls = self.correlation[calls]
        work = self.rows(*DEVICE_WORK)
        numbers_of_work = self.correlation[work]
        # the first call whose number is not lower; it is the work's own where the two are equal
        place = np.searchsorted(numbers_of_calls, numbers_of_work)
        place = np.minimum(place, len(calls) - 1)
        is_own = numbers_of_calls[place] == numbers_of_work
        launched_by[work] = np.where(is_own, calls[place], -1)
        return launched_by

    def of_launch(self, times: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`times`, the table's starts or ends, of the call that launched each row; a time before all others where the
        trace does not say. The two differ: the first launch of a kernel loads its code.
        """
        calls = self.launched_by[rows]
        return np.where(calls >= 0, times[calls], _UNKNOWN)

    @cached_property
    def compute_threads(self) -> list[int]:
        """Threads whose operators compute: all but gloo's, which run no engine's ranges and not most operators."""
        # how many operators each thread ran
        counts = np.bincount(self.thread[self.rows(Kind.OPERATOR)], minlength=len(self.threads))
        with_gloo = set(self.thread[self.rows(Kind.GLOO)].tolist())
        with_ranges = set(self.thread[self.rows(Kind.RANGE)].tolist())
        of_gloo = with_gloo - with_ranges
        if len(counts):
            of_gloo.discard(int(counts.argmax()))
        return [thread for thread in np.flatnonzero(counts).tolist() if thread not in of_gloo]

    @cached_property
    def host_busy(self) -> dict[int, Intervals]:
        """When each computing thread of the host ran an operator, communication's copies among them."""
        rows = self.rows(Kind.OPERATOR)
        threads = self.thread[rows]
        return {thread: union(self.spans_of(rows[threads == thread])) for thread in self.compute_threads}

    @cached_property
    def steps(self) -> list[Window]:
        """The profiler's steps, in order of time."""
        windows = []
        for row in self.rows(Kind.STEP).tolist():
            _, _, number = self.names[int(self.name[row])].partition("#")
            windows.append(Window(int(number), int(self.start[row]), int(self.end[row])))
        return sorted(windows, key=lambda window: window.start)

    @cached_property
    def ranges(self) -> list[Range]:
        """Ranges of engines and optimizers, the outer one first."""
        return self._ranges(Kind.RANGE, _label)

    @cached_property
    def issues(self) -> list[Range]:
        """c10d operators; the label is the collective, "" where only their arguments say it."""
        return self._ranges(Kind.ISSUE, lambda name: (kind_of(name), ""))

    def _ranges(self, kind: Kind, named: Callable[[str], tuple[str, str]]) -> list[Range]:
        """Events of a kind as ranges, the outer one first; `named` gives a name's label and unit."""
        rows = self.rows(kind)
        rows = rows[np.lexsort((-self.end[rows], self.start[rows]))]
        # each name is looked into once, however many ranges have it
        labels: dict[int, tuple[str, str]] = {}
        for number in set(self.name[rows].tolist()):
            labels[number] = named(self.names[number])
        columns = zip(
            self.name[rows].tolist(),
            self.start[rows].tolist(),
            self.end[rows].tolist(),
            self.thread[rows].tolist(),
            rows.tolist(),
        )
        return [Range(*labels[name], start, end, thread, row) for name, start, end, thread, row in columns]

    @cached_property
    def transfers(self) -> list[Transfer]:
        """Everything that moves bytes between ranks, in order of time."""
        transfers = [self._transfer(row) for row in self.rows(Kind.GLOO, Kind.SHM, Kind.COMM).tolist()]
        return sorted(transfers, key=lambda transfer: (transfer.start, -transfer.end))

    def _transfer(self, row: int) -> Transfer:
        """An event that moves bytes, with the arguments that it was given."""
        name = self.names[int(self.name[row])]
        carrier = Kind(int(self.kind[row]))
        kind = self._collective_named(name, carrier)
        return Transfer(
            kind, int(self.start[row]), int(self.end[row]), carrier, int(self.thread[row]), row, self.details[row]
        )

    def _collective_named(self, name: str, carrier: Kind) -> str:
        """The collective that an event's own name says; "" where it says none."""
        if carrier == Kind.COMM:
            return self.comm_kernels.kind(name) or ""
        return kind_of(name)


def known(launches: np.ndarray) -> np.ndarray:
    """Which of the times that `of_launch` gave the trace shows."""
    return launches != _UNKNOWN


def _label(name: str) -> tuple[str, str]:
    """The label and the unit of a range of an engine or an optimizer."""
    if name.startswith("Optimizer."):
        return "optimizer", ""
    prefetch = _PREFETCH_RANGE.match(name)
    if prefetch:
        return "backward_prefetch", prefetch.group(1) or prefetch.group(2) or ROOT
    range_of_engine = _ENGINE_RANGE.match(name)
    if range_of_engine:
        return range_of_engine.group(1), range_of_engine.group(2) or ROOT
    return name, ""
