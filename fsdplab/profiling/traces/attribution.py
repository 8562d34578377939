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

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, Measure, close_gaps, size, split, union
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
    by_end = sorted(range(many), key=lambda index: (collectives[index].end, collectives[index].issue))
    pieces = sorted(
        (piece.start, piece.end, position if piece.role else many + position)
        for position, index in enumerate(by_end)
        for piece in collectives[index].pieces
        if piece.end > piece.start
    )
    edges = sorted({edge for piece in pieces for edge in piece[:2]})
    open_pieces: list[tuple[int, int]] = []
    spans, owners, at = [], [], 0
    for start, until in zip(edges, edges[1:]):
        while at < len(pieces) and pieces[at][0] <= start:
            heapq.heappush(open_pieces, (pieces[at][2], pieces[at][1]))
            at += 1
        while open_pieces and open_pieces[0][1] <= start:
            heapq.heappop(open_pieces)
        if open_pieces:
            spans.append((start, until))
            owners.append(by_end[open_pieces[0][0] % many])
    return np.array(spans, dtype=np.int64).reshape(-1, 2), np.array(owners, dtype=np.int64)


def causes_of(collectives: Sequence[Collective], shares: Sequence[Intervals], context: Context) -> list[str]:
    """The cause of each collective's share of the exposed instants."""
    link = _Link(collectives, context.on_gpu)
    return [_cause(each, share, link, context) for each, share in zip(collectives, shares)]


class _Link:
    """When the link carried any collective."""

    def __init__(self, collectives: Sequence[Collective], on_gpu: bool) -> None:
        ways = union([(way.start, way.end) for each in collectives if (way := each.transport)])
        self._carried = Measure(ways)
        self._runs = close_gaps(ways, _BACK_TO_BACK_NS) if on_gpu else None

    def queued(self, collective: Collective) -> int:
        """Nanoseconds that a collective spent behind others, between its issue and its start.

        A host that runs ahead issues long before the input is computed, so on a GPU only others that ran until this one
        began count.
        """
        if self._runs is None:
            return self._carried.between(collective.issue, collective.start)
        at = int(np.searchsorted(self._runs[:, 0], collective.start, side="left")) - 1
        if at < 0 or self._runs[at, 1] < collective.start:
            return 0
        return self._carried.between(max(collective.issue, int(self._runs[at, 0])), collective.start)


def _cause(collective: Collective, mine: Intervals, link: _Link, context: Context) -> str:
    exposed = size(mine)
    if not exposed:
        return "hidden"
    if not collective.issued:
        return "unknown"
    if collective.by_host:
        idle = exposed - context.host_busy.of(mine)
        return "waiting_for_peer" if 2 * idle >= exposed else "nothing_to_hide_behind"
    queued = link.queued(collective)
    if 2 * queued >= exposed:
        return "link_busy"
    if collective.emulated and 2 * (collective.start - collective.issue - queued) >= exposed:
        return "waiting_for_peer"
    return "late_start" if _late(collective, exposed, context) else "nothing_to_hide_behind"


def _late(collective: Collective, exposed: int, context: Context) -> bool:
    """Whether computing was there that an earlier start, or a call that does not hold the host, could have used."""
    before = context.computing.between(context.start, collective.issue)
    if collective.kind == "all_gather":
        at_once = (
            collective.start - collective.issue < _AT_ONCE_NS if context.on_gpu else collective.own or collective.held
        )
        return at_once and before > _ENOUGH * exposed
    after = context.computing.between(collective.end, context.phase_ends.get(collective.phase, context.end))
    return not context.on_gpu and collective.held and after > _ENOUGH * exposed
