"""The rows of a step's tables, from its account: `exposed`, `collectives`, and `timeline`, a step for a figure.

Timeline rows are for viewing, a few hundred a rank instead of the trace's hundred thousand: neighbours of the same
unit and phase are joined over gaps below 20 us, and over longer ones while a lane has too many rows, and across an
exposed or a blocked stretch only in the last resort. All sums are computed before anything is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fsdplab.common.rows import grouped
from fsdplab.common.words import OFF_LINK
from fsdplab.profiling.intervals import EMPTY, Intervals, close_gaps, latest_ends, pairs, size, subtract, union, within
from fsdplab.profiling.traces.account import PARTS, Account, TraceSets, account
from fsdplab.profiling.traces.collectives import Collective
from fsdplab.profiling.traces.steps import Step, pieces_of
from fsdplab.records.tables import IDLE_PARTS, PARTS_OF_COLLECTIVE, PARTS_OF_EXPOSED

Row = dict[str, Any]
Mark = tuple[str, str, str, str, int, int, bool]  # lane, unit, phase, name, start, end, emulated
DISPATCH_NS = 20_000  # between two operators: the host dispatches the next one
_BLOCKED_NS = 50_000  # a host without an operator for this long, while bytes are on their way, waits for them
_APART_NS = 1_000_000  # a lane that is still too full is joined over everything from here on
_MOST = {"compute": 240, "exposed": 120, "waiting": 80}
_LANES = ("all_gather", "reduce_scatter", "all_reduce")


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
                "exposed_ns": sum(parts), **dict(zip(PARTS_OF_COLLECTIVE, parts)), "cause": cause,
                "emulated": each.emulated, "on_link": spans,
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
    lane, way = each.kind if each.kind in _LANES else "other_communication", each.transport
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
