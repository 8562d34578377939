"""A trace as one table, a row an event, read once; and every rule of which event counts as what.

On the CPU, computing is every operator (`aten::mm`, custom ones too) on a thread that is no transport's; `c10d::*` only
enqueues or waits, and autograd's own ranges hold Python hooks and waiting, so neither computes. On a GPU, computing is
every kernel that moves no bytes between ranks (`CommKernels`); copies and memsets by the copy engines are neither
computing nor communication. Communication is `gloo:*` on gloo's threads, `shm:*` and the engine's marked ranges on the
thread that runs them, and communication kernels.

Names and threads are numbers in the table, and each name is judged once, so that a trace of a gigabyte fits in memory.
Times are the trace's own nanoseconds; `base_ns` is added when rows of a record are made.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fsdplab.profiling.intervals import Intervals, union
from fsdplab.profiling.traces.chrome import LATEST_NS, ChromeTrace, OddEvent, TraceError, as_trace_error, nanoseconds

ROOT = "root"  # the root unit; "" is no unit
_ENGINE_RANGE = re.compile(r"^FSDP::(\w+?)(?: \((.*)\))?$")
_PREFETCH_RANGE = re.compile(r"^FSDP::backward_prefetch (?:for (.+)|\((.*) for .*\))$")
_STEP = re.compile(r"^ProfilerStep#(\d{1,18})$")  # a record holds 64 bits
# What PyTorch of before 1.10 shows of a node, with nothing around it. One function of the engine has such a name and
# runs in the forward (engine/core/hooks.py).
_BACKWARD_NODE = re.compile(r"^(?!_EndOfBackward$)\w+Backward\d*$")
_NO_COMPUTING = (
    "c10d::", "_c10d_functional::", "c10d_functional::", "autograd::engine::", "torch::autograd::", "gloo:", "nccl:",
    "shm:", "FSDP::",
)  # fmt: skip
_OF_BEFORE = {  # categories as PyTorch wrote them until 2021 -> as it does now
    "Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
}  # fmt: skip
_OF_HOST, _OF_RUNTIME = ("cpu_op", "user_annotation"), ("cuda_runtime", "cuda_driver")
_READ = {*_OF_HOST, *_OF_RUNTIME, "kernel", "gpu_memcpy", "gpu_memset", *_OF_BEFORE}
_SYNCHRONOUS_COPIES = ("cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream")  # the host waits for these
_MOST_CORRELATION = 2**62
_ON_CUDA = 1  # the profiler's number of the kind of device
_UNKNOWN = -(2**62)  # the launch of work that the trace does not show


class Kind(IntEnum):
    """What an event counts as."""

    OPERATOR = 0  # computes, where no device does
    AUTOGRAD = 1
    RANGE = 2  # of an engine or an optimizer
    ISSUE = 3  # a c10d operator
    LOADING = 4
    STEP = 5
    GLOO = 6
    SHM = 7
    KERNEL = 8  # computes on a device
    COMM = 9  # a kernel that communicates
    COPY = 10
    LAUNCH = 11
    BLOCKED = 12
    BLOCKING_LAUNCH = 13
    IGNORED = 14


class Window(NamedTuple):
    """A step: its number, its begin and its end, in the trace's own ns."""

    number: int
    start: int
    end: int


class Range(NamedTuple):  # not a dataclass: a trace has a hundred thousand, and these are made in a third of the time
    """A named range on one thread. `label` of `FSDP::all_gather (blocks.3)` is `all_gather`, `unit` is `blocks.3`."""

    label: str
    unit: str
    start: int
    end: int
    thread: int


class Transfer(NamedTuple):
    """Something that moves bytes between ranks; `row` is the event whose launch is the collective's."""

    kind: str
    start: int
    end: int
    carrier: Kind
    thread: int
    row: int
    details: Mapping[str, Any] = MappingProxyType({})


_ITEM_BYTES = {
    "float": 4, "double": 8, "int": 4, "long": 8, "bfloat16": 2, "half": 2, "c10::bfloat16": 2, "c10::half": 2,
    "float16": 2, "float32": 4, "long int": 8, "short int": 2,  # "long" and "short" as GCC names them
    "signed char": 1, "unsigned char": 1, "char": 1, "byte": 1, "bool": 1, "short": 2,
}  # fmt: skip


_MOST_BYTES = 2**50
_DAY_NS = 86_400 * 10**9
_LONGEST_NS = 365 * _DAY_NS


def tensor_bytes(dims: Any, kind: Any) -> int:
    """Bytes of a tensor of a trace's `Input Dims` and `Input type`; 0 for what is no tensor, or larger than a petabyte.

    >>> tensor_bytes([4, 8], "float"), tensor_bytes([], "Scalar")
    (128, 0)
    """
    plain = isinstance(dims, list) and dims and all(type(each) is int and each >= 0 for each in dims)
    nbytes = math.prod(dims) * _ITEM_BYTES.get(str(kind).lower(), 0) if plain else 0
    return nbytes if nbytes <= _MOST_BYTES else 0


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
    kind: np.ndarray
    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    correlation: np.ndarray
    names: Sequence[str]
    threads: Sequence[tuple[Any, Any]]  # process and thread, as the trace names them
    details: dict[int, dict[str, Any]]
    comm_kernels: CommKernels
    shapes: dict[int, str]
    allocated_peak: int | None  # bytes of the device's allocator at their highest, where the profiler noted them

    def rows(self, *kinds: Kind) -> np.ndarray:
        """The rows of some kinds, in order."""
        return np.flatnonzero(np.isin(self.kind, kinds) if len(kinds) > 1 else self.kind == kinds[0])

    def spans(self, *kinds: Kind) -> Intervals:
        """Start and end of each event of some kinds; they may overlap."""
        return self.spans_of(self.rows(*kinds))

    def spans_of(self, rows: np.ndarray) -> Intervals:
        """Start and end of some rows."""
        return np.stack([self.start[rows], self.end[rows]], axis=1)

    @cached_property
    def on_gpu(self) -> bool:
        """Whether a device worked: then the host's operators only launch."""
        return bool(np.isin(self.kind, (Kind.KERNEL, Kind.COMM)).any())

    @property
    def distributed(self) -> dict[str, Any]:
        """The profiler's `distributedInfo`; {} in files that lack it."""
        found = self.metadata.get("distributedInfo")
        return found if isinstance(found, dict) else {}

    @cached_property
    def world_size(self) -> int:
        """How many ranks the job has; 1 where the trace does not say."""
        return int(self.distributed.get("world_size") or 1)

    @cached_property
    def launched_by(self) -> np.ndarray:
        """For each row the row of the host's call that launched it; -1 where the trace does not say."""
        calls = self.rows(Kind.LAUNCH, Kind.BLOCKING_LAUNCH)
        calls = calls[self.correlation[calls] >= 0]
        found = np.full(len(self.kind), -1)
        device = self.rows(Kind.KERNEL, Kind.COMM, Kind.COPY)
        if len(calls):
            calls = calls[np.argsort(self.correlation[calls], kind="stable")]
            numbers = self.correlation[calls]
            at = np.minimum(np.searchsorted(numbers, self.correlation[device]), len(calls) - 1)
            found[device] = np.where(numbers[at] == self.correlation[device], calls[at], -1)
        return found

    def of_launch(self, times: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`times`, the table's starts or ends, of the call that launched each row; a time before all others where the
        trace does not say. The two differ: the first launch of a kernel loads its code.
        """
        by = self.launched_by[rows]
        return np.where(by >= 0, times[by], _UNKNOWN)

    @cached_property
    def compute_threads(self) -> list[int]:
        """Threads whose operators compute: all but gloo's, which run no engine's ranges and not most operators."""
        counts = np.bincount(self.thread[self.rows(Kind.OPERATOR)], minlength=len(self.threads))
        gloo = set(self.thread[self.rows(Kind.GLOO)].tolist()) - set(self.thread[self.rows(Kind.RANGE)].tolist())
        gloo -= {int(counts.argmax())} if len(counts) else set()
        return [thread for thread in np.flatnonzero(counts).tolist() if thread not in gloo]

    @cached_property
    def host_busy(self) -> dict[int, Intervals]:
        """When each computing thread of the host ran an operator, communication's copies among them."""
        rows = self.rows(Kind.OPERATOR)
        return {thread: union(self.spans_of(rows[self.thread[rows] == thread])) for thread in self.compute_threads}

    @cached_property
    def steps(self) -> list[Window]:
        """The profiler's steps, in order of time."""
        rows = self.rows(Kind.STEP)
        numbers = [int(self.names[name].partition("#")[2]) for name in self.name[rows].tolist()]
        return sorted(
            map(Window, numbers, self.start[rows].tolist(), self.end[rows].tolist()), key=lambda step: step.start
        )

    @cached_property
    def ranges(self) -> list[Range]:
        """Ranges of engines and optimizers, the outer one first."""
        return self._ranges(Kind.RANGE, _label)

    @cached_property
    def issues(self) -> list[Range]:
        """c10d operators; the label is the collective."""
        return self._ranges(Kind.ISSUE, lambda name: (kind_of(name), ""))

    def _ranges(self, kind: Kind, named: Callable[[str], tuple[str, str]]) -> list[Range]:
        rows = self.rows(kind)
        rows = rows[np.lexsort((-self.end[rows], self.start[rows]))]
        labels = {number: named(self.names[number]) for number in set(self.name[rows].tolist())}
        columns = (each[rows].tolist() for each in (self.name, self.start, self.end, self.thread))
        return [Range(*labels[name], *others) for name, *others in zip(*columns)]

    @cached_property
    def transfers(self) -> list[Transfer]:
        """Everything that moves bytes between ranks, in order of time."""
        found = [self._transfer(row) for row in self.rows(Kind.GLOO, Kind.SHM, Kind.COMM).tolist()]
        return sorted(found, key=lambda one: (one.start, -one.end))

    def _transfer(self, row: int) -> Transfer:
        name, details, carrier = self.names[int(self.name[row])], self.details[row], Kind(int(self.kind[row]))
        kind = kind_of(name)
        if carrier == Kind.COMM:
            kind = kind_of(str(details.get("Collective name") or "")) or self.comm_kernels.kind(name) or ""
        return Transfer(kind, int(self.start[row]), int(self.end[row]), carrier, int(self.thread[row]), row, details)


def known(launches: np.ndarray) -> np.ndarray:
    """Which of the times that `of_launch` gave the trace shows."""
    return launches != _UNKNOWN


# ---- reading


def read_events(path: str | Path, comm_patterns: Sequence[str] = (), shapes: bool = False) -> Events:
    """Read a whole trace; TraceError when the file is damaged, of several ranks, or holds nothing that took time.

    `comm_patterns`: kernels that communicate beside those of the table, as `comm_pattern` takes them.
    `shapes`: keep what operators were given.
    """
    trace, comm_kernels = ChromeTrace(path), CommKernels(comm_patterns)
    with as_trace_error(trace.path):
        reader = _Reader(comm_kernels, shapes)
        reader.take(trace)
        _check_metadata(trace.metadata)
        if trace.base_ns + reader.last >= 2 * LATEST_NS:
            raise OddEvent("a time of more than 64 bits")
    if "mergedRanks" in trace.metadata:
        ranks = trace.metadata["mergedRanks"]
        raise TraceError(
            f"{path} holds the ranks {ranks} merged into one file, which is for viewing; analyse each rank's own trace."
        )
    if reader.first is None:
        raise TraceError(
            f"{path} holds no event that took time: nothing ran while the profiler did; profile at least one whole"
            " training step."
        )
    found = reader.events(trace)
    processes = {str(found.threads[thread][0]) for thread in found.thread[found.rows(Kind.STEP)].tolist()}
    if len(processes) > 1:
        raise TraceError(
            f"{found.path} holds the steps of {len(processes)} processes ({', '.join(sorted(processes)[:4])}); expected"
            " one rank's: give each process its own trace."
        )
    return found


def _check_metadata(metadata: dict[str, Any]) -> None:
    """OddEvent where what stands around the events is of another type than the profiler's."""
    world = metadata.get("distributedInfo")
    held = [("baseTimeNanoseconds", metadata.get("baseTimeNanoseconds") or 0)]
    if isinstance(world, dict):
        held += [(name, world[name]) for name in ("rank", "world_size") if name in world]
    for name, value in held:
        if not isinstance(value, int) or not 0 <= value < LATEST_NS:
            raise OddEvent(f"{name} is {value!r:.40}")


def _told(event: dict[str, Any]) -> str:
    """An event in short: `'sm90_gemm' of 'kernel', ts 600.0, dur -5`."""
    values = (event.get(key) for key in ("name", "cat", "ts", "dur"))
    name, category, start, length = (repr(each[:40] if isinstance(each, str) else each)[:44] for each in values)
    return f"{name} of {category}, ts {start}, dur {length}"


class _Reader:
    """Fills the table. Start, end, kind, name, thread and correlation of an event are six numbers in a row."""

    def __init__(self, comm_kernels: CommKernels, shapes: bool) -> None:
        self._comm_kernels, self._wants_shapes = comm_kernels, shapes
        self._shapes: dict[int, str] = {}
        self._once: dict[str, str] = {}  # each text of shapes is kept once
        self._rows = array("q")
        self._verdicts: dict[tuple[str, str], tuple[Kind, int]] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._details: dict[int, dict[str, Any]] = {}
        self.first: int | None = None
        self.last = 0
        self._allocated_peak: int | None = None

    def take(self, trace: ChromeTrace) -> None:
        """The hot loop: what an event counts as is looked up by its name and category."""
        verdicts, threads, details, add = self._verdicts, self._threads, self._details, self._rows.extend
        first, last, count, ignored, device = None, 0, 0, Kind.IGNORED, Kind.KERNEL
        wants_shapes = self._wants_shapes
        event: dict[str, Any] = {}
        try:
            for event in trace:
                if event.get("ph") == "i" and event.get("name") == "[memory]":
                    self._note_memory(event.get("args"))
                if event.get("ph") != "X" or event.get("cat", "") not in _READ:
                    continue
                start = nanoseconds(event["ts"])
                end = start + nanoseconds(event.get("dur") or 0)
                if end < start:
                    raise OddEvent
                if first is None or start < first:
                    first = start
                if end > last:
                    last = end
                key = event["name"], event["cat"]
                verdict = verdicts.get(key)
                if verdict is None:
                    verdict = verdicts[key] = self._judged(*key), len(verdicts)
                kind, number = verdict
                if kind is ignored:
                    continue
                own = event["pid"], event["tid"]
                thread = threads.get(own)
                if thread is None:
                    thread = threads[own] = len(threads)
                add((start, end, kind, number, thread, correlation_of(event) if kind >= device else -1))
                if kind in _MOVES_BYTES:
                    given = event.get("args")
                    details[count] = given if isinstance(given, dict) else {}
                elif wants_shapes and kind == 0:
                    self._note_shapes(count, event.get("args"))
                count += 1
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise OddEvent(_told(event)) from None
        self.first, self.last = first, last
        if first is not None and (first < -LATEST_NS or last > LATEST_NS):
            raise OddEvent("a time of more than 64 bits")
        if first is not None and last - first > _LONGEST_NS:
            raise OddEvent(f"events over {(last - first) // _DAY_NS} days")

    def _note_memory(self, given: Any) -> None:
        """The allocator of a device tells its whole; that of the CPU only what has changed since profiling began."""
        if isinstance(given, dict) and given.get("Device Type") == _ON_CUDA:
            total = given.get("Total Allocated")
            if type(total) is int and 0 <= total < LATEST_NS:
                self._allocated_peak = max(self._allocated_peak or 0, total)

    def _note_shapes(self, row: int, given: Any) -> None:
        if isinstance(given, dict) and "Input Dims" in given:
            text = json.dumps([given["Input Dims"], given.get("Input type")])
            self._shapes[row] = self._once.setdefault(text, text)

    def _judged(self, name: str, category: str) -> Kind:
        category = _OF_BEFORE.get(category, category)
        if category in _OF_HOST:
            return _of_host(name, category)
        if category in _OF_RUNTIME:
            launches = any(word in name for word in ("Launch", "Memcpy", "Memset"))
            if "Synchronize" in name or name in _SYNCHRONOUS_COPIES:
                return Kind.BLOCKING_LAUNCH if launches else Kind.BLOCKED
            return Kind.LAUNCH if launches else Kind.IGNORED
        if category != "kernel":
            return Kind.COPY
        return Kind.KERNEL if self._comm_kernels.kind(name) is None else Kind.COMM

    def events(self, trace: ChromeTrace) -> Events:
        """The table of what was taken."""
        columns = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, 6).T
        start, end, correlation = (columns[at].copy() for at in (0, 1, 5))
        kind, name, thread = (columns[at].astype(small) for at, small in ((2, np.int8), (3, np.int32), (4, np.int32)))
        names = [name for name, _ in self._verdicts]
        return Events(
            trace.path, trace.metadata, trace.base_ns, self.first or 0, self.last, kind, start, end, name, thread,
            correlation, names, list(self._threads), self._details, self._comm_kernels,
            self._shapes, self._allocated_peak,
        )  # fmt: skip


_MOVES_BYTES = {Kind.GLOO, Kind.SHM, Kind.COMM}


def correlation_of(event: dict[str, Any]) -> int:
    """The number that a device's work shares with its launch (text in earlier versions); -1 where there is none."""
    given = (event.get("args") or {}).get("correlation", -1)
    if isinstance(given, str) and given.isdecimal() and len(given) < 20:
        given = int(given)
    if not isinstance(given, int):
        return -1
    if not -1 <= given < _MOST_CORRELATION:
        raise ValueError(f"the correlation {given!r:.40}")
    return given


_STARTS = (
    ("gloo:", Kind.GLOO), ("shm:", Kind.SHM), ("FSDP::", Kind.RANGE),
    ("Optimizer.", Kind.RANGE), ("autograd::engine::evaluate_function", Kind.AUTOGRAD),
    ("enumerate(DataLoader)", Kind.LOADING),
)  # fmt: skip


def _of_host(name: str, category: str) -> Kind:
    """What an event on the host counts as."""
    if _STEP.match(name):
        return Kind.STEP
    for start, kind in _STARTS:
        if name.startswith(start):
            return kind
    if _BACKWARD_NODE.search(name):
        return Kind.AUTOGRAD
    if name.startswith(("c10d::", "_c10d_functional::", "nccl:")):
        return Kind.ISSUE if kind_of(name) else Kind.IGNORED
    computes = category == "cpu_op" and "::" in name and not name.startswith(_NO_COMPUTING)
    return Kind.OPERATOR if computes else Kind.IGNORED


def _label(name: str) -> tuple[str, str]:
    if name.startswith("Optimizer."):
        return "optimizer", ""
    found = _PREFETCH_RANGE.match(name)
    if found:
        return "backward_prefetch", found.group(1) or found.group(2) or ROOT
    found = _ENGINE_RANGE.match(name)
    return (found.group(1), found.group(2) or ROOT) if found else (name, "")


# ---- kernels that move bytes between ranks, told by their names
#
# NCCL and RCCL name the collective in the kernel or in its arguments. RCCL's generic kernel names nothing, so the
# host's call around its launch tells (`collectives`). Libraries that move bytes with kernels of their own (expert
# dispatch, one-shot all-reduces of inference engines, symmetric memory) are in a table of patterns, which a caller
# extends.


KINDS = {  # in a name, letters only -> what the collective is; the order matters
    "reducescatter": "reduce_scatter", "allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv", "send": "send_recv", "recv": "send_recv", "barrier": "barrier",
    "gather": "gather", "scatter": "scatter", "reduce": "reduce",
}  # fmt: skip
NAMED = "by name"  # of a pattern: the kernel's name says which collective it is
TABLE = (
    (r"nccl|rccl", NAMED),
    (r"deep_ep::|internode::|intranode::|internode_ll::", "all_to_all"),  # DeepEP: dispatch and combine of experts
    (r"cross_device_reduce", "all_reduce"),  # vLLM, SGLang
    (r"(one|two)_?shot_?all_?reduce|all_?reduce_?fusion|multimem_all_reduce|quick_?reduce|qr_all_reduce", "all_reduce"),
    (r"(multimem|symm_mem|two_shot|one_shot)\w*all_?gather", "all_gather"),
    (r"(multimem|symm_mem|two_shot|one_shot)\w*reduce_?scatter", "reduce_scatter"),
    (r"mscclpp?|nvshmem|rocshmem", NAMED),
)


def comm_pattern(text: str) -> tuple[re.Pattern[str], str]:
    """What is searched for in kernels' names, ignoring case, and the collective that it means, as an option gives them:
    `my_dispatch=all_to_all`, or `my_comm` where the kernels' names say the rest.

    Raises TraceError for what is no regular expression, or no collective.
    """
    expression, equals, kind = text.rpartition("=")
    if not equals:
        expression, kind = text, NAMED
    known = sorted(set(KINDS.values()))
    if kind != NAMED and kind not in known:
        raise TraceError(
            f"the pattern {text!r} names the collective {kind!r}; expected PATTERN or PATTERN=COLLECTIVE with one of"
            f" {', '.join(known)}."
        )
    try:
        compiled = re.compile(expression, re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise TraceError(
            f"the pattern {expression!r} is no regular expression ({error}); expected one that is found in the names of"
            " kernels, such as my_dispatch."
        ) from None
    if compiled.search(""):
        raise TraceError(f"the pattern {text!r} is found in every name; expected one that only communication has.")
    return compiled, kind


class CommKernels:
    """Says of a kernel's name which collective it is; each name is looked at once."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        self._patterns = [*map(comm_pattern, more), *((re.compile(text, re.IGNORECASE), kind) for text, kind in TABLE)]
        self._known: dict[str, str | None] = {}

    def kind(self, name: str) -> str | None:
        """The collective, "" for communication that does not say which, None for computing."""
        if name not in self._known:
            kind = next((kind for expression, kind in self._patterns if expression.search(name)), None)
            self._known[name] = kind_of(name) if kind == NAMED else kind
        return self._known[name]


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The collective in a name such as `c10d::_allgather_base_` or `ncclDevKernel_AllGather_RING_LL`; else ""."""
    letters = "".join(each for each in name.split("::")[-1].lower() if each.isalpha())
    return next((kind for part, kind in KINDS.items() if part in letters), "")
