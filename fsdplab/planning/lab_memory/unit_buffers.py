"""The buffers of one unit on one rank, which the engine's own `Unit` takes and frees, and those of the transports.

Slices at rest, the gathered parameters, whole gradients, reduced ones, and what the shared-memory transport keeps for
peers to read (`engine/transport/shared_memory/transport.py`). The layouts are the engine's own
(`engine/core/layout.py`), padding and alignment included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from fsdplab.engine.core.layout import SLICES_ALIGNED, WHOLE_ALIGNED, Layout
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.unit import ReduceOptions
from fsdplab.planning.program import PlannedMemory, Sharing
from fsdplab.workloads.shapes import Parameter

from .held import Book, Held

PAGE = 4096  # buffers that peers read are whole pages
MASTER = REDUCED = 4  # bytes of an element at rest and of one that is reduced: float32 in every run of the lab


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
        self._rest = _layout(parameters, shards, MASTER, SLICES_ALIGNED)
        self._layout = _layout(parameters, shards, itemsize, WHOLE_ALIGNED if shards == 1 else 0)
        self._wire = _layout(parameters, shards, REDUCED, 0)
        alike = self._layout.slots == self._rest.slots and self._layout.slice_bytes == self._rest.slice_bytes
        self._reads_in_place = alike and not sharing.casts and not sharing.aliased
        self._gathered: Held | None = None
        self._at_rest: list[Held] = []
        self._arrived: dict[str, Held] = {}  # gradients that autograd left, by parameter
        self._whole: dict[str, Held] = {}  # those that were collected
        self._reduced: list[Held] = []  # what the optimizer reads

    # ---- at rest

    def place_at_rest(self) -> None:
        """Slices at rest: a buffer of their own, or views of the whole one."""
        if self.keeps_whole:
            self._gathered = self._book.hold(self._layout.whole_bytes, "parameter_slices")
        if not self.sharing.aliased and not self.sharing.offloads:
            self._at_rest = [self._book.hold(self._rest.slice_bytes, "parameter_slices")]

    @property
    def own_elements(self) -> int:
        """Elements that the first rank's optimizer updates: no rank has more."""
        spans = ((slot, *slot.span(0)) for slot in self._rest.slots)
        return sum((stop - start) * slot.row_bytes // MASTER for slot, start, stop in spans)

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return len(self._names)

    # ---- gather, free

    def gather(self, phase: str) -> None:
        """The place to read from is taken at once; what is kept whole is there already. A slice that peers cannot read
        in place travels through a buffer.
        """
        if self.sharing.shards and not self._reads_in_place:
            self._transports.gathers.take(self._layout.slice_bytes)
        if self._gathered is None:
            self._gathered = self._book.hold(self._layout.whole_bytes, "gathered_parameters")

    def free(self) -> None:
        if not self.keeps_whole:
            self._gathered = None

    # ---- gradients

    def gradient(self, name: str, nbytes: int) -> None:
        """Autograd leaves the gradient of a parameter; a second one in the same backward is added to it."""
        arrived = self._book.hold(nbytes, "whole_gradients")
        self._arrived.setdefault(name, arrived)

    def collect_gradients(self, keep: bool) -> None:
        """Take the gradients of this backward, adding them to those of earlier ones: kept ones are kept in the dtype
        that is reduced, and a sum of two dtypes casts first.
        """
        for name in [each for each in self._names if each in self._arrived]:
            arrived = self._arrived.pop(name)
            wide = arrived.nbytes // self._itemsize * REDUCED
            cast = keep and wide != arrived.nbytes
            if name not in self._whole:
                self._whole[name] = self._book.hold(wide, "whole_gradients") if cast else arrived
            elif cast:
                self._book.hold(wide, "activations")
            del arrived

    def has_gradients(self, or_zeros: bool) -> bool:
        return bool(self._whole)

    def reduce(self, options: ReduceOptions) -> Iterator[Pending]:
        """Take a slice for the sum, and pack the gradients for the peers."""
        shards, replicates = self.sharing.shards, self.sharing.replicates
        output = self._book.hold(self._wire.slice_bytes, "gradient_slices" if shards else "whole_gradients")
        if shards:
            self._transports.reductions.take((self._shards - 1) * self._wire.slice_bytes)
        elif replicates:
            self._exchange()
        yield Pending(lambda: None)  # of an all-reduce alone: this rank's sum, then those of the others
        if replicates:
            if shards:
                self._exchange()
            yield Pending(lambda: None)
        self._hand_out(output)

    def _exchange(self) -> None:
        part = -(-(self._wire.slice_bytes // REDUCED) // self._replicas) * REDUCED
        self._transports.exchanges.take(self._replicas * part)

    def _hand_out(self, output: Held) -> None:
        """Rows for the optimizer: written into gradients that are kept whole, added to earlier rows, or the output."""
        if self._whole:
            self._reduced, self._whole = list(self._whole.values()), {}
        elif not self._reduced and not self.sharing.offloads:
            self._reduced = [output]

    def forget_gradients(self) -> None:
        self._whole = {}

    def step(self) -> None:
        """The optimizer writes to the slices, and its gradients are set to None."""
        self._reduced, self.written = [], True


def _layout(parameters: Sequence[Parameter], ranks: int, itemsize: int, alignment: int) -> Layout:
    return _layout_of(tuple((each.name, each.shape, itemsize) for each in parameters), ranks, alignment)


@lru_cache(maxsize=512)
def _layout_of(entries: tuple[tuple[str, tuple[int, ...], int], ...], ranks: int, alignment: int) -> Layout:
    """Kept, since a lab asks again with every number of tokens, on which it does not depend."""
    return Layout.of(entries, ranks, alignment)
