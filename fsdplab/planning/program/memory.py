"""The memory of a unit in a plan: the engine's `Unit` asks it what it asks tensors for in training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.engine.core.unit import Memory, ReduceOptions, Unit

# the buffers of a unit that come and go in a step
GATHERED = "gathered"  # the unsharded parameters
FEWER = "fewer"  # shards over fewer ranks, kept from the forward to the backward
ARRIVING = "arriving"  # what a gather from those arrives in, before it is copied into the unsharded parameters
GRADIENTS = "unsharded_gradients"  # unsharded, of one backward
KEPT = "kept_gradients"  # unsharded, kept for later micro-batches or for the optimizer
SENT = "reduction"  # the packed gradients that a reduction reads
REDUCED = "sharded_gradients"  # the result of a reduction


@dataclass(frozen=True)
class Sharing:
    """What a strategy cuts, and whether it reshards all units but the root after their forward; whether more than one
    rank shards, and more than one replicates. `casts`: the dtype that computes is not that at rest; `offloads`: shards
    at rest leave the memory that computes; `streams`: CUDA, where one stream waits for the other and the host for none;
    `fewer`: units reshard to fewer ranks after their forward; `no_sync`: the training loop reduces in the last
    micro-batch only.
    """

    cuts: tuple[str, ...]
    reshards_after_forward: bool
    shards: bool
    replicates: bool
    casts: bool = False
    offloads: bool = False
    streams: bool = False
    fewer: bool = False
    no_sync: bool = False

    @classmethod
    def of(cls, strategy: str, shards: int, replicas: int, **choices: bool) -> Sharing:
        """A strategy by its name, over `shards` ranks with so many `replicas`."""
        row = STRATEGY_ROWS[strategy]
        return cls(row.cuts, row.reshards_after_forward, shards > 1, replicas > 1, **choices)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients stay unsharded until the last backward of a step."""
        return "gradients" not in self.cuts or self.no_sync

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
    """The memory of a unit in a plan: which buffers it takes and gives back, and when. Subclasses count them."""

    keeps_whole = keeps_gradients = hides_all_reduce = False

    def __init__(self, name: str, sharing: Sharing) -> None:
        self.name, self.sharing = name, sharing
        self.params = ("all",)
        self.keeps_whole = sharing.keeps_whole
        self.keeps_gradients = "gradients" not in sharing.cuts and sharing.shards
        self.hides_all_reduce = sharing.shards and sharing.replicates and not sharing.streams
        # whether the result of a reduction is written into gradients that are kept, or goes to host memory
        self.gives_back_reduced = self.keeps_gradients or sharing.offloads
        self.written = True  # whether the optimizer has stepped since the unit was unsharded
        self._over_fewer = False  # whether it keeps shards over fewer ranks
        self._handed_out = False  # whether the optimizer has got gradients in this step

    @abstractmethod
    def change(self, buffer: str, sign: int) -> None: ...  # it takes one of its buffers (1), or gives it back (-1)
    @abstractmethod
    def issue(self, kind: str, phase: str, after: Pending | None = None) -> Pending: ...  # a collective

    def take(self, buffer: str) -> None:
        """One of its buffers."""
        self.change(buffer, 1)

    def give_back(self, buffer: str) -> None:
        """The same."""
        self.change(buffer, -1)

    def changed(self) -> bool:
        return self.written

    def show_unsharded(self) -> None:
        self.written = False

    # ---- unshard, reshard

    def gather(self, phase: str) -> Pending | None:
        sharing = self.sharing
        if not self.keeps_whole:
            self.take(GATHERED)
        if self._over_fewer:
            self.take(ARRIVING)
        if sharing.shards:
            return self.issue("all_gather", phase)
        return None if sharing.aliased else Pending(lambda: None)  # a cast, or a copy from the host

    def arrived(self) -> None:
        if self._over_fewer:
            self.give_back(ARRIVING)

    def show_shards(self, until_backward: bool) -> None:
        kept, self._over_fewer = self._over_fewer, self.sharing.fewer and until_backward
        if self._over_fewer and not kept:
            self.take(FEWER)
        elif kept and not self._over_fewer:
            self.give_back(FEWER)

    def show_own_shards(self) -> None:
        self.show_shards(until_backward=False)

    def free(self) -> None:
        if not self.keeps_whole:
            self.give_back(GATHERED)

    # ---- reduce

    def reduce(self, options: ReduceOptions) -> Iterator[Pending]:
        sharing = self.sharing
        if sharing.shards:
            self.take(SENT)
        self.take(REDUCED)
        if sharing.shards:
            scattered = self.issue("reduce_scatter", "backward")
            behind = sharing.replicates and sharing.streams
            summed = self.issue("all_reduce", "backward", scattered) if behind else None
            yield scattered
            self.give_back(SENT)
            if sharing.replicates:
                yield summed or self.issue("all_reduce", "backward")
        elif sharing.replicates:
            yield from self.issue("all_reduce", "backward").parts()
        else:
            yield Pending(lambda: None)
        self.hand_out()

    def hand_out(self) -> None:
        """Give the optimizer the result, which is added to an earlier one."""
        if self._handed_out or self.gives_back_reduced:
            self.give_back(REDUCED)
        self._handed_out = True


def planned_order(
    memories: Mapping[str, PlannedMemory], sharing: Sharing, schedule: Schedule, in_flight: int = 1
) -> StepOrder:
    """The engine's order of units over planned memories; the first is the root, which keeps its parameters after its
    forward. `in_flight`: reductions that may be under way when the next begins.
    """
    root, reshards = next(iter(memories)), sharing.reshards_after_forward
    units = {name: Unit(memory, reshards and name != root) for name, memory in memories.items()}
    for unit in units.values():
        unit.in_flight = in_flight
    return StepOrder(units, schedule)


def begin_micro_batch(order: StepOrder, sharing: Sharing, last: bool) -> None:
    """Set what a training loop sets before a micro-batch."""
    order.root.is_last_backward = last
    for unit in order.units.values():
        unit.sync = last or not sharing.reduces_once
