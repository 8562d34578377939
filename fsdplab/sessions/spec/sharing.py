"""Several ranks on one GPU: which ways there are, and what a rank must know of them.

A learner with a single GPU has two. The transport `shared_gpu` moves bytes inside the GPU itself; and NCCL from 2.30 on
takes several ranks a GPU, once it is told to. In both the processes take turns, so such runs are labelled emulated.
"""

from __future__ import annotations

from fsdplab.sessions.spec.run_spec import RunSpec, nccl_version


def device_of_ranks(spec: RunSpec) -> str:
    """Where ranks compute: `cpu`, `cuda` (each takes a GPU in turn), or `cuda:0` for all of them."""
    return "cuda:0" if spec.place == "cuda" and spec.shares_a_gpu and spec.transport != "nccl" else spec.place


def carrier(spec: RunSpec) -> dict[str, str]:
    """What a record's environment says instead of the device's usual backend, where ranks share a GPU."""
    if not spec.shares_a_gpu:
        return {}
    if spec.transport == "nccl":
        return {"backend": f"nccl {'.'.join(map(str, nccl_version()))}, several ranks on one GPU"}
    return {"backend": "shared_gpu" if spec.place == "cuda" else "shared_gpu, rehearsed on the CPU"}


def nccl_variables(spec: RunSpec) -> dict[str, str]:
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
