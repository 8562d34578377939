"""Timeline rows: a step for a figure, with a few hundred marks a rank instead of the trace's hundred thousand.

Rows are for viewing: neighbours of the same unit and phase are joined over gaps below 20 us, and over longer ones while
a lane has too many rows, and across an exposed or a blocked stretch only in the last resort. The figures (`breakdown`,
`exposed`) are computed before anything is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, close_gaps, latest_ends, split, subtract, union, within
from fsdplab.profiling.traces.classify import TraceEvents
from fsdplab.profiling.traces.collectives import Collective, Launches
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.steps import Window, pieces_of

Row = dict[str, Any]
DISPATCH_NS = 20_000  # between two operators: the host dispatches the next one
_BLOCKED_NS = 50_000  # a host without an operator for this long, while bytes are on their way, waits for them
_APART_NS = 1_000_000  # a lane that is still too full is joined over everything from here on
_MOST = {"compute": 240, "exposed": 120, "waiting": 80}
_LANES = ("all_gather", "reduce_scatter", "all_reduce")
_LIFECYCLE = (
    "pre_forward",
    "pre_backward",
    "post_backward",
    "root_post_backward_callback",
    "link",
    "backward_prefetch",
)


class TimelineRows:
    """Makes the rows of one rank's steps."""

    def __init__(self, found: TraceEvents, rank: int, segments: Segments) -> None:
        self._found, self._rank, self._segments = found, rank, segments
        self._lifecycle = union([(each.start, each.end) for each in found.ranges if each.label.startswith(_LIFECYCLE)])
        self._blocked = union(found.blocked.pairs())
        self._labels = self._launched() if found.on_gpu else []
        self._kernels = found.kernels.pairs()

    def rows(
        self,
        window: Window,
        computing: Intervals,
        host_busy: Intervals,
        collectives: Sequence[Collective],
        shares: Sequence[Intervals],
        kernels: np.ndarray,
    ) -> list[Row]:
        """All lanes of one step, in order of time within a lane; `shares` are the exposed instants of each collective,
        `kernels` the step's own, as positions in `TraceEvents.kernels`.
        """
        step, start, end = window.number, window.start, window.end
        waiting = self._waiting(start, end, host_busy, collectives)
        exposed = np.concatenate([EMPTY, *shares])
        barriers = union(exposed, waiting)[:, 0]
        lanes = [
            [("step", "", "", f"step {step}", start, end, False)],
            self._compute(start, end, computing, kernels, barriers),
            [row for each in collectives for row in _communication(each, start, end)],
            self._exposed(collectives, shares, exposed),
            self._waits(waiting, collectives),
        ]
        return [self._row(step, *row) for lane in lanes for row in sorted(lane, key=lambda each: (each[0], each[4]))]

    def _row(self, step: int, lane: str, unit: str, phase: str, name: str, start: int, end: int, emulated: bool) -> Row:
        base = self._found.base_ns
        return {
            "rank": self._rank, "step": step, "lane": lane, "unit": unit, "phase": phase, "name": name,
            "start_ns": base + int(start), "end_ns": base + int(end), "emulated": emulated,
        }  # fmt: skip

    def _compute(
        self, start: int, end: int, computing: Intervals, kernels: np.ndarray, barriers: np.ndarray
    ) -> list[tuple]:
        labels: Sequence[Any]
        if self._found.on_gpu:
            kernels = kernels[np.argsort(self._kernels[kernels, 0], kind="stable")]
            pieces = np.clip(self._kernels[kernels], start, end)
            labels = [self._labels[index] for index in kernels.tolist()]
        else:
            pieces = split(computing, self._segments.changes)
            labels = list(zip(self._segments.units_at(pieces[:, 0]), self._segments.phases_at(pieces[:, 0])))
        return [
            ("compute", *label, "compute", *span, False)
            for label, span in joined(pieces, labels, barriers, _MOST["compute"])
        ]

    def _launched(self) -> list[tuple[str, str]]:
        """The unit and phase that launched each kernel."""
        starts = self._found.kernels.pairs()[:, 0]
        numbers = np.array(self._found.kernel_launches, dtype=np.int64)
        launches = Launches(self._found).starts(numbers, starts)
        return list(zip(self._segments.units_at(launches), self._segments.phases_at(launches)))

    def _exposed(
        self, collectives: Sequence[Collective], shares: Sequence[Intervals], exposed: Intervals
    ) -> list[tuple]:
        """`exposed`: the pieces of all shares, one share after the other."""
        owner: np.ndarray = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
        order = np.lexsort((exposed[:, 1], exposed[:, 0]))
        pieces, owners = exposed[order], [collectives[index] for index in owner[order].tolist()]
        labels = [(each.unit, each.phase, each.kind, each.emulated) for each in owners]
        return [
            ("exposed", *label[:3], *span, label[3])
            for label, span in joined(pieces, labels, EMPTY[:, 0], _MOST["exposed"])
        ]

    def _waiting(self, start: int, end: int, host_busy: Intervals, collectives: Sequence[Collective]) -> Intervals:
        if self._found.on_gpu:
            return within(self._blocked, start, end)
        moving = within(union(pieces_of(collectives), self._lifecycle), start, end)
        idle = close_gaps(subtract(moving, host_busy), 1_000)
        return idle[idle[:, 1] - idle[:, 0] >= _BLOCKED_NS]

    def _waits(self, waiting: Intervals, collectives: Sequence[Collective]) -> list[tuple]:
        """Blocked stretches, each named by the collective of whose pieces it holds most."""
        longest = waiting[np.argsort(waiting[:, 0] - waiting[:, 1], kind="stable")[: _MOST["waiting"]]]
        reach = np.array([(each.first, each.last) for each in collectives], dtype=np.int64).reshape(-1, 2)
        rows = []
        for start, end in longest.tolist():
            held = lambda each: sum(max(0, min(end, piece.end) - max(start, piece.start)) for piece in each.pieces)  # noqa: E731
            near = np.flatnonzero((reach[:, 0] < end) & (reach[:, 1] > start)).tolist()
            best = max((collectives[index] for index in near), key=held, default=None)
            if best is not None and held(best) > 0:
                rows.append(("waiting", best.unit, best.phase, best.kind, start, end, best.emulated))
            else:
                rows.append(("waiting", "", self._segments.phases_at([start])[0], "host", start, end, False))
        return rows


def _communication(each: Collective, start: int, end: int) -> list[tuple]:
    """The transport as one row named by its kind, the host's copies beside it as rows of their own."""
    lane = each.kind if each.kind in _LANES else "other_communication"
    way, rows = each.transport, []
    if way is not None and len(each.pieces) == 1:  # a kernel
        first, last = max(start, way.start), min(end, way.end)
        return [(lane, each.unit, each.phase, each.kind, first, last, each.emulated)] if first < last else []
    moved = (max(start, way.start), min(end, way.end)) if way else (start, start)
    for role in ("copy-in", "copy-out", "blocked"):
        spans = [(max(start, piece.start), min(end, piece.end)) for piece in each.pieces if piece.role == role]
        for span in _beside(spans, *moved):
            rows.append((lane, each.unit, each.phase, f"{each.kind} {role}", *span, False))
    if moved[0] < moved[1]:
        rows.append((lane, each.unit, each.phase, each.kind, *moved, each.emulated))
    return rows


def _beside(spans: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The spans less what lies from `start` to `end`, joined over gaps below 20 us. Plain numbers: a collective has one
    or two.
    """
    parts: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        apart = [(first, min(last, start)), (max(first, end), last)] if start < end else [(first, last)]
        parts += [part for part in apart if part[0] < part[1]]
    rows: list[tuple[int, int]] = []
    for first, last in sorted(parts):
        if rows and first - rows[-1][1] < DISPATCH_NS:
            rows[-1] = (rows[-1][0], max(rows[-1][1], last))
        else:
            rows.append((first, last))
    return rows


def joined(
    pieces: Intervals, labels: Sequence[Any], barriers: np.ndarray, most: int
) -> list[tuple[Any, tuple[int, int]]]:
    """Neighbours with the same label made one over gaps below 20 us, doubled until at most `most` rows are left; never
    across a barrier below 1 ms.

    >>> joined(np.array([[0, 5], [9, 12], [90_000, 95_000]]), ["a", "a", "a"], np.array([]), most=9)
    [('a', (0, 12)), ('a', (90000, 95000))]
    """
    apart = _Neighbours(pieces, labels, barriers)
    gap = DISPATCH_NS
    while True:
        first = apart.rows(gap, across=gap >= _APART_NS)
        if len(first) <= most or gap > 10**9:
            return apart.spans(first)
        gap *= 2


class _Neighbours:
    """Pieces in order of their starts, and what lies between each and the one before it."""

    def __init__(self, pieces: Intervals, labels: Sequence[Any], barriers: np.ndarray) -> None:
        self._pieces, self._labels = pieces, labels
        numbers: dict[Any, int] = {}
        codes = np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)
        self._new_label = np.concatenate([[True], codes[1:] != codes[:-1]])[: len(codes)]
        ends = latest_ends(pieces[:, 1], np.cumsum(self._new_label))
        self._gap = np.concatenate([[0], pieces[1:, 0] - ends[:-1]])[: len(codes)]
        before = np.asarray(np.searchsorted(barriers, pieces[:, 0], side="right"))
        passed = np.concatenate([[False], before[1:] != before[:-1]])[: len(codes)]
        self._barrier = passed & (self._gap > 0)

    def rows(self, gap: int, across: bool) -> np.ndarray:
        """The positions at which a row begins, where gaps below `gap` are closed; `across`: over barriers too."""
        first = self._new_label | (self._gap >= gap)
        return np.flatnonzero(first if across else first | self._barrier)

    def spans(self, first: np.ndarray) -> list[tuple[Any, tuple[int, int]]]:
        """Label, start and end of each row."""
        if not len(first):
            return []
        ends = np.maximum.reduceat(self._pieces[:, 1], first)
        starts = self._pieces[first, 0]
        return [(self._labels[at], span) for at, span in zip(first.tolist(), zip(starts.tolist(), ends.tolist()))]
