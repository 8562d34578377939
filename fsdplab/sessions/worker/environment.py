"""Captures the environment of a run, so that two records can be compared and a result repeated.

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
    """Describe the environment of this process, JSON-able; `device` is where its ranks run: `"cpu"` or `"cuda"`."""
    gpus_here: list[dict[str, Any]] = []
    backend = "gloo"
    if device == "cuda":
        gpus_here = _gpus()
        # (2, 27, 3) -> nccl 2.27.3
        backend = "nccl " + ".".join(map(str, torch.cuda.nccl.version()))
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
        "gpus": gpus_here,
        "backend": backend,
        "commit": _commit(),
        "variables": _variables(),
    }


def _variables() -> dict[str, str]:
    """Return the variables that change how ranks compute or communicate; no path, which identifies a machine."""
    variables = {}
    for name, value in sorted(os.environ.items()):
        if name in _VARIABLES or name.startswith(_PREFIXES):
            # whether the variable was set counts; a path would name users and folders
            variables[name] = "(a path)" if os.sep in value else value
    return variables


def _gpus() -> list[dict[str, Any]]:
    versions = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    driver = versions[0] if versions else ""
    described = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        described.append({"name": gpu.name, "memory_bytes": gpu.total_memory, "driver": driver or None})
    return described


def _commit() -> str | None:
    """Return the commit of the checkout that this package lies in; None for an installed package."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():
        return None
    return output_of("git", "-C", str(checkout), "rev-parse", "HEAD") or None


# ---- several ranks on one GPU. NCCL from 2.30 on (torch 2.14) runs them if its environment says so; before, gloo
# carries a GPU's tensors through host memory. The processes take turns on it, so such runs are labelled emulated.


def carrier(spec: RunSpec) -> dict[str, str]:
    """Return the backend in a record's environment where ranks share a GPU; {} for other runs."""
    if not spec.shares_a_gpu:
        return {}
    by = "gloo through host memory"
    if spec.backend == "nccl":
        by = f"nccl {'.'.join(map(str, gpus.nccl_version()))}"
    return {"backend": f"{by}, several ranks on one GPU"}


def nccl_variables(spec: RunSpec) -> dict[str, str]:
    """Return NCCL's environment variables for several ranks on a GPU; {} for other runs.

    Each rank gets its part of the eight blocks that one would take: all ranks' kernels must fit on the GPU at once, or
    they wait for each other for ever.
    """
    if spec.backend != "nccl" or not spec.shares_a_gpu:
        return {}
    return {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        # of eight blocks two ranks get four each; with more than eight ranks, one each
        "NCCL_MAX_CTAS": str(max(1, 8 // spec.processes)),
    }
