"""Whether the network that a spec asks for can be: links, the wind tunnel, and the mesh that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.planning.hardware import HardwareError, parse_cluster
from fsdplab.planning.links import LinkError, parse_link
from fsdplab.workloads import ConfigError, preset

from .refusing import SpecError, check_whole
from .spec_asked import Asked


def check_network(spec: Asked, on_shared_memory: Sequence[str]) -> None:
    """Links and the mesh that they belong to: SpecError unless they go together."""
    _check_shard_group(spec)
    if spec.engine == "twin":
        return  # the twin has no network: what is said of one is for the runs that it is compared with
    if bool(spec.emulate) != bool(spec.as_model):
        raise SpecError(
            f"emulate={spec.emulate!r}, as_model={spec.as_model!r}: give both, such as emulate='8xH100',"
            " as_model='llama-3.1-8b', or none of them"
        )
    if spec.linked and spec.engine not in ("lab", *on_shared_memory):
        raise SpecError(
            f"engine {spec.engine} cannot be put behind an emulated link; leave link and emulate out, or give"
            f" engine='lab' or {on_shared_memory[0]!r}"
        )
    if spec.linked and spec.place == "cuda" and spec.engine != "lab":
        raise SpecError(
            f"between CUDA ranks only the lab's engine meets an emulated link, got {spec.engine}; give engine='lab' or"
            " device='cpu'"
        )
    if spec.linked and spec.place == "cuda" and spec.link_queues != 1:
        raise SpecError(
            f"an emulated link between CUDA ranks has one queue, got link_queues={spec.link_queues}; leave"
            " link_queues=1"
        )
    if spec.link_across and (spec.strategy != "hybrid_shard" or spec.engine != "lab"):
        raise SpecError(
            f"link_across is between the shard groups of the lab's hybrid_shard, not of {spec.engine} {spec.strategy};"
            " leave it out"
        )
    try:
        for text in filter(None, (spec.link, spec.link_across)):
            parse_link(text)
        if spec.emulate and spec.as_model:
            parse_cluster(spec.emulate)
            preset(spec.as_model)
    except (LinkError, HardwareError, ConfigError) as error:
        raise SpecError(str(error)) from error


def _check_shard_group(spec: Asked) -> None:
    if spec.strategy == "hybrid_shard" and spec.shard_size is None:
        raise SpecError(
            f"hybrid_shard needs shard_size, the ranks of one shard group: a divisor of world_size={spec.world_size}"
        )
    if spec.shard_size is None:
        return
    check_whole("shard_size", spec.shard_size, 1)
    if spec.strategy != "hybrid_shard":
        raise SpecError(
            f"shard_size is for hybrid_shard, not {spec.strategy}; leave it out, or give strategy='hybrid_shard'"
        )
    if spec.world_size % spec.shard_size:
        raise SpecError(f"shard_size is {spec.shard_size}, which does not divide world_size={spec.world_size}")
