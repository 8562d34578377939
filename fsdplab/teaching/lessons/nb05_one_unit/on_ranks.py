"""The part of lesson 05 that runs on the ranks: one layer's life with the learner's functions, beside a whole one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.functions_in_use import functions


def read_dropped(payload: object) -> float:
    """Read a tensor whose memory was given back. This ends the process."""
    whole = torch.ones(1000, 1000)
    whole.untyped_storage().resize_(0)
    return whole.sum().item()


def layer_life(payload: dict[str, Any]) -> dict[str, Any]:
    """Take one Linear through a training step on this rank with the learner's functions, beside the whole layer.

    `payload`: workspace, parts (ids of exercises), rows, columns. Returns the bytes held after each moment, and the
    largest differences.
    """
    open_course(workspace=payload["workspace"])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = SimpleNamespace(**functions(*payload["parts"]))
    layer, twin, inputs = _layer_and_twin(payload["rows"], payload["columns"])
    moments, output, gradient = _life(layer, inputs[rank], parts)
    twin_outputs, twin_gradient = _of_the_twin(twin, inputs)
    # the learner's own `shard` cuts the twin's gradient as it cut the parameters
    right_shard = parts.shard(twin_gradient, rank, ranks)
    differences = {
        "output": float((output - twin_outputs[rank]).abs().max()),
        "sharded gradient": float((gradient - right_shard).abs().max()),
    }
    return {"moments": moments, "differences": differences}


def _layer_and_twin(rows: int, columns: int) -> tuple[nn.Linear, nn.Linear, list[torch.Tensor]]:
    """Return two equal layers, and the input of every rank, float32 [8, columns]."""
    torch.manual_seed(0)
    layer, twin = nn.Linear(columns, rows, bias=False), nn.Linear(columns, rows, bias=False)
    twin.load_state_dict(layer.state_dict())
    # of all ranks, drawn from one seed: each rank takes its own, the twin takes all
    inputs = [torch.randn(8, columns, requires_grad=True) for _ in range(dist.get_world_size())]
    return layer, twin, inputs


def _life(
    layer: nn.Linear, x: torch.Tensor, parts: SimpleNamespace
) -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]:
    """Return the life in time order: (moments, output, this rank's shard of the mean gradient)."""
    # `whole` keeps its shape when its memory is given back, and the layer computes with it
    weight, whole = layer.weight, layer.weight.data
    moments: list[dict[str, Any]] = []
    reduced: torch.Tensor | None = None

    def note(moment: str) -> None:
        moments.append(
            {
                "moment": moment,
                "sharded_parameters": shard.nbytes,
                # of the storage: 0 after a reshard, where `whole.nbytes` stays
                "unsharded_parameters": whole.untyped_storage().nbytes(),
                "unsharded_gradients": 0 if weight.grad is None else weight.grad.nbytes,
                "sharded_gradients": 0 if reduced is None else reduced.nbytes,
            }
        )

    shard = parts.shard(whole, dist.get_rank(), dist.get_world_size())
    parts.reshard(whole)
    note("shard (at rest)")
    parts.unshard(shard, whole)
    note("unshard")
    y = layer(x)
    note("forward")
    parts.reshard(whole)
    note("reshard")
    parts.unshard(shard, whole)
    note("unshard again")
    y.square().sum().backward()
    note("backward")
    parts.reshard(whole)
    note("reshard again")
    reduced = parts.reduce(weight.grad)
    note("reduce")
    weight.grad = None
    note("at rest again")
    return moments, y.detach(), reduced


def _of_the_twin(twin: nn.Linear, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the whole layer's outputs for every rank's input, and the mean of its gradients."""
    outputs, total = [], torch.zeros_like(twin.weight)
    for x in inputs:
        # each rank's gradient by itself; `total` sums them up
        twin.weight.grad = None
        y = twin(x)
        y.square().sum().backward()
        total += twin.weight.grad
        outputs.append(y.detach())
    return outputs, total / len(inputs)
