"""The rows that one step of one rank has in a record's tables, made from the step's account.

Rows of `breakdown`, `idle`, `exposed` and `collectives` are sums over the account's labels. Rows of `timeline` are for
viewing, a few hundred a rank instead of the trace's hundred thousand: neighbours of the same unit and phase are joined
over gaps below 20 us, and over longer ones while a lane has too many rows, and across an exposed or a blocked stretch
only in the last resort. All sums are computed before anything is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fsdplab.common.collectives import collective_row
from fsdplab.common.rows import grouped
from fsdplab.common.words import OFF_LINK
from fsdplab.profiling.intervals import EMPTY, Intervals, close_gaps, latest_ends, pairs, size, subtract, union, within
from fsdplab.profiling.traces.account import PARTS, Account, TraceSets, account
from fsdplab.profiling.traces.collective import Collective
from fsdplab.profiling.traces.steps import Step, pieces_of
from fsdplab.records.tables import IDLE_PARTS, PARTS_OF_COLLECTIVE, PARTS_OF_EXPOSED

Row = dict[str, Any]
DISPATCH_NS = 20_000  # between two operators: the host dispatches the next one
_BLOCKED_NS = 50_000  # a host without an operator for this long, while bytes are on their way, waits for them
_SHORTEST_NS = 1_000  # an operator that ends before this does not end the host's waiting
_APART_NS = 1_000_000  # a lane that is still too full is joined over everything from here on
_LONGEST_GAP_NS = 10**9
_MOST = {"compute": 240, "exposed": 120, "waiting": 80}


class Mark(NamedTuple):
    """A row of the timeline on the trace's own clock."""

    lane: str  # "step", "compute", "exposed", "waiting", or that of a collective's kind
    unit: str
    phase: str
    name: str  # what the viewer writes on it
    start: int
    end: int
    emulated: bool  # whether it is of an emulated link


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
        """The beginning of every row."""
        return {"rank": self.rank, "step": self.step.window.number}

    def _within(self, spans: Intervals) -> Intervals:
        """What of sorted, disjoint spans lies in the step."""
        return within(spans, self.step.window.start, self.step.window.end)

    def breakdown(self) -> Row:
        """The sums of the parts; beside them for how long the device did anything, another step's work too, and how
        long the host waited for a core. None where there is no device, and where nobody noted the waits.
        """
        row = self._where
        row.update(breakdown_of(self.account.sums))
        row["device_busy_ns"] = None
        if self.trace.on_gpu:
            row["device_busy_ns"] = size(self._within(self.trace.device))
        row["core_wait_ns"] = None
        if len(self.trace.core_waits):
            row["core_wait_ns"] = self.account.core_wait_ns
        return row

    def idle(self) -> Row:
        """The part "other" by cause."""
        row = self._where
        for name in IDLE_PARTS:
            row[name] = self.account.sums[f"idle {name}"]
        return row

    def exposed(self) -> list[Row]:
        """One row a unit, phase and kind; of several collectives the most exposed one gives the cause."""
        collectives = self.step.collectives
        parts = self.account.parts  # a row a collective, a column a part
        by_label = grouped(range(len(collectives)), lambda index: collectives[index].label[:3])
        rows = []
        for (unit, phase, kind), members in by_label.items():
            # two that ran at once communicated for as long as one; what is exposed has one owner, so that it adds up
            spans = union(pieces_of([collectives[index] for index in members]))
            sums = parts[members].sum(0)
            most_exposed = max(members, key=lambda index: parts[index].sum())
            rows.append(
                {
                    **self._where,
                    "unit": unit,
                    "phase": phase,
                    "kind": kind,
                    "communication_ns": size(self._within(spans)),
                    "exposed_ns": int(sums.sum()),
                    "cause": self.account.causes[most_exposed],
                    **parts_of(sums),
                }
            )
        return rows

    def collectives(self) -> list[Row]:
        """One row a collective counted in the step; `on_link`, when it was exposed on the link, is in no table."""
        on_link = self._spans_on_link()
        parts_of_each = self.account.parts.tolist()
        rows = []
        for index, collective in enumerate(self.step.collectives):
            if not self.step.counted[index]:  # the step before has its row
                continue
            parts = parts_of_each[index]
            row = self._described(collective)
            row["exposed_ns"] = sum(parts)
            row.update(zip(PARTS_OF_COLLECTIVE, parts))
            row["cause"] = self.account.causes[index]
            row["emulated"] = collective.emulated
            row["on_link"] = on_link[index]
            rows.append(row)
        return rows

    def _spans_on_link(self) -> list[list[list[int]]]:
        """When each collective was exposed on the link, in absolute ns.

        Cells 0-10, 10-20 and 20-30, of which the first two move bytes for collective 1: [[0, 20]] at place 1.
        """
        on_link: list[list[list[int]]] = [[] for _ in self.step.collectives]
        owner_on_link = np.where(self.account.moving, self.account.owner, -1)
        spans, owners = self.account.cells.runs(owner_on_link)
        absolute: Intervals = spans + self.trace.events.base_ns
        for span, index in zip(absolute.tolist(), owners.tolist()):
            on_link[index].append(span)
        return on_link

    def _described(self, collective: Collective) -> Row:
        """What a collective is, when it ran, and among whom."""
        base = self.trace.events.base_ns
        return {
            **self._where,
            "unit": collective.unit,
            "phase": collective.phase,
            "kind": collective.kind,
            "issue_ns": base + collective.issue,
            "start_ns": base + collective.start,
            "end_ns": base + collective.end,
            "logical_bytes": collective.nbytes,
            "group": collective.group,
            "group_size": collective.group_size,
            "members": collective.members,
        }

    # ---- the timeline

    def timeline(self) -> list[Row]:
        """All lanes of a step, in order of time within a lane."""
        window = self.step.window
        base = self.trace.events.base_ns
        # what is exposed, and where the host was blocked: computing is not joined across these
        waiting = self._waiting()
        exposed, labels = self._exposed()
        barriers = union(exposed, waiting)[:, 0]

        whole = Mark("step", "", "", f"step {window.number}", window.start, window.end, False)
        communication: list[Mark] = []
        for collective in self.step.collectives:
            communication += _communication(collective, window.start, window.end)
        lanes = [[whole], self._compute(barriers), communication, _exposed_marks(exposed, labels), self._waits(waiting)]
        rows = []
        for marks in lanes:
            # the marks of communication are of several lanes, one a kind
            for mark in sorted(marks, key=lambda mark: (mark.lane, mark.start)):
                row = self._where
                row["lane"] = mark.lane
                row["unit"] = mark.unit
                row["phase"] = mark.phase
                row["name"] = mark.name
                row["start_ns"] = base + int(mark.start)
                row["end_ns"] = base + int(mark.end)
                row["emulated"] = mark.emulated
                rows.append(row)
        return rows

    def _labels_at(self, instants: np.ndarray) -> list[tuple[str, str]]:
        """The unit and the phase at each instant."""
        segments = self.trace.segments
        return list(zip(segments.units_at(instants), segments.phases_at(instants)))

    def _exposed(self) -> tuple[Intervals, list[tuple[Any, ...]]]:
        """Exposed stretches, each with the label of its collective and whether bytes moved."""
        # one number a cell, so that a stretch ends where either changes: 2 x 3 + 1 where collective 3 moves bytes
        owner_and_moving = 2 * self.account.owner + self.account.moving
        of_exposed = np.where(self.account.exposed, owner_and_moving, -1)
        spans, numbers = self.account.cells.runs(of_exposed)
        labels = []
        for number in numbers.tolist():
            index, moving = divmod(number, 2)
            labels.append((*self.step.collectives[index].label, moving))
        return spans, labels

    def _compute(self, barriers: np.ndarray) -> list[Mark]:
        """Computing by the unit and phase of the host, or those that launched each kernel."""
        events = self.trace.events
        if events.on_gpu:  # a row a kernel, before they are joined
            in_order = np.argsort(events.start[self.step.kernels], kind="stable")
            kernels = self.step.kernels[in_order]
            pieces = np.clip(events.spans_of(kernels), self.step.window.start, self.step.window.end)
            # the host's unit at the launch; where that is not known, at the kernel's own start
            launch = events.launched_by[kernels]
            begun = np.where(launch >= 0, events.start[launch], events.start[kernels])
        else:  # a row wherever the unit or the phase changes
            cells = self.account.cells
            segment = np.searchsorted(self.trace.segments.changes, cells.start, side="right")
            pieces, _ = cells.runs(np.where(self.account.computing, segment, -1))
            begun = pieces[:, 0]
        marks = []
        labels = self._labels_at(begun)
        for (unit, phase), span in joined(pieces, labels, barriers, _MOST["compute"]):
            marks.append(Mark("compute", unit, phase, "compute", *span, False))
        return marks

    def _waiting(self) -> Intervals:
        """When the host was blocked while bytes were on their way."""
        if self.trace.on_gpu:
            return self._within(self.trace.blocked)
        # on a CPU no call says that it waits: the host runs no operator, though there is something to carry
        cells = self.account.cells
        in_hooks = cells.inside(self._within(self.trace.lifecycle))
        is_communicating = (self.account.owner >= 0) | in_hooks
        is_waiting = (self.account.part >= 0) & is_communicating & ~self.account.host
        spans, _ = cells.runs(np.where(is_waiting, 0, -1))
        idle = close_gaps(spans, _SHORTEST_NS)
        lasts = idle[:, 1] - idle[:, 0]
        return idle[lasts >= _BLOCKED_NS]

    def _waits(self, waiting: Intervals) -> list[Mark]:
        """Blocked stretches, each named by the collective of whose pieces it holds most."""
        collectives = self.step.collectives
        lasts = waiting[:, 1] - waiting[:, 0]
        longest_first = np.argsort(-lasts, kind="stable")
        longest = waiting[longest_first[: _MOST["waiting"]]]
        # a collective is looked at only where it reaches into the stretch
        reach = pairs([(collective.first, collective.last) for collective in collectives])
        marks: list[Mark] = []
        for start, end in longest.tolist():
            near = np.flatnonzero((reach[:, 0] < end) & (reach[:, 1] > start))
            # the first one of those that it holds as much of
            awaited: Collective | None = None
            most_ns = 0
            for index in near.tolist():
                held_ns = _held(collectives[index], start, end)
                if held_ns > most_ns:
                    awaited, most_ns = collectives[index], held_ns
            if awaited is not None:
                unit, phase, kind, emulated = awaited.label
                marks.append(Mark("waiting", unit, phase, kind, start, end, emulated))
            else:  # blocked by something else than communication
                _, phase = self._labels_at(np.array([start]))[0]
                marks.append(Mark("waiting", "", phase, "host", start, end, False))
        return marks


def breakdown_of(sums: dict[str, int]) -> dict[str, int]:
    """The columns of a record's `breakdown` from the sums of an account's parts.

    10 ms of compute only, 6 overlapped, 3 on the link and 1 of rest: a step of 20 ms, 16 of computing, 3 exposed.
    """
    exposed = parts_of([sums[name] for name in PARTS_OF_COLLECTIVE])
    compute_only = sums["compute_only_ns"]
    overlapped = sums["overlapped_ns"]
    return {
        "step_ns": sum(sums[name] for name in PARTS),
        "compute_ns": compute_only + overlapped,
        "compute_only_ns": compute_only,
        "overlapped_ns": overlapped,
        "exposed_ns": sum(exposed.values()),
        "other_ns": sum(sums[f"idle {name}"] for name in IDLE_PARTS),
        **exposed,
    }


def parts_of(sums: Sequence[int] | np.ndarray) -> dict[str, int]:
    """The parts of exposed time from the sums of `PARTS_OF_COLLECTIVE`: packing and unpacking are copying.

    >>> parts_of([5, 1, 2, 4, 0])
    {'on_link_ns': 5, 'copying_ns': 3, 'waiting_ns': 4, 'no_core_ns': 0}
    """
    on_link, packing, unpacking, waiting, no_core = map(int, sums)
    copying = packing + unpacking
    return dict(zip(PARTS_OF_EXPOSED, (on_link, copying, waiting, no_core)))


def _held(collective: Collective, start: int, end: int) -> int:
    """For how long a collective's pieces ran between two instants, those that ran at once counted each."""
    held_ns = 0
    for piece in collective.pieces:
        held_ns += max(0, min(end, piece.end) - max(start, piece.start))
    return held_ns


def _exposed_marks(
    exposed: Intervals,
    labels: Sequence[tuple[Any, ...]],  # of each stretch: unit, phase, kind, emulated, and whether bytes moved
) -> list[Mark]:
    """Exposed stretches, those in which no bytes moved with a name of their own."""
    marks = []
    no_barriers = EMPTY[:, 0]
    for label, span in joined(exposed, labels, no_barriers, _MOST["exposed"]):
        unit, phase, kind, emulated, moving = label
        name = kind if moving else kind + OFF_LINK
        marks.append(Mark("exposed", unit, phase, name, *span, emulated))
    return marks


def _communication(collective: Collective, start: int, end: int) -> list[Mark]:
    """The transport as one mark named by its kind, the host's copies beside it as marks of their own."""
    lane = collective_row(collective.kind).lane
    unit, phase, kind, emulated = collective.label
    transport = collective.transport
    moved = (start, start)  # empty where nothing but the host carried it
    if transport:
        moved = (max(start, transport.start), min(end, transport.end))

    marks: list[Mark] = []
    if len(collective.pieces) > 1 or transport is None:
        # a copy that runs beside the transport is hidden by it, and would cover it in a viewer
        for role in ("copy-in", "copy-out", "blocked"):
            for begun, ended in _beside(collective, role, moved, start, end):
                marks.append(Mark(lane, unit, phase, f"{kind} {role}", begun, ended, False))
    if moved[0] < moved[1]:
        marks.append(Mark(lane, unit, phase, kind, *moved, emulated))
    return marks


def _beside(collective: Collective, role: str, moved: tuple[int, int], start: int, end: int) -> list[list[int]]:
    """When a collective's pieces of a role ran in a step while its transport did not."""
    spans: list[tuple[int, int]] = []
    for piece in collective.pieces:
        if piece.role == role:
            spans.append((max(start, piece.start), min(end, piece.end)))
    if not spans:
        return []
    # a copy of ten tensors is ten operators with short gaps between them: one mark
    beside = close_gaps(subtract(spans, [moved]), DISPATCH_NS)
    listed: list[list[int]] = beside.tolist()
    return listed


def joined(
    pieces: Intervals,  # in order of their starts; they may overlap
    labels: Sequence[Any],  # of each piece
    barriers: np.ndarray,  # instants, in order
    most: int,  # how many rows there may be
) -> list[tuple[Any, tuple[int, int]]]:
    """Join neighbours of one label over gaps below 20 us, doubled until at most `most` rows are left; never across a
    barrier below 1 ms.

    >>> joined(np.array([[0, 5], [9, 12], [90_000, 95_000]]), ["a", "a", "a"], np.array([]), most=9)
    [('a', (0, 12)), ('a', (90000, 95000))]
    """
    if not len(pieces):
        return []
    starts, ends = pieces[:, 0], pieces[:, 1]
    # where another label begins: of a, a, b, a these are numbered 0, 0, 1, 0, and new at 0, 2 and 3
    numbers: dict[Any, int] = {}
    of_label = [numbers.setdefault(label, len(numbers)) for label in labels]
    is_new = np.diff(of_label, prepend=-1) != 0
    # how long nothing ran before each piece of the same label: an earlier piece may be the last to end
    latest = latest_ends(ends, np.cumsum(is_new))
    ends_before: np.ndarray = np.append(starts[:1], latest[:-1])
    gap = starts - ends_before

    # where a barrier lies between two pieces: the second one has passed more of them than the first
    passed: np.ndarray = np.asarray(np.searchsorted(barriers, starts, side="right"))
    behind_barrier = (np.diff(passed, prepend=passed[0]) != 0) & (gap > 0)

    # a row begins where the label changes, behind a gap, and behind a barrier, until the rows are few enough
    below = DISPATCH_NS
    while True:
        keeps_barriers = below < _APART_NS
        first = np.flatnonzero(is_new | (gap >= below) | behind_barrier & keeps_barriers)
        if len(first) <= most or below > _LONGEST_GAP_NS:
            break
        below *= 2
    joined_ends = np.maximum.reduceat(ends, first)  # the latest end from each first piece to the next one
    spans = zip(starts[first].tolist(), joined_ends.tolist())
    return [(labels[index], span) for index, span in zip(first.tolist(), spans)]
