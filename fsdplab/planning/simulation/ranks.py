"""Ranks in simulated time: which are alike, the operations that each walks through, and the network between them.

The operations are those that the engine's own order gives (`planning/program.py`). On the streams of a GPU an
all-reduce over replicas is issued behind its reduce-scatter; the host issues it later.

Two ranks are alike when they compute at one pace and their shard groups and replica groups hold the same kinds of
ranks: then every collective of theirs begins and ends at the same instants. The kinds are found by refining a first
guess, the paces, until no group separates ranks of one kind (as automata are minimised: Moore 1956). Without a slow
rank there is one kind, whatever the number of ranks.

A communicator carries its collectives one after the other, in the order in which they were issued. Each begins when
its last rank has issued it. Its latency passes first; then its bytes travel, at an equal part of the link's bandwidth
where the axis's other communicator sends too. (The emulated link gives both queues the full bandwidth.)
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdplab.planning.program import (
    OPTIMIZER,
    SLOWED,
    Compute,
    Issue,
    Move,
    Operation,
    Program,
    StepWork,
    Transfer,
    UnitWork,
    Wait,
)


@dataclass(frozen=True)
class RankClass:
    """Ranks that are alike: the first of them, how many, their pace (1.5: compute takes 1.5 times as long), and the
    classes of their shard group and of their replica group, by index.
    """

    first: int
    count: int
    pace: float
    groups: Mapping[str, tuple[int, ...]]


def rank_classes(shards: int, replicas: int, paces: Mapping[int, float]) -> list[RankClass]:
    """Return the classes of `shards` x `replicas` ranks in the order of their first ranks; `paces` of the slow ones.

    >>> [alike.count for alike in rank_classes(8, 1250, {})]
    [10000]
    >>> [(alike.first, alike.count) for alike in rank_classes(4, 2, {5: 1.5})]
    [(0, 3), (1, 1), (4, 3), (5, 1)]
    """
    ranks = shards * replicas
    if not paces:
        return [RankClass(0, ranks, 1.0, {"shard": (0,), "replicate": (0,)})]
    colours = _numbered([paces.get(rank, 1.0) for rank in range(ranks)])
    while True:
        # the mesh has a shard group in each row, and a replica group in each column
        rows = [_colours_in(colours[first : first + shards]) for first in range(0, ranks, shards)]
        columns = [_colours_in(colours[place::shards]) for place in range(shards)]
        finer = _numbered([(colours[rank], rows[rank // shards], columns[rank % shards]) for rank in range(ranks)])
        if max(finer) == max(colours):  # no group separates ranks of one colour any more
            break
        colours = finer
    classes = []
    for colour, count in sorted(Counter(colours).items()):
        first = colours.index(colour)
        groups = {"shard": rows[first // shards], "replicate": columns[first % shards]}
        classes.append(RankClass(first, count, paces.get(first, 1.0), groups))
    return classes


def _colours_in(group: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(group)))


def _numbered(keys: list[Hashable]) -> list[int]:
    """Equal keys get equal numbers, in order of first appearance: `["b", "a", "b"]` -> `[0, 1, 0]`."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


# ---- the network


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
        """Take from each collective on the link what has passed of it since the last event."""
        if self._left:
            passed = (self._clock.now - self._since) / len(self._left)
            for collective in self._left:
                self._left[collective] -= passed
        self._since = self._clock.now

    def _plan(self) -> None:
        """Set the event of the next end; one set earlier is void, because the sharing has changed."""
        self._version += 1
        if not self._left:
            return
        version = self._version
        next_end = min(self._left, key=self._left.__getitem__)
        wait = max(0.0, self._left[next_end]) * len(self._left)
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
        collective = self._queue[place]
        assert (collective.unit, collective.phase) == (unit, phase), (collective, unit, phase)
        collective.issued[member] = self._clock.now
        if place == self._first:
            collective.started[member] = self._clock.now
            self._try(collective)
        return collective

    def _try(self, collective: Collective) -> None:
        """Begin it, if all have issued it: its latency passes, then its bytes are on the link."""
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
        """Return the queue of a kind of collective along an axis, for the group of these classes.

        Axes that pass one link share it where their groups have the same classes.
        """
        axis = transfer.axis
        queue = int(self._number == 2 and transfer.kind != "all_gather" and axis == "shard")
        link = self._links.setdefault((transfer.link or axis, group), Link(self._clock))
        key = (axis, group, queue)
        if key not in self._made:
            self._made[key] = Communicator(self._clock, link, group)
        return self._made[key]


# ---- one rank


Pauses = Iterator["float | Collective"]  # seconds to compute, or a collective to wait for


@dataclass(frozen=True)
class Span:
    """Compute of a unit in a phase, or a wait for its collective (`kind`); SLOWED is compute of no unit."""

    unit: str
    phase: str
    kind: str
    start: float
    end: float


@dataclass
class RankLog:
    """All that one class of ranks did; times in seconds since the step began."""

    rank: RankClass
    computed: list[Span] = field(default_factory=list)
    waited: list[Span] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    life: list[tuple[str, str, str, float]] = field(default_factory=list)  # unit, state, phase, time
    passed: list[float] = field(default_factory=list)  # when each operation of the last micro-batch was over
    end: float = 0.0


class Rank:
    """Walks through the `program` of a step of `work`, and notes what happens in its log."""

    def __init__(
        self, index: int, rank: RankClass, work: StepWork, program: Program, clock: Clock, network: Network
    ) -> None:
        self.log = RankLog(rank)
        self._index, self._work, self._clock, self._network = index, work, clock, network
        self._units = {unit.name: unit for unit in work.units}
        self._pauses = self._step(program)

    def go_on(self) -> None:
        """Run until the next pause, and set when to come back."""
        for pause in self._pauses:
            if isinstance(pause, float):
                self._clock.at(self._clock.now + pause, self.go_on)
                return
            if pause.ended is None:
                pause.when_ended(self.go_on)
                return
        self.log.end = self._clock.now

    def _step(self, program: Program) -> Pauses:
        for operations in program:
            yield from self._micro_batch(operations)
        yield from self._compute("", "backward", self._work.slowed_s, SLOWED)
        yield from self._run(self._work.optimizer, OPTIMIZER)

    def _micro_batch(self, operations: Sequence[Operation]) -> Pauses:
        issued: dict[int, Collective] = {}
        behind: dict[int, int] = {}  # the number of a collective -> of that after which it begins
        for operation in operations:
            if isinstance(operation, Issue) and operation.after is not None:
                behind[operation.number] = operation.after
        last = -1  # the collective that was issued last, if nothing was computed since
        self.log.passed = []
        for operation in operations:
            if isinstance(operation, Issue):
                last = operation.number
                self._begin(operation, issued)
            elif isinstance(operation, Wait):
                number = operation.number
                if number not in issued:  # it begins behind another one, which is under way
                    yield from self._wait(issued[behind[number]])
                if number == last and issued[number].transfer.kind == "all_gather":
                    issued[number].on_demand = True
                yield from self._wait(issued[number])
            elif isinstance(operation, Compute):
                last = -1
                if operation.phase in ("forward", "backward"):
                    yield from self._run(self._units[operation.unit], operation.phase)
            elif isinstance(operation, Move):
                self.log.life.append((operation.unit, operation.after, operation.phase, self._clock.now))
            self.log.passed.append(self._clock.now)

    def _begin(self, issue: Issue, issued: dict[int, Collective]) -> None:
        """Issue it now, or when that has ended after which it begins."""

        def begin() -> None:
            unit = self._units[issue.unit]
            issued[issue.number] = self._issue(unit, issue.phase, unit.sent[issue.kind])

        if issue.after is None or issued[issue.after].ended is not None:
            begin()
        else:
            issued[issue.after].when_ended(begin)

    def _run(self, unit: UnitWork, phase: str) -> Pauses:
        """Compute in equal parts, each behind one of the collectives that stand in its way."""
        seconds, inline = unit.products(phase)
        for transfer in inline:
            yield from self._wait(self._issue(unit, phase, transfer))
            yield from self._compute(unit.name, phase, seconds / len(inline))
        if not inline:
            yield from self._compute(unit.name, phase, seconds)

    def _compute(self, unit: str, phase: str, seconds: float, kind: str = "") -> Pauses:
        start = self._clock.now
        taken_s = seconds * self.log.rank.pace
        if taken_s:
            yield float(taken_s)
            self.log.computed.append(Span(unit, phase, kind, start, self._clock.now))

    def _wait(self, collective: Collective) -> Pauses:
        start = self._clock.now
        yield collective
        if self._clock.now > start:
            kind = collective.transfer.kind
            self.log.waited.append(Span(collective.unit, collective.phase, kind, start, self._clock.now))

    def _issue(self, unit: UnitWork, phase: str, transfer: Transfer) -> Collective:
        """Tensor- and context-parallel groups run at the pace of their slowest rank, so they wait for nobody."""
        group = self.log.rank.groups.get(transfer.axis, (self._index,))
        communicator = self._network.communicator(transfer, group)
        collective = communicator.issue(self._index, unit.name, phase, transfer)
        self.log.collectives.append(collective)
        return collective
