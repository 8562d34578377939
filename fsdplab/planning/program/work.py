"""What the units of a step compute and send, and how long a program of them takes: one pass over its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdplab.engine.core.step import Schedule

from .memory import Sharing
from .record import Compute, Holds, Issue, Operation, Wait, record_step

ROOT, BLOCK = "root", "block"


@dataclass(frozen=True)
class Transfer:
    """One collective on an otherwise free link: the latency of all its steps, then the bytes that one rank sends."""

    kind: str
    wire_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0
    axis: str = "shard"

    @property
    def seconds(self) -> float:
        """Latency and bytes together: 1 ms and 10 MB at 10 GB/s are 2 ms."""
        return self.latency_s + self.wire_bytes / self.bytes_per_s


@dataclass(frozen=True)
class UnitWork:
    """One unit on one rank. `inline_*`: collectives that stand between the unit's products, and hide nothing. `holds`:
    what it has where no collective shows it.
    """

    name: str
    forward_s: float
    backward_s: float
    gather: Transfer | None = None
    reduce: Transfer | None = None
    across: Transfer | None = None  # the all-reduce of the shard over the replicas
    inline_forward: tuple[Transfer, ...] = ()
    inline_backward: tuple[Transfer, ...] = ()
    holds: Holds | None = None

    @property
    def scatters(self) -> bool:
        """Whether gradients are reduce-scattered over the shards."""
        return self.reduce is not None and self.reduce.kind == "reduce_scatter"

    @property
    def all_reduce(self) -> Transfer | None:
        """Of a shard over the replicas, or of all gradients over the ranks."""
        return self.reduce if self.reduce and not self.scatters else self.across

    def transfer(self, kind: str) -> Transfer:
        """The collective of a `kind`; raises `ValueError` if the unit has none."""
        found = {"all_gather": self.gather, "all_reduce": self.all_reduce}.get(kind, self.reduce)
        if found is None:
            raise ValueError(f"unit {self.name!r} has no {kind}")
        return found

    def computes_s(self, phase: str) -> float:
        """Seconds of a forward or a backward, with the collectives between its products."""
        forward = phase == "forward"
        seconds, inline = (self.forward_s, self.inline_forward) if forward else (self.backward_s, self.inline_backward)
        return seconds + sum(each.seconds for each in inline)

    def on_links(self, change: Callable[[Transfer], Transfer]) -> UnitWork:
        """The same unit, each of its collectives changed."""
        return replace(
            self, inline_forward=tuple(map(change, self.inline_forward)),
            inline_backward=tuple(map(change, self.inline_backward)), gather=self.gather and change(self.gather),
            reduce=self.reduce and change(self.reduce), across=self.across and change(self.across),
        )  # fmt: skip


@dataclass(frozen=True)
class StepWork:
    """A step of a rank: blocks in the forward's order inside a root, whose own compute follows them (the head)."""

    root: UnitWork
    blocks: tuple[UnitWork, ...]
    optimizer_s: float = 0.0
    exchange_s: float = 0.0  # of what the optimizer's step sends, which nothing hides
    prefetch: int = 1
    micro_batches: int = 1
    in_flight: int = 1  # reductions that may be under way when the next begins: the engine's default
    sharing: Sharing = Sharing.of("full_shard", 1, 1, streams=True)
    shards: int = 1
    replicas: int = 1

    @property
    def units(self) -> tuple[UnitWork, ...]:
        """Root first, as the forward reaches them."""
        return (self.root, *self.blocks)

    @property
    def compute_s(self) -> float:
        """Seconds of compute of the whole step."""
        return self.micro_batches * sum(unit.forward_s + unit.backward_s for unit in self.units) + self.optimizer_s

    def shared(self, **choices: bool) -> StepWork:
        """The same step with other choices of `sharing`."""
        return replace(self, sharing=replace(self.sharing, **choices))  # type: ignore[arg-type]

    def on_links(self, change: Callable[[Transfer], Transfer]) -> StepWork:
        """The same step, each collective changed."""
        changed = tuple(each.on_links(change) for each in self.blocks)
        return replace(self, root=self.root.on_links(change), blocks=changed)


def program_of(work: StepWork, schedule: Schedule | None = None) -> Sequence[Sequence[Operation]]:
    """The operations of each micro-batch of a step of `work`, in the order of `schedule`, by default the engine's;
    whether ranks shard and replicate follows from what its units send.
    """
    shards = any(unit.gather or unit.scatters for unit in work.units)
    sharing = replace(work.sharing, shards=shards, replicates=any(unit.all_reduce for unit in work.units))
    units = tuple((unit.name, unit.holds or _held_by(unit)) for unit in work.units)
    if schedule is None:
        return planned_step(units, sharing, work.prefetch, work.micro_batches, work.in_flight)
    return record_step(dict(units), sharing, schedule, micro_batches=work.micro_batches, in_flight=work.in_flight)


def _held_by(unit: UnitWork) -> Holds:
    trained = bool(unit.reduce or unit.across)
    return Holds(trained or bool(unit.gather), trained)


@lru_cache(maxsize=64)
def planned_step(
    units: Sequence[tuple[str, Holds]], sharing: Sharing, prefetch: int, micro_batches: int, in_flight: int = 1
) -> Sequence[Sequence[Operation]]:
    """The operations of each micro-batch of a step in the engine's order. They are kept, since they depend on no bytes
    and no seconds: plans that differ in these have one program.
    """
    return record_step(dict(units), sharing, Schedule(prefetch), micro_batches=micro_batches, in_flight=in_flight)


def step_seconds(work: StepWork) -> float:
    """Seconds of a step, of whose micro-batches those between the first and the last are alike."""
    count, units = work.micro_batches, {unit.name: unit for unit in work.units}
    program = program_of(replace(work, micro_batches=min(count, 3)))
    each = [seconds_of(operations, units) for operations in program]
    return sum(each) + (count - len(each)) * each[len(each) // 2] + work.optimizer_s + work.exchange_s


def seconds_of(operations: Sequence[Operation], units: Mapping[str, UnitWork]) -> float:
    """Seconds from the first operation of a micro-batch to the end of the last.

    All-reduces have a link of their own; other collectives run one after the other.

    >>> send = {kind: Transfer(kind, 1.0, 1.0) for kind in ("all_gather", "reduce_scatter")}
    >>> root, block = UnitWork("root", 0.0, 0.0), UnitWork("blocks.0", 2.0, 3.0, *send.values())
    >>> (operations,) = program_of(StepWork(root, (block,), prefetch=0))
    >>> seconds_of(operations, {unit.name: unit for unit in (root, block)})
    8.0
    """
    distinct = {id(unit): _costs(unit) for unit in units.values()}
    costs = {name: distinct[id(unit)] for name, unit in units.items()}
    now, free = 0.0, {False: 0.0, True: 0.0}  # link across replicas -> when it is free
    ended: dict[int, float] = {}
    for each in operations:
        if isinstance(each, Wait):
            now = max(now, ended[each.number])
        elif isinstance(each, Compute):
            now += costs[each.unit].get(each.phase, 0.0)
        elif isinstance(each, Issue):
            across = each.kind == "all_reduce"
            begin = max(now if each.after is None else ended[each.after], free[across])
            ended[each.number] = free[across] = begin + costs[each.unit][each.kind]
    return now


def _costs(unit: UnitWork) -> dict[str, float]:
    """Seconds of each phase and of each kind of collective."""
    sent = [each for each in (unit.gather, unit.reduce, unit.across) if each]
    found = {each.kind: each.seconds for each in sent}
    return found | {phase: unit.computes_s(phase) for phase in ("forward", "backward")}
