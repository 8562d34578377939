"""What ranks look at before an engine takes a model of one's own: equal weights, unused parameters, its facts."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.units import Units, parameters_in, words_of
from fsdplab.workloads.workload import Task


def facts_of(model: nn.Module, workload: Task, units: Units) -> dict[str, Any]:
    """The model as the record keeps it: its parameters, its units, and what is said of it."""
    return {
        "parameters": parameters_in([model]),
        "units": words_of(units.modules) or "the whole model",
        "notes": [*workload.notes(model), units.sentence],
    }


def check_equal(model: nn.Module, device: torch.device) -> None:
    """ModelError on every rank unless all of them have built the same values: engines send slices, and none checks."""
    text = "".join(f"{name} {tuple(each.shape)} {_sum(each)};" for name, each in model.state_dict().items())
    mine = zlib.crc32(text.encode())
    bounds = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if bounds[0] != -bounds[1]:
        raise ModelError(
            "model() has other values on another rank; build it from torch's, numpy's and Python's random numbers,"
            " which are seeded before, and from nothing that differs between processes"
        )


def _sum(value: Any) -> float:
    return value.detach().abs().double().sum().item() if isinstance(value, torch.Tensor) and value.numel() else 0.0


class Tried(NamedTuple):
    """What a first loss shows of a model: parameters without a gradient on some rank, and buffers that it changes."""

    unused: bool
    changes_buffers: bool


def tried(model: nn.Module, workload: Task, drawn: Any, device: torch.device) -> Tried:
    """What DDP must be told before it takes the model, which afterwards is as it was, its buffers too."""
    kept = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    for module, name, buffer in kept:
        module._buffers[name] = None if buffer is None else buffer.clone()
    workload.seeded_loss(model, drawn).backward()
    unused = any(each.grad is None for each in model.parameters() if each.requires_grad)
    changed = any(_differ(module._buffers[name], buffer) for module, name, buffer in kept)
    model.zero_grad(set_to_none=True)
    for module, name, buffer in kept:
        module._buffers[name] = buffer
    found = torch.tensor([unused, changed], dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Tried(*map(bool, found.tolist()))


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    return one.shape != other.shape or not torch.equal(one, other)
