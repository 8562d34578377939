"""Overlap of computing and communication in one rank's trace, step by step.

C is the union of computing, M the union of communication (`classify` says what counts). Exposed is M without C: the
time that communication costs. compute only + overlapped + exposed + other = the step is asserted to the nanosecond for
every step, so no time is lost; the part "other" is split by cause (`idle_parts`). On the CPU a gap below 20 us between
two operators of a thread is the dispatch of the next one and counts as computing; on a GPU kernels count as they are.

On the CPU a step is a `ProfilerStep#k` range of the host; on a GPU it is the device work that this range launched
(`steps`). A trace without such ranges is one step.

An emulated link: the ledger's transfers are M in place of the trace's transports, with the host's copies and its waits
for the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdplab.profiling.intervals import (
    EMPTY,
    Intervals,
    Measure,
    close_gaps,
    intersect,
    length,
    lengths_of,
    size,
    subtract,
    union,
    within,
)
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.traces.attribution import Context, attribute, causes_of
from fsdplab.profiling.traces.chrome import TraceError, without_collection
from fsdplab.profiling.traces.classify import Thread, TraceEvents, read_events
from fsdplab.profiling.traces.collectives import MARKED, Collective, find_collectives
from fsdplab.profiling.traces.exposed_parts import ExposedParts, exposed_parts, summed
from fsdplab.profiling.traces.idle_parts import IdleTime
from fsdplab.profiling.traces.origin import Origin, origin_of
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.shared_gpu import take_shared
from fsdplab.profiling.traces.steps import (
    ByLaunch,
    ByWindow,
    HostStep,
    NoStep,
    Steps,
    all_device_work,
    pieces_of,
    shows_launches,
)
from fsdplab.profiling.traces.timeline_rows import DISPATCH_NS, TimelineRows

Row = dict[str, Any]
_PARTS = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")


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
    `no_step`: device work outside of the steps. `origin`: where it was made.
    """

    path: Path
    rank: int
    world_size: int | None
    device: str
    steps: tuple[StepAnalysis, ...]
    no_step: NoStep = NoStep()
    origin: Origin = Origin()

    def rows(self, table: str) -> list[Row]:
        """The rows of `breakdown`, `idle`, `timeline`, `exposed` or `collectives` over all steps."""
        rows = [getattr(step, table) for step in self.steps]
        return rows if table in ("breakdown", "idle") else [row for each in rows for row in each]


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
) -> TraceAnalysis:
    """Read one rank's trace and account for every nanosecond of its steps.

    `ledger`: this rank's ledger rows; those of an emulated link replace the trace's transports. `life`: the units'
    transitions; they give the issue time of a gather whose range the trace lacks. `rank`: in place of the file's own;
    `default_rank` where the file has none. `first_step` numbers the steps from there, else they keep the profiler's
    numbers. `whole`: the whole trace as one step. `comm_patterns`: kernels that communicate beside NCCL's
    (`comm_kernels.comm_pattern`). Raises TraceError for files that cannot be read, or of several ranks without any
    communication; AccountingError if a step did not add up. A step of 100 ms with 80 computing, 50 communicating and 40
    of that at once: overlapped 40, exposed 10, compute only 40, other 10 ms.
    """
    with without_collection():
        found = take_shared(read_events(path, comm_patterns))
        return _analysed(found, path, ledger, life, rank, first_step, whole, default_rank)


def _analysed(
    found: TraceEvents,
    path: str | Path,
    ledger: Sequence[Row] | None,
    life: Sequence[Row] | None,
    rank: int | None,
    first_step: int | None,
    whole: bool,
    default_rank: int,
) -> TraceAnalysis:
    """`analyse_trace`, of events that have been read."""
    step_ranges = whole or bool(found.steps)
    whole = whole or not found.steps
    steps = [(first_step or 0, found.first or 0, found.last)] if whole else found.steps
    if first_step is not None:
        steps = [(first_step + index, start, end) for index, (_, start, end) in enumerate(steps)]
    own_rank = found.distributed.get("rank", default_rank) if rank is None else rank
    transfers = [row for row in ledger or () if row["emulated"] and row["rank"] == own_rank]
    transitions = [row for row in life or () if row["rank"] == own_rank]
    account = _Account(found, int(own_rank), find_collectives(found, transfers, transitions), steps, whole)
    world_size, device = found.distributed.get("world_size"), "cuda" if found.on_gpu else "cpu"
    origin = origin_of(found.metadata, any(each.label == "link" for each in found.ranges))
    steps_found = account.analysed()
    no_step = replace(account.no_step, step_ranges=step_ranges)
    analysis = TraceAnalysis(Path(path), int(own_rank), world_size, device, steps_found, no_step, origin)
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
    """One rank's sets of instants, cut into steps. All times are the trace's own until rows are made."""

    def __init__(
        self, found: TraceEvents, rank: int, collectives: list[Collective], steps: Sequence[HostStep], whole: bool
    ) -> None:
        self._found, self._rank = found, rank
        threads = _host_threads(found)
        self._host_busy = union(*threads.values())
        self._host_measure = Measure(self._host_busy)
        self._segments = Segments(found, threads.values(), steps)
        for each, phase in zip(collectives, self._segments.phases_at([each.issue for each in collectives])):
            each.phase = each.phase or phase
        self._steps = _steps(
            found, collectives, steps, EMPTY if found.on_gpu else _host_computing(found, threads), whole
        )
        self._timeline = TimelineRows(found, rank, self._segments)
        self._idle = IdleTime(found, collectives)
        self.no_step = self._steps.no_step
        self._loading = subtract(union(found.loading.pairs()), all_device_work(found, collectives))
        self._host_steps = {number: (start, end) for number, start, end in steps}

    def analysed(self) -> tuple[StepAnalysis, ...]:
        """All steps, in order."""
        return tuple(self._step(index) for index in range(len(self._steps.windows)))

    def _step(self, index: int) -> StepAnalysis:
        window = self._steps.windows[index]
        number, start, end = window.number, window.start, window.end
        computing, mine = self._steps.computing(index), self._steps.collectives(index)
        communication = within(union(pieces_of(mine)), start, end)
        exposed = subtract(communication, computing)
        breakdown = _breakdown(self._rank, number, end - start, computing, communication, exposed)
        shares = attribute(exposed, mine)
        parts = exposed_parts(mine, shares, self._host_busy)
        sizes = [part.exposed_ns for part in parts]
        if (attributed := sum(sizes)) != breakdown["exposed_ns"]:
            raise AccountingError(
                f"step {number}: {breakdown['exposed_ns']} ns were exposed, {attributed} attributed; report this with"
                " the trace"
            )
        breakdown |= summed(parts)
        context = Context(
            start, end, Measure(computing), self._host_measure, self._phase_ends(start, end), self._found.on_gpu
        )
        causes = causes_of(mine, shares, sizes, context)
        host_busy = within(self._host_busy, start, end)
        other = subtract([(start, end)], union(computing, communication))
        return StepAnalysis(
            number,
            breakdown,
            tuple(self._timeline.rows(window, computing, host_busy, mine, shares, self._steps.kernels(index))),
            tuple(_exposed_rows(self._rank, number, start, end, mine, sizes, causes, parts)),
            tuple(
                self._described(number, each, exposed_ns, cause, part)
                for each, exposed_ns, cause, part in zip(mine, sizes, causes, parts)
                if self._steps.lists(index, each)
            ),
            {"rank": self._rank, "step": number, **self._idle.parts(window, other)},
            size(within(self._loading, *self._host_steps[number])),
            computing + self._found.base_ns,
        )

    def _phase_ends(self, start: int, end: int) -> dict[str, int]:
        changes = self._segments.changes
        first, last = np.searchsorted(changes, start, side="right"), np.searchsorted(changes, end, side="left")
        edges = [start, *changes[first:last].tolist()]
        return dict(zip(self._segments.phases_at(edges), [*edges[1:], end]))

    def _described(self, step: int, each: Collective, exposed_ns: int, cause: str, parts: ExposedParts) -> Row:
        base = self._found.base_ns
        return {
            "rank": self._rank, "step": step, "unit": each.unit, "phase": each.phase, "kind": each.kind,
            "issue_ns": base + each.issue,
            "start_ns": base + each.start, "end_ns": base + each.end, "logical_bytes": each.nbytes,
            "exposed_ns": exposed_ns, "cause": cause,
            "emulated": each.emulated, "on_link": [[base + first, base + last] for first, last in parts.on_link],
            "group": each.group, "group_size": each.group_size,
        }  # fmt: skip


def _steps(
    found: TraceEvents,
    collectives: Sequence[Collective],
    steps: Sequence[HostStep],
    host_computing: Intervals,
    whole: bool,
) -> Steps:
    """By launch on a GPU, where the trace tells who launched what; else by the clock. `whole`: all is one step."""
    if not found.on_gpu:
        return ByWindow(found, host_computing, collectives, steps, NoStep())
    computing = union(found.kernels.pairs())
    if whole:
        device = all_device_work(found, collectives)
        return ByWindow(found, computing, collectives, [(steps[0][0], int(device[0, 0]), int(device[-1, 1]))], NoStep())
    if shows_launches(found):
        return ByLaunch(found, collectives, steps)
    return ByWindow(found, computing, collectives, steps, NoStep(by_launch=False))


def _host_threads(found: TraceEvents) -> dict[Thread, Intervals]:
    """When each computing thread of the host ran an operator, communication's copies among them."""
    return {thread: union(found.operators[thread].pairs()) for thread in found.compute_threads()}


def _host_computing(found: TraceEvents, threads: dict[Thread, Intervals]) -> Intervals:
    """Operators with the dispatch between them, less what the same thread did inside ranges that are communication."""
    marked: dict[Thread, list[tuple[int, int]]] = {}
    for each in found.ranges:
        if each.label in MARKED:
            marked.setdefault(each.thread, []).append((each.start, each.end))
    for transfer in found.transfers:
        if transfer.thread[0] == "shm":
            marked.setdefault(transfer.thread[1:], []).append((transfer.start, transfer.end))
    calls: dict[Thread, list[tuple[int, int]]] = {}
    for each in found.issues:  # inside a c10d call a thread enqueues or waits
        calls.setdefault(each.thread, []).append((each.start, each.end))
    parts = []
    for thread, busy in threads.items():
        apart = union(marked.get(thread, EMPTY), calls.get(thread, EMPTY))
        parts.append(subtract(close_gaps(subtract(busy, apart), DISPATCH_NS), apart))
    return union(*parts)


def _breakdown(
    rank: int, step: int, whole: int, computing: Intervals, communication: Intervals, exposed: Intervals
) -> Row:
    overlapped = length(intersect(computing, communication))
    row = {
        "rank": rank, "step": step, "step_ns": whole, "compute_ns": length(computing),
        "compute_only_ns": length(subtract(computing, communication)),
        "overlapped_ns": overlapped, "exposed_ns": length(exposed),
        "other_ns": whole - length(union(computing, communication)),
    }  # fmt: skip
    parts = [row[name] for name in _PARTS]
    if sum(parts) != whole or min(parts) < 0 or row["compute_only_ns"] + overlapped != row["compute_ns"]:
        named = dict(zip(_PARTS, parts))
        raise AccountingError(
            f"step {step} of rank {rank} took {whole} ns, its parts {named} sum to {sum(parts)}; report this with the"
            " trace"
        )
    return row


def _exposed_rows(
    rank: int,
    step: int,
    start: int,
    end: int,
    collectives: Sequence[Collective],
    sizes: Sequence[int],
    causes: Sequence[str],
    parts: Sequence[ExposedParts],
) -> list[Row]:
    """One row a unit, phase and kind; of several collectives the most exposed one gives the cause."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, each in enumerate(collectives):
        groups.setdefault((each.unit, each.phase, each.kind), []).append(index)
    pieces = [pieces_of([collectives[index] for index in members]) for members in groups.values()]
    of_group: np.ndarray = np.repeat(np.arange(len(pieces)), [len(each) for each in pieces])
    lengths = lengths_of(np.clip(np.concatenate([EMPTY, *pieces]), start, end), of_group, len(pieces))
    rows = []
    for ((unit, phase, kind), members), communication_ns in zip(groups.items(), lengths.tolist()):
        rows.append({
            "rank": rank, "step": step, "unit": unit, "phase": phase, "kind": kind,
            "communication_ns": communication_ns,
            "exposed_ns": sum(sizes[index] for index in members),
            "cause": causes[max(members, key=lambda index: sizes[index])],
            **summed([parts[index] for index in members]),
        })  # fmt: skip
    return rows
