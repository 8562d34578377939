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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, clip, intersect, length, subtract, union
from fsdplab.profiling.traces.collectives import Collective

_AT_ONCE_NS = 100_000  # a kernel that starts this soon after its launch did not wait on the device: the host came late
_ENOUGH = 0.1  # computing of a tenth of the exposed time is something to hide behind


@dataclass(frozen=True)
class Context:
    """The input of the causes for one step: its window, when it computed, when the host ran operators, where each phase
    ends, the device.
    """

    start: int
    end: int
    computing: Intervals
    host_busy: Intervals
    phase_ends: dict[str, int]
    on_gpu: bool = False


def attribute(exposed: Intervals, collectives: Sequence[Collective]) -> list[Intervals]:
    """For each collective the exposed instants that are its own; together they are `exposed`, and no two share an
    instant.
    """
    shares = [EMPTY] * len(collectives)
    left = exposed
    by_end = sorted(range(len(collectives)), key=lambda index: (collectives[index].end, collectives[index].issue))
    for of_host in (True, False):
        for index in by_end:
            mine, left = _take(
                left, [(piece.start, piece.end) for piece in collectives[index].pieces if bool(piece.role) is of_host]
            )
            if len(mine):
                shares[index] = union(shares[index], mine)
    return shares


def _take(left: Intervals, wanted: list[tuple[int, int]]) -> tuple[Intervals, Intervals]:
    """The wanted part of `left`, and the rest; only the part of `left` around the wanted is looked at."""
    if not len(left) or not wanted:
        return EMPTY, left
    first = np.searchsorted(left[:, 1], min(start for start, _ in wanted), side="right")
    last = np.searchsorted(left[:, 0], max(end for _, end in wanted), side="left")
    if first >= last:
        return EMPTY, left
    near = left[first:last]
    return intersect(near, wanted), np.concatenate([left[:first], subtract(near, wanted), left[last:]])


def causes_of(collectives: Sequence[Collective], shares: Sequence[Intervals], context: Context) -> list[str]:
    """The cause of each collective's share of the exposed instants."""
    ways = np.array(
        [(way.start, way.end) if (way := each.transport) else (0, 0) for each in collectives], dtype=np.int64
    ).reshape(-1, 2)
    return [
        _cause(each, share, np.delete(ways, index, axis=0), context)
        for index, (each, share) in enumerate(zip(collectives, shares))
    ]


def _cause(collective: Collective, mine: Intervals, others: Intervals, context: Context) -> str:
    exposed = length(mine)
    if not exposed:
        return "hidden"
    if not collective.issued:
        return "unknown"
    if collective.by_host:
        idle = exposed - length(intersect(mine, clip(context.host_busy, int(mine[0, 0]), int(mine[-1, 1]))))
        return "waiting_for_peer" if 2 * idle >= exposed else "nothing_to_hide_behind"
    queued = length(np.clip(others, collective.issue, max(collective.issue, collective.start)))
    if 2 * queued >= exposed:
        return "link_busy"
    if collective.emulated and 2 * (collective.start - collective.issue - queued) >= exposed:
        return "waiting_for_peer"
    return "late_start" if _late(collective, exposed, context) else "nothing_to_hide_behind"


def _late(collective: Collective, exposed: int, context: Context) -> bool:
    """Whether computing was there that an earlier start, or a call that does not hold the host, could have used."""
    before = length(clip(context.computing, context.start, collective.issue))
    if collective.kind == "all_gather":
        at_once = (
            collective.start - collective.issue < _AT_ONCE_NS if context.on_gpu else collective.own or collective.held
        )
        return at_once and before > _ENOUGH * exposed
    after = length(clip(context.computing, collective.end, context.phase_ends.get(collective.phase, context.end)))
    return not context.on_gpu and collective.held and after > _ENOUGH * exposed
