"""The buffers of one unit on one rank through its life, as `engine/core/unit.py` and the transports make them.

Slices at rest, the gathered parameters, whole gradients, reduced ones, and what the shared-memory transport keeps for
peers to read (`engine/transport/shared_memory/transport.py`). The layouts are the engine's own
(`engine/core/layout.py`), padding and alignment included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.engine.core.layout import SLICES_ALIGNED, WHOLE_ALIGNED, Layout
from fsdplab.planning.models import Parameter

from .held import Book, Held

PAGE = 4096  # buffers that peers read are whole pages
MASTER = REDUCED = 4  # bytes of an element at rest and of one that is reduced: float32 in every run of the lab


@dataclass(frozen=True)
class Sharing:
    """Who shares what: the strategy over `shards` ranks with so many `replicas`; `itemsize` of what computes."""

    strategy: str
    shards: int
    replicas: int
    itemsize: int
    offloads: bool

    @property
    def cuts(self) -> tuple[str, ...]:
        """The states that are cut."""
        return STRATEGY_ROWS[self.strategy].cuts

    @property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients stay until the optimizer has stepped, and travel once a step."""
        return "gradients" not in self.cuts


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


class UnitBuffers:
    """One unit's life in bytes."""

    def __init__(self, parameters: Sequence[Parameter], sharing: Sharing, book: Book, transports: Transports) -> None:
        self.sharing, self._book, self._transports = sharing, book, transports
        self._names = [each.name for each in parameters]
        self._lay_out(parameters)
        self._gathered: Held | None = None
        self._at_rest: list[Held] = []
        self._arrived: dict[str, Held] = {}  # gradients that autograd left, by parameter
        self._whole: dict[str, Held] = {}  # those that were collected
        self._output: Held | None = None  # of the reduction in flight
        self._reduced: list[Held] = []  # what the optimizer reads
        self._stages = 0  # of the reduction in flight, that are left

    def _lay_out(self, parameters: Sequence[Parameter]) -> None:
        s = self.sharing
        ranks = s.shards
        self._rest = _layout(parameters, ranks, MASTER, SLICES_ALIGNED)
        self._layout = _layout(parameters, ranks, s.itemsize, WHOLE_ALIGNED if ranks == 1 else 0)
        self._wire = _layout(parameters, ranks, REDUCED, 0)
        whole = "parameters" not in s.cuts
        self._aliased = (whole or ranks == 1 and not s.offloads) and s.itemsize == MASTER
        self.keeps_whole = self._aliased or whole and ranks > 1
        alike = self._layout.slots == self._rest.slots and self._layout.slice_bytes == self._rest.slice_bytes
        self._reads_in_place = s.itemsize == MASTER and alike and not self._aliased

    # ---- at rest

    def place_at_rest(self) -> None:
        """Slices at rest: a buffer of their own, or views of the whole one."""
        if self.keeps_whole:
            self._gathered = self._book.hold(self._layout.whole_bytes, "parameter_slices")
        if not self._aliased and not self.sharing.offloads:
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

    # ---- gather, drop

    def start_unshard(self, refreshes: bool) -> None:
        """A gather begins: the place to read from is taken at once. What is kept whole is there already, and its rows
        are refreshed in place once a step.
        """
        travels = self.sharing.shards > 1 and (self._gathered is None or self.keeps_whole and refreshes)
        if travels and not self._reads_in_place:
            self._transports.gathers.take(self._layout.slice_bytes)
        if self._gathered is None:
            self._gathered = self._book.hold(self._layout.whole_bytes, "gathered_parameters")

    def reshard(self) -> None:
        """Drop the whole parameters, where they are not kept."""
        if not self.keeps_whole:
            self._gathered = None

    # ---- gradients

    def gradient(self, name: str, nbytes: int) -> None:
        """Autograd leaves the gradient of a parameter; a second one in the same backward is added to it."""
        arrived = self._book.hold(nbytes, "whole_gradients")
        self._arrived.setdefault(name, arrived)

    def collect(self, at_once: bool) -> None:
        """Take the gradients of this backward, adding them to those of earlier ones: kept ones are kept in the dtype
        that is reduced, and a sum of two dtypes casts first.
        """
        for name in [each for each in self._names if each in self._arrived]:
            arrived = self._arrived.pop(name)
            wide = arrived.nbytes // self.sharing.itemsize * REDUCED
            cast = not at_once and wide != arrived.nbytes
            if name not in self._whole:
                self._whole[name] = self._book.hold(wide, "whole_gradients") if cast else arrived
            elif cast:
                self._book.hold(wide, "activations")
            del arrived

    def start_reduce(self) -> None:
        """Pack the gradients for the peers, and take a slice for the sum."""
        s = self.sharing
        kind = "gradient_slices" if s.shards > 1 else "whole_gradients"
        self._output = self._book.hold(self._wire.slice_bytes, kind)
        self._stages = (s.shards > 1) + (s.replicas > 1)
        if s.shards > 1:
            self._transports.reductions.take((s.shards - 1) * self._wire.slice_bytes)
        elif s.replicas > 1:
            self._exchange()
            self._stages = 2  # this rank's sum is a stage, those of the others the next
        if not s.keeps_gradients or s.shards == 1:
            self._whole.clear()

    def _exchange(self) -> None:
        ranks = self.sharing.replicas
        part = -(-(self._wire.slice_bytes // REDUCED) // ranks) * REDUCED
        self._transports.exchanges.take(ranks * part)

    def finish_reduce(self) -> bool:
        """The stage in flight has ended; True once the optimizer has its rows."""
        self._stages -= 1
        if self._stages > 0:
            if self.sharing.shards > 1:
                self._exchange()
            return False
        self._hand_out()
        return True

    def _hand_out(self) -> None:
        """Rows for the optimizer: written into gradients that are kept whole, added to earlier rows, or the output."""
        output, self._output = self._output, None
        if self._whole:
            self._reduced, self._whole = list(self._whole.values()), {}
        elif output is not None and not self._reduced and not self.sharing.offloads:
            self._reduced = [output]

    def zero_grad(self) -> None:
        """The optimizer has stepped: its gradients go."""
        self._reduced = []


def _layout(parameters: Sequence[Parameter], ranks: int, itemsize: int, alignment: int) -> Layout:
    return _layout_of(tuple((each.name, each.shape, itemsize) for each in parameters), ranks, alignment)


@lru_cache(maxsize=512)
def _layout_of(entries: tuple[tuple[str, tuple[int, ...], int], ...], ranks: int, alignment: int) -> Layout:
    """Kept, since a lab asks again with every number of tokens, on which it does not depend."""
    return Layout.of(entries, ranks, alignment)
