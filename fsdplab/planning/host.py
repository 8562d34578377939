"""States that rest in host memory: the copies over a GPU's link to its host, and the optimizer that steps on the CPU.

As the engine does it, and FSDP2: shards are copied as they rest and cast on the GPU, so float32 shards take 4 bytes an
element of the link whatever computes; each all-gather begins behind the copy of its shard. Reduced gradients go back
unit by unit. Each direction has a stream of its own, and both run beside compute. The optimizer steps when the last
gradients have arrived; nothing else goes on meanwhile.
"""

from __future__ import annotations

from .links import HOST_LINK, LinkSpec
from .memory import unit_bytes
from .plan_spec import PlanSpec
from .program import TO_DEVICE, TO_HOST, Transfer
from .traffic import counts

# What fused Adam moves on the CPUs of one node, and unfused operators, which read and write three times as much: 28
# bytes a parameter in float32, 10 billion parameters in 2.57 and 14.76 s on a DGX-2 (Ren et al. 2021, ZeRO-Offload,
# table 4: CPU-Adam and PyTorch's).
OPTIMIZER_SOURCE = "at the rate of ZeRO-Offload's table 4 (a DGX-2's CPUs, which the GPUs of a node share)"
_FUSED, _UNFUSED = 28 * 10e9 / 2.57, 3 * 28 * 10e9 / 14.76


def host_link(spec: PlanSpec) -> LinkSpec:
    """The link of a GPU to its host; PCIe 4 is assumed where its row says nothing."""
    return spec.gpu.host_link or HOST_LINK


def copies(spec: PlanSpec, shard_bytes: float, gradient_bytes: float) -> dict[str, Transfer]:
    """The copies of a unit with a shard and reduced gradients of so many bytes. GPUs without a link of their own send
    collectives over the same PCIe, one after the other.
    """
    sizes = {TO_DEVICE: shard_bytes, TO_HOST: gradient_bytes}
    rate, shared = host_link(spec).bytes_per_s, spec.gpu.link.name.startswith("pcie")
    return {
        kind: Transfer(kind, nbytes, rate, axis=kind, link="node" if shared else kind) for kind, nbytes in sizes.items()
    }


def copied_bytes(spec: PlanSpec, unit: str) -> tuple[float, float]:
    """Bytes of a block's or the root's shard at rest, and of its reduced gradients."""
    parameters = spec.model.root if unit == "root" else spec.model.block
    held = unit_bytes(parameters, spec, adapted=unit != "root")
    return held.sharded_parameters, held.sharded_gradients


def host_crossing(spec: PlanSpec) -> float:
    """Bytes of a rank over the host's link in a step: the shard for every gather, and the gradients back; 0 without
    offload.
    """
    if not spec.offload:
        return 0.0
    crossing = 0.0
    for unit, alike in (("block", spec.model.layers), ("root", 1)):
        gathers, reductions = counts(spec.row, spec.grad_accum, unit == "root")
        gathers = min(gathers, spec.grad_accum) if spec.sharing.fewer else gathers
        shard, gradients = copied_bytes(spec, unit)
        crossing += alike * (gathers * shard + (1 if spec.sharing.no_sync else reductions) * gradients)
    return crossing


def host_optimizer_s(spec: PlanSpec, moved: float) -> float:
    """Seconds of the CPU's optimizer step for a rank that moves so many bytes: the GPUs of a node share its CPUs."""
    rate = _UNFUSED if spec.optimizer == "adamw-foreach" else _FUSED
    return moved * min(spec.gpus, spec.gpus_per_node) / rate
