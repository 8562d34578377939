"""Overlap of computing and communication in one rank's trace, step by step.

C is the union of computing, M the union of communication (`classify` says what counts). Exposed is M without C: the
time that communication costs. compute only + overlapped + exposed + other = the step is asserted to the nanosecond for
every step, so no time is lost. On the CPU a gap below 20 us between two operators of a thread is the dispatch of the
next one and counts as computing; on a GPU kernels count as they are. A step is a `ProfilerStep#k` range of the host, or
the whole trace where there is none.

An emulated link: the ledger's transfers are M in place of the trace's transports, with the host's copies and its waits
for the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.profiling.intervals import EMPTY, Intervals, clip, close_gaps, intersect, length, subtract, union
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.traces.attribution import Context, attribute, causes_of
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.classify import Thread, TraceEvents, read_events
from fsdplab.profiling.traces.collectives import MARKED, Collective, find_collectives
from fsdplab.profiling.traces.exposed_parts import ExposedParts, exposed_parts, summed
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.shared_gpu import take_shared
from fsdplab.profiling.traces.timeline_rows import DISPATCH_NS, TimelineRows

Row = dict[str, Any]
_PARTS = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")


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

    @property
    def overlap(self) -> float | None:
        """The share of communication time that was hidden, 0 to 1; None where nothing was communicated."""
        hidden, exposed = self.breakdown["overlapped_ns"], self.breakdown["exposed_ns"]
        return hidden / (hidden + exposed) if hidden + exposed else None


@dataclass(frozen=True)
class TraceAnalysis:
    """All steps of one rank's trace. `device` is "cpu" or "cuda"; `world_size` is None where the trace does not say."""

    path: Path
    rank: int
    world_size: int | None
    device: str
    steps: tuple[StepAnalysis, ...]

    def rows(self, table: str) -> list[Row]:
        """The rows of `breakdown`, `timeline`, `exposed` or `collectives` over all steps."""
        rows = [getattr(step, table) for step in self.steps]
        return rows if table == "breakdown" else [row for each in rows for row in each]


def analyse_trace(
    path: str | Path,
    *,
    ledger: Sequence[Row] | None = None,
    life: Sequence[Row] | None = None,
    rank: int | None = None,
    first_step: int | None = None,
    whole: bool = False,
) -> TraceAnalysis:
    """Read one rank's trace and account for every nanosecond of its steps.

    `ledger`: this rank's ledger rows; those of an emulated link replace the trace's transports. `life`: the units'
    transitions; they give the issue time of a gather whose range the trace lacks. `rank`: where the file lacks it.
    `first_step` numbers the steps from there, else they keep the profiler's numbers. `whole`: the whole trace as one
    step. Raises TraceError for files that cannot be read, or of several ranks without any communication;
    AccountingError if a step did not add up. A step of 100 ms with 80 computing, 50 communicating and 40 of that at
    once: overlapped 40, exposed 10, compute only 40, other 10 ms.
    """
    found = take_shared(read_events(path))
    steps = [] if whole else found.steps
    steps = steps or [(0 if first_step is None else first_step, found.first or 0, found.last)]
    if first_step is not None:
        steps = [(first_step + index, start, end) for index, (_, start, end) in enumerate(steps)]
    own_rank = found.distributed.get("rank", 0) if rank is None else rank
    transfers = [row for row in ledger or () if row["emulated"] and row["rank"] == own_rank]
    transitions = [row for row in life or () if row["rank"] == own_rank]
    account = _Account(found, int(own_rank), find_collectives(found, transfers, transitions), steps)
    world_size = found.distributed.get("world_size")
    analysis = TraceAnalysis(
        Path(path), int(own_rank), world_size, "cuda" if found.on_gpu else "cpu", tuple(map(account.step, steps))
    )
    _require_communication(analysis)
    return analysis


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
        self, found: TraceEvents, rank: int, collectives: list[Collective], steps: Sequence[tuple[int, int, int]]
    ) -> None:
        self._found, self._rank, self._collectives = found, rank, collectives
        self._ends = [end for _, _, end in steps]
        threads = _host_threads(found)
        self._host_busy = union(*threads.values())
        self._computing = union(found.kernels.pairs()) if found.on_gpu else _host_computing(found, threads)
        self._communication = union(*([(piece.start, piece.end) for piece in each.pieces] for each in collectives))
        self._segments = Segments(found, threads.values(), steps)
        for each, phase in zip(collectives, self._segments.phases_at([each.issue for each in collectives])):
            each.phase = each.phase or phase
        self._timeline = TimelineRows(found, rank, self._segments)

    def step(self, step: tuple[int, int, int]) -> StepAnalysis:
        number, start, end = step
        computing, communication = clip(self._computing, start, end), clip(self._communication, start, end)
        exposed = subtract(communication, computing)
        breakdown = _breakdown(self._rank, number, end - start, computing, communication, exposed)
        mine = [
            each for each in self._collectives if any(piece.start < end and piece.end > start for piece in each.pieces)
        ]
        shares = attribute(exposed, mine)
        if (attributed := sum(map(length, shares))) != breakdown["exposed_ns"]:
            raise AccountingError(
                f"step {number}: {breakdown['exposed_ns']} ns were exposed, {attributed} attributed; report this with"
                " the trace"
            )
        parts = exposed_parts(mine, shares, self._host_busy)
        breakdown |= summed(parts)
        context = Context(start, end, computing, self._host_busy, self._phase_ends(start, end), self._found.on_gpu)
        causes = causes_of(mine, shares, context)
        return StepAnalysis(
            number,
            breakdown,
            tuple(self._timeline.rows(number, start, end, computing, self._host_busy, mine, shares)),
            tuple(_exposed_rows(self._rank, number, start, end, mine, shares, causes, parts)),
            tuple(
                self._described(number, each, share, cause, part)
                for each, share, cause, part in zip(mine, shares, causes, parts)
                if self._began_in(step, each)
            ),
        )

    def _began_in(self, step: tuple[int, int, int], each: Collective) -> bool:
        """Whether no earlier step has it: gloo's range may end late, in the next step, and its bytes count once."""
        began = min(piece.start for piece in each.pieces)
        return next(end for end in self._ends if end > began) == step[2]

    def _phase_ends(self, start: int, end: int) -> dict[str, int]:
        changes = [start, *(change for change in self._segments.changes.tolist() if start < change < end)]
        return dict(zip(self._segments.phases_at(changes), [*changes[1:], end]))

    def _described(self, step: int, each: Collective, share: Intervals, cause: str, parts: ExposedParts) -> Row:
        base = self._found.base_ns
        return {
            "rank": self._rank, "step": step, "unit": each.unit, "phase": each.phase, "kind": each.kind,
            "issue_ns": base + each.issue,
            "start_ns": base + each.start, "end_ns": base + each.end, "logical_bytes": each.nbytes,
            "exposed_ns": length(share), "cause": cause,
            "emulated": each.emulated, "on_link": (parts.on_link + base).tolist(),
        }  # fmt: skip


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
    shares: Sequence[Intervals],
    causes: Sequence[str],
    parts: Sequence[ExposedParts],
) -> list[Row]:
    """One row a unit, phase and kind; of several collectives the most exposed one gives the cause."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, each in enumerate(collectives):
        groups.setdefault((each.unit, each.phase, each.kind), []).append(index)
    rows = []
    for (unit, phase, kind), members in groups.items():
        pieces = union(*([(piece.start, piece.end) for piece in collectives[index].pieces] for index in members))
        rows.append({
            "rank": rank, "step": step, "unit": unit, "phase": phase, "kind": kind,
            "communication_ns": length(clip(pieces, start, end)),
            "exposed_ns": sum(length(shares[index]) for index in members),
            "cause": causes[max(members, key=lambda index: length(shares[index]))],
            **summed([parts[index] for index in members]),
        })  # fmt: skip
    return rows
