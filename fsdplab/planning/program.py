"""A planned step as a list of operations, found by running the engine's own order over units without tensors.

The decisions are those of the engine's own objects (`StepOrder`, `Unit`); only what they act on is replaced. What the
units compute and send is added to that, and how long a program of them takes is one pass over its operations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.engine.core.unit import Memory, ReduceOptions, Unit

# ---- the memory of a unit in a plan


# the buffers of a unit that come and go in a step
GATHERED = "gathered"  # the unsharded parameters
FEWER = "fewer"  # shards over fewer ranks, kept from the forward to the backward
ARRIVING = "arriving"  # what a gather from those arrives in, before it is copied into the unsharded parameters
GRADIENTS = "unsharded_gradients"  # unsharded, of one backward
KEPT = "kept_gradients"  # unsharded, kept for later micro-batches or for the optimizer
SENT = "reduction"  # the packed gradients that a reduction reads
REDUCED = "sharded_gradients"  # the result of a reduction

# copies between the memory where shards rest and the device: issued and waited for as collectives are
TO_DEVICE, TO_HOST = "copy_to_device", "copy_to_host"


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
        """Make the sharing of a strategy by its name, over `shards` ranks with so many `replicas`."""
        row = STRATEGY_ROWS[strategy]
        return cls(row.cuts, row.reshards_after_forward, shards > 1, replicas > 1, **choices)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients stay unsharded until the last backward of a step."""
        return "gradients" not in self.cuts or self.no_sync

    @property
    def copies(self) -> bool:
        """Whether shards are copied to the device that computes, and gradients back, beside its compute."""
        return self.offloads and self.streams

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
        self.leaving: list[Pending] = []  # gradients on their way to host memory, at most one unit's

    @abstractmethod
    def change(self, buffer: str, sign: int) -> None: ...  # it takes one of its buffers (1), or gives it back (-1)
    @abstractmethod
    def issue(self, kind: str, phase: str, after: Pending | None = None) -> Pending: ...  # a collective

    def take(self, buffer: str) -> None:
        """Take one of its buffers."""
        self.change(buffer, 1)

    def give_back(self, buffer: str) -> None:
        """Give back a buffer that was taken."""
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
        copied = None
        if self._over_fewer:  # what is gathered from these shards is on the device already
            self.take(ARRIVING)
        elif sharing.copies:
            copied = self.issue(TO_DEVICE, phase)
        if sharing.shards:
            return self.issue("all_gather", phase, copied)
        if copied is None and not sharing.aliased:
            return Pending(lambda: None)  # a cast
        return copied

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
            summed = None
            if sharing.replicates and sharing.streams:  # its stream waits for the other, and nobody else does
                summed = self.issue("all_reduce", "backward", scattered)
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
        """Give the optimizer the result, which is added to an earlier one: at once, also on the host."""
        if self.sharing.copies:
            self.await_copies()  # whoever computes takes the memory of the last ones again
            self.leaving.append(self.issue(TO_HOST, "backward"))
            if self._handed_out:
                self.await_copies()
        if self._handed_out or self.gives_back_reduced:
            self.give_back(REDUCED)
        self._handed_out = True

    def await_copies(self) -> None:
        """Wait until gradients that left for host memory are there."""
        while self.leaving:
            self.leaving.pop().wait()


def planned_order(
    memories: Mapping[str, PlannedMemory], sharing: Sharing, schedule: Schedule, in_flight: int = 1
) -> StepOrder:
    """Make the engine's order of units over planned memories; the first is the root, which keeps its parameters after
    its forward. `in_flight`: reductions that may be under way when the next begins.
    """
    root = next(iter(memories))
    units = {}
    for name, memory in memories.items():
        unit = Unit(memory, sharing.reshards_after_forward and name != root)
        unit.in_flight = in_flight
        units[name] = unit
    return StepOrder(units, schedule)


def begin_micro_batch(order: StepOrder, sharing: Sharing, last: bool) -> None:
    """Set what a training loop sets before a micro-batch."""
    order.root.is_last_backward = last
    for unit in order.units.values():
        unit.sync = last or not sharing.reduces_once


# ---- operations


class Issue(NamedTuple):
    """A collective is issued, or a copy from or to host memory. It begins when the one numbered `after` is complete, if
    there is one.
    """

    number: int
    unit: str
    phase: str
    kind: str
    after: int | None = None


class Wait(NamedTuple):
    """Whoever computes waits for the collective or the copy of this number."""

    number: int


class Compute(NamedTuple):
    """A unit's own operators, forward or backward; "begin" is what the root computes before its blocks, and "end" the
    backward of that.
    """

    unit: str
    phase: str


class Change(NamedTuple):
    """A unit takes one of its buffers (`sign` 1), or gives it back (-1)."""

    unit: str
    buffer: str
    sign: int


class Move(NamedTuple):
    """A unit's parameters go from one state to another."""

    unit: str
    before: str
    after: str
    phase: str


Operation = Issue | Wait | Compute | Change | Move
Program = Sequence[Sequence[Operation]]  # of each micro-batch of a step


class Holds(NamedTuple):
    """Whether a unit has parameters, and whether any of them is trained."""

    parameters: bool = True
    gradients: bool = True


class RecordedMemory(PlannedMemory):
    """Writes what a unit does into `log`."""

    def __init__(self, name: str, sharing: Sharing, holds: Holds, log: list[Operation]) -> None:
        super().__init__(name, sharing)
        self._trained, self._log = holds.gradients, log
        self.params = self.params if holds.parameters else ()
        self._gradients = ""  # the buffer that holds unsharded gradients, if one does

    def change(self, buffer: str, sign: int) -> None:
        self._log.append(Change(self.name, buffer, sign))

    def issue(self, kind: str, phase: str, after: Pending | None = None) -> Pending:
        log = self._log
        number = len(log)  # its place in the micro-batch
        before = None if after is None else after.event
        assert before is None or isinstance(before, int), "it was issued elsewhere"
        log.append(Issue(number, self.name, phase, kind, before))
        return Pending(lambda: log.append(Wait(number)), event=number)

    def collect_gradients(self, keep: bool) -> None:
        """Take the gradients of a backward; they are cast to be kept, or added to earlier ones, one by one."""
        if not self._trained:
            return
        self.take(GRADIENTS)
        if not keep and not self._gradients:
            self._gradients = GRADIENTS
            return
        self.give_back(GRADIENTS)
        if not self._gradients:
            self.take(KEPT)
        self._gradients = KEPT

    def has_gradients(self, or_zeros: bool) -> bool:
        return bool(self._gradients)

    def hand_out(self) -> None:
        super().hand_out()
        if self.keeps_gradients and not self.sharing.offloads:  # the optimizer has them
            self._gradients = ""

    def forget_gradients(self) -> None:
        if self._gradients:
            self.give_back(self._gradients)
            self._gradients = ""

    def moved(self, before: str, after: str, phase: str) -> None:
        self._log.append(Move(self.name, before, after, phase))


@lru_cache(maxsize=64)
def record_step(
    units: tuple[tuple[str, Holds], ...],
    sharing: Sharing,
    prefetch: int = 1,
    micro_batches: int = 1,
    in_flight: int = 1,
    schedule: Callable[[int], Schedule] = Schedule,
) -> Program:
    """List the operations of each micro-batch of a step that is not the run's first; the first of `units` is the root.

    A micro-batch ends with every collective waited for. The result is kept, since it depends on no bytes and no
    seconds: plans that differ in these have one program.

    >>> units = ("root", Holds()), ("block", Holds())
    >>> (operations,) = record_step(units, Sharing.of("shard_grad_op", 2, 1))
    >>> [operation.unit for operation in operations if isinstance(operation, Issue) and operation.kind == "all_gather"]
    ['root', 'block']
    """
    log: list[Operation] = []
    ahead = schedule(prefetch)
    memories = {name: RecordedMemory(name, sharing, holds, log) for name, holds in units}
    leaving: list[Pending] = []  # of all units: there is one stream for it
    for memory in memories.values():
        memory.leaving = leaving
    order = planned_order(memories, sharing, ahead, in_flight)
    ahead.begin()
    for name, _ in units:  # an earlier step has taught it the order
        ahead.before_forward(name)
    segments = []
    for number in range(micro_batches):
        log.clear()
        begin_micro_batch(order, sharing, last=number == micro_batches - 1)
        _micro_batch(order, log)
        segments.append(list(log))
    return segments


def _micro_batch(order: StepOrder, log: list[Operation]) -> None:
    root, *blocks = order.units.values()
    order.before_forward(root)
    log.append(Compute(root.name, "begin"))
    for unit in blocks:
        order.before_forward(unit)
        log.append(Compute(unit.name, "forward"))
        order.after_forward(unit, will_backward=True)
    log.append(Compute(root.name, "forward"))
    order.after_forward(root, will_backward=True)
    order.begin_backward()
    order.before_backward(root)
    log.append(Compute(root.name, "backward"))
    for unit in reversed(blocks):
        order.before_backward(unit)
        log.append(Compute(unit.name, "backward"))
        order.after_backward(unit)
    log.append(Compute(root.name, "end"))
    order.end_backward()


# ---- what units compute and send


ROOT, BLOCK = "root", "block"
SLOWED = "slowed by collectives"
OPTIMIZER = "optimizer"  # beside them: what its step sends, and its phase


@dataclass(frozen=True)
class Transfer:
    """One collective, or a copy between a rank and its host's memory, on an otherwise free link: the latency of all its
    steps, then the bytes that one rank sends.

    `link` is what it passes: axes with the same one share its bandwidth. Without a name its axis has it for itself.
    """

    kind: str
    wire_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0
    axis: str = "shard"
    link: str = ""

    @property
    def seconds(self) -> float:
        """Latency and bytes together: 1 ms and 10 MB at 10 GB/s are 2 ms."""
        return self.latency_s + self.wire_bytes / self.bytes_per_s

    def followed_by(self, other: Transfer) -> Transfer:
        """Join both into one, such as the gathers of a frozen base and of its adapters."""
        wire_bytes = self.wire_bytes + other.wire_bytes
        latency_s = self.latency_s + other.latency_s
        return replace(self, wire_bytes=wire_bytes, latency_s=latency_s)


@dataclass(frozen=True)
class UnitWork:
    """One unit on one rank. `sent`: the collectives that move its states, by kind; an all-reduce is of all gradients
    over the ranks, or of a reduced shard over the replicas. `inline_*`: collectives that stand between the unit's
    products, and hide nothing. `holds`: what it has where no collective shows it.
    """

    name: str
    forward_s: float
    backward_s: float
    sent: Mapping[str, Transfer] = field(default_factory=dict)
    inline_forward: tuple[Transfer, ...] = ()
    inline_backward: tuple[Transfer, ...] = ()
    holds: Holds | None = None

    def products(self, phase: str) -> tuple[float, tuple[Transfer, ...]]:
        """Return the seconds of a forward or a backward, and the collectives between its products."""
        if phase == "forward":
            return self.forward_s, self.inline_forward
        return self.backward_s, self.inline_backward

    def on_links(self, change: Callable[[Transfer], Transfer]) -> UnitWork:
        """Return the same unit, each of its collectives changed."""
        return replace(
            self,
            sent={kind: change(transfer) for kind, transfer in self.sent.items()},
            inline_forward=tuple(map(change, self.inline_forward)),
            inline_backward=tuple(map(change, self.inline_backward)),
        )


@dataclass(frozen=True)
class StepWork:
    """A step of a rank: blocks in the forward's order inside a root, whose own compute follows them (the head).
    `exchange` is what the optimizer's step sends, of which nothing is hidden; `slowed_s` are seconds by which all
    passes together take longer since collectives run beside them. The seconds of the optimizer are the CPU's where
    states rest in host memory: it steps when all gradients are there, and the next gather begins behind it.
    """

    root: UnitWork
    blocks: tuple[UnitWork, ...]
    optimizer_s: float = 0.0
    exchange: tuple[Transfer, ...] = ()
    prefetch: int = 1
    micro_batches: int = 1
    in_flight: int = 1  # reductions that may be under way when the next begins: the engine's default
    sharing: Sharing = Sharing.of("full_shard", 1, 1, streams=True)
    shards: int = 1
    replicas: int = 1
    slowed_s: float = 0.0

    @property
    def units(self) -> tuple[UnitWork, ...]:
        """Root first, as the forward reaches them."""
        return (self.root, *self.blocks)

    @property
    def compute_s(self) -> float:
        """Seconds of compute of the whole step."""
        passes_s = self.micro_batches * sum(unit.forward_s + unit.backward_s for unit in self.units)
        return passes_s + self.slowed_s + self.optimizer_s

    @property
    def inline_s(self) -> float:
        """Seconds of the collectives between products in the whole step, each alone on its link."""
        pass_s = 0.0
        for unit in self.units:
            pass_s += sum(transfer.seconds for transfer in (*unit.inline_forward, *unit.inline_backward))
        return self.micro_batches * pass_s

    @property
    def exchange_s(self) -> float:
        """Seconds of what the optimizer's step sends."""
        return sum(transfer.seconds for transfer in self.exchange)

    @property
    def optimizer(self) -> UnitWork:
        """The optimizer's step, as a unit whose collectives stand between its parts."""
        name = OPTIMIZER if self.exchange else ""
        return UnitWork(name, 0.0, self.optimizer_s, inline_backward=self.exchange)

    @property
    def without_copies(self) -> StepWork:
        """The same step with copies that take no time."""

        def empty_if_copy(transfer: Transfer) -> Transfer:
            return replace(transfer, wire_bytes=0.0) if transfer.kind in (TO_DEVICE, TO_HOST) else transfer

        return self.on_links(empty_if_copy)

    def shared(self, **choices: bool) -> StepWork:
        """Return the same step with other choices of `sharing`."""
        return replace(self, sharing=replace(self.sharing, **choices))  # type: ignore[arg-type]

    def on_links(self, change: Callable[[Transfer], Transfer]) -> StepWork:
        """Return the same step, each collective changed."""
        return replace(
            self,
            root=self.root.on_links(change),
            blocks=tuple(block.on_links(change) for block in self.blocks),
            exchange=tuple(map(change, self.exchange)),
        )


def program_of(work: StepWork, schedule: Callable[[int], Schedule] = Schedule) -> Program:
    """List the operations of each micro-batch of a step of `work`; `schedule` makes from the prefetch depth the rule
    that says what to gather ahead. Whether ranks shard and replicate follows from what the units send.
    """
    kinds = {kind for unit in work.units for kind in unit.sent}
    shards = bool(kinds & {"all_gather", "reduce_scatter"})
    sharing = replace(work.sharing, shards=shards, replicates="all_reduce" in kinds)
    units = []
    for unit in work.units:
        # a unit that is gathered alone is frozen
        holds = unit.holds or Holds(bool(unit.sent), bool(unit.sent.keys() - {"all_gather"}))
        units.append((unit.name, holds))
    return record_step(tuple(units), sharing, work.prefetch, work.micro_batches, work.in_flight, schedule)


def step_seconds(work: StepWork) -> float:
    """Sum the seconds of a step: its passes, the optimizer, and what that sends."""
    units = {unit.name: unit for unit in work.units}
    passes_s = _over_micro_batches(work, lambda operations: seconds_of(operations, units))
    return passes_s + work.slowed_s + work.optimizer_s + work.exchange_s


def copies_seconds(work: StepWork) -> float:
    """Sum the seconds of a step's copies from and to host memory, as if alone and one after the other."""
    units = {unit.name: unit for unit in work.units}

    def copies(operations: Sequence[Operation]) -> float:
        issued = (operation for operation in operations if isinstance(operation, Issue))
        copied = (issue for issue in issued if issue.kind in (TO_DEVICE, TO_HOST))
        return sum(units[issue.unit].sent[issue.kind].seconds for issue in copied)

    return _over_micro_batches(work, copies)


def _over_micro_batches(work: StepWork, seconds: Callable[[Sequence[Operation]], float]) -> float:
    """The sum over the micro-batches of a step, of which those between the first and the last are alike."""
    count = work.micro_batches
    few = replace(work, micro_batches=min(count, 3))
    by_micro_batch = [seconds(operations) for operations in program_of(few)]
    alike_s = by_micro_batch[len(by_micro_batch) // 2]
    return sum(by_micro_batch) + (count - len(by_micro_batch)) * alike_s


def seconds_of(operations: Sequence[Operation], units: Mapping[str, UnitWork]) -> float:
    """Time a micro-batch from its first operation to the end of the last.

    Collectives of states run one after the other, all-reduces beside them where they pass another link. Those between
    products have half of a link while others send on it too: both end later by the time that they share.

    >>> send = {kind: Transfer(kind, 1.0, 1.0) for kind in ("all_gather", "reduce_scatter")}
    >>> root, block = UnitWork("root", 0.0, 0.0), UnitWork("blocks.0", 2.0, 3.0, send)
    >>> (operations,) = program_of(StepWork(root, (block,), prefetch=0))
    >>> seconds_of(operations, {unit.name: unit for unit in (root, block)})
    8.0
    """
    costs = {name: _costs(unit) for name, unit in units.items()}
    now = 0.0  # of whoever computes
    free_at: dict[str, float] = {}  # by link
    ended: dict[int, float] = {}  # by the number of a collective
    on_link: dict[str, list[int]] = {}
    for operation in operations:
        if isinstance(operation, Wait):
            now = max(now, ended[operation.number])
        elif isinstance(operation, Compute):
            cost = costs[operation.unit].get(operation.phase, _FREE)
            begin = now
            now += cost.seconds
            for link, inline_s in cost.inline_s.items():
                # the part of these seconds in which the link is busy with others, too
                busy = min(1.0, max(0.0, free_at.get(link, 0.0) - begin) / cost.seconds)
                shared_s = inline_s * busy
                if shared_s:
                    free_at[link] += shared_s
                    for number in on_link[link]:
                        if ended[number] > begin:
                            ended[number] += shared_s
                now += shared_s
        elif isinstance(operation, Issue):
            cost = costs[operation.unit][operation.kind]
            ready = now if operation.after is None else ended[operation.after]
            begin = max(ready, free_at.get(cost.link, 0.0))
            ended[operation.number] = free_at[cost.link] = begin + cost.seconds
            on_link.setdefault(cost.link, []).append(operation.number)
    return now


class _Cost(NamedTuple):
    """What a phase or a collective of a unit takes."""

    seconds: float  # of a phase with the collectives between its products
    link: str = ""  # that a collective passes, or a queue of its own
    inline_s: Mapping[str, float] = MappingProxyType({})  # of those between products, by the link that they pass


_FREE = _Cost(0.0)


def _costs(unit: UnitWork) -> dict[str, _Cost]:
    """Return the cost of each phase of a unit, and of each kind of collective that moves its states."""
    costs = {}
    for kind, transfer in unit.sent.items():
        queue = "across" if kind == "all_reduce" else "states"
        costs[kind] = _Cost(transfer.seconds, transfer.link or queue)
    for phase in ("forward", "backward"):
        seconds, inline = unit.products(phase)
        inline_s: dict[str, float] = {}
        for transfer in inline:
            if transfer.seconds:
                inline_s[transfer.link] = inline_s.get(transfer.link, 0.0) + transfer.seconds
        costs[phase] = _Cost(seconds + sum(inline_s.values()), inline_s=inline_s)
    return costs
