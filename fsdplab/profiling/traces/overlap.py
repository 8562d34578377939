"""Overlap of computing and communication in one rank's trace, step by step.

C is the union of computing, M the union of communication (`events` says what counts). Exposed is M without C: the time
that communication costs. Every instant of a step has one label (`account`), so compute only + overlapped + exposed +
other is the step to the nanosecond; the part "other" is split by cause (`idle`). On the CPU a gap below 20 us between
two operators of a thread is the dispatch of the next one and counts as computing; on a GPU kernels count as they are.

A step is a `ProfilerStep#k` range of the host, on a GPU with the device work that this range launched, wherever it ran
(`steps`). A trace without such ranges is one step.

An emulated link: the ledger's transfers are M in place of the trace's transports, with the host's copies and its waits
for the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdplab.profiling.intervals import EMPTY, Intervals, close_gaps, size, subtract, union, within
from fsdplab.profiling.traces.account import PARTS, TraceSets
from fsdplab.profiling.traces.chrome import TraceError, without_collection
from fsdplab.profiling.traces.collectives import Collective, communicating, find_collectives
from fsdplab.profiling.traces.events import Events, Kind, read_events
from fsdplab.profiling.traces.origin import Origin, origin_of
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.step_rows import DISPATCH_NS, StepRows, parts_of
from fsdplab.profiling.traces.steps import ByLaunch, ByWindow, HostStep, NoStep, Steps, shows_launches
from fsdplab.records.tables import IDLE_PARTS, PARTS_OF_COLLECTIVE

Row = dict[str, Any]


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
    (`comm_kernels.comm_pattern`). `core_waits`: when the rank's thread waited for a core (absolute ns).

    Raises TraceError for files that cannot be read, or of several ranks without any
    communication; AccountingError if a step did not add up. A step of 100 ms with 80 computing, 50 communicating and 40
    of that at once: overlapped 40, exposed 10, compute only 40, other 10 ms.
    """
    with without_collection():
        found = read_events(path, comm_patterns)
        return _analysed(found, path, ledger, life, rank, first_step, whole, default_rank, core_waits)


def _analysed(
    found: Events,
    path: str | Path,
    ledger: Sequence[Row] | None,
    life: Sequence[Row] | None,
    rank: int | None,
    first_step: int | None,
    whole: bool,
    default_rank: int,
    core_waits: Intervals,
) -> TraceAnalysis:
    """`analyse_trace`, of events that have been read."""
    step_ranges = whole or bool(found.steps)
    whole = whole or not found.steps
    steps = [(first_step or 0, found.first, found.last)] if whole else found.steps
    if first_step is not None:
        steps = [(first_step + index, start, end) for index, (_, start, end) in enumerate(steps)]
    own_rank = found.distributed.get("rank", default_rank) if rank is None else rank
    transfers = [row for row in ledger or () if row["emulated"] and row["rank"] == own_rank]
    transitions = [row for row in life or () if row["rank"] == own_rank]
    collectives = find_collectives(found, transfers, transitions)
    account = _Account(found, int(own_rank), collectives, steps, whole, core_waits)
    world_size, device = found.distributed.get("world_size"), "cuda" if found.on_gpu else "cpu"
    origin = origin_of(found.metadata, any(each.label == "link" for each in found.ranges))
    steps_found = account.analysed()
    no_step = replace(account.no_step, step_ranges=step_ranges)
    analysis = TraceAnalysis(
        Path(path), int(own_rank), world_size, device, steps_found, no_step, origin, found.allocated_peak
    )
    _require_steps(analysis, len(steps))
    _require_communication(analysis)
    return analysis


def _require_steps(analysis: TraceAnalysis, ranges: int) -> None:
    if not analysis.steps:
        raise TraceError(
            f"{analysis.path} has {ranges} ProfilerStep ranges and device work, but no range launched any of it: the"
            " trace lacks the host's launches; profile with ProfilerActivity.CPU and ProfilerActivity.CUDA."
        )


def _require_communication(analysis: TraceAnalysis) -> None:
    if (analysis.world_size or 1) > 1 and not any(step.collectives for step in analysis.steps):
        raise TraceError(
            f"{analysis.path} is of rank {analysis.rank} of {analysis.world_size} and shows no communication in its"
            " steps, so there is no overlap: the profiler did not see the transport; use gloo, NCCL, or an engine"
            " whose ranges (FSDP::all_gather ...) mark it."
        )


class _Account:
    """One rank's steps. All times are the trace's own until rows are made."""

    def __init__(
        self,
        found: Events,
        rank: int,
        collectives: list[Collective],
        steps: Sequence[HostStep],
        whole: bool,
        core_waits: Intervals,
    ) -> None:
        threads = _host_threads(found)
        segments = Segments(found, threads.values(), steps)
        for each, phase in zip(collectives, segments.phases_at([each.issue for each in collectives])):
            each.phase = each.phase or phase
        computing = EMPTY if found.on_gpu else _host_computing(found, threads)
        self._steps, self._base, self._rank = _steps(found, collectives, steps, computing, whole), found.base_ns, rank
        trace = TraceSets(found, collectives, segments, union(*threads.values()), core_waits - found.base_ns)
        self._rows, self.no_step = StepRows(found, rank, trace), self._steps.no_step
        self._loading = subtract(trace.loading, trace.device)
        self._host_steps = {number: (start, end) for number, start, end in steps}

    def analysed(self) -> tuple[StepAnalysis, ...]:
        """All steps, in order."""
        return tuple(self._step(index) for index in range(len(self._steps.windows)))

    def _step(self, index: int) -> StepAnalysis:
        window, computing = self._steps.windows[index], self._steps.computing(index)
        mine, where = self._steps.collectives(index), {"rank": self._rank, "step": window.number}
        found = self._rows.account(window, computing, mine)
        listed = zip(self._rows.collectives(window, mine, found), mine)
        return StepAnalysis(
            window.number,
            {**where, **breakdown_of(found.sums), **self._rows.beside(window, found)},
            tuple(self._rows.timeline(window, mine, found, self._steps.kernels(index))),
            tuple(self._rows.exposed(window, mine, found)),
            tuple(row for row, each in listed if self._steps.lists(index, each)),
            {**where, **found.idle},
            size(within(self._loading, *self._host_steps[window.number])),
            computing + self._base,
        )


def breakdown_of(sums: dict[str, int]) -> dict[str, int]:
    """The columns of a record's `breakdown` from the sums of an account's parts.

    10 ms of compute only, 6 overlapped, 3 on the link and 1 of rest: a step of 20 ms, 16 of computing, 3 exposed.
    """
    exposed = parts_of([sums[name] for name in PARTS_OF_COLLECTIVE])
    compute_only, overlapped = sums["compute_only_ns"], sums["overlapped_ns"]
    return {
        "step_ns": sum(sums[name] for name in PARTS), "compute_ns": compute_only + overlapped,
        "compute_only_ns": compute_only, "overlapped_ns": overlapped, "exposed_ns": sum(exposed.values()),
        "other_ns": sum(sums[f"idle {name}"] for name in IDLE_PARTS), **exposed,
    }  # fmt: skip


def _steps(
    found: Events, collectives: Sequence[Collective], steps: Sequence[HostStep], host_computing: Intervals, whole: bool
) -> Steps:
    """By launch on a GPU, where the trace tells who launched what; else by the clock. `whole`: all is one step."""
    if not found.on_gpu:
        return ByWindow(found, host_computing, collectives, steps, NoStep())
    computing = union(found.spans(Kind.KERNEL))
    if whole:
        return ByWindow(found, computing, collectives, steps, NoStep())
    if shows_launches(found):
        return ByLaunch(found, collectives, steps)
    return ByWindow(found, computing, collectives, steps, NoStep(by_launch=False))


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
