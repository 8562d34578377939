"""Runs the engine's order of a step over planned units, and writes down what they do.

The decisions are those of the engine's own objects (`StepOrder`, `Unit`); only what they act on is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.step import Schedule, StepOrder

from .memory import GRADIENTS, KEPT, PlannedMemory, Sharing, begin_micro_batch, planned_order


class Issue(NamedTuple):
    """A collective is issued. It begins when the one numbered `after` is complete, if there is one."""

    number: int
    unit: str
    phase: str
    kind: str
    after: int | None = None


class Wait(NamedTuple):
    """Whoever computes waits for the collective of this number."""

    number: int


class Compute(NamedTuple):
    """A unit's own operators, forward or backward; "begin" is what the root computes before its blocks, and "end" the
    backward of that.
    """

    unit: str
    phase: str


class Change(NamedTuple):
    """A unit takes one of its buffers (`sign` 1), or gives it back (-1)."""

    unit: str
    buffer: str
    sign: int


class Move(NamedTuple):
    """A unit's parameters go from one state to another."""

    unit: str
    before: str
    after: str
    phase: str


Operation = Issue | Wait | Compute | Change | Move
Program = Sequence[Sequence[Operation]]  # of each micro-batch of a step


class Holds(NamedTuple):
    """Whether a unit has parameters, and whether any of them is trained."""

    parameters: bool = True
    gradients: bool = True


class RecordedMemory(PlannedMemory):
    """Writes what a unit does into `log`."""

    def __init__(self, name: str, sharing: Sharing, holds: Holds, log: list[Operation]) -> None:
        super().__init__(name, sharing)
        self._trained, self._log = holds.gradients, log
        self.params = self.params if holds.parameters else ()
        self._gradients = ""  # the buffer that holds unsharded gradients, if one does

    def change(self, buffer: str, sign: int) -> None:
        self._log.append(Change(self.name, buffer, sign))

    def issue(self, kind: str, phase: str, after: Pending | None = None) -> Pending:
        log, number, before = self._log, len(self._log), None if after is None else after.event
        assert before is None or isinstance(before, int), "it was issued elsewhere"
        log.append(Issue(number, self.name, phase, kind, before))
        return Pending(lambda: log.append(Wait(number)), event=number)

    def collect_gradients(self, keep: bool) -> None:
        """All gradients of a backward are there; they are cast to be kept, or added to earlier ones, one by one."""
        if not self._trained:
            return
        self.take(GRADIENTS)
        if keep or self._gradients:
            self.give_back(GRADIENTS)
            if not self._gradients:
                self.take(KEPT)
        self._gradients = KEPT if keep or self._gradients else GRADIENTS

    def has_gradients(self, or_zeros: bool) -> bool:
        return bool(self._gradients)

    def hand_out(self) -> None:
        super().hand_out()
        if self.keeps_gradients and not self.sharing.offloads:  # the optimizer has them
            self._gradients = ""

    def forget_gradients(self) -> None:
        if self._gradients:
            self.give_back(self._gradients)
            self._gradients = ""

    def moved(self, before: str, after: str, phase: str) -> None:
        self._log.append(Move(self.name, before, after, phase))


@lru_cache(maxsize=64)
def record_step(
    units: tuple[tuple[str, Holds], ...], sharing: Sharing, prefetch: int = 1, micro_batches: int = 1,
    in_flight: int = 1, schedule: Callable[[int], Schedule] = Schedule,
) -> Program:  # fmt: skip
    """The operations of each micro-batch of a step that is not the run's first; the first of `units` is the root.

    A micro-batch ends with every collective waited for. The result is kept, since it depends on no bytes and no
    seconds: plans that differ in these have one program.

    >>> units = ("root", Holds()), ("block", Holds())
    >>> (operations,) = record_step(units, Sharing.of("shard_grad_op", 2, 1))
    >>> [operation.unit for operation in operations if isinstance(operation, Issue) and operation.kind == "all_gather"]
    ['root', 'block']
    """
    log: list[Operation] = []
    ahead, memories = schedule(prefetch), {name: RecordedMemory(name, sharing, holds, log) for name, holds in units}
    order = planned_order(memories, sharing, ahead, in_flight)
    ahead.begin()
    for name, _ in units:  # an earlier step has taught it the order
        ahead.before_forward(name)
    segments = []
    for number in range(micro_batches):
        log.clear()
        begin_micro_batch(order, sharing, last=number == micro_batches - 1)
        _micro_batch(order, log)
        segments.append(list(log))
    return segments


def _micro_batch(order: StepOrder, log: list[Operation]) -> None:
    root, *blocks = order.units.values()
    order.before_forward(root)
    log.append(Compute(root.name, "begin"))
    for unit in blocks:
        order.before_forward(unit)
        log.append(Compute(unit.name, "forward"))
        order.after_forward(unit, will_backward=True)
    log.append(Compute(root.name, "forward"))
    order.after_forward(root, will_backward=True)
    order.begin_backward()
    order.before_backward(root)
    log.append(Compute(root.name, "backward"))
    for unit in reversed(blocks):
        order.before_backward(unit)
        log.append(Compute(unit.name, "backward"))
        order.after_backward(unit)
    log.append(Compute(root.name, "end"))
    order.end_backward()
