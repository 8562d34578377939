"""Several ranks on one GPU: who carries the bytes, and the settings that it needs.

NCCL from 2.30 on (torch 2.14) runs several ranks a GPU if its environment says so; before, gloo carries a GPU's tensors
through host memory. The processes take turns on the GPU, so such runs are labelled emulated.
"""

from __future__ import annotations

from fsdplab.sessions.spec import gpus
from fsdplab.sessions.spec.run_spec import RunSpec


def carrier(spec: RunSpec) -> dict[str, str]:
    """The backend in a record's environment where ranks share a GPU."""
    if not spec.shares_a_gpu:
        return {}
    by = f"nccl {'.'.join(map(str, gpus.nccl_version()))}" if spec.backend == "nccl" else "gloo through host memory"
    return {"backend": f"{by}, several ranks on one GPU"}


def nccl_variables(spec: RunSpec) -> dict[str, str]:
    """NCCL's environment variables for several ranks on a GPU; {} for other runs.

    Each rank gets its part of the eight blocks that one would take: all ranks' kernels must fit on the GPU at once, or
    they wait for each other for ever.
    """
    if spec.backend != "nccl" or not spec.shares_a_gpu:
        return {}
    return {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(max(1, 8 // spec.processes)),
    }
