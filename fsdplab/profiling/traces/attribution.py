"""Attributes exposed time to collectives and causes.

An instant may have several collectives in flight. The host's own copies and waits name theirs; otherwise the instant
goes to the collective that ends first, because the host goes on at its end. So every exposed nanosecond belongs to
exactly one collective.

Causes, in the order in which they are tried:
- `hidden`: nothing of it was exposed;
- `unknown`: the trace does not show who issued it;
- `link_busy`: it spent at least half of what was exposed behind other collectives, between its issue and its start;
- `waiting_for_peer`: as long between issue and start with a free link (an emulated link starts when the last rank has
  issued), or idle inside a copy by the host; over several ranks' traces `with_peers` (skew) finds the rest;
- `late_start`: its consumer issued it when needed (no prefetch), or the issuing call blocked the host, though there was
  computing to hide it;
- `nothing_to_hide_behind`: issued early and on a free link, but too little computing was left: the first gather, the
  last reduction, small units.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, Measure, close_gaps, split, union
from fsdplab.profiling.traces.collectives import Collective

_AT_ONCE_NS = 100_000  # a kernel that starts this soon after its launch did not wait on the device: the host came late
_BACK_TO_BACK_NS = 10_000  # two kernels this close on a GPU: the second waited for the first
_ENOUGH = 0.1  # computing of a tenth of the exposed time is something to hide behind


@dataclass(frozen=True)
class Context:
    """The input of the causes for one step: its window, when it computed, when the host ran operators, where each phase
    ends, the device.
    """

    start: int
    end: int
    computing: Measure
    host_busy: Measure
    phase_ends: dict[str, int]
    on_gpu: bool = False


def attribute(exposed: Intervals, collectives: Sequence[Collective]) -> list[Intervals]:
    """For each collective the exposed instants that are its own; together they are `exposed`, and no two share an
    instant.

    `exposed` is sorted and disjoint. One sweep over all edges, so that the time grows with their number only.
    """
    shares = [EMPTY] * len(collectives)
    spans, owners = _owned(collectives)
    if not len(exposed) or not len(spans):
        return shares
    pieces = split(exposed, spans.ravel())
    at = np.searchsorted(spans[:, 0], pieces[:, 0], side="right") - 1
    held = (at >= 0) & (pieces[:, 0] < spans[at, 1])
    pieces, owner = pieces[held], owners[at[held]]
    order = np.argsort(owner, kind="stable")
    pieces, owner = pieces[order], owner[order]
    new_owner = np.concatenate([[True], owner[1:] != owner[:-1]])[: len(owner)]
    first = new_owner | np.concatenate([[True], pieces[1:, 0] != pieces[:-1, 1]])[: len(owner)]
    last = np.concatenate([first[1:], [True]])[: len(owner)]
    whole, owner = np.stack([pieces[first, 0], pieces[last, 1]], axis=1), owner[first]
    bounds = [*np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]])[: len(owner)]).tolist(), len(owner)]
    for start, end in zip(bounds, bounds[1:]):
        shares[int(owner[start])] = whole[start:end]
    return shares


def _owned(collectives: Sequence[Collective]) -> tuple[Intervals, np.ndarray]:
    """Disjoint intervals in order of time, and the index of the collective that each belongs to: the host's own pieces
    first, then the collective that ends first.
    """
    many = len(collectives)
    by_end = np.lexsort(([each.issue for each in collectives], [each.end for each in collectives]))
    pieces = np.array(
        [
            (piece.start, piece.end, position if piece.role else many + position)
            for position, index in enumerate(by_end.tolist())
            for piece in collectives[index].pieces
            if piece.end > piece.start
        ],
        dtype=np.int64,
    ).reshape(-1, 3)
    pieces = pieces[np.lexsort((pieces[:, 2], pieces[:, 1], pieces[:, 0]))]
    alone = _alone(pieces)
    owned = np.concatenate([pieces[alone], _swept(pieces[~alone].tolist())])
    owned = owned[np.argsort(owned[:, 0], kind="stable")]
    return owned[:, :2], by_end[owned[:, 2] % many] if many else owned[:, 2]


def _alone(pieces: np.ndarray) -> np.ndarray:
    """Which pieces overlap no other; they are in order of their starts."""
    apart: np.ndarray = np.ones(len(pieces) + 1, dtype=bool)
    apart[1:-1] = pieces[1:, 0] >= np.maximum.accumulate(pieces[:-1, 1])
    return apart[:-1] & apart[1:]


def _swept(pieces: list[list[int]]) -> np.ndarray:
    """(start, end, number) of disjoint intervals: at every instant the lowest number of the pieces there."""
    edges = sorted({edge for piece in pieces for edge in piece[:2]})
    open_pieces: list[tuple[int, int]] = []
    spans, at = [], 0
    for start, until in zip(edges, edges[1:]):
        while at < len(pieces) and pieces[at][0] <= start:
            heapq.heappush(open_pieces, (pieces[at][2], pieces[at][1]))
            at += 1
        while open_pieces and open_pieces[0][1] <= start:
            heapq.heappop(open_pieces)
        if open_pieces:
            spans.append((start, until, open_pieces[0][0]))
    return np.array(spans, dtype=np.int64).reshape(-1, 3)


def causes_of(
    collectives: Sequence[Collective], shares: Sequence[Intervals], exposed: Sequence[int], context: Context
) -> list[str]:
    """The cause of each collective's share of the exposed instants; `exposed`: the lengths of the shares."""
    around = _around(collectives, shares, context)
    return [_cause(*one, context.on_gpu) for one in zip(collectives, exposed, around)]


class _Around(NamedTuple):
    """What happened around one collective, in ns: how long it was queued behind others, how long the step computed
    before its issue and after its end in its phase, and for how long the host was busy in its share.
    """

    queued: int
    computed_before: int
    computed_after: int
    host_busy: int


def _around(collectives: Sequence[Collective], shares: Sequence[Intervals], context: Context) -> list[_Around]:
    """All collectives of a step at once: a trace may hold nothing but collectives."""
    if not collectives:
        return []
    issue = np.array([each.issue for each in collectives], dtype=np.int64)
    start = np.array([each.start for each in collectives], dtype=np.int64)
    end = np.array([each.end for each in collectives], dtype=np.int64)
    until = np.array([context.phase_ends.get(each.phase, context.end) for each in collectives], dtype=np.int64)
    computing = context.computing
    columns = (
        _queued(collectives, issue, start, context.on_gpu),
        computing.within(np.full(len(issue), context.start), issue),
        computing.within(end, until),
        _host_busy(collectives, shares, context.host_busy),
    )
    return [_Around(*row) for row in zip(*(column.tolist() for column in columns))]


def _queued(collectives: Sequence[Collective], issue: np.ndarray, start: np.ndarray, on_gpu: bool) -> np.ndarray:
    """Nanoseconds that each collective spent behind others on the link, between its issue and its start.

    A host that runs ahead issues long before the input is computed, so on a GPU only others that ran until this one
    began count.
    """
    ways = union([(way.start, way.end) for each in collectives if (way := each.transport)])
    carried = Measure(ways)
    if not on_gpu or not len(ways):
        return carried.within(issue, start)
    runs = close_gaps(ways, _BACK_TO_BACK_NS)
    at = np.searchsorted(runs[:, 0], start, side="left") - 1
    behind = (at >= 0) & (runs[at, 1] >= start)
    return np.where(behind, carried.within(np.maximum(issue, runs[at, 0]), start), 0)


def _host_busy(collectives: Sequence[Collective], shares: Sequence[Intervals], host_busy: Measure) -> np.ndarray:
    """For how long the host was busy in the shares of those that it carries itself; 0 for the others."""
    busy: np.ndarray = np.zeros(len(collectives), dtype=np.int64)
    mine = [index for index, each in enumerate(collectives) if each.by_host]
    if mine:
        pieces = np.concatenate([shares[index] for index in mine])
        owner: np.ndarray = np.repeat(mine, [len(shares[index]) for index in mine])
        np.add.at(busy, owner, host_busy.within(pieces[:, 0], pieces[:, 1]))
    return busy


def _cause(collective: Collective, exposed: int, around: _Around, on_gpu: bool) -> str:
    if not exposed:
        return "hidden"
    if not collective.issued:
        return "unknown"
    if collective.by_host:
        return "waiting_for_peer" if 2 * (exposed - around.host_busy) >= exposed else "nothing_to_hide_behind"
    if 2 * around.queued >= exposed:
        return "link_busy"
    if collective.emulated and 2 * (collective.start - collective.issue - around.queued) >= exposed:
        return "waiting_for_peer"
    return "late_start" if _late(collective, exposed, around, on_gpu) else "nothing_to_hide_behind"


def _late(collective: Collective, exposed: int, around: _Around, on_gpu: bool) -> bool:
    """Whether computing was there that an earlier start, or a call that does not hold the host, could have used."""
    if collective.kind == "all_gather":
        at_once = collective.start - collective.issue < _AT_ONCE_NS if on_gpu else collective.own or collective.held
        return at_once and around.computed_before > _ENOUGH * exposed
    return not on_gpu and collective.held and around.computed_after > _ENOUGH * exposed
