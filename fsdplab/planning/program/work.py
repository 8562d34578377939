"""What the units of a step compute and send, and how long a program of them takes: one pass over its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdplab.engine.core.step import Schedule

from .memory import Sharing
from .record import Compute, Holds, Issue, Operation, Program, Wait, record_step

ROOT, BLOCK = "root", "block"
SLOWED = "slowed by collectives"
OPTIMIZER = "optimizer"  # beside them: what its step sends, and its phase


@dataclass(frozen=True)
class Transfer:
    """One collective on an otherwise free link: the latency of all its steps, then the bytes that one rank sends.

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
        """Both as one, such as the gathers of a frozen base and of its adapters."""
        wire_bytes, latency_s = self.wire_bytes + other.wire_bytes, self.latency_s + other.latency_s
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
        """Seconds of a forward or a backward, and the collectives between its products."""
        return (self.forward_s, self.inline_forward) if phase == "forward" else (self.backward_s, self.inline_backward)

    def on_links(self, change: Callable[[Transfer], Transfer]) -> UnitWork:
        """The same unit, each of its collectives changed."""
        sent = {kind: change(each) for kind, each in self.sent.items()}
        forward, backward = (tuple(map(change, each)) for each in (self.inline_forward, self.inline_backward))
        return replace(self, sent=sent, inline_forward=forward, inline_backward=backward)


@dataclass(frozen=True)
class StepWork:
    """A step of a rank: blocks in the forward's order inside a root, whose own compute follows them (the head).
    `exchange` is what the optimizer's step sends, of which nothing is hidden; `slowed_s` are seconds by which all
    passes together take longer since collectives run beside them.
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
    def exchange_s(self) -> float:
        """Seconds of what the optimizer's step sends."""
        return sum(each.seconds for each in self.exchange)

    @property
    def optimizer(self) -> UnitWork:
        """The optimizer's step, as a unit whose collectives stand between its parts."""
        name = OPTIMIZER if self.exchange else ""
        return UnitWork(name, 0.0, self.optimizer_s, inline_backward=self.exchange)

    def shared(self, **choices: bool) -> StepWork:
        """The same step with other choices of `sharing`."""
        return replace(self, sharing=replace(self.sharing, **choices))  # type: ignore[arg-type]

    def on_links(self, change: Callable[[Transfer], Transfer]) -> StepWork:
        """The same step, each collective changed."""
        changed = tuple(each.on_links(change) for each in self.blocks)
        exchange = tuple(map(change, self.exchange))
        return replace(self, root=self.root.on_links(change), blocks=changed, exchange=exchange)


def program_of(work: StepWork, schedule: Callable[[int], Schedule] = Schedule) -> Program:
    """The operations of each micro-batch of a step of `work`; `schedule` makes from the prefetch depth the rule that
    says what to gather ahead. Whether ranks shard and replicate follows from what the units send.
    """
    kinds = {kind for unit in work.units for kind in unit.sent}
    sharing = replace(
        work.sharing, shards=bool(kinds & {"all_gather", "reduce_scatter"}), replicates="all_reduce" in kinds
    )
    units = tuple((unit.name, unit.holds or _held_by(unit)) for unit in work.units)
    return record_step(units, sharing, work.prefetch, work.micro_batches, work.in_flight, schedule)


def _held_by(unit: UnitWork) -> Holds:
    return Holds(bool(unit.sent), bool(unit.sent.keys() - {"all_gather"}))


def step_seconds(work: StepWork) -> float:
    """Seconds of a step, of whose micro-batches those between the first and the last are alike."""
    count, units = work.micro_batches, {unit.name: unit for unit in work.units}
    program = program_of(replace(work, micro_batches=min(count, 3)))
    each = [seconds_of(operations, units) for operations in program]
    return sum(each) + (count - len(each)) * each[len(each) // 2] + work.slowed_s + work.optimizer_s + work.exchange_s


def seconds_of(operations: Sequence[Operation], units: Mapping[str, UnitWork]) -> float:
    """Seconds from the first operation of a micro-batch to the end of the last.

    Collectives of states run one after the other, all-reduces beside them where they pass another link. Those between
    products have half of a link while others send on it too: both end later by the time that they share.

    >>> send = {kind: Transfer(kind, 1.0, 1.0) for kind in ("all_gather", "reduce_scatter")}
    >>> root, block = UnitWork("root", 0.0, 0.0), UnitWork("blocks.0", 2.0, 3.0, send)
    >>> (operations,) = program_of(StepWork(root, (block,), prefetch=0))
    >>> seconds_of(operations, {unit.name: unit for unit in (root, block)})
    8.0
    """
    distinct = {id(unit): _costs(unit) for unit in units.values()}
    costs = {name: distinct[id(unit)] for name, unit in units.items()}
    now, free = 0.0, dict[str, float]()  # link -> when it is free
    ended: dict[int, float] = {}
    on_link: dict[str, list[int]] = {}
    for each in operations:
        if isinstance(each, Wait):
            now = max(now, ended[each.number])
        elif isinstance(each, Compute):
            seconds, inline_s, link = costs[each.unit].get(each.phase, (0.0, 0.0, ""))
            shared = inline_s * min(1.0, max(0.0, free.get(link, 0.0) - now) / seconds) if inline_s else 0.0
            if shared:
                free[link] += shared
                for number in on_link[link]:
                    ended[number] += shared if ended[number] > now else 0.0
            now += seconds + shared
        elif isinstance(each, Issue):
            seconds, _, link = costs[each.unit][each.kind]
            begin = max(now if each.after is None else ended[each.after], free.get(link, 0.0))
            ended[each.number] = free[link] = begin + seconds
            on_link.setdefault(link, []).append(each.number)
    return now


def _costs(unit: UnitWork) -> dict[str, tuple[float, float, str]]:
    """Of each phase its seconds with the collectives between its products, the seconds of these, and the link that they
    pass; of each kind of collective its seconds, and its link or a queue of its own.
    """
    found = {
        kind: (each.seconds, 0.0, each.link or ("across" if kind == "all_reduce" else "states"))
        for kind, each in unit.sent.items()
    }
    for phase in ("forward", "backward"):
        seconds, inline = unit.products(phase)
        inline_s = sum(each.seconds for each in inline)
        found[phase] = seconds + inline_s, inline_s, inline[0].link if inline else ""
    return found
