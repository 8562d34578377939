"""The input of a simulated step: seconds of compute and collectives of every unit, taken from a plan's spec.

Compute is `step_time`'s roofline and traffic is `plan_traffic`'s, so that the simulation and the closed form differ in
the order of events only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdplab.planning.links import ring_steps
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.plan_traffic import AXES, AxisTraffic, axis_link, inline_counts, plan_traffic
from fsdplab.planning.program import Holds, Sharing
from fsdplab.planning.step_time import Compute

ROOT = "root"
_MOST_PASSES = 10_000  # each costs some milliseconds, and thousands of bytes of its record


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
    """One unit on one rank. `inline_*`: collectives that stand between the unit's products, and hide nothing."""

    name: str
    forward_s: float
    backward_s: float
    gather: Transfer | None = None
    reduce: Transfer | None = None
    across: Transfer | None = None  # the all-reduce of the slice over the replicas
    inline_forward: tuple[Transfer, ...] = ()
    inline_backward: tuple[Transfer, ...] = ()
    holds: Holds = Holds(False, False)  # also where no collective shows it

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


@dataclass(frozen=True)
class StepWork:
    """A step of a rank: blocks in the forward's order inside a root, whose own compute follows them (the head)."""

    root: UnitWork
    blocks: tuple[UnitWork, ...]
    optimizer_s: float = 0.0
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

    def shared(self, **choices: bool) -> StepWork:
        """The same step with other choices of `sharing`."""
        return replace(self, sharing=replace(self.sharing, **choices))  # type: ignore[arg-type]


def work_of(spec: PlanSpec, efficiency: float | None = None, in_flight: int = 1) -> StepWork:
    """The work of a plan's step; raises PlanError for a GPU of unknown FLOP/s, and for a step of too many events."""
    if (passes := spec.model.layers * spec.grad_accum) > _MOST_PASSES:
        raise PlanError(
            f"a simulated step has {spec.model.layers:,} blocks x {spec.grad_accum:,} micro-batches = {passes:,}"
            f" passes; expected at most {_MOST_PASSES:,}: give fewer --grad-accum, since those in the middle are alike"
        )
    compute, rows = Compute(spec, efficiency), plan_traffic(spec)
    block = _unit(spec, rows, "block", compute.forward_s, compute.backward_s)
    root = _unit(spec, rows, ROOT, compute.head_forward_s, compute.head_backward_s)
    return StepWork(
        root=root,
        blocks=tuple(replace(block, name=f"blocks.{index}") for index in range(spec.model.layers)),
        optimizer_s=compute.optimizer_s,
        prefetch=spec.prefetch,
        micro_batches=spec.grad_accum,
        in_flight=in_flight,
        sharing=spec.sharing,
        shards=spec.shards,
        replicas=spec.replicas,
    )


def on_links_of(spec: PlanSpec, work: StepWork) -> StepWork:
    """The same work with the bandwidths of `spec`, which may differ from the work's own plan in these alone."""
    rates = {axis: axis_link(spec, axis).bytes_per_s for axis in AXES}

    def linked(each: Transfer) -> Transfer:
        return replace(each, bytes_per_s=rates[each.axis])

    def unit(each: UnitWork) -> UnitWork:
        return replace(
            each,
            gather=each.gather and linked(each.gather),
            reduce=each.reduce and linked(each.reduce),
            across=each.across and linked(each.across),
            inline_forward=tuple(map(linked, each.inline_forward)),
            inline_backward=tuple(map(linked, each.inline_backward)),
        )

    return replace(work, root=unit(work.root), blocks=tuple(map(unit, work.blocks)))


def _unit(spec: PlanSpec, rows: Sequence[AxisTraffic], unit: str, forward_s: float, backward_s: float) -> UnitWork:
    mine = [row for row in rows if row.unit == unit]
    own = {
        name: _joined(spec, [row for row in mine if row.axis == axis and row.kind in kinds])
        for name, axis, kinds in (
            ("gather", "shard", ("all_gather",)),
            ("reduce", "shard", ("reduce_scatter", "all_reduce")),
            ("across", "replicate", ("all_reduce",)),
        )
    }
    forward: list[Transfer] = []
    backward: list[Transfer] = []
    for row in mine:
        first, then = inline_counts(spec, row)
        forward += [_transfer(spec, row)] * first
        backward += [_transfer(spec, row)] * then
    return UnitWork(
        unit,
        forward_s,
        backward_s,
        inline_forward=tuple(forward),
        inline_backward=tuple(backward),
        holds=Holds(gradients=unit != ROOT or not spec.lora_rank),
        **own,
    )


def _transfer(spec: PlanSpec, row: AxisTraffic) -> Transfer:
    link = axis_link(spec, row.axis)
    steps = row.ranks - 1 if row.kind == "ring" else ring_steps(row.kind, row.ranks)
    return Transfer(row.kind, row.wire_bytes, link.bytes_per_s, link.latency_s * steps, row.axis)


def _joined(spec: PlanSpec, rows: Sequence[AxisTraffic]) -> Transfer | None:
    """Rows of one unit that travel behind each other, as one: a frozen base and its adapters."""
    each = [_transfer(spec, row) for row in rows]
    if not each:
        return None
    return replace(
        each[0], wire_bytes=sum(one.wire_bytes for one in each), latency_s=sum(one.latency_s for one in each)
    )
