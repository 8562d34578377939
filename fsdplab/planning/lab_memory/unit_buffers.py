"""The buffers of one unit on one rank through its life, as `engine/core/unit.py` and the transports make them.

Slices at rest, the gathered parameters, whole gradients, reduced ones, and what the transports keep to let peers read.
The layouts are the engine's own (`engine/core/layout.py`), padding and alignment included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.engine.core.layout import SLICES_ALIGNED, WHOLE_ALIGNED, Layout
from fsdplab.planning.models import Parameter

from .held import Book, Held

PAGE = 4096  # buffers that peers read are whole pages
MASTER = REDUCED = 4  # bytes of an element at rest and of one that is reduced: the lab's runs use float32 for both


@dataclass(frozen=True)
class Sharing:
    """Who shares what: the strategy, over `shards` ranks, with so many `replicas`; `itemsize` of what computes.

    `in_place`: the transport reads what rests in shared memory (shm); else everything is staged (gloo).
    """

    strategy: str
    shards: int
    replicas: int
    itemsize: int
    in_place: bool
    offloads: bool

    @property
    def cuts(self) -> tuple[str, ...]:
        """The states that are cut."""
        return STRATEGY_ROWS[self.strategy].cuts

    @property
    def slices(self) -> int:
        """Over how many ranks slices are cut: 1 where nothing is."""
        return self.shards if self.cuts else 1


class Staging:
    """Buffers that operations of one kind take in turn; each is as large as the largest that it has held."""

    def __init__(self, book: Book, buffers: int) -> None:
        self._book, self._sizes, self._turn = book, [0] * buffers, 0

    def take(self, nbytes: int) -> None:
        """The next buffer holds `nbytes`."""
        index, self._turn = self._turn % len(self._sizes), self._turn + 1
        if nbytes > self._sizes[index]:
            grown = -(-nbytes // PAGE) * PAGE
            self._book.change(grown - self._sizes[index], "communication_buffers")
            self._sizes[index] = grown


class Transports:
    """What the transports of a rank keep between collectives: over shared memory two buffers for gathers, two for
    reductions, three for all-reduces (one of these ends a unit later than it sums); gloo keeps nothing.
    """

    def __init__(self, book: Book) -> None:
        self.gathers, self.reductions = Staging(book, 2), Staging(book, 2)
        self.exchanges = Staging(book, 3)


class UnitBuffers:
    """One unit's life in bytes."""

    def __init__(
        self, name: str, parameters: Sequence[Parameter], sharing: Sharing, book: Book, transports: Transports
    ) -> None:
        self.name, self.sharing, self._book, self._transports = name, sharing, book, transports
        entries = [(each.name, each.shape) for each in parameters]
        self._lay_out(entries)
        self.gathered: Held | None = None
        self.rest: Held | None = None
        self.whole: dict[str, Held] = {}  # gradients that autograd left or that are accumulated, by parameter
        self.reduced: Held | None = None  # what the optimizer reads
        self._output: Held | None = None
        self._kept: dict[str, Held] = {}  # whole gradients of which the optimizer reads rows
        self._staged: list[Held] = []
        self._gathering: Held | None = None
        self._stages = 0

    def _lay_out(self, entries: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        s = self.sharing
        alignment = WHOLE_ALIGNED if s.slices == 1 else 0
        self._at_rest = _layout(entries, s.slices, MASTER, SLICES_ALIGNED)
        self._layout = _layout(entries, s.slices, s.itemsize, alignment)
        self._wire = _layout(entries, s.slices, REDUCED, 0)
        whole = "parameters" not in s.cuts
        self.aliased = (whole or s.slices == 1 and not s.offloads) and s.itemsize == MASTER
        self.keeps_whole = self.aliased or whole and s.slices > 1
        alike = self._layout.slots == self._at_rest.slots and self._layout.slice_bytes == self._at_rest.slice_bytes
        self._reads_in_place = s.itemsize == MASTER and alike and not self.aliased

    # ---- at rest

    def place_at_rest(self) -> None:
        """Slices at rest: a buffer of their own, or views of the whole one."""
        if self.keeps_whole:
            self.gathered = self._book.hold(self._layout.whole_bytes, "parameter_slices")
        if not self.aliased and not self.sharing.offloads:
            self.rest = self._book.hold(self._at_rest.slice_bytes, "parameter_slices")

    def own_elements(self, rank: int) -> int:
        """Elements that a rank's optimizer updates."""
        spans = ((slot, *slot.span(rank)) for slot in self._at_rest.slots)
        return sum((stop - start) * slot.row_bytes // MASTER for slot, start, stop in spans)

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return len(self._at_rest.slots)

    # ---- gather, drop

    def start_unshard(self) -> None:
        """A gather begins: over shared memory the place to read from is taken at once, over gloo the flat buffer."""
        if self.gathered is not None or self._gathering is not None:
            return
        s = self.sharing
        if s.slices > 1 and not s.in_place:
            self._gathering = self._book.hold(self._layout.total_bytes, "communication_buffers")
            return
        self._stage_gather()
        self.gathered = self._book.hold(self._layout.whole_bytes, "gathered_parameters")

    def gather_kept(self) -> None:
        """The gather of a unit that is kept whole, once a step: its rows are refreshed in place."""
        if self.sharing.slices == 1:
            return
        if self.sharing.in_place:
            self._stage_gather()
        else:
            self._book.hold(self._layout.total_bytes, "communication_buffers")

    def _stage_gather(self) -> None:
        if self.sharing.slices > 1 and not self._reads_in_place:
            self._transports.gathers.take(self._layout.slice_bytes)

    def finish_unshard(self) -> None:
        """The gather has arrived: what was staged is unpacked and freed."""
        if self._gathering is not None:
            self.gathered = self._book.hold(self._layout.whole_bytes, "gathered_parameters")
            self._gathering = None

    def reshard(self) -> None:
        """Drop the whole parameters, where they are not kept."""
        self.finish_unshard()
        if not self.keeps_whole:
            self.gathered = None

    # ---- gradients

    def gradient(self, name: str, nbytes: int) -> None:
        """Autograd leaves the gradient of a parameter; a second one in the same backward is added to it."""
        arrived = self._book.hold(nbytes, "whole_gradients")
        self.whole.setdefault(f"new {name}", arrived)

    def collect(self, at_once: bool) -> None:
        """Take the gradients of this backward, adding them to those of earlier ones; what is kept is kept as it is
        reduced.
        """
        for name in [name for name in self.whole if name.startswith("new ")]:
            arrived = self.whole.pop(name)
            kept = name.removeprefix("new ")
            if kept not in self.whole:
                wide = arrived.nbytes // self.sharing.itemsize * REDUCED
                cast = not at_once and wide != arrived.nbytes
                self.whole[kept] = self._book.hold(wide, "whole_gradients") if cast else arrived
            del arrived

    def start_reduce(self) -> None:
        """Pack the gradients for the peers; a slice for the sum."""
        s = self.sharing
        sliced = s.slices > 1
        self._output = self._book.hold(self._wire.slice_bytes, "gradient_slices" if sliced else "whole_gradients")
        self._stages = (s.slices > 1) + (s.replicas > 1)
        if not s.cuts and s.in_place and s.replicas > 1:
            self._exchange()
            self._stages = 2  # the sum of this rank's part, then those of the others
        elif sliced:
            self._send()
        elif s.replicas > 1 and not s.in_place:
            self._stages = 1
        if "gradients" in s.cuts or not sliced:
            self.whole.clear()

    def _send(self) -> None:
        if self.sharing.in_place:
            self._transports.reductions.take((self.sharing.slices - 1) * self._wire.slice_bytes)
            return
        self._staged = [self._book.hold(self._wire.total_bytes, "communication_buffers") for _ in range(2)]

    def _exchange(self) -> None:
        ranks = self.sharing.replicas
        if self.sharing.in_place:
            part = -(-(self._wire.slice_bytes // REDUCED) // ranks) * REDUCED
            self._transports.exchanges.take(ranks * part)

    def finish_reduce(self) -> bool:
        """The stage in flight has ended; True once the optimizer has its rows."""
        self._staged = []
        self._stages -= 1
        if self._stages > 0:
            if self.sharing.cuts:
                self._exchange()
            return False
        self._hand_out()
        return True

    def _hand_out(self) -> None:
        """Rows for the optimizer: the output itself, added to what is there, or written into gradients kept whole."""
        output, self._output = self._output, None
        kept_whole = bool(self.whole)
        if self.sharing.offloads or kept_whole and self.reduced is None:
            if kept_whole:
                self._kept, self.whole = self.whole, {}
            return
        if self.reduced is None:
            self.reduced = output

    def zero_grad(self) -> None:
        """The optimizer has stepped: its gradients go."""
        self.reduced = None
        self._kept = {}
        self.whole.clear()


def _layout(entries: Sequence[tuple[str, tuple[int, ...]]], ranks: int, itemsize: int, alignment: int) -> Layout:
    return Layout.of([(name, shape, itemsize) for name, shape in entries], ranks, alignment)
