"""One rank's step as a program: what `engine/core/step.py` does with its units, in simulated time.

The order of gathers is the engine's own `Schedule`. The rest follows that file line by line: a unit is gathered and
waited for, then the next ones are started; a reduction starts behind its unit's backward, once fewer than `in_flight`
others are under way; over replicas its slice is all-reduced when its turn to be waited for comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdplab.engine.core.schedule import Schedule

from .classes import RankClass
from .network import Clock, Collective, Network
from .work import ROOT, StepWork, Transfer, UnitWork

Pauses = Iterator["float | Collective"]  # seconds to compute, or a collective to wait for


@dataclass(frozen=True)
class Span:
    """Compute of a unit in a phase, or a wait for its collective (`kind`)."""

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
    end: float = 0.0


class Rank:
    """Walks through a step of `work`, and notes what happens in its log."""

    def __init__(
        self, index: int, rank: RankClass, work: StepWork, clock: Clock, network: Network, schedule: Schedule
    ) -> None:
        self.log = RankLog(rank)
        self._index, self._work, self._clock, self._network = index, work, clock, network
        self._units = {unit.name: unit for unit in work.units}
        self._schedule = schedule
        self._gathered: dict[str, Collective | None] = {}
        self._reducing: list[tuple[UnitWork, Collective]] = []
        self._replicating: list[Collective] = []
        self._learn()
        self._pauses = self._step()

    def _learn(self) -> None:
        """The step is not the run's first: the schedule knows the forward's order."""
        self._schedule.begin()
        for unit in self._work.units:
            self._schedule.before_forward(unit.name)

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

    # ---- the step

    def _step(self) -> Pauses:
        last = self._work.micro_batches - 1
        for number in range(self._work.micro_batches):
            yield from self._forward()
            yield from self._backward(reduces=number == last or not self._work.reduces_once)
        yield from self._compute("", "optimizer", self._work.optimizer_s)

    def _forward(self) -> Pauses:
        root = self._work.root
        self._schedule.begin()
        yield from self._before_forward(root)
        for unit in self._work.blocks:
            yield from self._before_forward(unit)
            yield from self._run(unit, "forward", unit.forward_s, unit.inline_forward)
            self._schedule.after_forward(unit.name)
            if self._work.drops_after_forward:
                self._reshard(unit, "forward")
        yield from self._run(root, "forward", root.forward_s, root.inline_forward)
        self._schedule.after_forward(root.name)

    def _before_forward(self, unit: UnitWork) -> Pauses:
        yield from self._unshard(unit, "forward")
        for name in self._schedule.before_forward(unit.name):
            self._start_unshard(self._units[name], "forward")

    def _backward(self, reduces: bool) -> Pauses:
        for unit in (self._work.root, *reversed(self._work.blocks)):
            yield from self._unshard(unit, "backward")
            for name in self._schedule.before_backward(unit.name):
                self._start_unshard(self._units[name], "backward")
            yield from self._run(unit, "backward", unit.backward_s, unit.inline_backward)
            if unit.name != ROOT:
                yield from self._after_backward(unit, reduces)
        yield from self._after_backward(self._work.root, reduces)
        yield from self._finish_reductions()

    def _after_backward(self, unit: UnitWork, reduces: bool) -> Pauses:
        if self._work.drops_after_backward:
            self._reshard(unit, "backward")
        if reduces and unit.reduce:
            yield from self._make_room(self._work.in_flight)
            self._reducing.append((unit, self._issue(unit, "backward", unit.reduce)))
        elif reduces and unit.across:  # groups of one rank: nothing to scatter
            self._replicating.append(self._issue(unit, "backward", unit.across))

    def _make_room(self, most: int) -> Pauses:
        while len(self._reducing) >= most:
            unit, oldest = self._reducing.pop(0)
            yield from self._wait(oldest)
            if unit.across:
                issued = self._issue(unit, "backward", unit.across)
                while len(self._replicating) >= most:
                    yield from self._wait(self._replicating.pop(0))
                self._replicating.append(issued)

    def _finish_reductions(self) -> Pauses:
        yield from self._make_room(1)
        while self._replicating:
            yield from self._wait(self._replicating.pop(0))

    # ---- a unit

    def _start_unshard(self, unit: UnitWork, phase: str) -> bool:
        """Whether a gather was needed, and was issued."""
        if unit.name in self._gathered or unit.gather is None:
            return False
        self._gathered[unit.name] = self._issue(unit, phase, unit.gather)
        self._note(unit, "unsharding", phase)
        return True

    def _unshard(self, unit: UnitWork, phase: str) -> Pauses:
        on_demand = self._start_unshard(unit, phase)
        pending = self._gathered.get(unit.name)
        if pending is not None:
            pending.on_demand |= on_demand
            yield from self._wait(pending)
            self._gathered[unit.name] = None
            self._note(unit, "unsharded", phase)

    def _reshard(self, unit: UnitWork, phase: str) -> None:
        if unit.name in self._gathered:
            del self._gathered[unit.name]
            self._note(unit, "sharded", phase)

    def _note(self, unit: UnitWork, state: str, phase: str) -> None:
        self.log.life.append((unit.name, state, phase, self._clock.now))

    def _run(self, unit: UnitWork, phase: str, seconds: float, inline: tuple[Transfer, ...]) -> Pauses:
        """Compute in equal parts, each behind one of the collectives that stand in its way."""
        for transfer in inline:
            yield from self._wait(self._issue(unit, phase, transfer))
            yield from self._compute(unit.name, phase, seconds / len(inline))
        if not inline:
            yield from self._compute(unit.name, phase, seconds)

    def _compute(self, unit: str, phase: str, seconds: float) -> Pauses:
        start, taken = self._clock.now, seconds * self.log.rank.pace
        if taken:
            yield float(taken)
            self.log.computed.append(Span(unit, phase, "", start, self._clock.now))

    def _wait(self, collective: Collective) -> Pauses:
        start = self._clock.now
        yield collective
        if self._clock.now > start:
            kind = collective.transfer.kind
            self.log.waited.append(Span(collective.unit, collective.phase, kind, start, self._clock.now))

    def _issue(self, unit: UnitWork, phase: str, transfer: Transfer) -> Collective:
        """Tensor- and context-parallel groups run at the pace of their slowest rank, so they wait for nobody."""
        group = self.log.rank.groups.get(transfer.axis, (self._index,))
        communicator = self._network.communicator(transfer.axis, group, transfer.kind)
        issued = communicator.issue(self._index, unit.name, phase, transfer)
        self.log.collectives.append(issued)
        return issued
