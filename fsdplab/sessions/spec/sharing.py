"""Several ranks on one GPU: the possible ways, and their settings.

There are two. The transport `shared_gpu` moves bytes inside the GPU; NCCL from 2.30 on can run several ranks a GPU if
told so by its environment. In both the processes take turns, so such runs are labelled emulated.
"""

from __future__ import annotations

from fsdplab.sessions.spec.run_spec import RunSpec, nccl_version


def device_of_ranks(spec: RunSpec) -> str:
    """Where ranks compute: `cpu`, `cuda` (each takes a GPU in turn), or `cuda:0` for all of them."""
    return (
        "cuda:0" if spec.device_type == "cuda" and spec.shares_a_gpu and spec.transport != "nccl" else spec.device_type
    )


def carrier(spec: RunSpec) -> dict[str, str]:
    """The backend in a record's environment where ranks share a GPU."""
    if not spec.shares_a_gpu:
        return {}
    if spec.transport == "nccl":
        return {"backend": f"nccl {'.'.join(map(str, nccl_version()))}, several ranks on one GPU"}
    return {"backend": "shared_gpu" if spec.device_type == "cuda" else "shared_gpu, rehearsed on the CPU"}


def nccl_variables(spec: RunSpec) -> dict[str, str]:
    """NCCL's environment variables for several ranks on a GPU; {} for other runs.

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
