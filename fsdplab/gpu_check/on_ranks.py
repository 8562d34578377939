"""What the ranks of the check run, each a process started by the lab's own launcher.

python -m fsdplab.gpu_check.on_ranks collectives BACKEND MEBIBYTES FOLDER      values and bandwidth of NCCL
python -m fsdplab.gpu_check.on_ranks shard_1 FOLDER                            a run sharded along dimension 1
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdplab.engine import compat, fully_shard
from fsdplab.sessions import RunSpec
from fsdplab.sessions.worker import training
from fsdplab.sessions.worker.engines import Held, TrainingSetup, one_step, workload_of
from fsdplab.sessions.worker.optimizers import optimizer_of
from fsdplab.sessions.worker.rank_process import RankContext, rank_process

REPEATS = 5


def collectives(backend: str, mebibytes: str, folder: str) -> None:
    """Run each collective on known values, then time it; rows with what was wrong and the bus bandwidth."""
    with rank_process(folder, backend, "cuda" if backend == "nccl" else "cpu") as context:
        context.heartbeat.enter("collectives")
        rows = [_row(name, context, int(mebibytes) << 20) for name in ("all_gather", "reduce_scatter", "all_reduce")]
        context.write("result", {"rows": rows})


def _row(name: str, context: RankContext, nbytes: int) -> dict[str, object]:
    ranks, whole = context.world_size, nbytes // 4 // context.world_size * context.world_size
    call, source, target, expected = _case(name, context.rank, ranks, whole)
    source, target = source.to(context.device), target.to(context.device)
    call(source, target)
    wrong = _wrong((target if name != "all_reduce" else source).cpu(), expected)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        call(source, target)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    sent = 4 * whole * (ranks - 1) / ranks * (2 if name == "all_reduce" else 1)
    return {
        "collective": name,
        "ranks": ranks,
        "bytes": 4 * whole,
        "busbw_gb_s": sent / min(seconds) / 1e9,
        "wrong": wrong,
    }


def _case(
    name: str, rank: int, ranks: int, whole: int
) -> tuple[Callable[[Tensor, Tensor], object], Tensor, Tensor, Tensor]:
    """The call, what this rank sends, where it receives, and what must be there then. On 2 ranks, of 4 numbers in all:
    all_gather [1, 1], [2, 2] -> [1, 1, 2, 2]; reduce_scatter twice [1, 1, 1, 1] and [2, 2, 2, 2] -> [3, 3].
    """
    part, total = whole // ranks, float(ranks * (ranks + 1) // 2)
    if name == "all_gather":
        expected = torch.arange(1.0, ranks + 1).repeat_interleave(part)
        return _gather, torch.full((part,), rank + 1.0), torch.zeros(whole), expected
    mine = torch.full((whole,), rank + 1.0)
    if name == "reduce_scatter":
        return _reduce_scatter, mine, torch.zeros(part), torch.full((part,), total)
    return lambda source, target: dist.all_reduce(source), mine, mine[:0], torch.full((whole,), total)


def _gather(source: Tensor, target: Tensor) -> None:
    compat.all_gather_single(target, source)


def _reduce_scatter(source: Tensor, target: Tensor) -> None:
    compat.reduce_scatter_single(target, source)


def _wrong(got: Tensor, expected: Tensor) -> str:
    if torch.equal(got, expected):
        return ""
    first = int((got != expected).nonzero()[0])
    return f"values are wrong: element {first} of {len(got)} is {float(got[first])}, expected {float(expected[first])}"


def shard_1(folder: str) -> None:
    """Train as the run in FOLDER/spec.json says, with every matrix cut along dimension 1."""
    training.main(folder, _cut_along_dimension_1)


def _cut_along_dimension_1(spec: RunSpec, context: RankContext) -> TrainingSetup:
    workload = workload_of(spec)
    model = workload.build(context.device, spec.seed)
    mesh = init_device_mesh(context.device.type, (spec.world_size,))
    for module in [*(each for each in model.modules() if isinstance(each, workload.units(model))), model]:
        fully_shard(module, mesh=mesh, shard_placement_fn=_along_1)
    optimizer, mine = optimizer_of(spec, model, workload), Held(model)

    def step(batches: Sequence[Sequence[Any]]) -> float:
        return one_step(mine, optimizer, batches[0], workload.loss, context.heartbeat.enter).item()

    return TrainingSetup(model, optimizer, step)


def _along_1(parameter: nn.Parameter) -> Shard:
    return Shard(min(1, parameter.ndim - 1))


WORK: dict[str, Callable[..., None]] = {"collectives": collectives, "shard_1": shard_1}

if __name__ == "__main__":
    WORK[sys.argv[1]](*sys.argv[2:])
