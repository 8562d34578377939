"""Overlap of computing and communication in one rank's trace, step by step.

C is the union of computing, M the union of communication (`events` says what counts); exposed is M without C: the time
that communication costs. `steps` says what belongs to a step, `account` gives every instant of it one label, and
`step_rows` makes the rows of the record's tables from these. On the CPU a gap below 20 us between two operators of a
thread is the dispatch of the next one and counts as computing.

An emulated link: the ledger's transfers are M in place of the trace's transports, with the host's copies and its waits
for the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdplab.common.sizes import size as size_of
from fsdplab.profiling.intervals import EMPTY, Intervals, close_gaps, size, subtract, union, within
from fsdplab.profiling.traces.account import TraceSets
from fsdplab.profiling.traces.chrome import TraceError, without_collection
from fsdplab.profiling.traces.clocks import Clock
from fsdplab.profiling.traces.collective import Collective
from fsdplab.profiling.traces.collectives import communicating, find_collectives
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.event_reader import check_device, read_events
from fsdplab.profiling.traces.events import Events, Window
from fsdplab.profiling.traces.host_reads import HostReads
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.step_rows import DISPATCH_NS, Row, StepRows
from fsdplab.profiling.traces.steps import NoStep, steps_of

MARK = "fsdplab"  # the key of the lab's own mark in a trace's metadata: what of it was real
_UNNAMED_LINK = "a link"


@dataclass(frozen=True)
class Origin:
    """A trace's own words; "" for what it does not say. `link`: the emulated one, None where nothing tells of it."""

    device_name: str = ""
    backend: str = ""
    torch: str = ""
    link: str | None = None
    host: str = ""


def origin_of(metadata: Mapping[str, Any], waits_for_link: bool) -> Origin:
    """Read a trace's metadata; `waits_for_link`: it has ranges in which its host waited for an emulated link.

    >>> origin_of({"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}]}, False).device_name
    'NVIDIA A100-SXM4-80GB'
    """
    devices = metadata.get("deviceProperties")
    mark = metadata.get(MARK)
    first_device = devices[0] if isinstance(devices, list) and devices else None
    link = _text(mark, "link") or None
    if link is None and waits_for_link:
        link = _UNNAMED_LINK
    return Origin(
        device_name=_text(first_device, "name"),
        backend=_text(metadata.get("distributedInfo"), "backend"),
        torch=_text(metadata, "pytorch_version") or _text(mark, "torch"),
        link=link,
        host=_text(metadata, "host_name"),
    )


def _text(entry: Any, key: str) -> str:
    """A text of a trace's metadata; "" where it is missing or of another type."""
    value = entry.get(key) if isinstance(entry, Mapping) else None
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class StepAnalysis:
    """One step of one rank: a `breakdown` row, `timeline` and `exposed` rows as in the record's tables, and the
    collectives that began in it: one that ends in the next step is listed once, and is exposed in both.
    """

    step: int
    breakdown: Row
    timeline: tuple[Row, ...]
    exposed: tuple[Row, ...]
    collectives: tuple[Row, ...]
    idle: Row = field(default_factory=dict)  # the part "other" by cause, a row of the record's table of that name
    loading_ns: int = 0  # until the host had the step's data, on a GPU as far as the device did nothing meanwhile
    activities: tuple[Row, ...] = ()  # what `host_reads` counts
    computing: Intervals = field(default_factory=lambda: EMPTY, compare=False)  # when it computed, sorted and disjoint

    @property
    def overlap(self) -> float | None:
        """The share of communication time that was hidden, 0 to 1; None where nothing was communicated."""
        hidden = self.breakdown["overlapped_ns"]
        communication = hidden + self.breakdown["exposed_ns"]
        return hidden / communication if communication else None


@dataclass(frozen=True)
class TraceAnalysis:
    """All steps of one rank's trace, and what is known of the trace itself."""

    path: Path
    rank: int
    world_size: int | None  # None where the trace does not say
    device: str  # "cpu" or "cuda"
    steps: tuple[StepAnalysis, ...]
    no_step: NoStep = NoStep()  # device work outside of the steps
    origin: Origin = Origin()  # where it was made
    allocated_peak: int | None = None  # bytes of the device's allocator at their highest, where the trace tells
    clock: Clock = Clock()  # by how much it was ahead of the first rank's, which is taken from all times here already
    odd: tuple[str, ...] = ()  # sentences on events that were left out
    process: str = ""  # which process of which host was profiled
    devices: tuple[int, ...] = ()  # which devices it drove
    only_device: int | None = None  # the one that was looked at, if not all

    def rows(self, table: str) -> list[Row]:
        """The rows of `breakdown`, `idle`, `timeline`, `exposed`, `collectives` or `activities` over all steps."""
        if table in ("breakdown", "idle"):  # one row a step
            return [getattr(step, table) for step in self.steps]
        rows = []
        for step in self.steps:
            for row in getattr(step, table):
                rows.append({name: row[name] for name in row if name != "on_link"})
        return rows


@without_collection()
def analyse_trace(
    path: str | Path,
    *,
    ledger: Sequence[Row] | None = None,
    life: Sequence[Row] | None = None,
    rank: int | None = None,
    first_step: int | None = None,
    whole: bool = False,
    comm_patterns: Sequence[str] = (),
    default_rank: int = 0,
    core_waits: Intervals = EMPTY,
    device: int | None = None,
    may_be_apart: bool = False,
) -> TraceAnalysis:
    """Read one rank's trace and account for every nanosecond of its steps.

    `ledger`: this rank's ledger rows; those of an emulated link replace the trace's transports. `life`: the units'
    transitions; they give the issue time of a gather whose range the trace lacks. `rank`: in place of the file's own;
    `default_rank` where the file has none. `first_step` numbers the steps from there, else they keep the profiler's
    numbers. `whole`: the whole trace as one step. `comm_patterns`: kernels that communicate beside NCCL's
    (`comm_kernels.comm_pattern`). `core_waits`: when the rank's thread waited for a core (absolute ns). `device`: the
    only one that is looked at, of a process that drives several. `may_be_apart`: several ranks may have no
    communication, since the profiler is known to see theirs.

    Raises TraceError for files that cannot be read, or of several ranks without any communication; AccountingError if a
    step did not add up. A step of 100 ms with 80 computing, 50 communicating and 40 of that at once: overlapped 40,
    exposed 10, compute only 40, other 10 ms.
    """
    events = read_events(path, comm_patterns)
    if not isinstance(events.metadata.get(MARK), Mapping):  # the lab's own traces say what they are of
        check_device(events)
    devices = events.devices
    if device is not None:
        events = events.of_device(device)
    if rank is None:
        rank = events.distributed.get("rank", default_rank)
    rank = int(rank)

    profiled = [] if whole else events.steps
    ranges = profiled or [Window(0, events.first, events.last)]
    if first_step is not None:
        ranges = [window._replace(number=first_step + index) for index, window in enumerate(ranges)]
    segments = Segments(events, ranges)
    collectives = _collectives(events, segments, rank, ledger, life)
    computing = EMPTY if events.on_gpu else _host_computing(events)
    steps, no_step = steps_of(events, collectives, ranges, computing, whole=not profiled)

    trace = TraceSets(events, collectives, segments, core_waits - events.base_ns)
    loading = subtract(union(events.spans(Kind.LOADING)), trace.device)
    host_windows = {window.number: window for window in ranges}
    reads = HostReads(events)
    analysed = []
    for step in steps:
        analysed.append(_analysed(StepRows(rank, trace, step), loading, reads, host_windows[step.window.number]))

    allocated, reserved = events.peaks([step.window for step in steps] or ranges)
    waits_for_link = any(labelled.label == "link" for labelled in events.ranges)
    analysis = TraceAnalysis(
        path=Path(path),
        rank=rank,
        world_size=events.distributed.get("world_size"),
        device="cuda" if events.on_gpu else "cpu",
        steps=tuple(analysed),
        no_step=replace(no_step, step_ranges=whole or bool(profiled)),
        origin=origin_of(events.metadata, waits_for_link),
        allocated_peak=allocated,
        odd=(*events.odd, *_reserved(allocated, reserved)),
        process=_process(events),
        devices=tuple(devices),
        only_device=device,
    )
    _check(analysis, len(ranges), may_be_apart)
    return analysis


def _collectives(
    events: Events, segments: Segments, rank: int, ledger: Sequence[Row] | None, life: Sequence[Row] | None
) -> list[Collective]:
    """The rank's collectives, each with the phase in which it was issued."""
    transfers = [row for row in ledger or () if row["emulated"] and row["rank"] == rank]
    transitions = [row for row in life or () if row["rank"] == rank]
    collectives = find_collectives(events, transfers, transitions)
    phases = segments.phases_at([collective.issue for collective in collectives])
    for collective, phase in zip(collectives, phases):
        collective.phase = collective.phase or phase  # a ledger says the phase itself
    return collectives


def _reserved(allocated: int | None, reserved: int | None) -> list[str]:
    """What the allocator held beside what was allocated."""
    if allocated is None or reserved is None:
        return []
    return [f"of the device's memory {size_of(allocated)} were allocated at most, and {size_of(reserved)} reserved"]


def _process(events: Events) -> str:
    """The host and the number of the process that ran the steps; "" where the trace has no ranges of steps."""
    rows = events.rows(Kind.STEP)
    if not len(rows):
        return ""
    host = events.metadata.get("host_name") or ""
    process, _ = events.threads[int(events.thread[rows[0]])]
    return f"{host}:{process}"


def _analysed(rows: StepRows, loading: Intervals, reads: HostReads, of_host: Window) -> StepAnalysis:
    """The rows of a step; `of_host` is the host's range of it, in which `loading` and `reads` are counted."""
    return StepAnalysis(
        step=rows.step.window.number,
        breakdown=rows.breakdown(),
        timeline=tuple(rows.timeline()),
        exposed=tuple(rows.exposed()),
        collectives=tuple(rows.collectives()),
        idle=rows.idle(),
        loading_ns=size(within(loading, of_host.start, of_host.end)),
        activities=tuple(reads.of_step(of_host, rows.rank)),
        computing=rows.step.computing + rows.trace.events.base_ns,
    )


def _check(analysis: TraceAnalysis, ranges: int, may_be_apart: bool) -> None:
    """TraceError for a trace in which the steps have no work, or several ranks no communication."""
    if not analysis.steps:
        raise TraceError(
            f"{analysis.path} has {ranges} ProfilerStep ranges and device work, but no range launched any of it: the"
            " trace lacks the host's launches; profile with ProfilerActivity.CPU and ProfilerActivity.CUDA."
        )
    is_apart = (analysis.world_size or 1) > 1 and not any(step.collectives for step in analysis.steps)
    if is_apart and not may_be_apart:
        raise TraceError(
            f"{analysis.path} is of rank {analysis.rank} of {analysis.world_size} and shows no communication in its"
            " steps, so there is no overlap: no gradient was reduced (then the model trains nothing), or the profiler"
            " did not see the transport; use gloo, NCCL, or an engine whose ranges (FSDP::all_gather ...) mark it; or"
            " name the kernels that communicate, of oneCCL for example: --comm-pattern ccl"
        )


def _host_computing(events: Events) -> Intervals:
    """Operators with the dispatch between them, less what the same thread did for communication."""
    communicating_by_thread = communicating(events)
    parts = []
    for thread, busy in events.host_busy.items():
        communication = communicating_by_thread.get(thread, EMPTY)
        operators = subtract(busy, communication)
        with_dispatch = close_gaps(operators, DISPATCH_NS)
        parts.append(subtract(with_dispatch, communication))
    return union(*parts)
