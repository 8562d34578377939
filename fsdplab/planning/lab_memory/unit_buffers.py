"""The buffers of one unit on one rank, which the engine's own `Unit` takes and frees, and those of the transports.

Shards at rest, unsharded parameters, unsharded gradients, reduced gradients, and what the shared-memory transport keeps
for peers to read (`engine/transport/shared_memory/transport.py`). The layouts are the engine's own
(`engine/core/layout.py`), padding and alignment included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdplab.engine.core.layout import SHARDS_ALIGNED, WHOLE_ALIGNED, Layout
from fsdplab.engine.core.pending import Pending
from fsdplab.planning.program import PlannedMemory, Sharing
from fsdplab.planning.program.memory import GATHERED, REDUCED, SENT

from .held import Book, Held

PAGE = 4096  # buffers that peers read are whole pages
MASTER = 4  # bytes of an element at rest, unless a model has others: float32


@dataclass(frozen=True)
class Stored:
    """A parameter as a unit stores it: bytes of an element at rest and in computing; whether it has a gradient."""

    name: str
    shape: tuple[int, ...]
    rests: int = MASTER
    computes: int = MASTER
    trained: bool = True

    @property
    def count(self) -> int:
        """Its elements."""
        return prod(self.shape)


class Staging:
    """Buffers that operations of one kind take in turn; each grows to the largest that it has held, in all the steps of
    a training: where operations are not a multiple of the buffers, another one comes first in every step.
    """

    def __init__(self, buffers: int) -> None:
        self._sizes, self._taken = [0] * buffers, list[int]()

    def take(self, nbytes: int) -> None:
        """The next buffer holds `nbytes`."""
        self._taken.append(-(-nbytes // PAGE) * PAGE)

    def bytes_of_steps(self) -> int:
        """Bytes that are kept after steps that took what was taken since the last call."""
        buffers = len(self._sizes)
        for turn, nbytes in enumerate(self._taken * buffers):
            self._sizes[turn % buffers] = max(self._sizes[turn % buffers], nbytes)
        self._taken.clear()
        return sum(self._sizes)


class Transports:
    """What the shared-memory transports of a rank keep between collectives: two buffers for gathers that peers do not
    read where the slice rests, two for reductions, three for all-reduces (one ends a unit later than it sums).
    """

    def __init__(self) -> None:
        self.gathers, self.reductions, self.exchanges = Staging(2), Staging(2), Staging(3)

    def bytes_of_steps(self) -> int:
        """Bytes that are kept after steps as the last one."""
        return sum(each.bytes_of_steps() for each in (self.gathers, self.reductions, self.exchanges))


class UnitBuffers(PlannedMemory):
    """One unit's memory in bytes; without `transports`, as on a GPU, gradients are packed into their own buffer."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[Stored],
        sharing: Sharing,
        shards: int,
        replicas: int,
        book: Book,
        transports: Transports | None,
    ) -> None:
        super().__init__(name, sharing)
        self._shards, self._replicas = shards, replicas
        self._book, self._transports = book, transports
        trained = [each for each in parameters if each.trained]
        self.params = tuple(each.name for each in parameters)
        self._computes = {each.name: each.computes for each in trained}
        # gradients are reduced in the dtype of the masters where a run casts, else in their own
        self._reduced = MASTER if sharing.casts else max(self._computes.values(), default=MASTER)
        rest = _layout(tuple((each.name, each.shape, each.rests) for each in parameters), shards, SHARDS_ALIGNED)
        whole = tuple((each.name, each.shape, each.computes) for each in parameters)
        self._layout = _layout(whole, shards, WHOLE_ALIGNED if shards == 1 else 0)
        self._wire = _layout(tuple((each.name, each.shape, self._reduced) for each in trained), shards, 0)
        alike = self._layout.slots == rest.slots and self._layout.shard_bytes == rest.shard_bytes
        self._reads_in_place = alike and not sharing.casts and not sharing.aliased
        reduced = "sharded_gradients" if sharing.shards else "unsharded_gradients"
        self._sizes = {
            GATHERED: (self._layout.whole_bytes, "unsharded_parameters"),
            REDUCED: (self._wire.shard_bytes, reduced),
        }
        if transports is None:
            self._sizes[SENT] = self._wire.total_bytes, "communication_buffers"
        # shards rest in a buffer of their own, or are views of the whole one
        resting = self._layout.whole_bytes if self.keeps_whole else 0
        resting += 0 if sharing.aliased or sharing.offloads else rest.shard_bytes
        book.change(resting, "sharded_parameters")
        self._arrived: dict[str, Held] = {}  # gradients that autograd left, by parameter
        self._whole: dict[str, Held] = {}  # those that were collected
        self._optimizers: list[Held] = []  # those that were kept, which the optimizer reads

    @property
    def own_elements(self) -> int:
        """Elements that the first rank's optimizer updates: no rank has more."""
        spans = ((slot, *slot.span(0)) for slot in self._wire.slots)
        return sum((stop - start) * slot.row_bytes // slot.itemsize for slot, start, stop in spans)

    @property
    def updated(self) -> int:
        """How many parameters the optimizer updates."""
        return len(self._computes)

    # ---- buffers that come and go

    def change(self, buffer: str, sign: int) -> None:
        """What the transports keep between collectives (`issue`) is not counted here."""
        if buffer in self._sizes:
            nbytes, category = self._sizes[buffer]
            self._book.change(sign * nbytes, category)

    def issue(self, kind: str, phase: str, after: Pending | None = None) -> Pending:
        """Peers read this rank's part of a collective in a buffer, unless they read a shard in place."""
        nbytes, transports = self._wire.shard_bytes, self._transports
        if transports is None:
            pass
        elif kind == "reduce_scatter":
            transports.reductions.take((self._shards - 1) * nbytes)
        elif kind == "all_reduce":
            part = -(-(nbytes // self._reduced) // self._replicas) * self._reduced
            transports.exchanges.take(self._replicas * part)
        elif not self._reads_in_place:
            transports.gathers.take(self._layout.shard_bytes)
        return Pending(lambda: None)

    # ---- gradients

    def gradient(self, name: str, nbytes: int) -> None:
        """Autograd leaves a new gradient of a parameter."""
        self.give_gradient(name, self._book.hold(nbytes, "unsharded_gradients"))

    def give_gradient(self, name: str, arrived: Held) -> None:
        """Autograd leaves the gradient of a parameter; a second one in the same backward is added to it."""
        self._arrived.setdefault(name, arrived)

    def collect_gradients(self, keep: bool) -> None:
        """Take the gradients of this backward, adding them to those of earlier ones: kept ones are kept in the dtype
        that is reduced, and a sum of two dtypes casts first.
        """
        for name in [each for each in self._computes if each in self._arrived]:
            arrived = self._arrived.pop(name)
            wide = arrived.nbytes // self._computes[name] * self._reduced
            cast = keep and wide != arrived.nbytes
            if name not in self._whole:
                self._whole[name] = self._book.hold(wide, "unsharded_gradients") if cast else arrived
            elif cast:
                self._book.hold(wide, "activations")
            del arrived

    def has_gradients(self, or_zeros: bool) -> bool:
        return bool(self._whole)

    def hand_out(self) -> None:
        super().hand_out()
        self._optimizers += self._whole.values()
        self._whole = {}

    def forget_gradients(self) -> None:
        self._whole = {}

    def step(self) -> None:
        """The optimizer writes to the slices, and its gradients are set to None."""
        if self._handed_out and not self.gives_back_reduced:
            self.give_back(REDUCED)
        self.written, self._handed_out, self._optimizers = True, False, []


# kept, since a lab asks again with every number of tokens, on which it does not depend
_layout = lru_cache(maxsize=512)(Layout.of)
