"""Timeline rows: a step for a figure, with a few hundred marks a rank instead of the trace's hundred thousand.

Rows are for viewing: neighbours of the same unit and phase are joined over gaps below 20 us, and over longer ones while
a lane has too many rows, and across an exposed or a blocked stretch only in the last resort. The figures (`breakdown`,
`exposed`) are computed before anything is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, clip, close_gaps, split, subtract, union
from fsdplab.profiling.traces.classify import TraceEvents
from fsdplab.profiling.traces.collectives import Collective, Launches
from fsdplab.profiling.traces.segments import Segments

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
        self._kernels, self._labels = self._launched() if found.on_gpu else (EMPTY, [])

    def rows(
        self,
        step: int,
        start: int,
        end: int,
        computing: Intervals,
        host_busy: Intervals,
        collectives: Sequence[Collective],
        shares: Sequence[Intervals],
    ) -> list[Row]:
        """All lanes of one step, in order of time within a lane;
        `shares` are the exposed instants of each collective.
        """
        waiting = self._waiting(start, end, host_busy, collectives)
        barriers = np.sort(union(*shares, waiting)[:, 0])
        lanes = [
            [("step", "", "", f"step {step}", start, end, False)],
            self._compute(start, end, computing, barriers),
            [row for each in collectives for row in _communication(each, start, end)],
            self._exposed(collectives, shares),
            self._waits(waiting, collectives),
        ]
        return [self._row(step, *row) for lane in lanes for row in sorted(lane, key=lambda each: (each[0], each[4]))]

    def _row(self, step: int, lane: str, unit: str, phase: str, name: str, start: int, end: int, emulated: bool) -> Row:
        base = self._found.base_ns
        return {
            "rank": self._rank, "step": step, "lane": lane, "unit": unit, "phase": phase, "name": name,
            "start_ns": base + int(start), "end_ns": base + int(end), "emulated": emulated,
        }  # fmt: skip

    def _compute(self, start: int, end: int, computing: Intervals, barriers: np.ndarray) -> list[tuple]:
        if self._found.on_gpu:
            inside = (self._kernels[:, 1] > start) & (self._kernels[:, 0] < end)
            pieces = np.clip(self._kernels[inside], start, end)
            labels = [label for label, held in zip(self._labels, inside) if held]
        else:
            pieces = split(computing, self._segments.changes)
            labels = list(zip(self._segments.units_at(pieces[:, 0]), self._segments.phases_at(pieces[:, 0])))
        return [
            ("compute", *label, "compute", *span, False)
            for label, span in joined(pieces, labels, barriers, _MOST["compute"])
        ]

    def _launched(self) -> tuple[Intervals, list[tuple[str, str]]]:
        """Kernels in order of time, each with the unit and phase that launched it."""
        kernels = self._found.kernels.pairs()
        launches = Launches(self._found).starts(np.array(self._found.kernel_launches, dtype=np.int64), kernels[:, 0])
        order = np.argsort(kernels[:, 0], kind="stable")
        launches = launches[order]
        return kernels[order], list(zip(self._segments.units_at(launches), self._segments.phases_at(launches)))

    def _exposed(self, collectives: Sequence[Collective], shares: Sequence[Intervals]) -> list[tuple]:
        marked = sorted(
            ((*span, each) for each, share in zip(collectives, shares) for span in share.tolist()),
            key=lambda one: one[:2],
        )
        labels = [(each.unit, each.phase, each.kind, each.emulated) for _, _, each in marked]
        pieces = np.array([one[:2] for one in marked], dtype=np.int64).reshape(-1, 2)
        return [
            ("exposed", *label[:3], *span, label[3])
            for label, span in joined(pieces, labels, EMPTY[:, 0], _MOST["exposed"])
        ]

    def _waiting(self, start: int, end: int, host_busy: Intervals, collectives: Sequence[Collective]) -> Intervals:
        if self._found.on_gpu:
            return clip(self._blocked, start, end)
        moving = union(*([(piece.start, piece.end) for piece in each.pieces] for each in collectives))
        idle = subtract(clip(union(moving, self._lifecycle), start, end), host_busy)
        idle = close_gaps(idle, 1_000)
        return idle[idle[:, 1] - idle[:, 0] >= _BLOCKED_NS]

    def _waits(self, waiting: Intervals, collectives: Sequence[Collective]) -> list[tuple]:
        """Blocked stretches, each named by the collective of whose pieces it holds most."""
        longest = waiting[np.argsort(waiting[:, 0] - waiting[:, 1], kind="stable")[: _MOST["waiting"]]]
        rows = []
        for start, end in longest.tolist():
            held = lambda each: sum(max(0, min(end, piece.end) - max(start, piece.start)) for piece in each.pieces)  # noqa: E731
            best = max(collectives, key=held, default=None)
            if best is not None and held(best) > 0:
                rows.append(("waiting", best.unit, best.phase, best.kind, start, end, best.emulated))
            else:
                rows.append(("waiting", "", self._segments.phases_at([start])[0], "host", start, end, False))
        return rows


def _communication(each: Collective, start: int, end: int) -> list[tuple]:
    """The transport as one row named by its kind, the host's copies beside it as rows of their own."""
    lane = each.kind if each.kind in _LANES else "other_communication"
    rows = []
    way = each.transport
    moved = clip([(way.start, way.end)], start, end) if way else EMPTY
    for role in ("copy-in", "copy-out", "blocked"):
        spans = [(piece.start, piece.end) for piece in each.pieces if piece.role == role]
        for span in close_gaps(subtract(clip(spans, start, end), moved), DISPATCH_NS).tolist():
            rows.append((lane, each.unit, each.phase, f"{each.kind} {role}", *span, False))
    return rows + [(lane, each.unit, each.phase, each.kind, *span, each.emulated) for span in moved.tolist()]


def joined(
    pieces: Intervals, labels: Sequence[Any], barriers: np.ndarray, most: int
) -> list[tuple[Any, tuple[int, int]]]:
    """Neighbours with the same label made one over gaps below 20 us, doubled until at most `most` rows are left; never
    across a barrier below 1 ms.

    >>> joined(np.array([[0, 5], [9, 12], [90_000, 95_000]]), ["a", "a", "a"], np.array([]), most=9)
    [('a', (0, 12)), ('a', (90000, 95000))]
    """
    gap = DISPATCH_NS
    while True:
        rows = _join(pieces, labels, barriers if gap < _APART_NS else barriers[:0], gap)
        if len(rows) <= most or gap > 10**9:
            return rows
        gap *= 2


def _join(
    pieces: Intervals, labels: Sequence[Any], barriers: np.ndarray, gap: int
) -> list[tuple[Any, tuple[int, int]]]:
    rows: list[list[Any]] = []
    before = np.asarray(np.searchsorted(barriers, pieces[:, 0], side="right"))
    since = -1
    for index, (start, end) in enumerate(pieces.tolist()):
        last = rows[-1] if rows else None
        if last and last[0] == labels[index] and start - last[2] < gap and (before[index] == since or start <= last[2]):
            last[2] = max(last[2], end)
        else:
            rows.append([labels[index], start, end])
        since = before[index]
    return [(label, (start, end)) for label, start, end in rows]
