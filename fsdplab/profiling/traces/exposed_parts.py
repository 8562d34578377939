"""The three parts of exposed time: on the link, copying, waiting for a peer.

Exposed time says what communication costs, its parts say what would help: a faster link or an earlier start, fewer
copies, a rank that comes sooner. An instant at which the host copies for a collective is copying. Else it is on the
link where a transport moves bytes, and waiting for a peer where none does. Over several ranks' traces `with_peers`
(skew) moves what a transport spent before its last rank came from the link to the peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplab.profiling.intervals import EMPTY, Intervals, intersect, size, subtract, union, within
from fsdplab.profiling.traces.collectives import Collective
from fsdplab.records import PARTS_OF_EXPOSED

# between two operators of a copy the host dispatches the next one; idle for longer, it waits
_DISPATCH_NS = 100_000


@dataclass(frozen=True)
class ExposedParts:
    """One collective's exposed instants, each in one of the three."""

    on_link: Intervals
    copying: Intervals
    waiting: Intervals

    def lengths(self) -> dict[str, int]:
        """Nanoseconds of each part, by the columns of a record's tables."""
        return dict(zip(PARTS_OF_EXPOSED, map(size, (self.on_link, self.copying, self.waiting))))


def exposed_parts(
    collectives: Sequence[Collective], shares: Sequence[Intervals], host_busy: Intervals
) -> list[ExposedParts]:
    """The parts of each collective's share of the exposed instants; `host_busy`: when the host ran operators."""
    moving = union(*([span] for each in collectives if (span := _transport(each)) is not None))
    return [_parts(each, share, moving, host_busy) for each, share in zip(collectives, shares)]


def summed(parts: Sequence[ExposedParts]) -> dict[str, int]:
    """The lengths of several collectives' parts."""
    lengths = [each.lengths() for each in parts]
    return {name: sum(each[name] for each in lengths) for name in PARTS_OF_EXPOSED}


def _transport(each: Collective) -> tuple[int, int] | None:
    """When the collective's bytes were on the link; None where the host itself copies them."""
    way = each.transport
    return None if way is None or each.by_host else (way.start, way.end)


def _parts(each: Collective, share: Intervals, moving: Intervals, host_busy: Intervals) -> ExposedParts:
    if not len(share):
        return ExposedParts(EMPTY, EMPTY, EMPTY)
    if len(each.pieces) == 1 and _transport(each) is not None:  # a kernel: all that it exposes is on the link
        return ExposedParts(share, EMPTY, EMPTY)
    first, last = int(share[0, 0]), int(share[-1, 1])
    moving, host_busy = within(moving, first, last), within(host_busy, first, last)
    at_host = intersect(share, [(piece.start, piece.end) for piece in each.pieces if _copies(piece.role, each.by_host)])
    idle = subtract(at_host, host_busy)
    copying = subtract(at_host, idle[idle[:, 1] - idle[:, 0] >= _DISPATCH_NS])
    rest = subtract(share, copying)
    if not each.by_host and each.transport is not None:  # a host that still sleeps when its bytes have come
        moving = union(moving, [(each.end, max(piece.end for piece in each.pieces if piece.role in ("", "blocked")))])
    return ExposedParts(intersect(rest, moving), copying, subtract(rest, moving))


def _copies(role: str, by_host: bool) -> bool:
    return role in ("copy-in", "copy-out") or by_host and not role
