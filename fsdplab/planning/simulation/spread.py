"""Spreads the seconds by which collectives slow compute down over the compute that they run beside.

A plan knows these seconds for the passes as a whole (`step_time.slowed_s`), so a rank computes them behind its last
reduction. In the log they belong where compute and collectives go on at once: all of that takes longer by one factor,
what follows moves, and the step, its compute and what is exposed stay as long as they were. Collectives take as long
as before: one that begins beside compute begins later in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from fsdplab.planning.program import SLOWED

from .ranks import Collective, RankLog, Span

Interval = tuple[float, float]


def spread_slowed(log: RankLog) -> RankLog:
    """Return the log of ranks that are all alike, its slowed compute where it is slowed."""
    slowed = [span for span in log.computed if span.kind == SLOWED]
    if not slowed:
        return log
    (behind,) = slowed
    computing = joined((span.start, span.end) for span in log.computed if span.end <= behind.start)
    sending = joined((collective.begun or 0.0, collective.ended or 0.0) for collective in log.collectives)
    beside = both(computing, sending) or computing
    moved = _longer_by(behind, beside)
    return replace(
        log,
        computed=[_span(span, moved) for span in log.computed if span is not behind],
        waited=[_span(span, moved) for span in log.waited],
        collectives=[_collective(collective, moved, computing) for collective in log.collectives],
        life=[(unit, state, phase, moved(time)) for unit, state, phase, time in log.life],
        passed=[moved(time) for time in log.passed],
    )


def _longer_by(behind: Span, beside: Sequence[Interval]) -> Callable[[float], float]:
    """The new time of an old one: later by the part of the slowed compute that has gone on by then."""
    starts = [start for start, _ in beside]
    before = [0.0, *accumulate(end - start for start, end in beside)]  # seconds of the intervals before each
    factor = (behind.end - behind.start) / before[-1]

    def moved(time: float) -> float:
        if time >= behind.end:
            return time  # it came behind the slowed compute already
        begun = bisect_right(starts, time)
        gone = before[begun]
        if begun:
            end = beside[begun - 1][1]
            if time < end:  # the last one goes on
                gone -= end - time
        return time + factor * gone

    return moved


def _span(span: Span, moved: Callable[[float], float]) -> Span:
    return replace(span, start=moved(span.start), end=moved(span.end))


def _collective(collective: Collective, moved: Callable[[float], float], computing: Sequence[Interval]) -> Collective:
    """A collective at its new times, no longer than before where compute leaves it room to begin later."""
    old_begun, old_ended = collective.begun, collective.ended
    assert old_begun is not None and old_ended is not None, "a step that is over has no collective under way"
    computes_until = old_begun
    for start, end in computing:
        if start <= old_begun < end:
            computes_until = end
            break
    ended = moved(old_ended)
    as_long_as_before = ended - (old_ended - old_begun)
    begun = max(moved(old_begun), min(as_long_as_before, moved(computes_until)))
    started = {}
    for rank, time in collective.started.items():
        # its turn comes when it begins, unless it waited for a peer
        started[rank] = begun if time == old_begun else moved(time)
    issued = {rank: moved(time) for rank, time in collective.issued.items()}
    return replace(collective, issued=issued, started=started, begun=begun, ended=ended)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order and apart.

    >>> joined([(2.0, 3.0), (0.0, 1.0), (2.5, 4.0), (1.0, 1.0)])
    [(0.0, 1.0), (2.0, 4.0)]
    """
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def both(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions of intervals.

    >>> both([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0)])
    [(1.0, 2.0), (3.0, 4.0)]
    """
    common: list[Interval] = []
    at = there = 0
    while at < len(one) and there < len(other):
        (one_start, one_end), (other_start, other_end) = one[at], other[there]
        start, end = max(one_start, other_start), min(one_end, other_end)
        if end > start:
            common.append((start, end))
        if one_end < other_end:  # the one that ends first meets nothing more
            at += 1
        else:
            there += 1
    return common
