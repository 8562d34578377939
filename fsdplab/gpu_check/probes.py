"""Short child processes that look at the GPUs, so that the process that asks never has a CUDA context.

A GPU in compute mode EXCLUSIVE_PROCESS takes one process: a context in `fsdplab doctor`, or in the process that starts
the ranks, would keep the rank out. A driver that hangs or crashes ends a child only.

    python -m fsdplab.gpu_check.probes NAME DEVICE      prints one line of JSON
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.common.sizes import size

Found = dict[str, Any]
LIMIT_S = 60.0
_ANSWER_S = 30.0  # for the second process of `ipc`
_LEAST_SHM = 512 << 20
_EXCLUSIVE, _PROHIBITED = 3, 2  # CU_COMPUTEMODE_...
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
_OLDER_WHEEL = "pip install torch --index-url https://download.pytorch.org/whl/cu126"
_LEAST_DRIVER = {12: "525", 13: "580"}  # by the major version of CUDA


def ask(probe: str, device: str = "cuda", limit_s: float = LIMIT_S) -> Found:
    """What the probe found in a process of its own, as a dict; `error` says in one line why it found nothing.

    `ask("ipc")` is `{"refused": ""}` where a second process can open the memory of a GPU.
    """
    command = run_of("fsdplab.gpu_check.probes", probe, device)
    try:
        done = subprocess.run(
            command, env=with_this_checkout(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=limit_s, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:.0f} s: the driver hangs; look at its log with dmesg"}
    printed = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and printed:
        return dict(json.loads(printed[-1]))
    return {"error": printed[-1][:300] if printed else f"the process ended with exit code {done.returncode}"}


# ---- the sentences: pure


def driver_complaint(driver_cuda: int | None, built_for: str | None) -> str:
    """Why this torch cannot use the driver, and what to do; "" where it can.

    `driver_cuda` is what cuDriverGetVersion returns (12040 for CUDA 12.4), `built_for` is torch.version.cuda.
    """
    if built_for is None:
        return "this torch is a build for the CPU; install one for CUDA: pip install torch"
    if driver_cuda is None:
        return "no NVIDIA driver answers; install one, or start the container with --gpus all"
    major = int(built_for.partition(".")[0])
    if driver_cuda // 1000 >= major:
        return ""
    handles, least = f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}", _LEAST_DRIVER.get(major, "a newer version")
    return (
        f"the driver handles CUDA up to {handles}, but this torch is built for CUDA {built_for}; update the driver to"
        f" {least} or newer, or install an older build: {_OLDER_WHEEL}"
    )


def kernel_complaint(name: str, capability: Sequence[int], architectures: Sequence[str]) -> str:
    """Why no kernel of this torch runs on the GPU, and what to do; "" where they do.

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
    major, minor = divmod(int("".join(each for each in number if each.isdigit())), 10)
    if kind == "compute":
        return (major, minor) <= mine
    return (major, minor) == mine if number[-1] == "a" else major == mine[0] and minor <= mine[1]


def shm_complaint(nbytes: int) -> str:
    """What a small /dev/shm breaks, and what to do; "" where it is large enough."""
    if nbytes >= _LEAST_SHM:
        return ""
    return (
        f"/dev/shm has {size(nbytes)}, too little for NCCL between the GPUs of a machine; start the container with"
        " --shm-size=8g, or set NCCL_SHM_DISABLE=1"
    )


def mode_complaint(mode: int) -> str:
    """What the compute mode forbids, and what to do; "" for the default mode."""
    if mode == _PROHIBITED:
        return "the compute mode is PROHIBITED, so no process may use the GPU; allow it with nvidia-smi -c 0"
    if mode == _EXCLUSIVE:
        return (
            "the compute mode is EXCLUSIVE_PROCESS: give each rank a GPU of its own, or allow several processes with"
            " nvidia-smi -c 0"
        )
    return ""


# ---- the driver, asked without a context


def _asked(function: str, *arguments: int) -> int | None:
    """The number that a function of libcuda returns through its first argument; None where it fails or is missing."""
    found = ctypes.c_int()
    try:
        code = getattr(ctypes.CDLL("libcuda.so.1"), function)(ctypes.byref(found), *arguments)
    except (OSError, AttributeError):
        return None
    return found.value if code == 0 else None


def driver_cuda() -> int | None:
    """The newest CUDA that the driver handles, 12040 for 12.4; None without a driver."""
    return _asked("cuDriverGetVersion")


def has_context(gpu: int) -> bool:
    """Whether this process has a CUDA context on the GPU. To ask makes none."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    try:
        state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
    except (OSError, AttributeError):
        return False
    return state(gpu, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value == 1


# ---- what runs in the child


def machine(device: str) -> Found:
    """Versions, every GPU with its memory and what one kernel computes there, and the sentences that apply."""
    import torch

    wrong = driver_complaint(driver_cuda(), torch.version.cuda) if device == "cuda" else ""
    found: Found = {"blocks": wrong, "advice": [], "gpus": [], "cuda": torch.version.cuda, "nccl": None}
    if device == "cpu":
        return found | {"gpus": [_gpu(device, "cpu", (0, 0))]}
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    found["advice"] = [shm_complaint(shm.f_frsize * shm.f_blocks)] if shm else []
    if not wrong and not torch.cuda.is_available():
        found["blocks"] = f"torch {torch.__version__} finds no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    if found["blocks"]:
        return found
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = (gpu.major, gpu.minor)
        found["blocks"] = found["blocks"] or kernel_complaint(gpu.name, capability, torch.cuda.get_arch_list())
        mode = _asked("cuDeviceGetAttribute", _COMPUTE_MODE, index) or 0
        found["advice"].append(mode_complaint(mode))
        found["gpus"].append(_gpu(f"cuda:{index}", gpu.name, capability) | {"exclusive": mode == _EXCLUSIVE})
    found["advice"] = [*dict.fromkeys(filter(None, found["advice"]))]
    return found | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _gpu(device: str, name: str, capability: tuple[int, int]) -> Found:
    """One device: what eight ones sum to there (8.0), or the error of the kernel; bytes in all and free."""
    import torch

    shown: Found = {
        "device": device,
        "name": name,
        "capability": f"{capability[0]}.{capability[1]}",
        "exclusive": False,
    }
    try:
        free, total = torch.cuda.mem_get_info(device) if device != "cpu" else (0, 0)
        ones = float(torch.ones(8, device=device).sum())
    except RuntimeError as error:  # no kernel for this GPU, a GPU that another process holds, no memory
        return shown | {"bytes": 0, "free": 0, "sum": None, "error": str(error).splitlines()[0][:300]}
    return shown | {"bytes": total, "free": free, "sum": ones, "error": ""}


def profiles(device: str) -> Found:
    """Kernels that a CUDA profile sees after a profile of the CPU, where that was the first of the process."""
    return {"kernels": [_profiled(device, activity) for activity in ("cpu", device)][-1]}


def profiles_cuda_first(device: str) -> Found:
    """The same where the first profile of the process had CUDA in it."""
    return {"kernels": [_profiled(device, activity) for activity in (device, "cpu", device)][-1]}


def _profiled(device: str, activity: str) -> int:
    """Profile one sum on the device; the events of the device that the profile has."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if activity == "cuda" else [])]
    with profile(activities=kinds) as seen:
        torch.ones(8, device=device).sum()
        if device == "cuda":
            torch.cuda.synchronize()
    return sum(event.device_type.name == device.upper() for event in seen.events())


def ipc(device: str) -> Found:
    """Why a second process cannot open the memory of this one's GPU; "" where it opens it and reads what is there."""
    from multiprocessing.reduction import ForkingPickler

    import torch
    import torch.multiprocessing as processes

    written = torch.arange(64, dtype=torch.uint8).to(device)  # by a copy: no kernel is needed
    context = processes.get_context("spawn")
    mine, other = context.Pipe()
    reader = context.Process(target=_read_by_ipc, args=(bytes(ForkingPickler.dumps(written)), other), daemon=True)
    reader.start()
    other.close()
    try:
        got = mine.recv() if mine.poll(_ANSWER_S) else f"the second process gave no answer within {_ANSWER_S:.0f} s"
    except EOFError:
        reader.join(_ANSWER_S)
        got = f"the second process ended with exit code {reader.exitcode} before it had read anything"
    finally:
        reader.kill()
    if isinstance(got, str):
        return {"refused": got}
    return {
        "refused": "" if got == [*range(64)] else f"the second process reads {got[:4]}..., expected [0, 1, 2, 3]..."
    }


def _read_by_ipc(told: bytes, answer: Any) -> None:
    try:
        answer.send(pickle.loads(told).cpu().tolist())
    except (RuntimeError, OSError) as error:
        answer.send(str(error).splitlines()[0][:200])


PROBES: dict[str, Callable[[str], Found]] = {
    each.__name__: each for each in (machine, profiles, profiles_cuda_first, ipc)
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](sys.argv[2])))
