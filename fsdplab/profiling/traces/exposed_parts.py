"""The three parts of exposed time: on the link, copying, waiting for a peer.

Exposed time says what communication costs, its parts say what would help: a faster link or an earlier start, fewer
copies, a rank that comes sooner. An instant at which the host copies for a collective is copying. Else it is on the
link where a transport moves bytes, and waiting for a peer where none does. Over several ranks' traces `with_peers`
(skew) moves what a transport spent before its last rank came from the link to the peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, covered, split, union, within
from fsdplab.profiling.traces.collectives import Collective
from fsdplab.records import PARTS_OF_EXPOSED

# between two operators of a copy the host dispatches the next one; idle for longer, it waits
_DISPATCH_NS = 100_000
_ON_LINK, _COPYING, _WAITING = range(3)


@dataclass(frozen=True, slots=True)
class ExposedParts:
    """How much of one collective's exposed time is in each of the three, in ns, and the instants on the link."""

    on_link: Sequence[Sequence[int]]
    on_link_ns: int
    copying_ns: int
    waiting_ns: int

    @property
    def exposed_ns(self) -> int:
        """All three."""
        return self.on_link_ns + self.copying_ns + self.waiting_ns

    def lengths(self) -> dict[str, int]:
        """Nanoseconds of each part, by the columns of a record's tables."""
        return dict(zip(PARTS_OF_EXPOSED, (self.on_link_ns, self.copying_ns, self.waiting_ns)))


def exposed_parts(
    collectives: Sequence[Collective], shares: Sequence[Intervals], host_busy: Intervals
) -> list[ExposedParts]:
    """The parts of each collective's share of the exposed instants, of which no two share any; `host_busy`: when the
    host ran operators, sorted and disjoint.
    """
    if not collectives:
        return []
    spans = np.concatenate([EMPTY, *shares])
    owner: np.ndarray = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    spans, owner, part = _in_parts(spans, owner, collectives, host_busy)
    sums: np.ndarray = np.zeros((3, len(collectives)), dtype=np.int64)
    np.add.at(sums, (part, owner), spans[:, 1] - spans[:, 0])
    moved, whose = _joined(spans[part == _ON_LINK], owner[part == _ON_LINK])
    bounds: list[int] = np.asarray(np.searchsorted(whose, np.arange(len(collectives) + 1))).tolist()
    pairs = moved.tolist()
    return [
        ExposedParts(pairs[first:last], *lengths)
        for first, last, lengths in zip(bounds, bounds[1:], zip(*sums.tolist()))
    ]


def summed(parts: Sequence[ExposedParts]) -> dict[str, int]:
    """The lengths of several collectives' parts."""
    sums = (sum(getattr(each, name) for each in parts) for name in PARTS_OF_EXPOSED)
    return dict(zip(PARTS_OF_EXPOSED, sums))


def _in_parts(
    spans: Intervals, owner: np.ndarray, collectives: Sequence[Collective], host_busy: Intervals
) -> tuple[Intervals, np.ndarray, np.ndarray]:
    """Shares cut so finely that each piece is in one part: the pieces in order of owner and time, their owners and
    parts.
    """
    copies, asleep = _copies(collectives), _asleep(collectives)
    if not len(copies.owner) and not len(asleep.owner):  # kernels: all that they expose is on the link
        return spans, owner, np.full(len(owner), _ON_LINK)
    moving = union(*([span] for each in collectives if (span := _transport(each)) is not None))
    host_busy = within(host_busy, int(spans[:, 0].min(initial=0)), int(spans[:, 1].max(initial=0)))
    cuts = np.concatenate([each.ravel() for each in (host_busy, moving, copies.spans, asleep.spans)])
    spans, owner = _cut(spans, owner, cuts)
    copying = copies.hold(spans, owner)
    idle = np.flatnonzero(copying & ~covered(host_busy, spans[:, 0]))
    copying[idle[_long(spans[idle], owner[idle])]] = False
    moves = covered(moving, spans[:, 0]) | asleep.hold(spans, owner)
    return spans, owner, np.where(copying, _COPYING, np.where(moves, _ON_LINK, _WAITING))


@dataclass(frozen=True)
class _Owned:
    """Intervals of several collectives, which may overlap, and the index of the one that each is of."""

    spans: Intervals
    owner: np.ndarray

    def hold(self, pieces: Intervals, owner: np.ndarray) -> np.ndarray:
        """For each piece whether an interval of its own collective holds its start."""
        if not len(self.owner):
            return np.zeros(len(pieces), dtype=bool)
        edges = np.unique(np.concatenate([self.spans.ravel(), pieces[:, 0]]))  # places instead of times: no overflow
        far = len(edges) + 1  # from one collective's places to the next one's
        mine = np.searchsorted(edges, self.spans) + far * self.owner[:, None]
        return covered(mine, np.searchsorted(edges, pieces[:, 0]) + far * owner)


def _copies(collectives: Sequence[Collective]) -> _Owned:
    """When the host copied for each."""
    found = [
        (piece.start, piece.end, index)
        for index, each in enumerate(collectives)
        if each.by_host or len(each.pieces) > 1 or each.transport is None
        for piece in each.pieces
        if piece.role in ("copy-in", "copy-out") or each.by_host and not piece.role
    ]
    return _owned(found)


def _asleep(collectives: Sequence[Collective]) -> _Owned:
    """When the host still slept though its bytes had come."""
    found = []
    for index, each in enumerate(collectives):
        if not each.by_host and each.transport is not None and len(each.pieces) > 1:
            until = max(piece.end for piece in each.pieces if piece.role in ("", "blocked"))
            if until > each.transport.end:
                found.append((each.transport.end, until, index))
    return _owned(found)


def _owned(found: Sequence[tuple[int, int, int]]) -> _Owned:
    numbers = np.array(found, dtype=np.int64).reshape(-1, 3)
    return _Owned(numbers[:, :2], numbers[:, 2])


def _transport(each: Collective) -> tuple[int, int] | None:
    """When the collective's bytes were on the link; None where the host itself copies them."""
    way = each.transport
    return None if way is None or each.by_host else (way.start, way.end)


def _cut(spans: Intervals, owner: np.ndarray, cuts: np.ndarray) -> tuple[Intervals, np.ndarray]:
    """Disjoint pieces, cut at the given instants, with their owners, in order of owner and time."""
    order = np.argsort(spans[:, 0], kind="stable")
    spans, owner = spans[order], owner[order]
    pieces = split(spans, np.concatenate([cuts, spans[:, 0]]))  # joins touching pieces of two owners, cuts them again
    owner = owner[np.searchsorted(spans[:, 0], pieces[:, 0], side="right") - 1]
    order = np.argsort(owner, kind="stable")
    return pieces[order], owner[order]


def _begins(spans: Intervals, owner: np.ndarray) -> np.ndarray:
    """Which pieces touch none of the same owner before them; they are in order of owner and time."""
    first: np.ndarray = np.ones(len(owner), dtype=bool)
    first[1:] = (owner[1:] != owner[:-1]) | (spans[1:, 0] != spans[:-1, 1])
    return first


def _joined(spans: Intervals, owner: np.ndarray) -> tuple[Intervals, np.ndarray]:
    """Touching pieces of one owner made one."""
    first = np.flatnonzero(_begins(spans, owner))
    last = np.append(first[1:], len(owner)) - 1 if len(first) else first
    return np.stack([spans[first, 0], spans[last, 1]], axis=1), owner[first]


def _long(spans: Intervals, owner: np.ndarray) -> np.ndarray:
    """Which pieces are in a run of touching ones that is longer than dispatching the next operator takes."""
    run = np.cumsum(_begins(spans, owner)) - 1
    lengths: np.ndarray = np.zeros(run[-1] + 1 if len(run) else 0, dtype=np.int64)
    np.add.at(lengths, run, spans[:, 1] - spans[:, 0])
    return lengths[run] >= _DISPATCH_NS
