"""The collectives of NCCL over all GPUs, on known values, and their bandwidth.

python -m fsdplab.gpu_check.collectives BACKEND RANKS            starts the ranks, prints their rows as JSON
python -m fsdplab.gpu_check.collectives BACKEND FOLDER rank      what each rank runs
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdplab.common.temporary import temporary_folder
from fsdplab.engine import compat
from fsdplab.sessions import RanksFailed
from fsdplab.sessions.launch.launcher import once_more, run_ranks
from fsdplab.sessions.launch.mailbox import Mailbox, read_lines
from fsdplab.sessions.worker.rank_process import RankContext, rank_process

NAMES = ("all_gather", "reduce_scatter", "all_reduce")
REPEATS = 5
MEBIBYTES = {"nccl": 256, "gloo": 1}
_Call = Callable[[Tensor, Tensor], object]


def main(backend: str, ranks: int) -> int:
    """Run the collectives on so many ranks, and print a row of each with what was wrong on any; 1 if ranks failed."""
    try:
        of_ranks = once_more(lambda: _rows(backend, ranks))
    except RanksFailed as error:
        print(f"{backend} forms no group of {ranks}: {str(error).strip().splitlines()[0][:300]}")
        return 1
    print(json.dumps([rows[0] | {"wrong": _of_all(rows)} for rows in zip(*of_ranks)]))
    return 0


def _rows(backend: str, ranks: int) -> list[list[dict[str, Any]]]:
    mailbox = Mailbox(temporary_folder("nccl"))
    program = ["-m", "fsdplab.gpu_check.collectives", backend, str(mailbox.folder), "rank"]
    run_ranks(program, mailbox, world_size=ranks, time_limit=80.0)
    return [read_lines(mailbox.of(rank, "result"))[0]["rows"] for rank in range(ranks)]


def _of_all(rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join([f"rank {rank}: {row['wrong']}" for rank, row in enumerate(rows) if row["wrong"]][:2])


def on_a_rank(backend: str, folder: str) -> None:
    """Run each collective on known values, then time it."""
    with rank_process(folder, backend, "cuda" if backend == "nccl" else "cpu") as context:
        context.heartbeat.enter("collectives")
        context.write("result", {"rows": [_row(name, context, MEBIBYTES[backend] << 20) for name in NAMES]})


def _row(name: str, context: RankContext, nbytes: int) -> dict[str, object]:
    ranks, whole = context.world_size, nbytes // 4 // context.world_size * context.world_size
    call, source, target, expected = case(name, context.rank, ranks, whole)
    source, target = source.to(context.device), target.to(context.device)
    call(target, source)
    wrong = wrong_value((target if name != "all_reduce" else source).cpu(), expected)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        call(target, source)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    sent = 4 * whole * (ranks - 1) / ranks * (2 if name == "all_reduce" else 1)
    speed = sent / min(seconds) / 1e9
    return {"collective": name, "ranks": ranks, "bytes": 4 * whole, "busbw_gb_s": speed, "wrong": wrong}


def case(name: str, rank: int, ranks: int, whole: int) -> tuple[_Call, Tensor, Tensor, Tensor]:
    """The call, what this rank sends, where it receives, and what must be there then. On 2 ranks, of 4 numbers in all:
    all_gather [1, 1], [2, 2] -> [1, 1, 2, 2]; reduce_scatter twice [1, 1, 1, 1] and [2, 2, 2, 2] -> [3, 3].
    """
    part, total = whole // ranks, float(ranks * (ranks + 1) // 2)
    if name == "all_gather":
        expected = torch.arange(1.0, ranks + 1).repeat_interleave(part)
        return compat.all_gather_single, torch.full((part,), rank + 1.0), torch.zeros(whole), expected
    mine = torch.full((whole,), rank + 1.0)
    if name == "reduce_scatter":
        return compat.reduce_scatter_single, mine, torch.zeros(part), torch.full((part,), total)
    return lambda target, source: dist.all_reduce(source), mine, mine[:0], torch.full((whole,), total)


def wrong_value(got: Tensor, expected: Tensor) -> str:
    """Where the first value differs; "" where none does."""
    if torch.equal(got, expected):
        return ""
    first = int((got != expected).nonzero()[0])
    return f"values are wrong: element {first} of {len(got)} is {float(got[first])}, expected {float(expected[first])}"


if __name__ == "__main__":
    if sys.argv[3:] == ["rank"]:
        on_a_rank(*sys.argv[1:3])
    else:
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
