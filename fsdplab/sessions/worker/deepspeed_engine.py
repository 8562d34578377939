"""DeepSpeed's ZeRO as an engine: stages 1, 2 and 3, configured to train what the other engines train.

Apart from engines.py because DeepSpeed owns the whole step: it scales the loss, decides when gradients are reduced, and
steps the optimizer. Importing it takes seconds, so only its own ranks do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker.rank_process import RankContext

LossOf = Callable[[nn.Module, Any], torch.Tensor]


def deepspeed_setup(
    stage: int, spec: RunSpec, context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf
) -> tuple[nn.Module, Any, Callable[..., float]]:
    """Return the (engine, optimizer, train_step) of ZeRO stage `stage`."""
    os.environ.setdefault("DS_ACCELERATOR", context.device.type)
    import deepspeed

    # an operator for inference on CPUs, which every rank would compile, and wait for whoever was killed compiling it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    size = sum(parameter.numel() for parameter in model.parameters())
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(stage, spec, size), dist_init_required=False
    )

    def train_step(batches_by_rank: Sequence[Sequence[Any]]) -> float:
        (batches,) = batches_by_rank
        total = torch.zeros((), device=context.device)
        for batch in batches:
            context.heartbeat.enter("forward")
            loss = loss_of(engine, batch)
            context.heartbeat.enter("backward")
            engine.backward(loss)  # divides by the number of micro-batches itself
            context.heartbeat.enter("optimizer")
            engine.step()  # steps after the last micro-batch only
            total += loss.detach() / len(batches)
        return total.item()

    return engine, optimizer, train_step


def configuration(stage: int, spec: RunSpec, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a run: its own defaults, but for two things.

    Nothing may train another model (clipping). And its reduce bucket of 500 million elements is allocated whole, 2 GB
    of float32, which would hide everything else of a small model; a bucket as large as the model behaves the same.
    """
    bf16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return {
        "train_micro_batch_size_per_gpu": spec.batch_size,
        "gradient_accumulation_steps": spec.micro_batches,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": min(500_000_000, parameters)},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        **(bf16 if spec.precision == "bf16" else {}),
    }
