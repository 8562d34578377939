"""The class of each event of a trace: computing, moving bytes, issuing, a range of the engine, or ignored.

All rules are here. On the CPU, computing is every operator (`aten::mm`, custom ones too) on a thread that is no
transport's; `c10d::*` only enqueues or waits, and autograd's own ranges hold Python hooks and waiting, so neither
computes. On a GPU, computing is every kernel that moves no bytes between ranks (`comm_kernels`); copies and memsets by
the copy engines are neither computing nor communication (they show as `other`). Communication is `gloo:*` on gloo's
threads, `shm:*` and the engine's marked ranges on the thread that runs them, and such kernels. Only these are kept, in
compact arrays; each operator name is classified once.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals
from fsdplab.profiling.traces.chrome import LATEST_NS, ChromeTrace, TraceError, nanoseconds, shown
from fsdplab.profiling.traces.comm_kernels import CommKernels, kind_of

Thread = tuple[int | str, int | str]  # process and thread, as the trace names them
Carrier = tuple[str, int | str, int | str]  # gloo, shm, shared_gpu or nccl, and its thread

_ENGINE_RANGE = re.compile(r"^FSDP::(\w+?)(?: \((.*)\))?$")
_PREFETCH_RANGE = re.compile(r"^FSDP::backward_prefetch (?:for (.+)|\((.*) for .*\))$")
_STEP = re.compile(r"^ProfilerStep#(\d{1,18})$")  # a record holds 64 bits
# What PyTorch of before 1.10 shows of a node, with nothing around it. One function of the engine has such a name and
# runs in the forward (engine/core/hooks.py).
_BACKWARD_NODE = re.compile(r"^(?!_EndOfBackward$)\w+Backward\d*$")
_NO_COMPUTING = (
    "c10d::",
    "_c10d_functional::",
    "c10d_functional::",
    "autograd::engine::",
    "torch::autograd::",
    "gloo:",
    "nccl:",
    "shm:",
    "FSDP::",
)
CATEGORIES = {  # as PyTorch has written them since 2021 -> as it does now
    "Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
}  # fmt: skip
_SYNCHRONOUS_COPIES = ("cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream")  # the host waits for these
_MOST_CORRELATION = 2**62


class Range(NamedTuple):  # not a dataclass: a trace has a hundred thousand, and these are made in a third of the time
    """A named range on one thread. `label` of `FSDP::all_gather (blocks.3)` is `all_gather`, `unit` is `blocks.3`; the
    root's unit is "".
    """

    label: str
    unit: str
    start: int
    end: int
    thread: Thread


class Transfer(NamedTuple):
    """A transfer of bytes: a gloo worker's or a main-thread transport's range, or an NCCL kernel; `launch` finds who
    launched a kernel.
    """

    kind: str
    start: int
    end: int
    thread: Carrier
    launch: int | None = None
    details: Mapping[str, Any] = MappingProxyType({})


@dataclass
class Spans:
    """Starts and ends of many intervals, eight bytes each."""

    start: array = field(default_factory=lambda: array("q"))
    end: array = field(default_factory=lambda: array("q"))

    def add(self, start: int, end: int) -> None:
        self.start.append(start)
        self.end.append(end)

    def pairs(self) -> Intervals:
        return (
            np.stack([np.array(self.start, dtype=np.int64), np.array(self.end, dtype=np.int64)], axis=1)
            if self.start
            else EMPTY
        )


@dataclass
class TraceEvents:
    """A trace, sorted into what the analysis needs; all times in ns of `time.time_ns()` (or of the trace's own clock
    where it has no base).
    """

    path: Path
    metadata: dict[str, Any]
    base_ns: int = 0
    operators: dict[Thread, Spans] = field(default_factory=lambda: defaultdict(Spans))
    autograd: Spans = field(default_factory=Spans)
    kernels: Spans = field(default_factory=Spans)
    kernel_launches: array = field(default_factory=lambda: array("q"))
    copies: Spans = field(default_factory=Spans)
    copy_launches: array = field(default_factory=lambda: array("q"))
    shared: list[Range] = field(default_factory=list)  # ranges of ranks that share a GPU; label = the whole name
    launches: dict[Thread, tuple[array, Spans]] = field(
        default_factory=lambda: defaultdict(lambda: (array("q"), Spans()))
    )
    ranges: list[Range] = field(default_factory=list)
    issues: list[Range] = field(default_factory=list)  # c10d:: operators; label = kind, unit = "asynchronous" or ""
    transfers: list[Transfer] = field(default_factory=list)
    blocked: Spans = field(default_factory=Spans)  # CUDA's own synchronising calls
    loading: Spans = field(default_factory=Spans)  # the host takes a batch from a DataLoader
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    step_processes: set[Any] = field(default_factory=set)  # one, in the trace of one rank
    first: int | None = None
    last: int = 0

    @cached_property
    def on_gpu(self) -> bool:
        """Whether kernels ran: then the host's operators only launch. Asked once all is read."""
        return bool(self.kernels.start) or any(transfer.launch is not None for transfer in self.transfers)

    @property
    def distributed(self) -> dict[str, Any]:
        """The profiler's `distributedInfo`; {} in files that lack it."""
        found = self.metadata.get("distributedInfo")
        return found if isinstance(found, dict) else {}

    def compute_threads(self) -> list[Thread]:
        """Threads whose operators compute: all but gloo's own (a thread that runs the engine's ranges, or most
        operators, is never gloo's).
        """
        gloo = {transfer.thread[1:] for transfer in self.transfers if transfer.thread[0] == "gloo"}
        busiest = max(self.operators, key=lambda thread: len(self.operators[thread].start), default=None)
        return [
            thread
            for thread in self.operators
            if thread not in gloo - {each.thread for each in self.ranges} - {busiest}
        ]


def read_events(
    path: str | Path, comm_patterns: Sequence[str] = (), see: Callable[[dict[str, Any]], None] | None = None
) -> TraceEvents:
    """Read and sort a whole trace; TraceError when the file is damaged, or holds nothing that took time.

    `comm_patterns`: kernels that communicate beside those of the table, as `comm_kernels.comm_pattern` takes them.
    `see`: called with every event, for what is not kept here.
    """
    trace = ChromeTrace(path)
    sorter = _Sorter(TraceEvents(trace.path, trace.metadata), CommKernels(comm_patterns))
    try:
        sorter.take(trace if see is None else _seen(trace, see))
        _check_metadata(trace.metadata)
        if trace.base_ns + sorter.found.last >= 2 * LATEST_NS:
            raise OddEvent("a time of more than 64 bits")
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        what = error if isinstance(error, OddEvent) else shown(error)
        raise TraceError(
            f"{path} holds something that PyTorch's profiler does not write ({what}); export the trace again."
        ) from None
    found = sorter.found
    if "mergedRanks" in found.metadata:
        ranks = found.metadata["mergedRanks"]
        raise TraceError(
            f"{path} holds the ranks {ranks} merged into one file, which is for viewing; analyse each rank's own trace."
        )
    if len(found.step_processes) > 1:
        named = ", ".join(sorted(map(str, found.step_processes))[:4])
        raise TraceError(
            f"{path} holds the steps of {len(found.step_processes)} processes ({named}); expected one rank's: give each"
            " process its own trace."
        )
    if found.first is None:
        raise TraceError(
            f"{path} holds no event that took time: nothing ran while the profiler did; profile at least one whole"
            " training step."
        )
    return _on_one_clock(found, trace.base_ns)


def _seen(events: Iterable[dict[str, Any]], see: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    for event in events:
        see(event)
        yield event


def _check_metadata(metadata: dict[str, Any]) -> None:
    """OddEvent where what stands around the events is of another type than the profiler's."""
    world = metadata.get("distributedInfo")
    held = [("baseTimeNanoseconds", metadata.get("baseTimeNanoseconds") or 0)]
    if isinstance(world, dict):
        held += [(name, world[name]) for name in ("rank", "world_size") if name in world]
    for name, value in held:
        if not isinstance(value, int) or not 0 <= value < LATEST_NS:
            raise OddEvent(f"{name} is {value!r:.40}")


class OddEvent(ValueError):
    """What no profiler writes, in words for a reader."""


def _told(event: dict[str, Any]) -> str:
    """An event in short: `'sm90_gemm' of 'kernel', ts 600.0, dur -5`."""
    values = (event.get(key) for key in ("name", "cat", "ts", "dur"))
    name, category, start, length = (repr(each[:40] if isinstance(each, str) else each)[:44] for each in values)
    return f"{name} of {category}, ts {start}, dur {length}"


class _Sorter:
    def __init__(self, found: TraceEvents, comm_kernels: CommKernels) -> None:
        self.found, self._comm_kernels = found, comm_kernels
        self._judged: dict[str, str] = {}
        self._calls: dict[str, tuple[bool, bool]] = {}  # of the CUDA runtime: whether it waits, whether it launches
        self._by_category = {
            "cpu_op": self._host, "user_annotation": self._host, "kernel": self._kernel, "gpu_memcpy": self._copy,
            "gpu_memset": self._copy, "cuda_runtime": self._launch, "cuda_driver": self._launch,
        }  # fmt: skip
        self._by_category |= {old: self._by_category[new] for old, new in CATEGORIES.items()}

    def take(self, events: Iterable[dict[str, Any]]) -> None:
        """The hot loop: most events are operators of the host, whose names are classified already."""
        found, handlers, judged, first, last = self.found, self._by_category, self._judged, None, 0
        event: dict[str, Any] = {}
        try:
            for event in events:
                if event.get("ph") != "X":
                    continue
                category = event.get("cat", "")
                handler = handlers.get(category)
                if handler is None:
                    continue
                start = nanoseconds(event["ts"])
                end = start + nanoseconds(event.get("dur") or 0)
                if end < start:
                    raise OddEvent
                if first is None or start < first:
                    first = start
                if end > last:
                    last = end
                if category == "cpu_op" and judged.get(event["name"]) == "operator":
                    spans = found.operators[event["pid"], event["tid"]]
                    spans.start.append(start)
                    spans.end.append(end)
                else:
                    handler(event, start, end)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise OddEvent(_told(event)) from None
        found.first, found.last = first, last
        if first is not None and (first < -LATEST_NS or last > LATEST_NS):
            raise OddEvent("a time of more than 64 bits")

    def _host(self, event: dict[str, Any], start: int, end: int) -> None:
        name = event["name"]
        verdict = self._judged.get(name)
        if verdict is None:
            category = event["cat"]
            verdict = self._judged[name] = judge(name, CATEGORIES.get(category, category))
        if verdict == "operator":
            self.found.operators[event["pid"], event["tid"]].add(start, end)
        elif verdict == "autograd":
            self.found.autograd.add(start, end)
        elif verdict == "loading":
            self.found.loading.add(start, end)
        elif verdict:
            self._named(verdict, event, start, end)

    def _named(self, verdict: str, event: dict[str, Any], start: int, end: int) -> None:
        name, found = event["name"], self.found
        thread = (event["pid"], event["tid"])
        hash(thread)  # TypeError for what is no number or text
        if verdict == "step":
            found.steps.append((int(name.partition("#")[2]), start, end))
            found.step_processes.add(event["pid"])
        elif verdict == "range":
            found.ranges.append(Range(*_label(name), start, end, thread))
        elif verdict == "shared_gpu":
            found.shared.append(Range(name, "", start, end, thread))
        elif verdict == "issue":
            found.issues.append(Range(kind_of(name), "", start, end, thread))
        else:
            found.transfers.append(
                Transfer(kind_of(name), start, end, (verdict, *thread), details=event.get("args") or {})
            )

    def _kernel(self, event: dict[str, Any], start: int, end: int) -> None:
        arguments = event.get("args") or {}
        correlation = correlation_of(event)
        kind = self._comm_kernels.kind(event["name"])
        if kind is None:
            self.found.kernels.add(start, end)
            self.found.kernel_launches.append(correlation)
            return
        thread = (event["pid"], event["tid"])
        hash(thread)
        kind = kind_of(str(arguments.get("Collective name") or "")) or kind
        self.found.transfers.append(Transfer(kind, start, end, ("nccl", *thread), correlation, arguments))

    def _copy(self, event: dict[str, Any], start: int, end: int) -> None:
        self.found.copies.add(start, end)
        self.found.copy_launches.append(correlation_of(event))

    def _launch(self, event: dict[str, Any], start: int, end: int) -> None:
        name = event["name"]
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = _waits(name), _launches(name)
        if call[0]:
            self.found.blocked.add(start, end)
        if call[1] and (correlation := correlation_of(event)) >= 0:
            correlations, spans = self.found.launches[event["pid"], event["tid"]]
            correlations.append(correlation)
            spans.add(start, end)


def _waits(name: str) -> bool:
    return "Synchronize" in name or name in _SYNCHRONOUS_COPIES


def _launches(name: str) -> bool:
    return any(word in name for word in ("Launch", "Memcpy", "Memset"))


def correlation_of(event: dict[str, Any]) -> int:
    """The number that a device's work shares with its launch; -1 where the trace has none. Earlier versions wrote it as
    text.
    """
    given = (event.get("args") or {}).get("correlation", -1)
    if isinstance(given, str) and given.isdecimal() and len(given) < 20:
        given = int(given)
    if not isinstance(given, int):
        return -1
    if not -1 <= given < _MOST_CORRELATION:
        raise ValueError(f"the correlation {given!r:.40}")
    return given


def judge(name: str, category: str) -> str:
    """The class of an event on the host: "" where it is ignored."""
    if name.startswith("gloo:"):
        return "gloo"
    if name.startswith("shm:"):
        return "shm"
    if name.startswith("shared_gpu:"):
        return "shared_gpu"
    if _STEP.match(name):
        return "step"
    if name.startswith(("FSDP::", "Optimizer.")):
        return "range"
    if name.startswith("autograd::engine::evaluate_function") or _BACKWARD_NODE.search(name):
        return "autograd"
    if name.startswith("enumerate(DataLoader)"):
        return "loading"
    if name.startswith(("c10d::", "_c10d_functional::", "nccl:")):
        return "issue" if kind_of(name) else ""
    return "operator" if category == "cpu_op" and "::" in name and not name.startswith(_NO_COMPUTING) else ""


def _label(name: str) -> tuple[str, str]:
    if name.startswith("Optimizer."):
        return "optimizer", ""
    found = _PREFETCH_RANGE.match(name)
    if found:
        return "backward_prefetch", unit_name(found.group(1) or found.group(2))
    found = _ENGINE_RANGE.match(name)
    return (found.group(1), unit_name(found.group(2))) if found else (name, "")


def unit_name(unit: str | None) -> str:
    """The root is "" everywhere, as in FSDP2's own ranges; the lab's engine writes it out."""
    return "" if unit in (None, "root") else unit


def _on_one_clock(found: TraceEvents, base: int) -> TraceEvents:
    """Sort what has an order; the base is added when rows are made, so that the arrays stay as they are."""
    found.base_ns = base
    for each in (found.ranges, found.issues, found.transfers):
        each.sort(key=lambda one: (one.start, -one.end))
    found.steps.sort(key=lambda step: step[1])
    return found
