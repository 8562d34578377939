"""Collectives of known values on every rank: whether what arrives is right, and how fast.

The rank's side of the probe `collectives` in `sessions/gpu_probes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdplab.common.collectives import bus_factor
from fsdplab.engine import compat

REPEATS = 5
MEBIBYTES = {"cuda": 256, "cpu": 1}


class Case(NamedTuple):
    """A collective: `call(target, source)` must leave `expected` in `target`."""

    kind: str
    call: Callable[[Tensor, Tensor], object]
    target: Tensor
    source: Tensor
    expected: Tensor


def cases(rank: int, ranks: int, whole: int) -> Iterator[Case]:
    """Each collective, of `whole` numbers in all. On 2 ranks, of 4 numbers: all_gather [1, 1], [2, 2] -> [1, 1, 2, 2];
    reduce_scatter twice [1, 1, 1, 1] and [2, 2, 2, 2] -> [3, 3]; all_reduce -> [3, 3, 3, 3].
    """
    part, mine, total = whole // ranks, torch.full((whole,), rank + 1.0), ranks * (ranks + 1) / 2
    gathered = torch.arange(1.0, ranks + 1).repeat_interleave(part)
    yield Case("all_gather", compat.all_gather_single, torch.zeros(whole), mine[:part], gathered)
    yield Case("reduce_scatter", compat.reduce_scatter_single, torch.zeros(part), mine, torch.full((part,), total))
    yield Case("all_reduce", lambda target, _: dist.all_reduce(target), mine, mine[:0], torch.full((whole,), total))


def rows(rank: int, ranks: int, device: str) -> list[dict[str, Any]]:
    """What this rank sees of each collective on "cuda" or "cpu": whether its values are right, and its bandwidth."""
    whole = (MEBIBYTES[device] << 20) // 4 // ranks * ranks
    return [_row(case, ranks, 4 * whole, device) for case in cases(rank, ranks, whole)]


def _row(case: Case, ranks: int, nbytes: int, device: str) -> dict[str, Any]:
    target, source = case.target.to(device), case.source.to(device)
    case.call(target, source)
    wrong = wrong_value(target.cpu(), case.expected)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        case.call(target, source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    busbw = nbytes * bus_factor(case.kind, ranks) / min(seconds) / 1e9
    return {"what": case.kind, "ranks": ranks, "bytes": nbytes, "busbw_gb_s": busbw, "wrong": wrong}


def wrong_value(got: Tensor, expected: Tensor) -> str:
    """Where the first value differs; "" where none does."""
    if torch.equal(got, expected):
        return ""
    first = int((got != expected).nonzero()[0])
    return f"values are wrong: element {first} of {len(got)} is {float(got[first])}, expected {float(expected[first])}"
