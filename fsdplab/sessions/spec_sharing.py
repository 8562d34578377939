"""Several ranks on one GPU: which ways there are, and whether a spec may take them.

A learner with a single GPU has two. The transport `shared_gpu` moves bytes inside the GPU itself; and NCCL from 2.30 on
takes several ranks a GPU, once it is told to. In both the processes take turns, so such runs are labelled emulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .refusing import SpecError
from .spec_asked import Asked

MULTI_RANK_NCCL = (2, 30)  # the first version that takes several ranks on one GPU


def shares_a_gpu(spec: Asked, on_shared_gpu: Sequence[str]) -> bool:
    """Whether ranks of `spec` share a GPU, or rehearse it on the CPU.

    Whoever asks for CUDA and for more ranks than there are GPUs gets `shared_gpu` by itself, where the engine can.
    """
    if spec.engine == "twin" or spec.world_size == 1:
        return False
    if spec.transport == "shared_gpu":
        return True
    able = spec.transport == "nccl" or spec.transport == "auto" and spec.engine in on_shared_gpu
    return able and spec.place == "cuda" and 0 < torch.cuda.device_count() < spec.processes


def check_sharing(spec: Asked, on_shared_gpu: Sequence[str]) -> None:
    """SpecError where a spec asks for shared GPUs and cannot have them."""
    if spec.transport == "shared_gpu":
        _check_transport(spec, on_shared_gpu)
    elif spec.transport == "nccl" and spec.shares_a_gpu and (found := nccl_version()) < MULTI_RANK_NCCL:
        raise SpecError(
            f"transport is nccl with {spec.processes} ranks on {torch.cuda.device_count()} GPU, which NCCL does from"
            f" 2.30 on, but torch brings {'.'.join(map(str, found))}; give transport='shared_gpu'"
        )


def _check_transport(spec: Asked, on_shared_gpu: Sequence[str]) -> None:
    if spec.engine not in (*on_shared_gpu, "twin"):
        able = " or ".join(repr(engine) for engine in on_shared_gpu)
        raise SpecError(
            f"transport is shared_gpu, but engine {spec.engine} brings its own; leave transport='auto', or give"
            f" engine={able}"
        )
    if spec.profile and spec.place == "cpu" and spec.engine != "twin":
        raise SpecError(
            "on the CPU shared_gpu is a rehearsal, whose traces show nothing of a GPU; give transport='shm', or"
            " profile=0"
        )
    if spec.engine == "torch-fsdp2" and spec.linked:
        raise SpecError(
            "on shared_gpu only the lab's engine meets an emulated link, got torch-fsdp2; leave link and emulate out,"
            " or give engine='lab'"
        )
    if spec.engine == "torch-fsdp2" and spec.strategy == "hybrid_shard":
        raise SpecError(
            "torch-fsdp2 reduces over replicas with the process group, which shared_gpu is not; give"
            " strategy='full_shard', or engine='lab'"
        )


def nccl_version() -> tuple[int, ...]:
    """The version of NCCL that torch runs with; (0,) without one."""
    return (
        tuple(torch.cuda.nccl.version())
        if torch.cuda.is_available() and torch.distributed.is_nccl_available()
        else (0,)
    )


def device_of_ranks(spec: Asked) -> str:
    """Where ranks compute: `cpu`, `cuda` (each takes a GPU in turn), or `cuda:0` for all of them."""
    return "cuda:0" if spec.place == "cuda" and spec.shares_a_gpu and spec.transport != "nccl" else spec.place


def carrier(spec: Asked) -> dict[str, str]:
    """What a record's environment says instead of the device's usual backend, where ranks share a GPU."""
    if not spec.shares_a_gpu:
        return {}
    if spec.transport == "nccl":
        return {"backend": f"nccl {'.'.join(map(str, nccl_version()))}, several ranks on one GPU"}
    return {"backend": "shared_gpu" if spec.place == "cuda" else "shared_gpu, rehearsed on the CPU"}


def nccl_variables(spec: Asked) -> dict[str, str]:
    """What NCCL must find in the environment before it starts, so that several ranks may share a GPU; {} for other
    runs.

    Each rank gets its part of the eight blocks that one would take: all ranks' kernels must fit on the GPU at once, or
    they wait for each other for ever.
    """
    if spec.transport != "nccl" or not spec.shares_a_gpu:
        return {}
    return {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(max(1, 8 // spec.processes)),
    }
