"""Reads a trace's file into the table of its events, and refuses what no analysis could use."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdplab.common.sizes import seconds
from fsdplab.common.words import plural
from fsdplab.profiling.traces.chrome import LATEST_NS, ChromeTrace, OddEvent, TraceError, as_trace_error, nanoseconds
from fsdplab.profiling.traces.comm_kernels import CommKernels
from fsdplab.profiling.traces.event_kinds import COPIES, OF_PYTHON, PASSED_OVER, READ, Kind, kind_of_event
from fsdplab.profiling.traces.events import Events, Range

_MODULE = "nn.Module: "  # begins the name of a module of the model in Python's stack
_MOST_LISTED = 4
_LONGEST_TEXT = 40  # characters of a name in a sentence
_MOST_CORRELATION = 2**62
_ON_CUDA = 1  # the profiler's number of the kind of device
_DAY_NS = 86_400 * 10**9
_LONGEST_NS = 365 * _DAY_NS
_KEEPS_DETAILS = {Kind.GLOO, Kind.SHM, Kind.COMM, Kind.ISSUE}
# the operators of convolutions that launch kernels; those around them (conv2d, convolution) only choose one
CONVOLUTIONS = ("cudnn_convolution", "miopen_convolution", "mkldnn_convolution", "cudnn_convolution_relu")


def read_events(path: str | Path, comm_patterns: Sequence[str] = (), shapes: bool = False) -> Events:
    """Read a whole trace; TraceError when the file is damaged, of several ranks, or holds nothing that took time.

    `comm_patterns`: kernels that communicate beside those of the table, as `comm_pattern` takes them.
    `shapes`: keep what operators were given.
    """
    trace = ChromeTrace(path)
    comm_kernels = CommKernels(comm_patterns)
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
    events = reader.events(trace)
    _check_one_process(events)
    return events


def _check_one_process(events: Events) -> None:
    """TraceError where several processes have marked steps: the trace is of several ranks."""
    threads = events.thread[events.rows(Kind.STEP)].tolist()
    processes = {str(events.threads[thread][0]) for thread in threads}
    if len(processes) > 1:
        listed = ", ".join(sorted(processes)[:_MOST_LISTED])
        raise TraceError(
            f"{events.path} holds the steps of {len(processes)} processes ({listed}); expected"
            " one rank's: give each process its own trace."
        )


def check_device(events: Events) -> None:
    """TraceError where the trace shows that a device worked but not its work: nothing then says what a step did."""
    if events.on_gpu:
        return
    if events.unread:
        raise TraceError(
            f"{events.path} has events of categories that are not read, {_listed(events.unread)}, and no work of a"
            " device that is: what ran there is not known; give a trace of CPU ranks, or of GPUs with the categories"
            " `kernel` and `gpu_memcpy`."
        )
    seen = _sign_of_device(events)
    if seen:
        raise TraceError(
            f"{events.path} {seen}, but no GPU work was recorded: profile with ProfilerActivity.CUDA too"
            " (activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]); a job that computes on the CPU of a machine"
            ' with GPUs is recorded with CUDA_VISIBLE_DEVICES="".'
        )


def _sign_of_device(events: Events) -> str:
    """What shows that a device worked, as the middle of a sentence; "" where nothing does."""
    devices = events.metadata.get("deviceProperties")
    names = []
    if isinstance(devices, list):
        names = [device.get("name") for device in devices if isinstance(device, dict)]
    launches = len(events.rows(Kind.LAUNCH, Kind.BLOCKING_LAUNCH)) > 0  # calls that start something on a device
    if not launches:  # then a device that is named, or a job over NCCL, is a sign if nothing was sent by the host
        uses_nccl = "nccl" in str(events.distributed.get("backend") or "")
        on_host = any(transfer.carrier in (Kind.GLOO, Kind.SHM) for transfer in events.transfers)
        if on_host or not (uses_nccl or names):
            return ""
    if names:
        return f"names {names[0]}"
    if launches:
        return "launches work"
    return "is of a job over NCCL"


def _check_metadata(metadata: dict[str, Any]) -> None:
    """OddEvent where what stands around the events is of another type than the profiler's."""
    numbers = {"baseTimeNanoseconds": metadata.get("baseTimeNanoseconds") or 0}
    world = metadata.get("distributedInfo")
    if isinstance(world, dict):
        for name in ("rank", "world_size"):
            if name in world:
                numbers[name] = world[name]
    for name, value in numbers.items():
        if not isinstance(value, int) or not 0 <= value < LATEST_NS:
            raise OddEvent(f"{name} is {value!r:.40}")


def _told(event: dict[str, Any]) -> str:
    """Describe an event in short: `'sm90_gemm' of 'kernel', ts 600.0, dur -5`."""
    told = []
    for key in ("name", "cat", "ts", "dur"):
        value = event.get(key)
        if isinstance(value, str):
            value = value[:_LONGEST_TEXT]
        told.append(repr(value)[: _LONGEST_TEXT + 4])
    name, category, start, length = told
    return f"{name} of {category}, ts {start}, dur {length}"


def _listed(categories: Mapping[str, int]) -> str:
    """List categories with their time: `npu_kernel (4.20 ms)`."""
    longest = sorted(categories, key=lambda name: -categories[name])[:_MOST_LISTED]
    listed = []
    for name in longest:
        lasted = seconds(categories[name] / 1e9)
        listed.append(f"{name[:_LONGEST_TEXT]!r} ({lasted})")
    return ", ".join(listed)


class _Reader:
    """Fills the table. Start, end, kind, name, thread and correlation of an event are six numbers in a row."""

    def __init__(self, comm_kernels: CommKernels, shapes: bool) -> None:
        self.first: int | None = None
        self.last = 0
        self._comm_kernels = comm_kernels
        self._rows = array("q")
        self._verdicts: dict[tuple[str, str], tuple[Kind, int]] = {}  # by name and category: kind, number of the name
        self._threads: dict[tuple[Any, Any], int] = {}
        self._details: dict[int, dict[str, Any]] = {}
        self._memory = array("q")  # when, of which device, bytes allocated and reserved: four numbers an event
        self._sequence = array("q")  # rows, each with its number in autograd's sequence
        self._wants_shapes = shapes
        self._shapes: dict[int, str] = {}
        self._once: dict[str, str] = {}  # each text of shapes is kept once
        self._modules: list[Range] = []

        # what is left out
        self._negative: list[str] = []  # the first event of a negative duration
        self._negatives = 0
        self._unread: dict[str, int] = {}  # ns of each category that is neither read nor known

    def take(self, trace: ChromeTrace) -> None:
        """Take all events of a trace. This is the hot loop: what an event counts as is looked up by its name and
        category, and what is used for every event is a local name.
        """
        verdicts, threads, details = self._verdicts, self._threads, self._details
        add_row, add_number = self._rows.extend, self._sequence.extend
        ignored, first_of_device, last_with_number = Kind.IGNORED, Kind.KERNEL, Kind.AUTOGRAD
        wants_shapes = self._wants_shapes
        first: int | None = None
        last = 0
        count = 0
        event: dict[str, Any] = {}
        try:
            for event in trace:
                if event.get("ph") != "X":  # no event that lasts
                    if event.get("name") == "[memory]":
                        self._note_memory(event)
                    continue
                category = event.get("cat", "")
                if category not in READ:
                    if category == OF_PYTHON:
                        if wants_shapes:
                            self._note_module(event)
                    elif category not in PASSED_OVER:
                        self._pass_over(str(category), event)
                    continue

                # its time
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

                # what it counts as
                key = event["name"], category
                verdict = verdicts.get(key)
                if verdict is None:
                    verdict = verdicts[key] = kind_of_event(*key, self._comm_kernels), len(verdicts)
                kind, number = verdict
                if kind is ignored:
                    continue

                # its row, and what of its arguments is needed
                thread_key = event["pid"], event["tid"]
                thread = threads.get(thread_key)
                if thread is None:
                    thread = threads[thread_key] = len(threads)
                correlation = correlation_of(event) if kind >= first_of_device else -1
                add_row((start, end, kind, number, thread, correlation))
                if kind in _KEEPS_DETAILS:
                    given = event.get("args")
                    details[count] = given if isinstance(given, dict) else {}
                elif kind in COPIES:
                    self._note_bytes(count, event.get("args"))
                elif kind <= last_with_number:
                    given = event.get("args")
                    if type(given) is dict:
                        node = given.get("Sequence number")
                        if type(node) is int and 0 <= node < LATEST_NS:
                            add_number((count, node))
                        if wants_shapes and kind == 0:
                            self._note_shapes(count, event["name"], given)
                count += 1
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise OddEvent(_told(event)) from None
        self.first, self.last = first, last
        self._check_times(count)

    def _check_times(self, count: int) -> None:
        """OddEvent where too many durations are negative, or times cannot be right."""
        if self._negatives > max(1, count // 100):
            raise OddEvent(self._negative[0])
        if self.first is None:
            return
        if self.first < -LATEST_NS or self.last > LATEST_NS:
            raise OddEvent("a time of more than 64 bits")
        length = self.last - self.first
        if length > _LONGEST_NS:
            raise OddEvent(f"events over {length // _DAY_NS} days")

    def _pass_over(self, category: str, event: dict[str, Any]) -> None:
        """Note how long the events of a category last that nobody knows."""
        lasted = event.get("dur")
        if isinstance(lasted, (int, float)) and lasted > 0 and math.isfinite(lasted):
            self._unread[category] = self._unread.get(category, 0) + nanoseconds(lasted)

    def _odd(self, trace: ChromeTrace) -> tuple[str, ...]:
        """Sentences on what is left out."""
        sentences = [trace.damaged.sentence()]
        if self._negatives:
            sentences.append(
                f"{plural(self._negatives, 'event')} left out whose duration is negative ({self._negative[0]}), as some"
                " versions of the profiler write it"
            )
        if self._unread:
            sentences.append(f"events of other categories are not read: {_listed(self._unread)}")
        return tuple(filter(None, sentences))

    def _note_memory(self, event: dict[str, Any]) -> None:
        """Note what a device's allocator holds; that of the CPU tells only what has changed since profiling began."""
        given = event.get("args")
        if not isinstance(given, dict) or given.get("Device Type") != _ON_CUDA:
            return
        allocated = _number(given, "Total Allocated")
        if allocated:
            device = _number(given, "Device Id")
            reserved = _number(given, "Total Reserved")
            self._memory.extend((nanoseconds(event["ts"]), device, allocated, reserved))

    def _note_module(self, event: dict[str, Any]) -> None:
        """Note the range of a module of the model; the rest of Python's stack is not needed."""
        name = event["name"]
        if not isinstance(name, str) or not name.startswith(_MODULE):
            return
        thread = self._threads.setdefault((event["pid"], event["tid"]), len(self._threads))
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event.get("dur") or 0)
        if end >= start:
            self._modules.append(Range(name.removeprefix(_MODULE), "", start, end, thread))

    def _note_bytes(self, row: int, given: Any) -> None:
        """Note how many bytes a copy moved; the rest of its arguments is not needed."""
        if isinstance(given, dict) and "bytes" in given:
            self._details[row] = {"bytes": given["bytes"]}

    def _note_shapes(self, row: int, name: str, given: dict[str, Any]) -> None:
        """Note the shapes and types that an operator was given; of a convolution its stride and padding too."""
        if "Input Dims" not in given:
            return
        kept = [given["Input Dims"], given.get("Input type")]
        if name.removeprefix("aten::") in CONVOLUTIONS:
            kept.append(given.get("Concrete Inputs"))
        text = json.dumps(kept)
        self._shapes[row] = self._once.setdefault(text, text)

    def events(self, trace: ChromeTrace) -> Events:
        """The table of what was taken."""
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, 6)
        start, end, kind, name, thread, correlation = rows.T
        return Events(
            path=trace.path,
            metadata=trace.metadata,
            base_ns=trace.base_ns,
            first=self.first or 0,
            last=self.last,
            kind=kind.astype(np.int8),
            start=start.copy(),  # a column of its own is read faster than every sixth number
            end=end.copy(),
            name=name.astype(np.int32),
            thread=thread.astype(np.int32),
            correlation=correlation.copy(),
            names=[name for name, _ in self._verdicts],
            threads=list(self._threads),
            details=self._details,
            comm_kernels=self._comm_kernels,
            shapes=self._shapes,
            memory=np.frombuffer(self._memory, dtype=np.int64).reshape(-1, 4),
            sequence=np.frombuffer(self._sequence, dtype=np.int64).reshape(-1, 2),
            modules=self._modules,
            odd=self._odd(trace),
            unread=self._unread,
        )


def _number(given: Mapping[str, Any], name: str) -> int:
    """An argument that is a number of at most 62 bits; 0 for anything else."""
    value = given.get(name, 0)
    if type(value) is not int or not 0 <= value < LATEST_NS:
        return 0
    return value


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
