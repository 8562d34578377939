"""The environment of a run, so that two records can be compared and a result repeated.

Recorded: versions, processor, accelerators, and the variables that change speed or communication. Never recorded: names
of users and hosts, and paths; a record is made to be shared.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy
import torch

from fsdplab import __version__
from fsdplab.common.machine import cpu_model, memory_bytes, output_of
from fsdplab.sessions.spec import RunSpec, gpus

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


def capture_environment(device: str) -> dict[str, Any]:
    """The environment of this process, JSON-able; `device` is where its ranks run: `"cpu"` or `"cuda"`."""
    chosen = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    return {
        "versions": {
            "fsdplab": __version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "platform": platform.platform(),
        "cpu": {
            "model": cpu_model(),
            "count": os.cpu_count(),
            "threads_per_rank": torch.get_num_threads(),
            "memory_bytes": memory_bytes(),
        },
        "device": device,
        "gpus": _gpus() if device == "cuda" else [],
        "backend": "nccl " + ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "gloo",
        "commit": _commit(),
        "variables": {name: "(a path)" if os.sep in value else value for name, value in sorted(chosen.items())},
    }


def _gpus() -> list[dict[str, Any]]:
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "driver": "".join(driver) or None} for gpu in properties
    ]


def _commit() -> str | None:
    """The commit of the checkout that this package lies in; None for an installed package."""
    checkout = Path(__file__).resolve().parents[3]
    return output_of("git", "-C", str(checkout), "rev-parse", "HEAD") or None if (checkout / ".git").exists() else None


# ---- several ranks on one GPU. NCCL from 2.30 on (torch 2.14) runs them if its environment says so; before, gloo
# carries a GPU's tensors through host memory. The processes take turns on it, so such runs are labelled emulated.


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
