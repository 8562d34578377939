"""Overlap of computing and communication in one rank's trace, step by step.

C is the union of computing, M the union of communication (`events` says what counts); exposed is M without C: the time
that communication costs. `steps` says what belongs to a step, `account` gives every instant of it one label. On the CPU
a gap below 20 us between two operators of a thread is the dispatch of the next one and counts as computing.

An emulated link: the ledger's transfers are M in place of the trace's transports, with the host's copies and its waits
for the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdplab.profiling.intervals import EMPTY, Intervals, close_gaps, size, subtract, union, within
from fsdplab.profiling.traces.account import TraceSets
from fsdplab.profiling.traces.chrome import TraceError, without_collection
from fsdplab.profiling.traces.collectives import communicating, find_collectives
from fsdplab.profiling.traces.events import Events, Kind, Window, read_events
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


def origin_of(metadata: Mapping[str, Any], waits_for_link: bool) -> Origin:
    """Read a trace's metadata; `waits_for_link`: it has ranges in which its host waited for an emulated link.

    >>> origin_of({"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}]}, False).device_name
    'NVIDIA A100-SXM4-80GB'
    """
    devices, job, mark = (metadata.get(key) for key in ("deviceProperties", "distributedInfo", MARK))
    first = devices[0] if isinstance(devices, list) and devices else None
    link = _text(mark, "link") or (_UNNAMED_LINK if waits_for_link else None)
    torch = _text(metadata, "pytorch_version") or _text(mark, "torch")
    return Origin(_text(first, "name"), _text(job, "backend"), torch, link)


def _text(found: Any, key: str) -> str:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class StepAnalysis:
    """One step of one rank: a `breakdown` row, `timeline` and `exposed` rows as in the record's tables, and the
    collectives that began in it: one that ends in the next step is listed once, and is exposed in both. `idle`: the
    part "other" by cause, a row of the record's table of that name. `loading_ns`: until the host had the step's data,
    on a GPU as far as the device did nothing meanwhile. `computing`: when the step computed, sorted and disjoint.
    """

    step: int
    breakdown: Row
    timeline: tuple[Row, ...]
    exposed: tuple[Row, ...]
    collectives: tuple[Row, ...]
    idle: Row = field(default_factory=dict)
    loading_ns: int = 0
    computing: Intervals = field(default_factory=lambda: EMPTY, compare=False)

    @property
    def overlap(self) -> float | None:
        """The share of communication time that was hidden, 0 to 1; None where nothing was communicated."""
        hidden, exposed = self.breakdown["overlapped_ns"], self.breakdown["exposed_ns"]
        return hidden / (hidden + exposed) if hidden + exposed else None


@dataclass(frozen=True)
class TraceAnalysis:
    """All steps of one rank's trace. `device` is "cpu" or "cuda"; `world_size` is None where the trace does not say;
    `no_step`: device work outside of the steps. `origin`: where it was made. `allocated_peak`: bytes of the device's
    allocator at their highest, where the trace tells.
    """

    path: Path
    rank: int
    world_size: int | None
    device: str
    steps: tuple[StepAnalysis, ...]
    no_step: NoStep = NoStep()
    origin: Origin = Origin()
    allocated_peak: int | None = None

    def rows(self, table: str) -> list[Row]:
        """The rows of `breakdown`, `idle`, `timeline`, `exposed` or `collectives` over all steps."""
        rows = [getattr(step, table) for step in self.steps]
        if table in ("breakdown", "idle"):
            return rows
        return [{name: row[name] for name in row if name != "on_link"} for each in rows for row in each]


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
) -> TraceAnalysis:
    """Read one rank's trace and account for every nanosecond of its steps.

    `ledger`: this rank's ledger rows; those of an emulated link replace the trace's transports. `life`: the units'
    transitions; they give the issue time of a gather whose range the trace lacks. `rank`: in place of the file's own;
    `default_rank` where the file has none. `first_step` numbers the steps from there, else they keep the profiler's
    numbers. `whole`: the whole trace as one step. `comm_patterns`: kernels that communicate beside NCCL's
    (`events.comm_pattern`). `core_waits`: when the rank's thread waited for a core (absolute ns).

    Raises TraceError for files that cannot be read, or of several ranks without any communication; AccountingError if a
    step did not add up. A step of 100 ms with 80 computing, 50 communicating and 40 of that at once: overlapped 40,
    exposed 10, compute only 40, other 10 ms.
    """
    found = read_events(path, comm_patterns)
    on_gpu, world_size = found.on_gpu, found.distributed.get("world_size")
    own_rank = int(found.distributed.get("rank", default_rank) if rank is None else rank)
    transfers = [row for row in ledger or () if row["emulated"] and row["rank"] == own_rank]
    collectives = find_collectives(found, transfers, [row for row in life or () if row["rank"] == own_rank])
    profiled = [] if whole else found.steps
    ranges = profiled or [Window(0, found.first, found.last)]
    if first_step is not None:
        ranges = [each._replace(number=first_step + index) for index, each in enumerate(ranges)]

    threads = _host_threads(found)
    segments = Segments(found, threads.values(), ranges)
    for each, phase in zip(collectives, segments.phases_at([each.issue for each in collectives])):
        each.phase = each.phase or phase
    computing = EMPTY if on_gpu else _host_computing(found, threads)
    steps, no_step = steps_of(found, collectives, ranges, computing, whole=not profiled)
    trace = TraceSets(found, collectives, segments, union(*threads.values()), core_waits - found.base_ns)
    loading = subtract(union(found.spans(Kind.LOADING)), trace.device)
    host_steps = {number: span for number, *span in ranges}
    analysis = TraceAnalysis(
        Path(path), own_rank, world_size, "cuda" if on_gpu else "cpu",
        tuple(
            _analysed(StepRows(own_rank, trace, step), size(within(loading, *host_steps[step.window.number])))
            for step in steps
        ),
        replace(no_step, step_ranges=whole or bool(profiled)),
        origin_of(found.metadata, any(each.label == "link" for each in found.ranges)), found.allocated_peak,
    )  # fmt: skip
    _check(analysis, len(ranges))
    return analysis


def _analysed(rows: StepRows, loading_ns: int) -> StepAnalysis:
    return StepAnalysis(
        rows.step.window.number, rows.breakdown(), tuple(rows.timeline()), tuple(rows.exposed()),
        tuple(rows.collectives()), rows.idle(), loading_ns, rows.step.computing + rows.trace.found.base_ns,
    )  # fmt: skip


def _check(analysis: TraceAnalysis, ranges: int) -> None:
    """TraceError for a trace in which the steps have no work, or several ranks no communication."""
    if not analysis.steps:
        raise TraceError(
            f"{analysis.path} has {ranges} ProfilerStep ranges and device work, but no range launched any of it: the"
            " trace lacks the host's launches; profile with ProfilerActivity.CPU and ProfilerActivity.CUDA."
        )
    if (analysis.world_size or 1) > 1 and not any(step.collectives for step in analysis.steps):
        raise TraceError(
            f"{analysis.path} is of rank {analysis.rank} of {analysis.world_size} and shows no communication in its"
            " steps, so there is no overlap: the profiler did not see the transport; use gloo, NCCL, or an engine"
            " whose ranges (FSDP::all_gather ...) mark it."
        )


def _host_threads(found: Events) -> dict[int, Intervals]:
    """When each computing thread of the host ran an operator, communication's copies among them."""
    rows = found.rows(Kind.OPERATOR)
    return {thread: union(found.spans_of(rows[found.thread[rows] == thread])) for thread in found.compute_threads}


def _host_computing(found: Events, threads: dict[int, Intervals]) -> Intervals:
    """Operators with the dispatch between them, less what the same thread did for communication."""
    apart, parts = communicating(found), []
    for thread, busy in threads.items():
        others = apart.get(thread, EMPTY)
        parts.append(subtract(close_gaps(subtract(busy, others), DISPATCH_NS), others))
    return union(*parts)
