"""One step of the lab's engine in bytes: the engine's own order (`engine/core/step.py`), around what a model computes.

Two steps are played. The first makes what lives on: the buffers of the transports, the order of the units. The second
is the one whose memory counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.planning.program import Sharing, begin_micro_batch, planned_order

from .held import Book, Bytes
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
    return rest_and_peak(run, model)[1]


def rest_and_peak(run: StepChoices, model: Computing) -> tuple[Bytes, Bytes]:
    """Bytes by category between two steps, with the batches of the next, and at the peak."""
    book, transports = Book(), None if run.on_card else Transports()
    choices = dict(casts=run.itemsize != MASTER, offloads=run.offloads, streams=run.on_card)
    sharing = Sharing.of(run.strategy, run.shards, run.replicas, **choices)
    units = {
        name: UnitBuffers(name, own, sharing, run.shards, run.replicas, book, transports)
        for name, own in model.units.items()
    }
    order, count = planned_order(units, sharing, Schedule(run.prefetch)), min(run.micro_batches, _ENOUGH)
    own = sum(unit.own_elements for unit in units.values())

    def step() -> None:
        for number in range(count):
            begin_micro_batch(order, sharing, last=number == count - 1)
            model.play(order, units, book)
        if run.foreach:
            book.hold(MASTER * own, "other")
        packed = book.hold(run.step_buffers, "communication_buffers")
        book.hold(run.step_scratch, "other")
        del packed
        for unit in units.values():
            unit.step()

    # the batches of a step are read before it begins
    book.change(model.nbytes * run.micro_batches + model.buffers, "other")
    step()
    # the optimizer has the state of every element that this rank updates, and a count of steps a parameter
    state = 0 if run.offloads else round(run.state_bytes * own) + 4 * sum(unit.updated for unit in units.values())
    book.change(state, "optimizer_state")
    if transports is not None:
        book.change(transports.bytes_of_steps(), "communication_buffers")
    book.begin()
    rests = dict(book.peak)
    step()
    return rests, book.peak
