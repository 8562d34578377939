"""States that rest in host memory: the copies over a GPU's link to its host, and the optimizer that steps on the CPU.

As the engine does it, and FSDP2: shards are copied as they rest and cast on the GPU, so float32 shards take 4 bytes an
element of the link whatever computes; each all-gather begins behind the copy of its shard. Reduced gradients go back
unit by unit. Each direction has a stream of its own, and both run beside compute. The optimizer steps when the last
gradients have arrived; nothing else goes on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from .links import HOST_LINK, LinkSpec
from .memory import host_bytes, unit_bytes
from .plan_spec import PlanSpec
from .program import TO_DEVICE, TO_HOST, Transfer
from .traffic import counts

# What fused Adam moves on the CPUs of one node, and unfused operators, which read and write three times as much: 28
# bytes a parameter in float32, 10 billion parameters in 2.57 and 14.76 s on a DGX-2 (Ren et al. 2021, ZeRO-Offload,
# table 4: CPU-Adam and PyTorch's).
OPTIMIZER_SOURCE = "at the rate of ZeRO-Offload's table 4 (a DGX-2's CPUs, which the GPUs of a node share)"
OPTIMIZER_CORES = 48  # of the DGX-2's two Xeon Platinum 8168
_FUSED, _UNFUSED = 28 * 10e9 / 2.57, 3 * 28 * 10e9 / 14.76

# Host memory of the usual node of eight GPUs of a kind, and which node that is: its vendor's data sheet.
_NODE = 8
_NODES = {
    "H100 SXM 80GB": (2e12, "a DGX H100"),
    "H200 SXM 141GB": (2e12, "a DGX H200"),
    "A100 SXM 80GB": (2e12, "a DGX A100 640GB"),
    "A100 SXM 40GB": (1152 * 2.0**30, "an AWS p4d.24xlarge"),
    "B200 SXM": (2e12, "a DGX B200 without its option of 4 TB"),
    "A10G": (768 * 2.0**30, "an AWS g5.48xlarge"),
    "T4": (384 * 2.0**30, "an AWS g4dn.metal"),
}


@dataclass(frozen=True)
class HostMemory:
    """Host memory of a node in bytes, and in words whose it is."""

    nbytes: float
    whose: str


def host_memory_of(spec: PlanSpec) -> HostMemory | None:
    """Return what `--host-memory` says, or else the usual node of the GPU has; None where no node is known."""
    if spec.host_memory is not None:
        return HostMemory(float(spec.host_memory), "--host-memory")
    if spec.gpus_per_node != _NODE or spec.gpu.name not in _NODES:
        return None
    return HostMemory(*_NODES[spec.gpu.name])


def node_host_bytes(spec: PlanSpec) -> float:
    """Return the bytes of a node's host memory that offloaded states of all its ranks take; 0 without offload.

    70 B parameters in float32 with Adam on four GPUs: 16 bytes each, 1.13 TB in one node.
    """
    return host_bytes(spec) * min(spec.gpus, spec.gpus_per_node)


def holds_offloaded(spec: PlanSpec) -> bool:
    """Return whether a node's host memory holds what is offloaded; unknown host memory is taken to."""
    if not spec.offload:
        return True
    known = host_memory_of(spec)
    return known is None or node_host_bytes(spec) <= known.nbytes


def host_link(spec: PlanSpec) -> LinkSpec:
    """Return the link of a GPU to its host; PCIe 4 is assumed where its row says nothing."""
    return spec.gpu.host_link or HOST_LINK


def copies(spec: PlanSpec, shard_bytes: float, gradient_bytes: float) -> dict[str, Transfer]:
    """Return the copies of a unit with a shard and reduced gradients of so many bytes.

    GPUs without a link of their own send collectives over the same PCIe, one after the other.
    """
    rate = host_link(spec).bytes_per_s
    is_shared = spec.gpu.link.name.startswith("pcie")
    transfers = {}
    for kind, nbytes in ((TO_DEVICE, shard_bytes), (TO_HOST, gradient_bytes)):
        link = "node" if is_shared else kind
        transfers[kind] = Transfer(kind, nbytes, rate, axis=kind, link=link)
    return transfers


def copied_bytes(spec: PlanSpec, unit: str) -> tuple[float, float]:
    """Return the bytes of a block's or the root's shard at rest, and of its reduced gradients."""
    parameters = spec.model.root if unit == "root" else spec.model.block
    held = unit_bytes(parameters, spec, adapted=unit != "root")
    return held.sharded_parameters, held.sharded_gradients


def host_crossing(spec: PlanSpec) -> float:
    """Return the bytes of a rank over the host's link in a step: the shard for every gather, and the gradients back; 0
    without offload.
    """
    if not spec.offload:
        return 0.0
    crossing = 0.0
    for unit, alike in (("block", spec.model.layers), ("root", 1)):
        gathers, reductions = counts(spec.row, spec.grad_accum, unit == "root")
        if spec.sharing.fewer:  # for its backward a unit is gathered from the device
            gathers = min(gathers, spec.grad_accum)
        if spec.sharing.no_sync:
            reductions = 1
        shard, gradients = copied_bytes(spec, unit)
        crossing += alike * (gathers * shard + reductions * gradients)
    return crossing


def host_optimizer_s(spec: PlanSpec, moved: float) -> float:
    """Return the seconds of the CPU's optimizer step for a rank that moves so many bytes.

    The GPUs of a node share its CPUs.
    """
    rate = _UNFUSED if spec.optimizer == "adamw-foreach" else _FUSED
    return moved * min(spec.gpus, spec.gpus_per_node) / rate
