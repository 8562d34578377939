"""The part of lesson 16 with pipeline stages; a file of its own, because torch's pipelining is slow to import."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from fsdplab.engine import fully_shard
from fsdplab.teaching.core.collectives_log import collectives
from fsdplab.teaching.lessons.nb16_composition.on_ranks import whole
from fsdplab.workloads import build_model, loss_of, preset
from fsdplab.workloads.parallel import GPTStage, build_stage
from fsdplab.workloads.twin import replay_gradients

FOUR_BLOCKS = dataclasses.replace(preset("gpt-tiny"), layers=4)
MICRO_BATCHES = 4


def stages(payload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Train two stages x two data ranks with units resharded or kept between a micro-batch's two passes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return {"resharded": _train(mesh, True), "kept": _train(mesh, False)}


def _train(mesh: DeviceMesh, reshard: bool) -> dict[str, Any]:
    number = mesh["pp"].get_local_rank()
    module, twin = build_stage(FOUR_BLOCKS, number, 2), build_model(FOUR_BLOCKS)
    for block in [*module.blocks.values(), module]:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_entropy)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (module, twin)]
    seen: Counter[str] = Counter()
    for step in range(2):
        seen = _step(schedule, module, step, mesh["dp"].get_local_rank())
        replay_gradients(twin, [_micro_batches(step, rank) for rank in range(2)], loss_of)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(twin.named_parameters())
    drift = max(float((whole(p) - expected[name]).abs().max()) for name, p in module.named_parameters())
    return {"all_gather": seen["all_gather"], "reduce_scatter": seen["reduce_scatter"], "drift": drift}


def _step(schedule: Schedule1F1B, module: GPTStage, step: int, rank: int) -> Counter[str]:
    """One step's micro-batches through the stages; the collectives that the engine issued, by kind."""
    tokens, targets = (torch.cat(part) for part in zip(*_micro_batches(step, rank)))
    with collectives() as issued:
        schedule.step(*([tokens] if module.begins else []), target=targets if module.ends else None)
    return Counter(each.kind for each in issued)


def _micro_batches(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Four of one sequence each: tokens and targets, int64 [1, 16]."""
    tokens = torch.randint(0, 256, (MICRO_BATCHES, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return list(zip(tokens[:, :-1].split(1), tokens[:, 1:].split(1)))


def _entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
