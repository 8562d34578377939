"""The buffers of one unit on one rank, which the engine's own `Unit` takes and frees, and those of the transports.

Shards at rest, unsharded parameters, unsharded gradients, reduced gradients, and what the shared-memory transport keeps
for peers to read (`engine/transport/shared_memory/transport.py`). The layouts are the engine's own
(`engine/core/layout.py`), padding and alignment included.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fsdplab.engine.core.layout import SHARDS_ALIGNED, WHOLE_ALIGNED, Layout
from fsdplab.engine.core.pending import Pending
from fsdplab.planning.program import PlannedMemory, Sharing
from fsdplab.planning.program.memory import GATHERED, REDUCED
from fsdplab.workloads.shapes import Parameter

from .held import Book, Held

PAGE = 4096  # buffers that peers read are whole pages
MASTER = REDUCED_BYTES = 4  # bytes of an element at rest and of one that is reduced: float32 in every run of the lab


class Staging:
    """Buffers that operations of one kind take in turn; each is as large as the largest that it has held."""

    def __init__(self, book: Book, buffers: int) -> None:
        self._book, self._sizes, self._turn = book, [0] * buffers, 0

    def take(self, nbytes: int) -> None:
        """The next buffer holds `nbytes`."""
        index, self._turn = self._turn % len(self._sizes), self._turn + 1
        if nbytes > self._sizes[index]:
            grown = -(-nbytes // PAGE) * PAGE
            self._book.grow_unseen(grown - self._sizes[index], "communication_buffers")
            self._sizes[index] = grown


class Transports:
    """What the shared-memory transports of a rank keep between collectives: two buffers for gathers that peers do not
    read where the slice rests, two for reductions, three for all-reduces (one ends a unit later than it sums).
    """

    def __init__(self, book: Book) -> None:
        self.gathers, self.reductions = Staging(book, 2), Staging(book, 2)
        self.exchanges = Staging(book, 3)


class UnitBuffers(PlannedMemory):
    """One unit's memory in bytes; `itemsize` is of what computes."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[Parameter],
        sharing: Sharing,
        shards: int,
        replicas: int,
        itemsize: int,
        book: Book,
        transports: Transports,
    ) -> None:
        super().__init__(name, sharing)
        self._shards, self._replicas = shards, replicas
        self._itemsize, self._book, self._transports = itemsize, book, transports
        self._names = [each.name for each in parameters]
        self._rest = _layout(parameters, shards, MASTER, SHARDS_ALIGNED)
        self._layout = _layout(parameters, shards, itemsize, WHOLE_ALIGNED if shards == 1 else 0)
        self._wire = _layout(parameters, shards, REDUCED_BYTES, 0)
        alike = self._layout.slots == self._rest.slots and self._layout.shard_bytes == self._rest.shard_bytes
        self._reads_in_place = alike and not sharing.casts and not sharing.aliased
        reduced = "sharded_gradients" if sharing.shards else "unsharded_gradients"
        self._sizes = {
            GATHERED: (self._layout.whole_bytes, "unsharded_parameters"),
            REDUCED: (self._wire.shard_bytes, reduced),
        }
        self._held: dict[str, list[Held]] = {GATHERED: [], REDUCED: []}
        self._at_rest: list[Held] = []
        self._arrived: dict[str, Held] = {}  # gradients that autograd left, by parameter
        self._whole: dict[str, Held] = {}  # those that were collected
        self._optimizers: list[Held] = []  # those that were kept, which the optimizer reads

    # ---- at rest

    def place_at_rest(self) -> None:
        """Slices at rest: a buffer of their own, or views of the whole one."""
        if self.keeps_whole:
            self._at_rest.append(self._book.hold(self._layout.whole_bytes, "sharded_parameters"))
        if not self.sharing.aliased and not self.sharing.offloads:
            self._at_rest.append(self._book.hold(self._rest.shard_bytes, "sharded_parameters"))

    @property
    def own_elements(self) -> int:
        """Elements that the first rank's optimizer updates: no rank has more."""
        spans = ((slot, *slot.span(0)) for slot in self._rest.slots)
        return sum((stop - start) * slot.row_bytes // MASTER for slot, start, stop in spans)

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return len(self._names)

    # ---- buffers that come and go

    def take(self, buffer: str) -> None:
        """What the transports keep between collectives (`issue`) is not counted here."""
        if buffer in self._sizes:
            self._held[buffer].append(self._book.hold(*self._sizes[buffer]))

    def give_back(self, buffer: str) -> None:
        if buffer in self._sizes:
            self._held[buffer].pop()

    def issue(self, kind: str, phase: str, after: Pending | None = None) -> Pending:
        """Peers read this rank's part of a collective in a buffer, unless they read a shard in place."""
        nbytes, transports = self._wire.shard_bytes, self._transports
        if kind == "reduce_scatter":
            transports.reductions.take((self._shards - 1) * nbytes)
        elif kind == "all_reduce":
            part = -(-(nbytes // REDUCED_BYTES) // self._replicas) * REDUCED_BYTES
            transports.exchanges.take(self._replicas * part)
        elif not self._reads_in_place:
            transports.gathers.take(self._layout.shard_bytes)
        return Pending(lambda: None)

    # ---- gradients

    def gradient(self, name: str, nbytes: int) -> None:
        """Autograd leaves the gradient of a parameter; a second one in the same backward is added to it."""
        arrived = self._book.hold(nbytes, "unsharded_gradients")
        self._arrived.setdefault(name, arrived)

    def collect_gradients(self, keep: bool) -> None:
        """Take the gradients of this backward, adding them to those of earlier ones: kept ones are kept in the dtype
        that is reduced, and a sum of two dtypes casts first.
        """
        for name in [each for each in self._names if each in self._arrived]:
            arrived = self._arrived.pop(name)
            wide = arrived.nbytes // self._itemsize * REDUCED_BYTES
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
        self._optimizers, self._held[REDUCED] = [], []
        self.written, self._handed_out = True, False


def _layout(parameters: Sequence[Parameter], ranks: int, itemsize: int, alignment: int) -> Layout:
    return _layout_of(tuple((each.name, each.shape, itemsize) for each in parameters), ranks, alignment)


@lru_cache(maxsize=512)
def _layout_of(entries: tuple[tuple[str, tuple[int, ...], int], ...], ranks: int, alignment: int) -> Layout:
    """Kept, since a lab asks again with every number of tokens, on which it does not depend."""
    return Layout.of(entries, ranks, alignment)
