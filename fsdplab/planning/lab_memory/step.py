"""One step of the lab's engine in bytes: the engine's own order (`engine/core/step.py`), around what a model computes.

A `Held` stands for a storage: its bytes are alive as long as somebody holds it, as a tensor's are. So what is let go of
here is freed when PyTorch would free it, by the same rule: the last reference is gone.

The buffers of a unit are those that the engine's own `Unit` takes and frees, and what the shared-memory transport keeps
for peers to read (`engine/transport/shared_memory/transport.py`), in the engine's own layouts, padding and alignment
included. What one micro-batch computes is a recording: storages that begin and end, between the calls of hooks. It is
made once from the plain model (sessions/micro_batch.py; of presets it is kept, see presets.py) and holds for every
strategy: sharding changes what stands between the calls, and not what a unit computes.

Two steps are played. The first makes what lives on: the buffers of the transports, the order of the units. The second
is the one whose memory counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

from fsdplab.common.names import CATEGORIES
from fsdplab.engine.core.layout import SHARDS_ALIGNED, WHOLE_ALIGNED, Layout
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.planning.program import GATHERED, REDUCED, SENT, PlannedMemory, Sharing, begin_micro_batch, planned_order

Bytes = dict[str, int]


class Book:
    """Counts what is alive. `peak` is the split at the largest sum since `begin`.

    >>> book = Book()
    >>> first = book.hold(40, "activations")
    >>> del first
    >>> book.total, book.peak["activations"]
    (0, 40)
    """

    def __init__(self) -> None:
        self._now: Bytes = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.begin()

    def begin(self) -> None:
        """The measured step begins: forget the peak so far."""
        self._most, self.peak = self.total, dict(self._now)

    def hold(self, nbytes: int, category: str) -> Held:
        """So many more bytes, for as long as the result is held."""
        return Held(self, nbytes, category)

    def change(self, nbytes: int, category: str) -> None:
        """More bytes of a category, or less."""
        self._now[category] += nbytes
        self.total += nbytes
        if self.total > self._most:
            self._most, self.peak = self.total, dict(self._now)


class Held:
    """Bytes of one storage."""

    __slots__ = ("_book", "category", "nbytes")

    def __init__(self, book: Book, nbytes: int, category: str) -> None:
        self._book, self.nbytes, self.category = book, nbytes, category
        book.change(nbytes, category)

    def __del__(self) -> None:
        self._book.change(-self.nbytes, self.category)


# ---- the buffers of a unit


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
    """Buffers that operations of one kind take in turn; each grows to the largest that it has held."""

    def __init__(self, buffers: int) -> None:
        self._sizes = [0] * buffers
        self._turn = 0

    def take(self, nbytes: int) -> None:
        """The next buffer holds `nbytes`."""
        pages = -(-nbytes // PAGE)
        self._sizes[self._turn] = max(self._sizes[self._turn], pages * PAGE)
        self._turn = (self._turn + 1) % len(self._sizes)

    def begin_again(self) -> None:
        """The next operation takes the first buffer: a forward or a backward has ended."""
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are kept between operations."""
        return sum(self._sizes)


class Transports:
    """What the shared-memory transports of a rank keep between collectives: two buffers for gathers that peers do not
    read where the slice rests, two for reductions, three for all-reduces (one ends a unit later than it sums).
    """

    def __init__(self) -> None:
        self.gathers = Staging(2)
        self.reductions = Staging(2)
        self.exchanges = Staging(3)
        self._all = (self.gathers, self.reductions, self.exchanges)

    def begin_again(self) -> None:
        """A forward or a backward has ended."""
        for staging in self._all:
            staging.begin_again()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept between operations."""
        return sum(staging.nbytes for staging in self._all)


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
        self._shards = shards
        self._replicas = replicas
        self._book = book
        self._transports = transports
        trained = [parameter for parameter in parameters if parameter.trained]
        self.params = tuple(parameter.name for parameter in parameters)
        self._computes = {parameter.name: parameter.computes for parameter in trained}
        # gradients are reduced in the dtype of the masters where a run casts, else in their own
        self._reduced = MASTER if sharing.casts else max(self._computes.values(), default=MASTER)
        self._gradients: dict[str, Held] = {}  # those that autograd left and nobody has collected, by parameter
        self._collected: dict[str, Held] = {}
        self._handed_to_optimizer: list[Held] = []

        resting = tuple((stored.name, stored.shape, stored.rests) for stored in parameters)
        computing = tuple((stored.name, stored.shape, stored.computes) for stored in parameters)
        reducing = tuple((stored.name, stored.shape, self._reduced) for stored in trained)
        at_rest = _layout(resting, shards, SHARDS_ALIGNED)
        self._gathered = _layout(computing, shards, WHOLE_ALIGNED if shards == 1 else 0)
        self._wire = _layout(reducing, shards, 0)
        same_bytes = self._gathered.slots == at_rest.slots and self._gathered.shard_bytes == at_rest.shard_bytes
        self._peers_read_shards = same_bytes and not sharing.casts and not sharing.aliased
        self._sizes = self._sizes_of_buffers()
        book.change(self._resting_bytes(at_rest), "sharded_parameters")

    def _sizes_of_buffers(self) -> dict[str, tuple[int, str]]:
        """Bytes and category of what the engine's `Unit` takes and gives back."""
        reduced = "sharded_gradients" if self.sharing.shards else "unsharded_gradients"
        sizes = {
            GATHERED: (self._gathered.whole_bytes, "unsharded_parameters"),
            REDUCED: (self._wire.shard_bytes, reduced),
        }
        if self._transports is None:
            sizes[SENT] = self._wire.total_bytes, "communication_buffers"
        return sizes

    def _resting_bytes(self, at_rest: Layout) -> int:
        """Shards rest in a buffer of their own, in host memory, or as views of the whole one."""
        nbytes = 0
        if self.keeps_whole:
            nbytes += self._gathered.whole_bytes
        if not self.sharing.aliased and not self.sharing.offloads:
            nbytes += at_rest.shard_bytes
        return nbytes

    @property
    def own_elements(self) -> int:
        """Elements that the first rank's optimizer updates: no rank has more."""
        elements = 0
        for slot in self._wire.slots:
            start, stop = slot.span(0)
            elements += (stop - start) * slot.row_bytes // slot.itemsize
        return elements

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
        if self._transports is not None:
            self._take_staging(kind, self._transports)
        return Pending(lambda: None)

    def await_peers(self) -> None:
        """A forward or a backward has ended: the transports take their first buffers next."""
        if self._transports is not None:
            self._transports.begin_again()

    def _take_staging(self, kind: str, transports: Transports) -> None:
        nbytes = self._wire.shard_bytes
        if kind == "reduce_scatter":
            transports.reductions.take((self._shards - 1) * nbytes)
        elif kind == "all_reduce":
            elements = nbytes // self._reduced
            elements_of_a_replica = -(-elements // self._replicas)
            transports.exchanges.take(self._replicas * elements_of_a_replica * self._reduced)
        elif not self._peers_read_shards:
            transports.gathers.take(self._gathered.shard_bytes)

    # ---- gradients

    def give_gradient(self, name: str, gradient: Held) -> None:
        """Autograd leaves the gradient of a parameter; a second one in the same backward is added to it."""
        self._gradients.setdefault(name, gradient)

    def collect_gradients(self, keep: bool) -> None:
        """Take the gradients of this backward, adding them to those of earlier ones: kept ones are kept in the dtype
        that is reduced, and a sum of two dtypes casts first.
        """
        for name, itemsize in self._computes.items():
            if name not in self._gradients:
                continue
            gradient = self._gradients.pop(name)
            reduced_bytes = gradient.nbytes // itemsize * self._reduced
            casts = keep and reduced_bytes != gradient.nbytes
            is_first = name not in self._collected
            if is_first and casts:
                self._collected[name] = self._book.hold(reduced_bytes, "unsharded_gradients")
            elif is_first:
                self._collected[name] = gradient
            elif casts:
                self._book.hold(reduced_bytes, "activations")  # the cast, which ends with the sum
            del gradient  # else its bytes were alive until the next one is taken

    def has_gradients(self, or_zeros: bool) -> bool:
        return bool(self._collected)

    def hand_out(self) -> None:
        super().hand_out()
        self._handed_to_optimizer += self._collected.values()
        self._collected = {}

    def forget_gradients(self) -> None:
        self._collected = {}

    def step(self) -> None:
        """The optimizer writes to the slices, and its gradients are set to None."""
        if self._handed_out and not self.gives_back_reduced:
            self.give_back(REDUCED)
        self.written = True
        self._handed_out = False
        self._handed_to_optimizer = []


# kept, since a lab asks again with every number of tokens, on which it does not depend
_layout = lru_cache(maxsize=512)(Layout.of)


# ---- a recorded micro-batch


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
    """A recording of a forward and a backward. `units`: their parameters, the root first; `nbytes`: of the batch;
    `buffers`: of the model's.
    `matrices`: the shapes of those that Muon steps, in its order: of the model's blocks, whatever its units are.
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
    matrices: tuple[tuple[int, int], ...] = ()

    def play(self, order: StepOrder, units: Mapping[str, UnitBuffers], book: Book) -> None:
        """Let `order` do what it does around these computations, and `book` count both."""
        alive: dict[int, Held] = {}  # by the number of the storage
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


# ---- a step


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


def peak_of_step(run: StepChoices, recording: MicroBatch) -> Bytes:
    """Bytes by category at the peak of the second step, on rank 0, whose shards are largest."""
    return rest_and_peak(run, recording)[1]


def rest_and_peak(run: StepChoices, recording: MicroBatch) -> tuple[Bytes, Bytes]:
    """Bytes by category between two steps, with the batches of the next, and at the peak."""
    book = Book()
    transports = None if run.on_card else Transports()
    sharing = Sharing.of(
        run.strategy, run.shards, run.replicas, casts=run.itemsize != MASTER, offloads=run.offloads, streams=run.on_card
    )
    units = {}
    for name, parameters in recording.units.items():
        units[name] = UnitBuffers(name, parameters, sharing, run.shards, run.replicas, book, transports)
    order = planned_order(units, sharing, Schedule(run.prefetch))

    # the batches of a step are read before it begins, and counted as activations, as they are when they are measured
    book.change(recording.nbytes * run.micro_batches, "activations")
    book.change(recording.buffers, "other")
    _play_step(run, recording, sharing, order, units, book)
    book.change(_state_bytes(run, units.values()), "optimizer_state")
    if transports is not None:
        book.change(transports.nbytes, "communication_buffers")
    book.begin()
    at_rest = dict(book.peak)
    _play_step(run, recording, sharing, order, units, book)
    return at_rest, book.peak


def _play_step(
    run: StepChoices,
    recording: MicroBatch,
    sharing: Sharing,
    order: StepOrder,
    units: Mapping[str, UnitBuffers],
    book: Book,
) -> None:
    """Play the micro-batches, then the optimizer's step."""
    count = min(run.micro_batches, _ENOUGH)
    for number in range(count):
        begin_micro_batch(order, sharing, last=number == count - 1)
        recording.play(order, units, book)
    if run.foreach:  # a temporary of all that this rank updates, which ends at once
        book.hold(MASTER * _own_elements(units.values()), "other")
    packed = book.hold(run.step_buffers, "communication_buffers")
    book.hold(run.step_scratch, "other")
    del packed
    for unit in units.values():
        unit.step()


def _state_bytes(run: StepChoices, units: Collection[UnitBuffers]) -> int:
    """Bytes of the optimizer's state of every element that this rank updates, and a count of steps a parameter."""
    if run.offloads:
        return 0
    counts_of_steps = 4 * sum(unit.updated for unit in units)
    return round(run.state_bytes * _own_elements(units)) + counts_of_steps


def _own_elements(units: Collection[UnitBuffers]) -> int:
    return sum(unit.own_elements for unit in units)
