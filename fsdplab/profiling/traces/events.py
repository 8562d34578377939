"""A trace as one table, a row an event, read once; and every rule of which event counts as what.

On the CPU, computing is every operator (`aten::mm`, custom ones too) on a thread that is no transport's; `c10d::*` only
enqueues or waits, and autograd's own ranges hold Python hooks and waiting, so neither computes. On a GPU, computing is
every kernel that moves no bytes between ranks (`CommKernels`); copies and memsets by the copy engines, between host and
device or inside the device, are neither computing nor communication, and copies to another device are communication.
Communication is `gloo:*` on gloo's threads, `shm:*` and the engine's marked ranges on the thread that runs them, and
communication kernels.

Names and threads are numbers in the table, and each name is judged once, so that a trace of a gigabyte fits in memory.
Times are the trace's own nanoseconds; `base_ns` is added when rows of a record are made.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fsdplab.common.collectives import kind_of
from fsdplab.common.sizes import seconds
from fsdplab.common.words import plural
from fsdplab.profiling.intervals import Intervals, union
from fsdplab.profiling.traces.chrome import LATEST_NS, ChromeTrace, OddEvent, TraceError, as_trace_error, nanoseconds
from fsdplab.profiling.traces.comm_kernels import CommKernels

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
_OF_HOST = ("cpu_op", "user_annotation")
_OF_RUNTIME = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver")
_READ = {*_OF_HOST, *_OF_RUNTIME, "kernel", "gpu_memcpy", "gpu_memset", *_OF_BEFORE}
_OF_PYTHON, _OF_MODULES = "python_function", "nn.Module: "  # the category of Python's stack, and its modules
_PASSED_OVER = {  # what the profiler writes beside them: of itself, Python's stack, arrows, and what is shown twice
    "", "python_function", "gpu_user_annotation", "cuda_sync", "overhead", "Trace", "fwdbwd", "ac2g", "emulated",
    "async_cpu_to_gpu", "cpu_instant_event", "cuda_profiler_range", "external_correlation", "collective_comm",
    "PyTorch Profiler",
}  # fmt: skip
_SYNCHRONOUS_COPIES = ("cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream")  # the host waits for these
_MOST_LISTED = 4
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
    COPY = 10  # between the host and a device
    DEVICE_COPY = 11  # inside a device, memsets among them
    LAUNCH = 12
    BLOCKED = 13
    BLOCKING_LAUNCH = 14
    IGNORED = 15


COPIES = (Kind.COPY, Kind.DEVICE_COPY)
DEVICE_WORK = (Kind.KERNEL, Kind.COMM, *COPIES)


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


_ITEM_BYTES = {
    "float": 4, "double": 8, "int": 4, "long": 8, "bfloat16": 2, "half": 2, "c10::bfloat16": 2, "c10::half": 2,
    "float16": 2, "float32": 4, "float64": 8, "long int": 8, "short int": 2,  # "long" and "short" as GCC names them
    "signed char": 1, "unsigned char": 1, "char": 1, "byte": 1, "bool": 1, "short": 2,
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "unsigned short": 2, "unsigned int": 4, "unsigned long": 8, "long long": 8,
    "complexhalf": 4, "complexfloat": 8, "complexdouble": 16,
    "c10::complex<c10::half>": 4, "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
_FORMATS = {
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float64": "fp64",
    "bfloat16": "bf16",
    "c10::bfloat16": "bf16",
    "half": "fp16",
    "c10::half": "fp16",
    "float16": "fp16",
}
_EIGHT_BITS = re.compile(r"^(c10::)?float8_e\w+$")


# the operators of convolutions that launch kernels; those around them (conv2d, convolution) only choose one
CONVOLUTIONS = ("cudnn_convolution", "miopen_convolution", "mkldnn_convolution", "cudnn_convolution_relu")
_MOST_BYTES = 2**50
_DAY_NS = 86_400 * 10**9
_LONGEST_NS = 365 * _DAY_NS


def tensor_bytes(dims: Any, kind: Any) -> int:
    """Bytes of a tensor of a trace's `Input Dims` and `Input type`; 0 for what is no tensor, or larger than a petabyte.

    >>> tensor_bytes([4, 8], "float"), tensor_bytes([], "Scalar")
    (128, 0)
    """
    plain = isinstance(dims, list) and dims and all(type(each) is int and each >= 0 for each in dims)
    nbytes = math.prod(dims) * _item_bytes(str(kind).lower()) if plain else 0
    return nbytes if nbytes <= _MOST_BYTES else 0


def _item_bytes(kind: str) -> int:
    return 1 if _EIGHT_BITS.match(kind) else _ITEM_BYTES.get(kind, 0)


@lru_cache(maxsize=4096)
def number_format(shapes: str) -> str:
    """The number format of the first matrix that an operator was given, as JSON of `Events.shapes`; "" for none.

    >>> number_format('[[[2], [4, 8], [8, 2]], ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"]]')
    'bf16'
    """
    dims, types, *_ = json.loads(shapes) if shapes else ([], [])
    given = zip(dims or (), types or ())
    matrices = (str(kind).lower() for dim, kind in given if isinstance(dim, list) and len(dim) > 1)
    first = next(matrices, "")
    return "fp8" if _EIGHT_BITS.match(first) else _FORMATS.get(first, "")


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
    memory: np.ndarray  # of the devices' allocators: when, of which device, bytes allocated and reserved
    sequence: np.ndarray  # rows of operators and of autograd's ranges, each with its number in autograd's sequence
    modules: Sequence[Range]  # of the model, where shapes were asked for and the trace has Python's stack
    odd: tuple[str, ...] = ()  # sentences on what was left out
    unread: Mapping[str, int] = field(default_factory=dict)  # ns of the categories that nobody knows

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
    def devices(self) -> list[int]:
        """The devices that computed or communicated, by their numbers."""
        rows = self.rows(Kind.KERNEL, Kind.COMM)
        numbers = {self.threads[thread][0] for thread in set(self.thread[rows].tolist())}
        return sorted(number for number in numbers if type(number) is int)

    def of_device(self, device: int) -> Events:
        """The same events without the work of other devices."""
        numbers = np.array([process == device for process, _ in self.threads])
        others = np.isin(self.kind, DEVICE_WORK) & ~numbers[self.thread]
        kind = np.where(others, Kind.IGNORED, self.kind).astype(self.kind.dtype)
        return replace(self, kind=kind, memory=self.memory[self.memory[:, 1] == device])

    def peaks(self, windows: Sequence[Window]) -> tuple[int | None, int | None]:
        """(bytes allocated, bytes reserved) at most in these steps, of the device that has most allocated; None where
        the profiler noted none.
        """
        begin, end = windows[0].start, windows[-1].end
        noted = self.memory[(self.memory[:, 0] >= begin) & (self.memory[:, 0] <= end)]
        if not len(noted):
            return None, None
        mine = noted[noted[:, 1] == noted[int(noted[:, 2].argmax()), 1]]
        return int(mine[:, 2].max()), int(mine[:, 3].max()) or None

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
        device = self.rows(*DEVICE_WORK)
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
        """c10d operators; the label is the collective, "" where only their arguments say it."""
        return self._ranges(Kind.ISSUE, lambda name: (kind_of(name), ""))

    def _ranges(self, kind: Kind, named: Callable[[str], tuple[str, str]]) -> list[Range]:
        rows = self.rows(kind)
        rows = rows[np.lexsort((-self.end[rows], self.start[rows]))]
        labels = {number: named(self.names[number]) for number in set(self.name[rows].tolist())}
        columns = (each[rows].tolist() for each in (self.name, self.start, self.end, self.thread))
        return [Range(*labels[name], *others) for name, *others in zip(*columns, rows.tolist())]

    @cached_property
    def transfers(self) -> list[Transfer]:
        """Everything that moves bytes between ranks, in order of time."""
        found = [self._transfer(row) for row in self.rows(Kind.GLOO, Kind.SHM, Kind.COMM).tolist()]
        return sorted(found, key=lambda one: (one.start, -one.end))

    def _transfer(self, row: int) -> Transfer:
        name, details, carrier = self.names[int(self.name[row])], self.details[row], Kind(int(self.kind[row]))
        kind = (self.comm_kernels.kind(name) or "") if carrier == Kind.COMM else kind_of(name)
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


def check_device(found: Events) -> None:
    """TraceError where the trace shows that a device worked but not its work: nothing then says what a step did."""
    if found.on_gpu:
        return
    if found.unread:
        raise TraceError(
            f"{found.path} has events of categories that are not read, {_listed(found.unread)}, and no work of a device"
            " that is: what ran there is not known; give a trace of CPU ranks, or of GPUs with the categories `kernel`"
            " and `gpu_memcpy`."
        )
    devices = found.metadata.get("deviceProperties")
    names = [each.get("name") for each in devices if isinstance(each, dict)] if isinstance(devices, list) else []
    backend = str(found.distributed.get("backend") or "")
    moves = any(each.carrier in (Kind.GLOO, Kind.SHM) for each in found.transfers)
    launches = len(found.rows(Kind.LAUNCH, Kind.BLOCKING_LAUNCH)) > 0
    if launches or ("nccl" in backend or names) and not moves:
        seen = f"names {names[0]}" if names else "launches work" if launches else "is of a job over NCCL"
        raise TraceError(
            f"{found.path} {seen}, but no GPU work was recorded: profile with ProfilerActivity.CUDA too"
            " (activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]); a job that computes on the CPU of a machine"
            ' with GPUs is recorded with CUDA_VISIBLE_DEVICES="".'
        )


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


def _listed(categories: Mapping[str, int]) -> str:
    """Categories with their time: `npu_kernel (4.20 ms)`."""
    longest = sorted(categories, key=lambda name: -categories[name])[:_MOST_LISTED]
    return ", ".join(f"{name[:40]!r} ({seconds(categories[name] / 1e9)})" for name in longest)


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
        self._memory = array("q")  # when, of which device, bytes allocated and reserved: four numbers an event
        self._modules: list[Range] = []
        self._sequence = array("q")  # rows, each with its number in autograd's sequence
        self._negative: list[str] = []  # the first events of a negative duration
        self._negatives = 0
        self._unread: dict[str, int] = {}  # ns of each category that is neither read nor known

    def take(self, trace: ChromeTrace) -> None:
        """The hot loop: what an event counts as is looked up by its name and category."""
        verdicts, threads, details, add = self._verdicts, self._threads, self._details, self._rows.extend
        first, last, count, ignored, device = None, 0, 0, Kind.IGNORED, Kind.KERNEL
        wants_shapes, autograd, numbered = self._wants_shapes, Kind.AUTOGRAD, self._sequence.extend
        event: dict[str, Any] = {}
        try:
            for event in trace:
                if event.get("ph") != "X":
                    if event.get("name") == "[memory]":
                        self._note_memory(event)
                    continue
                category = event.get("cat", "")
                if category not in _READ:
                    if category == _OF_PYTHON:
                        if wants_shapes:
                            self._note_module(event)
                    elif category not in _PASSED_OVER:
                        self._pass_over(str(category), event)
                    continue
                start = nanoseconds(event["ts"])
                end = start + nanoseconds(event.get("dur") or 0)
                if end < start:
                    self._negatives += 1
                    self._negative = self._negative or [_told(event)]
                    continue
                if first is None or start < first:
                    first = start
                if end > last:
                    last = end
                key = event["name"], category
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
                if kind in _KEEPS_DETAILS:
                    given = event.get("args")
                    details[count] = given if isinstance(given, dict) else {}
                elif kind in COPIES:
                    self._note_bytes(count, event.get("args"))
                elif kind <= autograd:
                    given = event.get("args")
                    if type(given) is dict:
                        node = given.get("Sequence number")
                        if type(node) is int and 0 <= node < LATEST_NS:
                            numbered((count, node))
                        if wants_shapes and kind == 0:
                            self._note_shapes(count, event["name"], given)
                count += 1
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise OddEvent(_told(event)) from None
        self.first, self.last = first, last
        if self._negatives > max(1, count // 100):
            raise OddEvent(self._negative[0])
        if first is not None and (first < -LATEST_NS or last > LATEST_NS):
            raise OddEvent("a time of more than 64 bits")
        if first is not None and last - first > _LONGEST_NS:
            raise OddEvent(f"events over {(last - first) // _DAY_NS} days")

    def _pass_over(self, category: str, event: dict[str, Any]) -> None:
        """Note how long the events of a category last that nobody knows."""
        lasted = event.get("dur")
        if isinstance(lasted, (int, float)) and lasted > 0 and math.isfinite(lasted):
            self._unread[category] = self._unread.get(category, 0) + nanoseconds(lasted)

    def _odd(self, trace: ChromeTrace) -> tuple[str, ...]:
        """Sentences on what is left out."""
        told = [trace.damaged.sentence()]
        if self._negatives:
            told.append(
                f"{plural(self._negatives, 'event')} left out whose duration is negative ({self._negative[0]}), as some"
                " versions of the profiler write it"
            )
        if self._unread:
            told.append(f"events of other categories are not read: {_listed(self._unread)}")
        return tuple(filter(None, told))

    def _note_memory(self, event: dict[str, Any]) -> None:
        """The allocator of a device tells its whole; that of the CPU only what has changed since profiling began."""
        given = event.get("args")
        if isinstance(given, dict) and given.get("Device Type") == _ON_CUDA:
            said = (given.get(name, 0) for name in ("Device Id", "Total Allocated", "Total Reserved"))
            device, allocated, reserved = (each if type(each) is int and 0 <= each < LATEST_NS else 0 for each in said)
            if allocated:
                self._memory.extend((nanoseconds(event["ts"]), device, allocated, reserved))

    def _note_module(self, event: dict[str, Any]) -> None:
        """Note the range of a module of the model; the rest of Python's stack is not needed."""
        name = event["name"]
        if not isinstance(name, str) or not name.startswith(_OF_MODULES):
            return
        own = event["pid"], event["tid"]
        thread = self._threads.setdefault(own, len(self._threads))
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event.get("dur") or 0)
        if end >= start:
            self._modules.append(Range(name.removeprefix(_OF_MODULES), "", start, end, thread))

    def _note_bytes(self, row: int, given: Any) -> None:
        """How many bytes a copy moved; the rest of its arguments is not needed."""
        if isinstance(given, dict) and "bytes" in given:
            self._details[row] = {"bytes": given["bytes"]}

    def _note_shapes(self, row: int, name: str, given: dict[str, Any]) -> None:
        """The shapes and types; of a convolution its stride and padding too."""
        if "Input Dims" in given:
            kept = [given["Input Dims"], given.get("Input type")]
            if name.removeprefix("aten::") in CONVOLUTIONS:
                kept.append(given.get("Concrete Inputs"))
            text = json.dumps(kept)
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
            return _of_copy_engine(name, category)
        return Kind.KERNEL if self._comm_kernels.kind(name) is None else Kind.COMM

    def events(self, trace: ChromeTrace) -> Events:
        """The table of what was taken."""
        columns = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, 6).T
        start, end, correlation = (columns[at].copy() for at in (0, 1, 5))
        kind, name, thread = (columns[at].astype(small) for at, small in ((2, np.int8), (3, np.int32), (4, np.int32)))
        names = [name for name, _ in self._verdicts]
        return Events(
            trace.path,
            trace.metadata,
            trace.base_ns,
            self.first or 0,
            self.last,
            kind,
            start,
            end,
            name,
            thread,
            correlation,
            names,
            list(self._threads),
            self._details,
            self._comm_kernels,
            self._shapes,
            np.frombuffer(self._memory, dtype=np.int64).reshape(-1, 4),
            np.frombuffer(self._sequence, dtype=np.int64).reshape(-1, 2),
            self._modules,
            self._odd(trace),
            self._unread,
        )


_KEEPS_DETAILS = {Kind.GLOO, Kind.SHM, Kind.COMM, Kind.ISSUE}
_INSIDE_A_DEVICE = re.compile(r"Memcpy [DA]to[DA]\b|CopyDeviceToDevice")
_TO_ANOTHER_DEVICE = re.compile(r"Memcpy PtoP|CopyPeer|PeerToPeer")


def _of_copy_engine(name: str, category: str) -> Kind:
    """What a copy or a memset counts as, by its direction."""
    if category == "gpu_memset" or _INSIDE_A_DEVICE.search(name):
        return Kind.DEVICE_COPY
    return Kind.COMM if _TO_ANOTHER_DEVICE.search(name) else Kind.COPY


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


_CALL_WITH_ARGUMENTS = "record_param_comms"  # c10d's own event of a call, with the collective's name, bytes and group
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
    if name == _CALL_WITH_ARGUMENTS:
        return Kind.ISSUE
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
