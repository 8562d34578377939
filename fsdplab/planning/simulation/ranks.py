"""One rank's step in simulated time: the operations that the engine's own order gives (`planning/program/record.py`).

On the streams of a GPU an all-reduce over replicas is issued behind its reduce-scatter; the host issues it later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from .classes import RankClass
from .network import Clock, Collective, Network

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
        last = -1  # the collective that was issued last, if nothing was computed since
        self.log.passed = []
        for each in operations:
            if isinstance(each, Issue):
                last = each.number
                self._begin(each, issued)
            elif isinstance(each, Wait):
                issued[each.number].on_demand |= (
                    each.number == last and issued[each.number].transfer.kind == "all_gather"
                )
                yield from self._wait(issued[each.number])
            elif isinstance(each, Compute):
                last = -1
                if each.phase in ("forward", "backward"):
                    yield from self._run(self._units[each.unit], each.phase)
            elif isinstance(each, Move):
                self.log.life.append((each.unit, each.after, each.phase, self._clock.now))
            self.log.passed.append(self._clock.now)

    def _begin(self, each: Issue, issued: dict[int, Collective]) -> None:
        """Issue it now, or when that has ended after which it begins."""

        def begin() -> None:
            unit = self._units[each.unit]
            issued[each.number] = self._issue(unit, each.phase, unit.sent[each.kind])

        before = None if each.after is None else issued[each.after]
        if before is None or before.ended is not None:
            begin()
        else:
            before.when_ended(begin)

    def _run(self, unit: UnitWork, phase: str) -> Pauses:
        """Compute in equal parts, each behind one of the collectives that stand in its way."""
        seconds, inline = unit.products(phase)
        for transfer in inline:
            yield from self._wait(self._issue(unit, phase, transfer))
            yield from self._compute(unit.name, phase, seconds / len(inline))
        if not inline:
            yield from self._compute(unit.name, phase, seconds)

    def _compute(self, unit: str, phase: str, seconds: float, kind: str = "") -> Pauses:
        start, taken = self._clock.now, seconds * self.log.rank.pace
        if taken:
            yield float(taken)
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
        issued = communicator.issue(self._index, unit.name, phase, transfer)
        self.log.collectives.append(issued)
        return issued
