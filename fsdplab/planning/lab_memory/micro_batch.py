"""What one micro-batch of a model computes, as a recording: storages that begin and end, between the calls of hooks.

It is made once from the plain model (sessions/micro_batch.py) and holds for every strategy: sharding changes what
stands between the calls, and not what a unit computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdplab.engine.core.step import StepOrder

from .held import Book, Held
from .unit_buffers import Stored, UnitBuffers


class Allocate(NamedTuple):
    """A storage of `nbytes` begins. `category`: activations, or unsharded_gradients for what a parameter gets."""

    storage: int
    nbytes: int
    category: str


class Free(NamedTuple):
    """The last tensor of a storage is gone; where that is a gradient, its unit still holds it."""

    storage: int


class Gradient(NamedTuple):
    """Autograd leaves the gradient of `unit`'s parameter in a storage."""

    unit: str
    parameter: str
    storage: int


class Call(NamedTuple):
    """A hook calls a method of `StepOrder`, for a unit or ("") for all; after a forward it says whether a backward will
    come, and whether nothing will announce that.
    """

    method: str
    unit: str
    will_backward: bool = True
    hidden: bool = False


Event = Allocate | Free | Gradient | Call


@dataclass(frozen=True)
class MicroBatch:
    """A recording. `units`: their parameters, the root first; `nbytes`: of the batch; `buffers`: of the model's.
    `flops` and `moved`: (unit, phase) -> floating-point operations of products, and bytes that other operators read and
    write; those of a second forward are in the backward's.
    """

    units: Mapping[str, tuple[Stored, ...]]
    events: Sequence[Event]
    nbytes: int
    buffers: int
    flops: Mapping[tuple[str, str], int] = field(default_factory=dict)
    moved: Mapping[tuple[str, str], int] = field(default_factory=dict)
    real: bool = False  # whether it was recorded on real tensors instead of fake ones

    def play(self, order: StepOrder, units: Mapping[str, UnitBuffers], book: Book) -> None:
        """Let `order` do what it does around these computations, and `book` count both."""
        alive: dict[int, Held] = {}
        for event in self.events:
            if isinstance(event, Allocate):
                alive[event.storage] = book.hold(event.nbytes, event.category)
            elif isinstance(event, Free):
                alive.pop(event.storage, None)
            elif isinstance(event, Gradient):
                units[event.unit].give_gradient(event.parameter, alive[event.storage])
            else:
                self._call(order, event)

    def _call(self, order: StepOrder, call: Call) -> None:
        if call.method in ("begin_backward", "end_backward"):
            getattr(order, call.method)()
            return
        unit = order.units[call.unit]
        if call.method == "after_forward":
            unit.hidden = call.hidden
            order.after_forward(unit, call.will_backward)
        elif call.method == "unshard_again":
            unit.start_unshard("backward")
            unit.finish_unshard("backward")
        else:
            getattr(order, call.method)(unit)
