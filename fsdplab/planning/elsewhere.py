"""What a plan needs beside the GPUs: host memory and cores where states are offloaded, and checkpoints.

A checkpoint holds what is trained and the optimizer's state, each element once, as it rests. Nodes write equal parts of
it at once. States in files (Rajbhandari et al. 2021, ZeRO-Infinity) take the same bytes of a drive as of host memory;
each step reads and writes what the CPU's optimizer would, and reads shards for gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fsdplab.common.names import strategies_that
from fsdplab.common.sizes import seconds, size

from .host import OPTIMIZER_CORES, host_crossing, host_memory_of, node_host_bytes
from .memory import adapters, all_units
from .plan_spec import PlanSpec, changed

HOST = "host memory of a node"
ASSUMED_STORAGE = 2e9  # bytes that a node writes in a second: one drive of PCIe 3, assumed


@dataclass(frozen=True)
class Elsewhere:
    """Bytes and seconds of a plan beside its GPUs; host memory and drives are those of one node."""

    host_bytes: float
    host_memory_bytes: float | None  # None where no node is known
    host_memory_of: str
    drive_bytes: float
    drive_bytes_per_step: float
    checkpoint_bytes: float
    checkpoint_bytes_a_node: float
    checkpoint_s: float
    storage_bytes_per_s: float
    storage_assumed: bool

    @property
    def fits_host(self) -> bool:
        """Whether the host has the memory, as far as it is known."""
        return self.host_memory_bytes is None or self.host_bytes <= self.host_memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for `--json`."""
        return asdict(self) | {"fits_host": self.fits_host}


def elsewhere(spec: PlanSpec) -> Elsewhere:
    """Return what a plan needs beside its GPUs."""
    nodes = max(1, spec.gpus // spec.gpus_per_node)
    known, host = host_memory_of(spec), node_host_bytes(spec)
    saved = checkpoint_bytes(spec)
    a_node = saved / nodes
    rate = float(spec.storage or ASSUMED_STORAGE)
    return Elsewhere(
        host_bytes=host,
        host_memory_bytes=known.nbytes if known else None,
        host_memory_of=known.whose if known else "",
        drive_bytes=host,
        drive_bytes_per_step=_drive_bytes_per_step(spec),
        checkpoint_bytes=saved,
        checkpoint_bytes_a_node=a_node,
        checkpoint_s=a_node / rate,
        storage_bytes_per_s=rate,
        storage_assumed=spec.storage is None,
    )


def checkpoint_bytes(spec: PlanSpec) -> float:
    """Return the bytes of a checkpoint: what is trained as it rests, and the optimizer's state.

    Llama 3.1 70B with masters in float32 and Adam: 12 bytes a parameter.

    >>> from .planner import plan_spec
    >>> round(checkpoint_bytes(plan_spec("llama-3.1-70b", "h100", gpus=16)) / 70_553_706_496)
    12
    """
    sharded = strategies_that(lambda row: row.saves_most)[0]
    alone = changed(
        spec,
        gpus=1,
        strategy=sharded,
        shard_size=None,
        tensor_parallel=1,
        context_parallel=1,
        pipeline_parallel=1,
        expert_parallel=1,
        schedule="1f1b",
        virtual_stages=1,
        nics=None,
        network=None,
    )
    assert alone is not None, "one GPU without any parallelism contradicts nothing"
    state = all_units(alone).optimizer_state
    if not spec.lora_rank:
        return spec.model.parameters * spec.rest_bytes + state
    trained = spec.model.layers * sum(factor.count for factor in adapters(spec.model.block, spec.lora_rank))
    return trained * spec.rest_bytes + state


def _drive_bytes_per_step(spec: PlanSpec) -> float:
    """Bytes that a node's drives would read and write in a step: shards for gathers, gradients, and the optimizer's
    state, parameters and gradients, of which the first two are written again.
    """
    if not spec.offload:
        return 0.0
    states = all_units(spec)
    stepped = 2 * states.optimizer_state + 3 * states.sharded_gradients
    return (host_crossing(spec) + stepped) * min(spec.gpus, spec.gpus_per_node)


def sentences(needed: Elsewhere) -> Iterator[tuple[str, str]]:
    """Yield a name and what is needed, in words."""
    if needed.host_bytes:
        yield HOST, _host_sentence(needed)
        yield "host cores", f"{OPTIMIZER_CORES} cores of a node are assumed for the optimizer"
        files = f"{size(needed.drive_bytes)} a node, {size(needed.drive_bytes_per_step)} read or written a step"
        yield "the same states in files", f"{files}; fsdplab plans no step with them"
    assumed = ", assumed; --storage names another" if needed.storage_assumed else ""
    rate = f"{size(needed.storage_bytes_per_s)}/s a node{assumed}"
    written = f"{size(needed.checkpoint_bytes)} in all, {size(needed.checkpoint_bytes_a_node)} a node"
    yield "a checkpoint", f"{written}: {seconds(needed.checkpoint_s)} at {rate}"


def _host_sentence(needed: Elsewhere) -> str:
    needs = f"{size(needed.host_bytes)} are needed"
    if needed.host_memory_bytes is None:
        return f"{needs}; how much a node has is not known here: give --host-memory, such as 512GB"
    has = f"{size(needed.host_memory_bytes)} ({needed.host_memory_of})"
    if needed.fits_host:
        return f"{needs} of {has}"
    return f"{needs}, which do not fit in {has}"
