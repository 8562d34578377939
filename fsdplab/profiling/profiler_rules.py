"""Rules of PyTorch's profiler that its users have to keep: what a profile asks for, and when it may be stopped.

The first profile of a process decides what later ones see: after one of the host alone, a profile of a GPU holds no
kernel, and nothing says so (torch 2.13 and newer; kineto prepares CUPTI once). So every profile asks for the same.

A profile is stopped once gloo's threads have noted the ends of their collectives. A gloo thread tells the waiting rank
that a collective is done, and then notes its end in the profile (torch 2.13, ProcessGroupGloo.cpp: `finishWorkGloo`
completes the future first, which DDP waits for). A busy machine may stop it in between for longer than the rest of a
step takes, and a profile that is stopped then is taken apart while it is written.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_AT_MOST_S = 1.0


def activities_on(device: torch.device) -> list[ProfilerActivity]:
    """What every profile of a process records: the host, and on a GPU its kernels."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def prepare_profiler(device: torch.device) -> None:
    """Take a profile of nothing on a GPU, so that no step pays for the start of CUPTI; on a CPU nothing is done."""
    if device.type == "cuda":
        with profile(activities=activities_on(device)):
            torch.cuda.synchronize(device)


def await_gloo_threads() -> None:
    """Return when no gloo thread of this process is at work, or after a second; at once where /proc is not there."""
    deadline = time.monotonic() + _AT_MOST_S
    while _at_work() and time.monotonic() < deadline:
        time.sleep(0.0005)


def _at_work() -> bool:
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with suppress(OSError):  # a thread that has just ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME and rest.split()[0] in "RD":  # running or about to, not waiting for work
                return True
    return False
