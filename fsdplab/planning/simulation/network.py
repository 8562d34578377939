"""Collectives in simulated time: queues of communicators, and the link that they share.

A communicator carries its collectives one after the other, in the order in which they were issued. Each begins when
its last rank has issued it. Its latency passes first; then its bytes travel, at an equal part of the link's bandwidth
where the axis's other communicator sends too. (The emulated link gives both queues the full bandwidth.)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from fsdplab.planning.program import Transfer

Action = Callable[[], None]


class Clock:
    """Simulated seconds, and what happens when. `operations` counts events: the cost of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.operations = 0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()  # events of one instant happen in the order in which they were set

    def at(self, time: float, action: Action) -> None:
        """Set an event."""
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def run(self) -> None:
        """Let everything happen."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            self.operations += 1
            action()


@dataclass(eq=False)
class Collective:
    """One collective of one group: when each class of ranks issued it, when its turn came there, and its passage."""

    unit: str
    phase: str
    transfer: Transfer
    issued: dict[int, float] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)  # issued, and the communicator free: waits for its peers
    on_demand: bool = False  # a gather that its consumer issued when it needed it
    begun: float | None = None
    ended: float | None = None
    _waiting: list[Action] = field(default_factory=list)

    def when_ended(self, action: Action) -> None:
        """Call back at the end, which has not come."""
        self._waiting.append(action)

    def end(self, now: float) -> None:
        """Done; whoever waits goes on."""
        self.ended = now
        for action in self._waiting:
            action()


class Link:
    """What the communicators of one group share: bytes of `k` collectives at once travel at 1/k of the bandwidth."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: dict[Collective, float] = {}  # seconds on a free link
        self._since = 0.0
        self._version = 0
        self._done: dict[Collective, Action] = {}

    def send(self, collective: Collective, done: Action) -> None:
        """Let the bytes travel, then call `done`."""
        self._advance()
        self._left[collective] = collective.transfer.wire_bytes / collective.transfer.bytes_per_s
        self._done[collective] = done
        self._plan()

    def _advance(self) -> None:
        passed = (self._clock.now - self._since) / len(self._left) if self._left else 0.0
        self._left = {each: left - passed for each, left in self._left.items()}
        self._since = self._clock.now

    def _plan(self) -> None:
        """Set the event of the next end; one set earlier is void, because the sharing has changed."""
        self._version += 1
        if self._left:
            next_end = min(self._left, key=lambda each: self._left[each])
            version, wait = self._version, max(0.0, self._left[next_end]) * len(self._left)
            self._clock.at(self._clock.now + wait, lambda: self._end(next_end, version))

    def _end(self, collective: Collective, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        del self._left[collective]
        self._plan()
        self._done.pop(collective)()


class Communicator:
    """One queue of a group: the n-th collective of each of its classes is the same one."""

    def __init__(self, clock: Clock, link: Link, members: tuple[int, ...]) -> None:
        self._clock, self._link, self._members = clock, link, members
        self._queue: list[Collective] = []
        self._issues = dict.fromkeys(members, 0)
        self._first = 0  # in the queue, of those that have not ended

    def issue(self, member: int, unit: str, phase: str, transfer: Transfer) -> Collective:
        """Join the class's next collective of this queue."""
        place = self._issues[member]
        self._issues[member] += 1
        if place == len(self._queue):
            self._queue.append(Collective(unit, phase, transfer))
        found = self._queue[place]
        assert (found.unit, found.phase) == (unit, phase), (found, unit, phase)
        found.issued[member] = self._clock.now
        if place == self._first:
            found.started[member] = self._clock.now
            self._try(found)
        return found

    def _try(self, collective: Collective) -> None:
        if len(collective.issued) == len(self._members):
            collective.begun = self._clock.now
            after = self._clock.now + collective.transfer.latency_s
            self._clock.at(after, lambda: self._link.send(collective, lambda: self._ended(collective)))

    def _ended(self, collective: Collective) -> None:
        self._first += 1
        if self._first < len(self._queue):
            following = self._queue[self._first]
            following.started = dict.fromkeys(following.issued, self._clock.now)
            self._try(following)
        collective.end(self._clock.now)


class Network:
    """All groups' communicators: by axis and classes of ranks, one for everything or reductions on one of their own."""

    def __init__(self, clock: Clock, communicators: int) -> None:
        self._clock, self._number = clock, communicators
        self._links: dict[tuple[str, tuple[int, ...]], Link] = {}
        self._made: dict[tuple[str, tuple[int, ...], int], Communicator] = {}

    def communicator(self, transfer: Transfer, group: tuple[int, ...]) -> Communicator:
        """The queue of a kind of collective along an axis, for the group of these classes.

        Axes that pass one link share it where their groups have the same classes.
        """
        axis = transfer.axis
        queue = int(self._number == 2 and transfer.kind != "all_gather" and axis == "shard")
        link = self._links.setdefault((transfer.link or axis, group), Link(self._clock))
        key = (axis, group, queue)
        if key not in self._made:
            self._made[key] = Communicator(self._clock, link, group)
        return self._made[key]
