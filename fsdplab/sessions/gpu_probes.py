"""Looks at the GPUs in short child processes, so that the process that asks never has a CUDA context.

A GPU in compute mode EXCLUSIVE_PROCESS takes one process: a context in `fsdplab doctor`, or in the process that starts
the ranks, would keep the rank out. A driver that hangs or crashes ends a child only.

    python -m fsdplab.sessions.gpu_probes NAME DEVICE      prints one line of JSON, DEVICE is cuda or cpu
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdplab.common.machine import output_of
from fsdplab.common.temporary import folder_of_this_process
from fsdplab.sessions.launch.limited import TOO_LONG, answer_in, run_within
from fsdplab.sessions.spec import gpus

Found = dict[str, Any]
LIMIT_S = 60.0
_ANSWER_S = 30.0  # for the second process of `ipc`


def ask(probe: str, device: str = "cuda", limit_s: float = LIMIT_S) -> Found:
    """Return what the probe found in a process of its own, as a dict; `error` says in one line why it found nothing.

    `ask("ipc")` is `{"refused": ""}` where a second process can open the memory of a GPU.
    """
    words = ("fsdplab.sessions.gpu_probes", probe, device)
    with tempfile.TemporaryDirectory(prefix="probe-", dir=folder_of_this_process()) as folder:
        log = Path(folder) / "log"
        code, wrong = run_within(words, limit_s, log)
        if not wrong:
            return dict(answer_in(log))
    if code == TOO_LONG:
        wrong = f"no answer within {limit_s:.0f} s: the driver hangs; look at its log with dmesg"
    return {"error": wrong}


# ---- what runs in the child


def machine(device: str) -> Found:
    """Return versions, every GPU with its memory and what one kernel computes there, and the sentences that apply."""
    import torch

    from fsdplab.sessions.worker.environment import capture_environment

    wrong = gpus.driver_complaint(gpus.driver_cuda(), torch.version.cuda) if device == "cuda" else ""
    found: Found = {"blocks": wrong, "advice": [], "gpus": [], "cuda": torch.version.cuda, "nccl": None, "driver": None}
    found["environment"] = capture_environment("cpu")  # with "cuda" it would have a context on every GPU
    if device == "cpu":
        return found | {"gpus": [_gpu(device, "cpu", (0, 0))]}
    if os.path.isdir("/dev/shm"):
        shm = os.statvfs("/dev/shm")
        found["advice"].append(gpus.shm_complaint(shm.f_frsize * shm.f_blocks))
    if not wrong and not torch.cuda.is_available():
        found["blocks"] = f"torch {torch.__version__} finds no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    if found["blocks"]:
        return found
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = (gpu.major, gpu.minor)
        found["blocks"] = found["blocks"] or gpus.kernel_complaint(gpu.name, capability, torch.cuda.get_arch_list())
        mode = gpus.compute_mode(index)
        found["advice"].append(gpus.mode_complaint(mode))
        found["gpus"].append(_gpu(f"cuda:{index}", gpu.name, capability) | {"exclusive": mode == gpus.EXCLUSIVE})
    found["advice"] = [*dict.fromkeys(advice for advice in found["advice"] if advice)]
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    versions = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    if versions and versions[0]:  # a line for each GPU
        found["driver"] = versions[0]
    return found


def _gpu(device: str, name: str, capability: tuple[int, int]) -> Found:
    """Describe one device: what eight ones sum to there (8.0), or the error of the kernel; bytes in all and free."""
    import torch

    gpu: Found = {"device": device, "name": name, "capability": f"{capability[0]}.{capability[1]}", "exclusive": False}
    try:
        free, total = 0, 0
        if device != "cpu":
            free, total = torch.cuda.mem_get_info(device)
        ones = float(torch.ones(8, device=device).sum())
    except RuntimeError as error:  # no kernel for this GPU, a GPU that another process holds, no memory
        return gpu | {"bytes": 0, "free": 0, "sum": None, "error": str(error).splitlines()[0][:300]}
    return gpu | {"bytes": total, "free": free, "sum": ones, "error": ""}


def ipc(device: str) -> Found:
    """Return why a second process cannot open the memory of this one's GPU, which is the machine's choice; "" where it
    opens it. `wrong` where it reads other than what is there.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch
    import torch.multiprocessing as processes

    written = torch.arange(64, dtype=torch.uint8).to(device)  # by a copy: no kernel is needed
    try:
        handle = bytes(ForkingPickler.dumps(written))
    except RuntimeError as error:  # the driver gives no handle
        return {"refused": str(error).splitlines()[0][:200], "wrong": ""}
    context = processes.get_context("spawn")
    receiving, sending = context.Pipe()
    reader = context.Process(target=_read_by_ipc, args=(handle, sending), daemon=True)
    reader.start()
    sending.close()
    answer: Any = f"the second process gave no answer within {_ANSWER_S:.0f} s"
    try:
        if receiving.poll(_ANSWER_S):
            answer = receiving.recv()
    except EOFError:
        reader.join(_ANSWER_S)
        answer = f"the second process ended with exit code {reader.exitcode} before it had read anything"
    finally:
        reader.kill()
    if isinstance(answer, str):  # what went wrong, in place of the numbers
        return {"refused": answer, "wrong": ""}
    wrong = ""
    if answer != [*range(64)]:
        wrong = f"the second process reads {answer[:4]}..., expected [0, 1, 2, 3]..."
    return {"refused": wrong, "wrong": wrong}


def _read_by_ipc(handle: bytes, answer: Any) -> None:
    try:
        answer.send(pickle.loads(handle).cpu().tolist())
    except (RuntimeError, OSError) as error:
        answer.send(str(error).splitlines()[0][:200])


PROBES: dict[str, Callable[[str], Found]] = {"machine": machine, "ipc": ipc}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](sys.argv[2])))
