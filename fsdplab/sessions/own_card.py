"""Measures what `fsdplab plan --gpu FILE.json` needs to know of this machine's device: products, memory, link.

A GPU where there is one, else the CPU, and the answer says which. Every quantity has its part of a time limit: a piece
of work grows until one repetition is long enough to be timed, and is repeated until the time is over, so a busy machine
measures less often and not longer. What other work took meanwhile is told.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fsdplab.common.machine import cores, cpu_model, memory_bytes
from fsdplab.planning.efficiency import HBM_EFFICIENCY
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY
from fsdplab.sessions.bf16_speed import fastest, timed

LONG_ENOUGH_S = 0.02  # of one repetition
_MOST = {"cuda": (8192, 2**30), "cpu": (2048, 2**27)}  # rows of a square product, bytes that are copied
_UNSTEADY = 0.2  # spread from which on it is told


@dataclass(frozen=True)
class Rate:
    """The fastest of some repetitions, which other work slowed down least, and how far apart the middle half of them
    are, as a part of their median.
    """

    per_s: float
    spread: float
    repetitions: int


@dataclass(frozen=True)
class OwnCard:
    """What was measured: FLOP/s in bfloat16, bytes of memory read and written a second, bytes over a link a second
    (None where there is one GPU), and in sentences what makes the figures doubtful.
    """

    name: str
    device: str
    memory: int
    products: Rate
    traffic: Rate
    link: Rate | None
    doubts: tuple[str, ...]

    def as_file(self) -> dict[str, Any]:
        """Return the content of a file for `--gpu`.

        Its figures stand where a data sheet's do, of which plans take a part: so they are larger by that part, and a
        plan reaches what was measured.
        """
        link = "pcie4"
        if self.link:
            link = f"{self.link.per_s / LINK_EFFICIENCY / 1e9:.4g}GB/s"
        tflops = _four_digits(self.products.per_s / 1e12)
        return {
            "name": self.name[:40],
            "memory_gib": round(self.memory / 2**30, 2),
            "link": link,
            "hbm_tb_per_s": _four_digits(self.traffic.per_s / HBM_EFFICIENCY / 1e12),
            "bf16_tflops": tflops,
            "measured_bf16_tflops": tflops,
        }


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def measure_card(seconds: float, on_progress: Callable[[str], None] = lambda what: None) -> OwnCard:
    """Measure for about so many seconds; `on_progress` gets what is being measured."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, nbytes = _MOST[device]
    # one part for products, one for memory, one for the link
    part_s = seconds / 3
    on_progress("matrix products in bfloat16")
    products = _rate(lambda size: _product(device, size), 256, rows, part_s)
    on_progress("memory")
    traffic = _rate(lambda size: _copy(device, device, size, 2), 2**20, nbytes, part_s)
    link = None
    if device == "cpu":
        name, memory = cpu_model(), memory_bytes()
        on_progress("what one rank copies from another's memory")
        link = _rate(lambda size: _copy("cpu", "cpu", size, 1), 2**20, nbytes, part_s)
    else:
        gpu = torch.cuda.get_device_properties(0)
        name, memory = gpu.name, gpu.total_memory
        if torch.cuda.device_count() > 1:
            on_progress("the link between two devices")
            link = _rate(lambda size: _copy("cuda", "cuda:1", size, 1), 2**20, nbytes, part_s)
    doubts = _doubts(device, {"matrix products": products, "memory": traffic, "link": link})
    return OwnCard(name, device, memory, products, traffic, link, tuple(doubts))


def _doubts(device: str, rates: dict[str, Rate | None]) -> list[str]:
    """List what makes the figures doubtful, a sentence each."""
    doubts = []
    if device == "cpu":
        doubts.append("there is no GPU here: these are the CPU's figures, for a plan of a job on such CPUs")
    if rates["link"] is None:
        doubts.append("there is one GPU here: its link is taken as PCIe 4's; write the link's name into the file")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores() + 0.5:
        wanted = f"{load:.1f} processes want its {cores()} cores"
        doubts.append(f"the machine is busy: {wanted}; measure again when it is idle")
    unsteady = [name for name, rate in rates.items() if rate is not None and rate.spread > _UNSTEADY]
    if unsteady:
        doubts.append(f"repetitions differ by more than {_UNSTEADY:.0%}: {', '.join(unsteady)}")
    return doubts


def _rate(make: Callable[[int], tuple[Callable[[], None], float]], size: int, most: int, seconds: float) -> Rate:
    """Measure what `make`'s work does a second: its size grows to `most`, or until a repetition is long enough."""
    end = time.perf_counter() + seconds
    work, amount = make(size)
    while fastest(work, 3) < LONG_ENOUGH_S and size < most and time.perf_counter() < end:
        size *= 2
        work, amount = make(size)
    times = [timed(work) for _ in range(3)]
    while time.perf_counter() < end:
        times.append(timed(work))
    # the three quartiles of the repetitions
    low, middle, high = statistics.quantiles(times, n=4)
    # the fastest repetition, which other processes disturbed least
    return Rate(amount / min(times), (high - low) / middle, len(times))


def _product(device: str, size: int) -> tuple[Callable[[], None], float]:
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)

    def work() -> None:
        torch.matmul(left, right, out=result)
        _wait(device)

    # a multiplication and an addition for each of size x size x size
    return work, 2.0 * size**3


def _copy(source: str, target: str, nbytes: int, passes: int) -> tuple[Callable[[], None], float]:
    """Return a copy, whose bytes pass memory twice, and a link once."""
    original = torch.ones(nbytes, dtype=torch.uint8, device=source)
    copy = torch.empty(nbytes, dtype=torch.uint8, device=target)

    def work() -> None:
        copy.copy_(original)
        _wait(source)

    # memory is read and written: 2 passes; a link carries each byte once
    return work, float(passes * nbytes)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
