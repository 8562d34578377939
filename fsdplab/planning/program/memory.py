"""The memory of a unit in a plan: the engine's `Unit` asks it what it asks tensors for in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.engine.core.step import StepOrder
from fsdplab.engine.core.unit import Memory, Unit


@dataclass(frozen=True)
class Sharing:
    """What a strategy cuts, and whether it reshards all units but the root after their forward; whether more than one
    rank shards, and more than one replicates. `casts`: the dtype that computes is not that at rest; `offloads`: shards
    at rest leave the memory that computes; `streams`: CUDA, where one stream waits for the other and the host for none.
    """

    cuts: tuple[str, ...]
    reshards_after_forward: bool
    shards: bool
    replicates: bool
    casts: bool = False
    offloads: bool = False
    streams: bool = False

    @classmethod
    def of(cls, strategy: str, shards: int, replicas: int, **choices: bool) -> Sharing:
        """A strategy by its name, over `shards` ranks with so many `replicas`."""
        row = STRATEGY_ROWS[strategy]
        return cls(row.cuts, row.reshards_after_forward, shards > 1, replicas > 1, **choices)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients stay unsharded until the last backward of a step."""
        return "gradients" not in self.cuts

    @property
    def aliased(self) -> bool:
        """Whether shards at rest are views of the unsharded parameters."""
        needs_no_gather = "parameters" not in self.cuts or not self.shards and not self.offloads
        return needs_no_gather and not self.casts

    @property
    def keeps_whole(self) -> bool:
        """Whether the unsharded parameters are never freed."""
        return self.aliased or "parameters" not in self.cuts and self.shards


class PlannedMemory(Memory):
    """The memory of a unit in a plan; what follows from the strategy is answered here, subclasses count."""

    keeps_whole = keeps_gradients = hides_all_reduce = False

    def __init__(self, name: str, sharing: Sharing) -> None:
        self.name, self.sharing = name, sharing
        self.params = ("all",)
        self.keeps_whole = sharing.keeps_whole
        self.keeps_gradients = sharing.reduces_once and sharing.shards
        self.hides_all_reduce = sharing.shards and sharing.replicates and not sharing.streams
        self.written = True  # whether the optimizer has stepped since the unit was unsharded

    def changed(self) -> bool:
        return self.written

    def show_unsharded(self) -> None:
        self.written = False


def units_over(memories: Mapping[str, PlannedMemory], sharing: Sharing) -> dict[str, Unit]:
    """The engine's units over planned memories; the first is the root, which keeps its parameters after its forward."""
    root = next(iter(memories))
    reshards = sharing.reshards_after_forward
    return {name: Unit(memory, reshards and name != root) for name, memory in memories.items()}


def begin_micro_batch(order: StepOrder, sharing: Sharing, last: bool) -> None:
    """Set what a training loop sets before a micro-batch."""
    order.root.is_last_backward = last
    for unit in order.units.values():
        unit.sync = last or not sharing.reduces_once
