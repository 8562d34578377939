"""The collectives of a planned step by mesh axis: whose ranks they join, over which link, how many, how many bytes.

Sharded and replicated axes: traffic.py's counts, which the ledger of real runs is held against. Tensor parallelism with
the sequence cut between the products: an all-gather before and a reduce-scatter behind each of a block's two halves,
and the same in its backward (Korthikanti et al. 2022, section 4.2.2). Context parallelism: keys and values travel round
a ring (Liu et al. 2023, Ring Attention), and their gradients with them in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdplab.workloads.shapes import Parameter

from .links import LinkSpec, ring_steps
from .memory import adapters, frozen_bytes, frozen_parts, sharers
from .muon import OwnersStep
from .plan_spec import PlanSpec
from .program import OPTIMIZER, Transfer
from .stages import sent_between_stages, stages
from .traffic import Traffic, UnitShapes, step_traffic

AXES = ("shard", "replicate", "tensor", "context", "expert", "pipeline")
# Of a link's data sheet, what collectives reach: 376 to 380 of 450 GB/s measured between two GPUs (NVIDIA/nccl #1264).
LINK_EFFICIENCY = 0.84


@dataclass(frozen=True)
class AxisTraffic:
    """Collectives of one kind of one kind of unit along one axis in a step; bytes are what one rank sends for each.
    `inline`: how many stand between the products of one forward of the unit, and of one backward; none of those that
    move states.
    """

    axis: str
    unit: str  # "block" (all blocks together), "root" or "optimizer"
    kind: str
    count: float
    wire_bytes: float
    ranks: int
    inline: tuple[int, int] = (0, 0)

    @property
    def step_bytes(self) -> float:
        """Bytes that one rank sends for them in a step."""
        return self.count * self.wire_bytes


def plan_traffic(spec: PlanSpec) -> list[AxisTraffic]:
    """List every collective of a step of `spec`; nothing for an axis of one rank.

    Of a pipeline: those of the stage that sends most.
    """
    if spec.pipeline_parallel > 1:
        by_stage = (_of_stage(stage, index, spec) for index, stage in stages(spec))
        return max(by_stage, key=_bytes)
    return [
        *_state_traffic(spec),
        *_tensor_traffic(spec),
        *_context_traffic(spec),
        *_expert_traffic(spec),
        *_optimizer_traffic(spec),
    ]


def _bytes(rows: Sequence[AxisTraffic]) -> float:
    return sum(row.step_bytes for row in rows)


def _of_stage(stage: PlanSpec, index: int, spec: PlanSpec) -> list[AxisTraffic]:
    """Of one stage: its own, and what it sends to its neighbours."""
    return [*plan_traffic(stage), sends_of(spec, index)]


def sends_of(spec: PlanSpec, index: int) -> AxisTraffic:
    """Count what one stage sends: results to the next and gradients to the one before it, of every micro-batch.

    Of four stages with 8 micro-batches the first and the last send 8 times, those between them 16 times. With several
    parts a stage the last also sends results to the first, and the first gradients to the last, of all parts but one.
    """
    parts = spec.virtual_stages
    results = parts - (index == spec.pipeline_parallel - 1)
    gradients = parts - (index == 0)
    count = spec.grad_accum * (results + gradients)
    return AxisTraffic("pipeline", "stage", "send", count, sent_between_stages(spec), 2)


def bytes_by_axis(rows: Sequence[AxisTraffic]) -> dict[str, int]:
    """Sum the bytes that one rank sends in a step by axis; axes without traffic are left out."""
    by_axis = {}
    for axis in AXES:
        sent = sum(row.step_bytes for row in rows if row.axis == axis)
        if sent:
            by_axis[axis] = round(sent)
    return by_axis


def sent_by_a_node(spec: PlanSpec, rows: Sequence[AxisTraffic]) -> int:
    """Bytes that the GPUs of one node together send over its network in a step.

    A ring through all GPUs of two nodes leaves each node once: what leaves it is what one rank sends, by whichever
    network card. Where each GPU has a ring with its like in the other nodes, every one of these rings leaves the node.

    >>> from fsdplab.planning.planner import plan_spec
    >>> for strategy in ("full_shard", "hybrid_shard"):
    ...     spec = plan_spec("llama-3.1-8b", "h100", gpus=16, gpus_per_node=8, strategy=strategy)
    ...     print(strategy, round(sent_by_a_node(spec, plan_traffic(spec)) / 1e9))
    full_shard 58
    hybrid_shard 32
    """
    per_node = min(spec.gpus, spec.gpus_per_node)
    sent = 0.0
    for row in rows:
        if leaves_node(spec, row.axis):
            inner, _ = _mesh(spec)[row.axis]
            of_a_ring = max(1, per_node // inner)
            sent += row.step_bytes * per_node / of_a_ring
    return round(sent)


def axis_link(spec: PlanSpec, axis: str) -> LinkSpec:
    """Return the link of a rank along an axis, at what collectives reach of it.

    Axes lie inside each other: tensor, context, shard, replicate. Where an axis stays inside a node, it has the GPUs'
    own link; where it leaves, that of a ring over nodes (hardware.py).
    """
    fabric, own = spec.fabric, spec.gpu.link
    if fabric is None or not leaves_node(spec, axis):
        return replace(own, bytes_per_s=own.bytes_per_s * LINK_EFFICIENCY)
    if axis == "pipeline":
        return fabric.ring(spec.gpu, 1, 1, LINK_EFFICIENCY)  # a card to the same card of another node
    inner, _ = _mesh(spec)[axis]
    per_node = min(spec.gpus, spec.gpus_per_node)
    members = max(1, per_node // inner)  # of a ring in each node
    return fabric.ring(spec.gpu, members, _nodes(spec, axis), LINK_EFFICIENCY)


def part_of_network(spec: PlanSpec) -> tuple[int, float] | None:
    """Return how many nodes the longest ring passes, and its part of the network's rate; None for one node."""
    outside = [axis for axis in AXES if leaves_node(spec, axis)]
    if spec.fabric is None or not outside:
        return None
    nodes = max(_nodes(spec, axis) for axis in outside)
    return round(nodes), spec.fabric.part(nodes)


def _nodes(spec: PlanSpec, axis: str) -> float:
    """Nodes that one ring of an axis passes."""
    inner, ranks = _mesh(spec)[axis]
    return min(ranks, inner * ranks / min(spec.gpus, spec.gpus_per_node))


def leaves_node(spec: PlanSpec, axis: str) -> bool:
    """Return whether the groups of an axis have members in several nodes."""
    inner, ranks = _mesh(spec)[axis]
    per_node = min(spec.gpus, spec.gpus_per_node)
    if axis == "pipeline":  # neighbours are a stage apart
        return inner >= per_node and ranks > 1
    return inner * ranks > per_node


def transfer_of(spec: PlanSpec, row: AxisTraffic) -> Transfer:
    """Return one collective of the row, on an otherwise free link."""
    link = axis_link(spec, row.axis)
    latency_s = link.latency_s * ring_steps(row.kind, row.ranks)
    passes = "network" if leaves_node(spec, row.axis) else "node"
    return Transfer(row.kind, row.wire_bytes, link.bytes_per_s, latency_s, row.axis, passes)


def latency_s(spec: PlanSpec, rows: Sequence[AxisTraffic]) -> float:
    """Sum the seconds of a step's communication, as if alone, that no bandwidth shortens.

    A ring over 2,048 ranks has 2,047 steps.
    """
    return sum(row.count * transfer_of(spec, row).latency_s for row in rows)


def _mesh(spec: PlanSpec) -> dict[str, tuple[int, int]]:
    """Axis -> GPUs of one of its ranks, those of the axes inside it, and its ranks; context-parallel ranks are among
    the shards.
    """
    tensor, pipeline = spec.tensor_parallel, spec.pipeline_parallel
    return {
        "tensor": (1, tensor),
        "context": (tensor, spec.context_parallel),
        "shard": (tensor, spec.shards),
        "replicate": (tensor * spec.shards, spec.replicas),
        "expert": (tensor, spec.expert_parallel),
        "pipeline": (spec.gpus // pipeline, pipeline),
    }


# ---- states


def _state_traffic(spec: PlanSpec) -> list[AxisTraffic]:
    traffic = []
    shape = spec.model
    for unit, parameters, count in (("block", shape.block, shape.layers), ("root", shape.root, 1)):
        held = spec.held(parameters)
        if spec.lora_rank:
            for row in _lora_rows(held, unit, spec):
                traffic.append(on_axis(row, unit, count, spec))
            continue
        for part, among in sharers(held, spec):
            for row in _rows(part, unit, spec, spec.gather_bytes, among):
                traffic.append(on_axis(row, unit, count, spec, among))
    return [row for row in traffic if row.wire_bytes]


def on_axis(row: Traffic, unit: str, units: int, spec: PlanSpec, among: int | None = None) -> AxisTraffic:
    """Turn a row of the formula for one unit into that of `units` such units along its axis.

    `among`: the ranks that share it; all shards by default.
    """
    count = row.count * units
    if row.kind == "all_reduce" and spec.row.in_groups:
        return AxisTraffic("replicate", unit, row.kind, count, row.wire_bytes, spec.replicas)
    return AxisTraffic("shard", unit, row.kind, count, row.wire_bytes, among or spec.shards)


def _rows(
    parameters: Sequence[Parameter], unit: str, spec: PlanSpec, itemsize: int, among: int | None = None
) -> list[Traffic]:
    if not parameters:
        return []
    shapes = UnitShapes(unit, tuple((parameter.name, parameter.shape) for parameter in parameters))
    rows = step_traffic(
        [shapes],
        spec.strategy,
        (among or spec.shards) * spec.replicas,
        param_itemsize=itemsize,
        reduce_itemsize=spec.reduce_bytes,
        micro_batches=spec.grad_accum,
        replicas=spec.replicas,
    )
    if not spec.sharing.no_sync or spec.row.reduces_once:
        return rows
    # under no_sync the last micro-batch alone reduces
    return [row if row.kind == "all_gather" else replace(row, count=1) for row in rows]


def _lora_rows(parameters: Sequence[Parameter], unit: str, spec: PlanSpec) -> list[Traffic]:
    """A frozen base is gathered, in its own bytes, and never reduced; adapters are gathered and reduced."""
    adapted = unit == "block"
    packed = sum(frozen_bytes(frozen, itemsize) for frozen, itemsize in frozen_parts(parameters, spec, adapted))
    base = _rows([Parameter("base", (packed,))], unit, spec, 1)
    gathered = [row for row in base if row.kind == "all_gather"]
    if not adapted:
        return gathered
    return gathered + _rows(adapters(parameters, spec.lora_rank), unit, spec, spec.gather_bytes)


def owners_step(spec: PlanSpec) -> OwnersStep:
    """Return Muon's step: within a shard group, or over all ranks that hold whole matrices."""
    cut = bool(spec.row.cuts)
    return OwnersStep.of(spec.model, spec.shards if cut else spec.replicas, not cut)


def _optimizer_traffic(spec: PlanSpec) -> list[AxisTraffic]:
    if spec.optimizer != "muon":
        return []
    axis = "shard" if spec.row.cuts else "replicate"
    step = owners_step(spec)
    return [AxisTraffic(axis, OPTIMIZER, row.kind, row.count, row.wire_bytes, step.ranks) for row in step.traffic()]


# ---- activations


def _tensor_traffic(spec: PlanSpec) -> list[AxisTraffic]:
    ranks = spec.tensor_parallel
    if ranks == 1:
        return []
    wire = spec.tokens * spec.model.width * spec.param_bytes * (ranks - 1) / ranks
    gathered_again = 0 if spec.checkpointing == "none" else 2  # a recomputed forward gathers again
    reduced_again = 2 if spec.checkpointing in ("attention", "full") else 0
    return [
        _inline("tensor", "block", "all_gather", (2, 2 + gathered_again), wire, ranks, spec),
        _inline("tensor", "block", "reduce_scatter", (2, 2 + reduced_again), wire, ranks, spec),
        _inline("tensor", "root", "all_gather", (1, 1), wire, ranks, spec),
        _inline("tensor", "root", "reduce_scatter", (1, 1), wire, ranks, spec),
    ]


def _context_traffic(spec: PlanSpec) -> list[AxisTraffic]:
    ranks = spec.context_parallel
    if ranks == 1:
        return []
    keys_and_values = 2 * spec.tokens * spec.model.kv_width * spec.param_bytes / spec.tensor_parallel
    inline = (1, 2)  # gradients travel in the backward, too
    if spec.checkpointing != "none":
        inline = (1, 3)
    return [_inline("context", "block", "ring", inline, keys_and_values * (ranks - 1), ranks, spec)]


def _expert_traffic(spec: PlanSpec) -> list[AxisTraffic]:
    """Tokens travel to the GPUs that hold their experts, and their results back (Lepikhin et al. 2020, GShard); so do
    gradients. Tokens are taken as spread evenly over the experts.
    """
    ranks, experts = spec.expert_parallel, spec.model.mixture
    if ranks == 1 or experts is None:
        return []
    taken = spec.tokens * experts.per_token * spec.model.width * spec.param_bytes / spec.tensor_parallel
    inline = (2, 2)
    if spec.checkpointing in ("attention", "full"):  # the forward is recomputed
        inline = (2, 4)
    return [_inline("expert", "block", "all_to_all", inline, taken * (ranks - 1) / ranks, ranks, spec)]


def _inline(
    axis: str, unit: str, kind: str, inline: tuple[int, int], wire_bytes: float, ranks: int, spec: PlanSpec
) -> AxisTraffic:
    alike = spec.model.layers if unit == "block" else 1
    count = sum(inline) * spec.grad_accum * alike
    return AxisTraffic(axis, unit, kind, count, wire_bytes, ranks, inline)
