"""One step of the lab's engine in bytes: the engine's own order (`engine/core/step.py`), around what a model computes.

Two steps are played. The first makes what lives on: the buffers of the transports, the order of the units. The second
is the one whose memory counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.planning.program import Sharing, begin_micro_batch, units_over

from .held import Book, Bytes, Held
from .unit_buffers import MASTER, Stored, Transports, UnitBuffers

_ENOUGH = 3  # micro-batches: those between the first and the last are alike


@dataclass(frozen=True, kw_only=True)
class StepChoices:
    """What a run of the lab's engine chooses, whatever it trains, as far as its memory goes.
    `itemsize`: bytes of an element that computes, where parameters at rest have 4.
    """

    strategy: str
    shards: int
    replicas: int
    itemsize: int = MASTER
    micro_batches: int = 1
    prefetch: int = 1
    offloads: bool = False
    foreach: bool = False
    state_bytes: float = 2 * MASTER  # of optimizer state an element: AdamW's two moments
    step_buffers: int = 0  # bytes of communication buffers at the fullest moment of the optimizer's step
    step_scratch: int = 0  # and of other tensors
    on_card: bool = False  # whether a GPU's allocator makes what collectives need, instead of shared memory


class Computing(Protocol):
    """A model in units, the root first; bytes of a micro-batch and of the model's buffers; `play` runs a forward and a
    backward, and calls `order` where the engine's hooks would.
    """

    @property
    def units(self) -> Mapping[str, Sequence[Stored]]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def buffers(self) -> int: ...
    def play(self, order: StepOrder, units: Mapping[str, UnitBuffers], book: Book) -> None: ...


def peak_of_step(run: StepChoices, model: Computing) -> Bytes:
    """Bytes by category at the peak of the second step, on rank 0, whose shards are largest."""
    return _Play(run, model).moments()[1]


def rest_and_peak(run: StepChoices, model: Computing) -> tuple[Bytes, Bytes]:
    """Bytes by category between two steps, with the batches of the next, and at the peak."""
    return _Play(run, model).moments()


class _Play:
    """The units, the model and what is alive."""

    def __init__(self, run: StepChoices, model: Computing) -> None:
        self.run, self.model, self.book = run, model, Book()
        choices = dict(casts=run.itemsize != MASTER, offloads=run.offloads, streams=run.on_card)
        self.sharing = Sharing.of(run.strategy, run.shards, run.replicas, **choices)
        self.transports = None if run.on_card else Transports()
        self.units = {
            name: UnitBuffers(name, own, self.sharing, run.shards, run.replicas, self.book, self.transports)
            for name, own in model.units.items()
        }
        self.order = StepOrder(units_over(self.units, self.sharing), Schedule(run.prefetch))
        for unit in self.units.values():
            unit.place_at_rest()

    def moments(self) -> tuple[Bytes, Bytes]:
        # the batches of a step are read before it begins
        alive = [self.book.hold(self.model.nbytes * self.run.micro_batches + self.model.buffers, "other")]
        self._step()
        alive.append(self._optimizer_state())
        if self.transports is not None:
            alive.append(self.book.hold(self.transports.bytes_of_steps(), "communication_buffers"))
        self.book.begin()
        rests = dict(self.book.peak)
        self._step()
        del alive
        return rests, self.book.peak

    def _optimizer_state(self) -> Held:
        """That of every element that this rank updates, and a count of steps a parameter."""
        own = sum(unit.own_elements for unit in self.units.values())
        counts = sum(unit.updated for unit in self.units.values())
        nbytes = 0 if self.run.offloads else round(self.run.state_bytes * own) + 4 * counts
        return self.book.hold(nbytes, "optimizer_state")

    def _step(self) -> None:
        count = min(self.run.micro_batches, _ENOUGH)
        for number in range(count):
            begin_micro_batch(self.order, self.sharing, last=number == count - 1)
            self.model.play(self.order, self.units, self.book)
        if self.run.foreach:
            self.book.hold(MASTER * sum(unit.own_elements for unit in self.units.values()), "other")
        packed = self.book.hold(self.run.step_buffers, "communication_buffers")
        self.book.hold(self.run.step_scratch, "other")
        del packed
        for unit in self.units.values():
            unit.step()
