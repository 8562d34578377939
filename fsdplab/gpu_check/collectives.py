"""The collectives of NCCL over all GPUs, on known values, and their bandwidth.

python -m fsdplab.gpu_check.collectives BACKEND RANKS        starts the ranks, and prints their rows as JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdplab.engine import compat
from fsdplab.sessions import RanksFailed, call_on_ranks

REPEATS = 5
MEBIBYTES = {"nccl": 256, "gloo": 1}


def main(backend: str, ranks: int) -> int:
    """Run the collectives on so many ranks, and print a row of each with what was wrong on any; 1 if ranks failed."""
    device = "any" if backend == "nccl" else "cpu"
    try:
        found = call_on_ranks(__file__, "rows", world_size=ranks, payload=backend, time_limit=80.0, device=device)
    except RanksFailed as error:
        print(f"{backend} forms no group of {ranks}: {str(error).strip().splitlines()[0][:300]}")
        return 1
    print(json.dumps([same[0] | {"wrong": _of_all(same)} for same in zip(*found)]))
    return 0


def _of_all(rows: tuple[dict[str, Any], ...]) -> str:
    return "; ".join([f"rank {rank}: {row['wrong']}" for rank, row in enumerate(rows) if row["wrong"]][:2])


class Case(NamedTuple):
    """A collective: `call(target, source)` must leave `expected` in `target`."""

    name: str
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


def rows(rank: int, ranks: int, backend: str) -> list[dict[str, Any]]:
    """What this rank sees of each collective: whether its values are right, then its bus bandwidth."""
    whole, device = (MEBIBYTES[backend] << 20) // 4 // ranks * ranks, "cuda" if backend == "nccl" else "cpu"
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
    sent = nbytes * (ranks - 1) / ranks * (2 if case.name == "all_reduce" else 1)
    speed = sent / min(seconds) / 1e9
    return {"what": case.name, "ranks": ranks, "bytes": nbytes, "busbw_gb_s": speed, "wrong": wrong}


def wrong_value(got: Tensor, expected: Tensor) -> str:
    """Where the first value differs; "" where none does."""
    if torch.equal(got, expected):
        return ""
    first = int((got != expected).nonzero()[0])
    return f"values are wrong: element {first} of {len(got)} is {float(got[first])}, expected {float(expected[first])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
