"""Runs the engine's order of a step over planned units, and writes down what they do.

The decisions are those of the engine's own objects (`StepOrder`, `Unit`); only what they act on is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.schedule import Schedule
from fsdplab.engine.core.step import StepOrder
from fsdplab.engine.core.unit import ReduceOptions

from .memory import PlannedMemory, Sharing, begin_micro_batch, units_over


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
    """A unit's own operators, forward or backward; "begin" is what the root computes before its blocks."""

    unit: str
    phase: str


class Change(NamedTuple):
    """So many more bytes of a category, or fewer."""

    unit: str
    category: str
    nbytes: int


class Move(NamedTuple):
    """A unit's parameters go from one state to another."""

    unit: str
    before: str
    after: str
    phase: str


Operation = Issue | Wait | Compute | Change | Move


@dataclass(frozen=True)
class UnitSizes:
    """Bytes of one unit on one rank: its parameters and gradients unsharded, and the reduced shard of its gradients. No
    bytes mean that it has no parameters, or none that are trained.
    """

    whole: int
    gradients: int
    reduced: int


class RecordedMemory(PlannedMemory):
    """Writes what a unit does into `log`."""

    def __init__(self, name: str, sharing: Sharing, sizes: UnitSizes, log: list[Operation]) -> None:
        super().__init__(name, sharing)
        self._sizes, self._log = sizes, log
        self.params = self.params if sizes.whole else ()
        self._gradients = self._reduced = False

    def _count(self, category: str, nbytes: int) -> None:
        if nbytes:
            self._log.append(Change(self.name, category, nbytes))

    def _issue(self, kind: str, phase: str, after: int | None = None) -> tuple[int, Pending]:
        number = len(self._log)
        self._log.append(Issue(number, self.name, phase, kind, after))
        return number, Pending(lambda: self._log.append(Wait(number)))

    def gather(self, phase: str) -> Pending | None:
        if self.sharing.shards:
            return self._issue("all_gather", phase)[1]
        return None if self.sharing.aliased else Pending(lambda: None)  # a cast, or a copy from the host

    def arrived(self) -> None:
        self._count("gathered_parameters", 0 if self.keeps_whole else self._sizes.whole)

    def free(self) -> None:
        self._count("gathered_parameters", 0 if self.keeps_whole else -self._sizes.whole)

    def collect_gradients(self, keep: bool) -> None:
        if self._sizes.gradients and not self._gradients:
            self._count("whole_gradients", self._sizes.gradients)
            self._gradients = True

    def has_gradients(self, or_zeros: bool) -> bool:
        return self._gradients

    def reduce(self, options: ReduceOptions) -> Iterator[Pending]:
        sharing = self.sharing
        if sharing.shards:
            number, scattered = self._issue("reduce_scatter", "backward")
            behind = sharing.replicates and sharing.streams
            summed = self._issue("all_reduce", "backward", number)[1] if behind else None
            yield scattered
            if sharing.replicates:
                yield summed or self._issue("all_reduce", "backward")[1]
        elif sharing.replicates:
            yield from self._issue("all_reduce", "backward")[1].parts()
        else:
            yield Pending(lambda: None)
        self._count("gradient_slices", 0 if self._reduced else self._sizes.reduced)
        self._reduced = True

    def forget_gradients(self) -> None:
        self._count("whole_gradients", -self._sizes.gradients if self._gradients else 0)
        self._gradients = False

    def moved(self, before: str, after: str, phase: str) -> None:
        self._log.append(Move(self.name, before, after, phase))


def record_step(
    units: Mapping[str, UnitSizes], sharing: Sharing, schedule: Schedule, *, micro_batches: int = 1, in_flight: int = 1
) -> list[list[Operation]]:
    """The operations of each micro-batch of a step that is not the run's first; the first of `units` is the root.

    A micro-batch ends with every collective waited for.

    >>> sizes = {name: UnitSizes(whole=8, gradients=8, reduced=4) for name in ("root", "block")}
    >>> (operations,) = record_step(sizes, Sharing.of("shard_grad_op", 2, 1), Schedule(1))
    >>> [operation.unit for operation in operations if isinstance(operation, Issue) and operation.kind == "all_gather"]
    ['root', 'block']
    """
    log: list[Operation] = []
    memories = {name: RecordedMemory(name, sharing, sizes, log) for name, sizes in units.items()}
    order = StepOrder(units_over(memories, sharing), schedule)
    for unit in order.units.values():
        unit.in_flight = in_flight
    schedule.begin()
    for name in units:  # an earlier step has taught it the order
        schedule.before_forward(name)
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
    order.end_backward()
