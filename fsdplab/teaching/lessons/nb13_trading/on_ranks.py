"""The part of lesson 13 that runs on the ranks: its small models, a training of a few steps, and what it sends and
keeps, in bytes. Time is measured nowhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.engine import events, shard_model
from fsdplab.engine.compat import local_of
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec
from fsdplab.sessions.bf16_speed import bf16_is_slow
from fsdplab.teaching.core.collectives_log import collectives
from fsdplab.teaching.core.recorded import recorded
from fsdplab.teaching.core.training_on_ranks import Training
from fsdplab.workloads import ByteText, ModelShape, block_types, build_model, loss_of
from fsdplab.workloads.shapes import gpt

SMALL = gpt("small", layers=2, width=32, heads=2, context=32)
TIED = replace(SMALL, tied=True)
LARGER = replace(SMALL, layers=4, width=256, heads=4, kv_heads=4, ffn=1024)  # 3.3 million parameters
JOB: dict[str, Any] = {"model": "gpt-20m", "batch_size": 4, "sequence_length": 128, "steps": 1, "time_limit": 300}
CARD = 150_000_000  # bytes of the emulated card that JOB must fit
CHOICES = ("precision", "checkpoint", "offload")
ADAPTER_RANK = 4
STEPS = 2


def bf16_run(checkpoint: str = "none", offload: str = "none") -> RunRecord:
    """Load JOB in bf16 as it was recorded, for processors on which bf16 would take minutes.

    Its bytes are those of a run.
    """
    return recorded(f"lesson-13/bf16-{checkpoint}-{offload}")


def peak_of(choices: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Return (bytes at the peak, by category) of JOB with these choices.

    They are measured here, or recorded where bf16 is slow.
    """
    slow = torch.tensor(float(choices.get("precision") == "bf16" and bf16_is_slow()))
    dist.all_reduce(slow, dist.ReduceOp.MAX)  # the ranks decide alike
    if not slow:
        memory = Training(RunSpec(**JOB, **choices, device="cpu")).measured()
        return memory.peak_total, memory.peak
    # the recorded runs are of bf16, and differ in these two
    recorded_choices = {name: choices[name] for name in ("checkpoint", "offload") if name in choices}
    peak = bf16_run(**recorded_choices).summary.peak_memory_bytes
    return known(peak.total), dict(peak.split)


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the batch of `rank` at `step` in every small training of this lesson: two sequences of 16 bytes."""
    return ByteText.from_standard_library().batch(step, rank, ranks, batch_size=2, sequence_length=16)


class Adapted(nn.Module):
    """A Linear and a low-rank change to it (LoRA): y = x W^T + b + x down^T up^T; down [r, in], up [out, r]."""

    def __init__(self, linear: nn.Linear, seed: int) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(seed)
        self.linear = linear
        self.adapter_down = nn.Parameter(0.1 * torch.randn(ADAPTER_RANK, linear.in_features, generator=stream))
        self.adapter_up = nn.Parameter(0.1 * torch.randn(linear.out_features, ADAPTER_RANK, generator=stream))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.adapter_down.T @ self.adapter_up.T


def adapted_model(config: ModelShape = SMALL) -> nn.Module:
    """Return a GPT with adapters beside the queries and values of every block; the same weights on every rank."""
    model = build_model(config)
    for number, block in enumerate(model.blocks):
        # a seed for each adapter, so that every rank draws the same
        block.attention.query = Adapted(block.attention.query, seed=2 * number)
        block.attention.value = Adapted(block.attention.value, seed=2 * number + 1)
    return model


def adapters_of(model: nn.Module) -> list[str]:
    """Return the names of the parameters that adapters add."""
    return [name for name, _ in model.named_parameters() if "adapter" in name]


def shard(model: nn.Module) -> nn.Module:
    """Shard a model with `full_shard`, blocks as units, over all ranks."""
    return shard_model(model, "full_shard", units=block_types(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[events.Collective]:
    """Train a few steps; return the collectives of the last one."""
    for step in range(STEPS):
        with collectives() as seen:
            loss_of(model, *batch(step, dist.get_rank(), dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()  # whatever the optimizer does not know
    return seen


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state on this rank, step counters left out."""
    nbytes = 0
    for state in optimizer.state.values():
        for value in state.values():
            # a step counter has no dimension
            if isinstance(value, Tensor) and value.dim():
                nbytes += local_of(value).nbytes
    return nbytes


def frozen_costs(payload: object) -> dict[str, dict[str, int]]:
    """Train one model whole and through adapters only.

    Returns what each unshards, reduces and keeps on this rank, in bytes.
    """
    costs = {}
    for which in ("everything", "adapters only"):
        model = adapted_model(LARGER)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(which == "everything" or "adapter" in name)
        shard(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        # bytes on the wire of the last step, by kind
        sent: Counter[str] = Counter()
        for collective in train(model, optimizer):
            sent[collective.kind] += collective.wire_bytes
        costs[which] = {
            "unsharded": sent["all_gather"],
            "reduced": sent["reduce_scatter"],
            "gradients": sum(local_of(parameter).nbytes for parameter in trained),
            "optimizer state": state_bytes(optimizer),
        }
    return costs
