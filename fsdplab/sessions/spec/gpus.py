"""Finds how many GPUs of this machine ranks can use, and says in one sentence why they cannot use one.

The driver is asked through libcuda, which makes no CUDA context: one in a process that only starts ranks would keep the
ranks of an EXCLUSIVE_PROCESS cluster out.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fsdplab.common.sizes import size

MULTI_RANK_NCCL = (2, 30)  # the first version that takes several ranks on one GPU
EXCLUSIVE, _PROHIBITED = 3, 2  # CU_COMPUTEMODE_...
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
_LEAST_SHM = 512 << 20
_OLDER_WHEEL = "uv pip install torch --torch-backend=cu126"
_LEAST_DRIVER = {12: "525", 13: "580"}  # by the major version of CUDA


def usable_gpus() -> int:
    """Return how many GPUs torch can use; 0 where something is in the way, which `why_no_gpu` names. A build for the
    CPU can use none, so that it is not imported to be asked: that takes seconds.
    """
    if "torch" not in sys.modules and _is_built_for_cpu():
        return 0
    import torch

    # asked first: torch would print a warning of its own
    if torch.version.hip is None and driver_complaint(driver_cuda(), torch.version.cuda):
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@cache
def _is_built_for_cpu() -> bool:
    """Return whether the installed torch says of itself, in its `version.py`, that it was built for the CPU alone."""
    spec = find_spec("torch")
    versions = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if versions is None or not versions.exists():
        return False
    # cuda: Optional[str] = '12.8' or None, and hip likewise
    told = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *(.+)$", versions.read_text(), re.MULTILINE))
    return told.get("cuda") == "None" and told.get("hip", "None") == "None"


def why_no_gpu() -> str:
    """Return why torch can use no GPU here, and what to do."""
    import torch

    return driver_complaint(driver_cuda(), torch.version.cuda) or (
        f"torch {torch.__version__} finds none; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    )


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL that torch runs with; (0,) without one."""
    import torch

    return (
        tuple(torch.cuda.nccl.version())
        if torch.cuda.is_available() and torch.distributed.is_nccl_available()
        else (0,)
    )


# ---- the sentences: pure


def driver_complaint(driver_cuda: int | None, built_for: str | None) -> str:
    """Return why this torch cannot use the driver, and what to do; "" where it can.

    `driver_cuda` is what cuDriverGetVersion returns (12040 for CUDA 12.4), `built_for` is torch.version.cuda.
    """
    if built_for is None:
        return "this torch is a build for the CPU; install one for CUDA: pip install torch"
    if driver_cuda is None:
        return "no NVIDIA driver answers; install one, or start the container with --gpus all"
    major = int(built_for.partition(".")[0])
    # within a major version of CUDA a driver runs newer builds too
    if driver_cuda // 1000 >= major:
        return ""
    # 12040 -> 12.4
    handles, least = f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}", _LEAST_DRIVER.get(major, "a newer version")
    return (
        f"the driver handles CUDA up to {handles}, but this torch is built for CUDA {built_for}; update the driver to"
        f" {least} or newer, or install an older build: {_OLDER_WHEEL}"
    )


def kernel_complaint(name: str, capability: Sequence[int], architectures: Sequence[str]) -> str:
    """Return why no kernel of this torch runs on the GPU, and what to do; "" where they do.

    A kernel for sm_80 runs on 8.0 to 8.9, one for sm_90a on 9.0 only, and code for compute_80 on 8.0 and all above.
    """
    mine = (capability[0], capability[1])
    if any(_runs(architecture, mine) for architecture in architectures):
        return ""
    return (
        f"{name} has the compute capability {mine[0]}.{mine[1]}, and this torch has kernels for"
        f" {', '.join(architectures) or 'no GPU'} only; install a build that has them: {_OLDER_WHEEL}"
    )


def _runs(architecture: str, mine: tuple[int, int]) -> bool:
    kind, _, number = architecture.partition("_")
    # sm_90a -> (9, 0); sm_120 -> (12, 0)
    major, minor = divmod(int("".join(each for each in number if each.isdigit())), 10)
    # code that the driver compiles, for this GPU and all newer ones
    if kind == "compute":
        return (major, minor) <= mine
    # kernels run on later minor versions of their major one; those with "a" on exactly one
    return (major, minor) == mine if number[-1] == "a" else major == mine[0] and minor <= mine[1]


def shm_complaint(nbytes: int) -> str:
    """Return what a small /dev/shm breaks, and what to do; "" where it is large enough."""
    if nbytes >= _LEAST_SHM:
        return ""
    return (
        f"/dev/shm has {size(nbytes)}, too little for NCCL between the GPUs of a machine; start the container with"
        " --shm-size=8g, or set NCCL_SHM_DISABLE=1"
    )


def mode_complaint(mode: int) -> str:
    """Return what the compute mode forbids, and what to do; "" for the default mode."""
    if mode == _PROHIBITED:
        return "the compute mode is PROHIBITED, so no process may use the GPU; allow it with nvidia-smi -c 0"
    if mode == EXCLUSIVE:
        return (
            "the compute mode is EXCLUSIVE_PROCESS: give each rank a GPU of its own, or allow several processes with"
            " nvidia-smi -c 0"
        )
    return ""


# ---- the driver, asked without a context


def _asked(function: str, *arguments: int) -> int | None:
    """Return the number that a function of libcuda returns through its first argument; None where it fails or is
    missing.
    """
    found = ctypes.c_int()
    try:
        # 0 is CUDA_SUCCESS; a machine without a driver has no such library
        code = getattr(ctypes.CDLL("libcuda.so.1"), function)(ctypes.byref(found), *arguments)
    except (OSError, AttributeError):
        return None
    return found.value if code == 0 else None


def driver_cuda() -> int | None:
    """Return the newest CUDA that the driver handles, 12040 for 12.4; None without a driver."""
    return _asked("cuDriverGetVersion")


def has_context(gpu: int) -> bool:
    """Return whether this process has a CUDA context on the GPU. To ask makes none."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    try:
        state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
    except (OSError, AttributeError):
        return False
    return state(gpu, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value == 1


def compute_mode(gpu: int) -> int:
    """Return the CUcomputemode of a GPU: 0 for the default, also where the driver does not tell."""
    return _asked("cuDeviceGetAttribute", _COMPUTE_MODE, gpu) or 0
