"""Overlap of computing and communication in one rank's trace, step by step.

C is the union of computing, M the union of communication (`events` says what counts); exposed is M without C: the time
that communication costs. `steps` says what belongs to a step, `account` gives every instant of it one label. On the CPU
a gap below 20 us between two operators of a thread is the dispatch of the next one and counts as computing.

An emulated link: the ledger's transfers are M in place of the trace's transports, with the host's copies and its waits
for the link.

From the account come the rows of the tables `exposed`, `collectives`, and `timeline`, a step for a figure. Timeline
rows are for viewing, a few hundred a rank instead of the trace's hundred thousand: neighbours of the same unit and
phase are joined over gaps below 20 us, and over longer ones while a lane has too many rows, and across an exposed or a
blocked stretch only in the last resort. All sums are computed before anything is joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdplab.common.collectives import collective_row
from fsdplab.common.rows import grouped
from fsdplab.common.sizes import size as size_of
from fsdplab.common.words import OFF_LINK
from fsdplab.profiling.intervals import EMPTY, Intervals, close_gaps, latest_ends, pairs, size, subtract, union, within
from fsdplab.profiling.traces.account import PARTS, Account, TraceSets, account
from fsdplab.profiling.traces.chrome import TraceError, without_collection
from fsdplab.profiling.traces.clocks import Clock
from fsdplab.profiling.traces.collectives import Collective, communicating, find_collectives
from fsdplab.profiling.traces.events import Events, Kind, Window, check_device, read_events
from fsdplab.profiling.traces.host_reads import HostReads
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.steps import NoStep, Step, pieces_of, steps_of
from fsdplab.records.tables import IDLE_PARTS, PARTS_OF_COLLECTIVE, PARTS_OF_EXPOSED

Row = dict[str, Any]
Mark = tuple[str, str, str, str, int, int, bool]  # lane, unit, phase, name, start, end, emulated
DISPATCH_NS = 20_000  # between two operators: the host dispatches the next one
_BLOCKED_NS = 50_000  # a host without an operator for this long, while bytes are on their way, waits for them
_APART_NS = 1_000_000  # a lane that is still too full is joined over everything from here on
_MOST = {"compute": 240, "exposed": 120, "waiting": 80}


@dataclass(frozen=True, eq=False)
class StepRows:
    """Makes the rows of one step of one rank."""

    rank: int
    trace: TraceSets
    step: Step

    @cached_property
    def account(self) -> Account:
        """The step's account; AccountingError where it does not add up."""
        return account(self.step.window, self.step.computing, self.step.collectives, self.trace)

    @property
    def _where(self) -> Row:
        return {"rank": self.rank, "step": self.step.window.number}

    def _within(self, spans: Intervals) -> Intervals:
        return within(spans, self.step.window.start, self.step.window.end)

    def breakdown(self) -> Row:
        """The sums of the parts; beside them for how long the device did anything, another step's work too, and how
        long the host waited for a core. None where there is no device, and where nobody noted the waits.
        """
        busy = size(self._within(self.trace.device)) if self.trace.on_gpu else None
        waited = self.account.core_wait_ns if len(self.trace.core_waits) else None
        return {**self._where, **breakdown_of(self.account.sums), "device_busy_ns": busy, "core_wait_ns": waited}

    def idle(self) -> Row:
        """The part "other" by cause."""
        return {**self._where, **{name: self.account.sums[f"idle {name}"] for name in IDLE_PARTS}}

    def exposed(self) -> list[Row]:
        """One row a unit, phase and kind; of several collectives the most exposed one gives the cause."""
        mine, found = self.step.collectives, self.account
        groups, rows = grouped(range(len(mine)), lambda index: mine[index].label[:3]), []
        for (unit, phase, kind), members in groups.items():
            spans, sums = union(pieces_of([mine[index] for index in members])), found.parts[members].sum(0)
            rows.append({
                **self._where, "unit": unit, "phase": phase, "kind": kind,
                "communication_ns": size(self._within(spans)), "exposed_ns": int(sums.sum()),
                "cause": found.causes[max(members, key=lambda index: found.parts[index].sum())], **parts_of(sums),
            })  # fmt: skip
        return rows

    def collectives(self) -> list[Row]:
        """One row a collective counted in the step; `on_link`, when it was exposed on the link, is in no table."""
        base, found = self.trace.found.base_ns, self.account
        on_link: list[list[list[int]]] = [[] for _ in self.step.collectives]
        spans, whose = found.cells.runs(np.where(found.moving, found.owner, -1))
        for span, index in zip((spans + base).tolist(), whose.tolist()):
            on_link[index].append(span)
        listed = zip(self.step.collectives, self.step.counted, found.parts.tolist(), found.causes, on_link)
        return [
            {
                **self._where, "unit": each.unit, "phase": each.phase, "kind": each.kind,
                "issue_ns": base + each.issue, "start_ns": base + each.start, "end_ns": base + each.end,
                "logical_bytes": each.nbytes, "group": each.group, "group_size": each.group_size,
                "members": each.members, "exposed_ns": sum(parts), **dict(zip(PARTS_OF_COLLECTIVE, parts)),
                "cause": cause, "emulated": each.emulated, "on_link": spans,
            }
            for each, counted, parts, cause, spans in listed
            if counted
        ]  # fmt: skip

    def timeline(self) -> list[Row]:
        """All lanes of a step, in order of time within a lane."""
        window, mine, found = self.step.window, self.step.collectives, self.account
        exposed, whose = found.cells.runs(np.where(found.exposed, 2 * found.owner + found.moving, -1))
        waiting, labels = self._waiting(), [(*mine[one // 2].label, one % 2) for one in whose.tolist()]
        lanes: list[list[Mark]] = [
            [("step", "", "", f"step {window.number}", window.start, window.end, False)],
            self._compute(union(exposed, waiting)[:, 0]),
            [mark for each in mine for mark in _communication(each, window.start, window.end)],
            [
                ("exposed", unit, phase, kind if moving else kind + OFF_LINK, *span, emulated)
                for (unit, phase, kind, emulated, moving), span in joined(
                    exposed, labels, EMPTY[:, 0], _MOST["exposed"]
                )
            ],
            self._waits(waiting),
        ]
        base = self.trace.found.base_ns
        return [
            {
                **self._where, "lane": lane, "unit": unit, "phase": phase, "name": name,
                "start_ns": base + int(start), "end_ns": base + int(end), "emulated": emulated,
            }
            for marks in lanes
            for lane, unit, phase, name, start, end, emulated in sorted(marks, key=lambda each: (each[0], each[4]))
        ]  # fmt: skip

    def _labels_at(self, instants: np.ndarray) -> list[tuple[str, str]]:
        return list(zip(self.trace.segments.units_at(instants), self.trace.segments.phases_at(instants)))

    def _compute(self, barriers: np.ndarray) -> list[Mark]:
        """By the unit and phase of the host, or those that launched each kernel."""
        events, found = self.trace.found, self.account
        if events.on_gpu:
            kernels = self.step.kernels[np.argsort(events.start[self.step.kernels], kind="stable")]
            pieces = np.clip(events.spans_of(kernels), self.step.window.start, self.step.window.end)
            by = events.launched_by[kernels]
            labels = self._labels_at(np.where(by >= 0, events.start[by], events.start[kernels]))
        else:
            segment = np.searchsorted(self.trace.segments.changes, found.cells.start, side="right")
            pieces = found.cells.runs(np.where(found.computing, segment, -1))[0]
            labels = self._labels_at(pieces[:, 0])
        return [
            ("compute", *label, "compute", *span, False)
            for label, span in joined(pieces, labels, barriers, _MOST["compute"])
        ]

    def _waiting(self) -> Intervals:
        """When the host was blocked while bytes were on their way."""
        if self.trace.on_gpu:
            return self._within(self.trace.blocked)
        found, cells = self.account, self.account.cells
        moving = (found.part >= 0) & ((found.owner >= 0) | cells.inside(self._within(self.trace.lifecycle)))
        idle = close_gaps(cells.runs(np.where(moving & ~found.host, 0, -1))[0], 1_000)
        return idle[idle[:, 1] - idle[:, 0] >= _BLOCKED_NS]

    def _waits(self, waiting: Intervals) -> list[Mark]:
        """Blocked stretches, each named by the collective of whose pieces it holds most."""
        mine = self.step.collectives
        longest = waiting[np.argsort(waiting[:, 0] - waiting[:, 1], kind="stable")[: _MOST["waiting"]]]
        reach = pairs([(each.first, each.last) for each in mine])
        marks: list[Mark] = []
        for start, end in longest.tolist():
            near = [mine[index] for index in np.flatnonzero((reach[:, 0] < end) & (reach[:, 1] > start)).tolist()]
            best = max(near, key=lambda each: _held(each, start, end), default=None)
            if best is not None and _held(best, start, end) > 0:
                marks.append(("waiting", *best.label[:3], start, end, best.emulated))
            else:
                marks.append(("waiting", "", self._labels_at(np.array([start]))[0][1], "host", start, end, False))
        return marks


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


def parts_of(sums: Sequence[int] | np.ndarray) -> dict[str, int]:
    """The parts of exposed time from the sums of `PARTS_OF_COLLECTIVE`: packing and unpacking are copying.

    >>> parts_of([5, 1, 2, 4, 0])
    {'on_link_ns': 5, 'copying_ns': 3, 'waiting_ns': 4, 'no_core_ns': 0}
    """
    on_link, packing, unpacking, waiting, no_core = map(int, sums)
    return dict(zip(PARTS_OF_EXPOSED, (on_link, packing + unpacking, waiting, no_core)))


def _held(each: Collective, start: int, end: int) -> int:
    return sum(max(0, min(end, piece.end) - max(start, piece.start)) for piece in each.pieces)


def _communication(each: Collective, start: int, end: int) -> list[Mark]:
    """The transport as one mark named by its kind, the host's copies beside it as marks of their own."""
    lane, way = collective_row(each.kind).lane, each.transport
    moved = (max(start, way.start), min(end, way.end)) if way else (start, start)
    marks: list[Mark] = []
    for role in ("copy-in", "copy-out", "blocked") if len(each.pieces) > 1 or way is None else ():
        spans = [(max(start, piece.start), min(end, piece.end)) for piece in each.pieces if piece.role == role]
        beside = close_gaps(subtract(spans, [moved]), DISPATCH_NS).tolist() if spans else []
        marks += [(lane, each.unit, each.phase, f"{each.kind} {role}", *span, False) for span in beside]
    if moved[0] < moved[1]:
        marks.append((lane, each.unit, each.phase, each.kind, *moved, each.emulated))
    return marks


def joined(
    pieces: Intervals, labels: Sequence[Any], barriers: np.ndarray, most: int
) -> list[tuple[Any, tuple[int, int]]]:
    """Neighbours with the same label made one over gaps below 20 us, doubled until at most `most` rows are left; never
    across a barrier below 1 ms.

    >>> joined(np.array([[0, 5], [9, 12], [90_000, 95_000]]), ["a", "a", "a"], np.array([]), most=9)
    [('a', (0, 12)), ('a', (90000, 95000))]
    """
    if not len(pieces):
        return []
    numbers: dict[Any, int] = {}
    new = np.diff([numbers.setdefault(label, len(numbers)) for label in labels], prepend=-1) != 0
    gap = pieces[:, 0] - np.append(pieces[:1, 0], latest_ends(pieces[:, 1], np.cumsum(new))[:-1])
    passed: np.ndarray = np.asarray(np.searchsorted(barriers, pieces[:, 0], side="right"))
    barrier, below = (np.diff(passed, prepend=passed[0]) != 0) & (gap > 0), DISPATCH_NS
    while True:
        first = np.flatnonzero(new | (gap >= below) | barrier & (below < _APART_NS))
        if len(first) <= most or below > 10**9:
            break
        below *= 2
    spans = zip(pieces[first, 0].tolist(), np.maximum.reduceat(pieces[:, 1], first).tolist())
    return [(labels[at], span) for at, span in zip(first.tolist(), spans)]


# ---- the analysis of a trace


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
    devices, job, mark = (metadata.get(key) for key in ("deviceProperties", "distributedInfo", MARK))
    first = devices[0] if isinstance(devices, list) and devices else None
    link = _text(mark, "link") or (_UNNAMED_LINK if waits_for_link else None)
    torch = _text(metadata, "pytorch_version") or _text(mark, "torch")
    return Origin(_text(first, "name"), _text(job, "backend"), torch, link, _text(metadata, "host_name"))


def _text(found: Any, key: str) -> str:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class StepAnalysis:
    """One step of one rank: a `breakdown` row, `timeline` and `exposed` rows as in the record's tables, and the
    collectives that began in it: one that ends in the next step is listed once, and is exposed in both. `idle`: the
    part "other" by cause, a row of the record's table of that name. `loading_ns`: until the host had the step's data,
    on a GPU as far as the device did nothing meanwhile. `activities`: what `host_reads` counts. `computing`: when the
    step computed, sorted and disjoint.
    """

    step: int
    breakdown: Row
    timeline: tuple[Row, ...]
    exposed: tuple[Row, ...]
    collectives: tuple[Row, ...]
    idle: Row = field(default_factory=dict)
    loading_ns: int = 0
    activities: tuple[Row, ...] = ()
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
    allocator at their highest, where the trace tells. `clock`: by how much its clock was ahead of the first rank's,
    which is taken from all times here already. `odd`: sentences on events that were left out. `process`: which process
    of which host was profiled; `devices`: which devices it drove, `only_device`: the one that was looked at, if not
    all.
    """

    path: Path
    rank: int
    world_size: int | None
    device: str
    steps: tuple[StepAnalysis, ...]
    no_step: NoStep = NoStep()
    origin: Origin = Origin()
    allocated_peak: int | None = None
    clock: Clock = Clock()
    odd: tuple[str, ...] = ()
    process: str = ""
    devices: tuple[int, ...] = ()
    only_device: int | None = None

    def rows(self, table: str) -> list[Row]:
        """The rows of `breakdown`, `idle`, `timeline`, `exposed`, `collectives` or `activities` over all steps."""
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
    device: int | None = None,
) -> TraceAnalysis:
    """Read one rank's trace and account for every nanosecond of its steps.

    `ledger`: this rank's ledger rows; those of an emulated link replace the trace's transports. `life`: the units'
    transitions; they give the issue time of a gather whose range the trace lacks. `rank`: in place of the file's own;
    `default_rank` where the file has none. `first_step` numbers the steps from there, else they keep the profiler's
    numbers. `whole`: the whole trace as one step. `comm_patterns`: kernels that communicate beside NCCL's
    (`comm_kernels.comm_pattern`). `core_waits`: when the rank's thread waited for a core (absolute ns). `device`: the
    only one that is looked at, of a process that drives several.

    Raises TraceError for files that cannot be read, or of several ranks without any communication; AccountingError if a
    step did not add up. A step of 100 ms with 80 computing, 50 communicating and 40 of that at once: overlapped 40,
    exposed 10, compute only 40, other 10 ms.
    """
    found = read_events(path, comm_patterns)
    if not isinstance(found.metadata.get(MARK), Mapping):  # the lab's own traces say what they are of
        check_device(found)
    devices = found.devices
    if device is not None:
        found = found.of_device(device)
    on_gpu, world_size = found.on_gpu, found.distributed.get("world_size")
    own_rank = int(found.distributed.get("rank", default_rank) if rank is None else rank)
    transfers = [row for row in ledger or () if row["emulated"] and row["rank"] == own_rank]
    collectives = find_collectives(found, transfers, [row for row in life or () if row["rank"] == own_rank])
    profiled = [] if whole else found.steps
    ranges = profiled or [Window(0, found.first, found.last)]
    if first_step is not None:
        ranges = [each._replace(number=first_step + index) for index, each in enumerate(ranges)]

    segments = Segments(found, ranges)
    for each, phase in zip(collectives, segments.phases_at([each.issue for each in collectives])):
        each.phase = each.phase or phase
    computing = EMPTY if on_gpu else _host_computing(found)
    steps, no_step = steps_of(found, collectives, ranges, computing, whole=not profiled)
    trace = TraceSets(found, collectives, segments, core_waits - found.base_ns)
    loading = subtract(union(found.spans(Kind.LOADING)), trace.device)
    host_steps, reads = {each.number: each for each in ranges}, HostReads(found)
    allocated, reserved = found.peaks([step.window for step in steps] or ranges)
    analysis = TraceAnalysis(
        Path(path), own_rank, world_size, "cuda" if on_gpu else "cpu",
        tuple(
            _analysed(StepRows(own_rank, trace, step), loading, reads, host_steps[step.window.number])
            for step in steps
        ),
        replace(no_step, step_ranges=whole or bool(profiled)),
        origin_of(found.metadata, any(each.label == "link" for each in found.ranges)), allocated,
        odd=(*found.odd, *_reserved(allocated, reserved)), devices=tuple(devices), process=_process(found),
        only_device=device,
    )  # fmt: skip
    _check(analysis, len(ranges))
    return analysis


def _reserved(allocated: int | None, reserved: int | None) -> list[str]:
    """What the allocator held beside what was allocated."""
    if allocated is None or reserved is None:
        return []
    return [f"of the device's memory {size_of(allocated)} were allocated at most, and {size_of(reserved)} reserved"]


def _process(found: Events) -> str:
    """The host and the number of the process that ran the steps; "" where the trace has no ranges of steps."""
    rows = found.rows(Kind.STEP)
    if not len(rows):
        return ""
    return f"{found.metadata.get('host_name') or ''}:{found.threads[int(found.thread[rows[0]])][0]}"


def _analysed(rows: StepRows, loading: Intervals, reads: HostReads, of_host: Window) -> StepAnalysis:
    """The rows of a step; `of_host` is the host's range of it, in which `loading` and `reads` are counted."""
    loading_ns = size(within(loading, of_host.start, of_host.end))
    return StepAnalysis(
        rows.step.window.number, rows.breakdown(), tuple(rows.timeline()), tuple(rows.exposed()),
        tuple(rows.collectives()), rows.idle(), loading_ns, tuple(reads.of_step(of_host, rows.rank)),
        rows.step.computing + rows.trace.found.base_ns,
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
            " steps, so there is no overlap: no gradient was reduced (then the model trains nothing), or the profiler"
            " did not see the transport; use gloo, NCCL, or an engine whose ranges (FSDP::all_gather ...) mark it; or"
            " name the kernels that communicate, of oneCCL for example: --comm-pattern ccl"
        )


def _host_computing(found: Events) -> Intervals:
    """Operators with the dispatch between them, less what the same thread did for communication."""
    apart, parts = communicating(found), []
    for thread, busy in found.host_busy.items():
        others = apart.get(thread, EMPTY)
        parts.append(subtract(close_gaps(subtract(busy, others), DISPATCH_NS), others))
    return union(*parts)
