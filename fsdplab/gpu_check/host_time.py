"""How long a step takes, how long the host is busy with it, and whether the host ever waits inside it.

The host's time ends when the step's last launch has returned, before anybody synchronises: what is left of the step is
the GPU's head start. Where the GPU is so far behind that its queue of launches is full, the host waits for room, and
that counts too. On CPU both times are one.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SYNCHRONISED = "synchronizing CUDA operation"  # torch's words, from 1.10 on


@dataclass(frozen=True)
class Timed:
    """One step, in seconds: until the device was done, and until the host had launched everything."""

    step_s: float
    host_s: float


def synchronise(device: torch.device) -> None:
    """Wait for all work of the device; nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], device: torch.device) -> Timed:
    """Run `call` on an idle device and time it; the device is idle again afterwards."""
    synchronise(device)
    start = time.perf_counter()
    call()
    launched = time.perf_counter()
    synchronise(device)
    return Timed(time.perf_counter() - start, launched - start)


def host_syncs(call: Callable[[], Any], device: torch.device) -> list[str] | None:
    """Where the host waited for the device while `call` ran, one `file:line` each; None on CPU, which has no streams.

    Counted by torch's own sync debug mode: copies to the host, `.item()`, `nonzero`; what a library does past torch is
    not seen.
    """
    if device.type != "cuda":
        return None
    synchronise(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronise(device)
    return synchronisations([(str(each.message), each.filename, each.lineno) for each in heard])


def synchronisations(heard: Sequence[tuple[str, str, int]]) -> list[str]:
    """Of warnings (message, file, line) those that tell of a synchronisation, as `file:line` below the last two
    folders.
    """
    return [f"{'/'.join(file.split('/')[-2:])}:{line}" for message, file, line in heard if _SYNCHRONISED in message]


def medians(steps: Sequence[Timed]) -> dict[str, float]:
    """`step_s`, `step_s_min` and `host_s` of timed steps."""
    return {
        "step_s": statistics.median(each.step_s for each in steps),
        "step_s_min": min(each.step_s for each in steps),
        "host_s": statistics.median(each.host_s for each in steps),
    }
