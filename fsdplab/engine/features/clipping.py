"""The total gradient norm of a sharded model: a plain scalar, equal on every rank, whatever meshes its parameters live
on.

`torch.nn.utils.clip_grad_norm_` on DTensors returns a DTensor that still waits for its sum, and refuses parameters of
different meshes together. Here every mesh sums its own part (replicas counted once), in one all-reduce a mesh
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdplab.engine import compat
from fsdplab.engine.features.misuse_checks import refuse_unsharded_forms


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    groups: Iterable[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`; returns the norm before, a 0-d tensor.

    `groups` are those whose ranks hold other parameters of the same model (pipeline stages): their parts are added.
    Every rank must call it. Raises `RuntimeError` for a norm that is not finite, if asked. Example: gradients (3, 4) in
    all have norm 5; with `max_norm=1` they become (0.6, 0.8).
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    refuse_unsharded_forms(chosen, "the list given to clip_grad_norm_", "take it while the model is sharded")
    gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
    total = _total_norm(gradients, float(norm_type), tuple(groups), chosen)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of {len(gradients)} gradients is {total.item()}; look for the step that made it so"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    local = [compat.local_of(gradient) for gradient in gradients]
    for device, dtype in {(each.device, each.dtype) for each in local}:
        same = [each for each in local if (each.device, each.dtype) == (device, dtype)]
        torch._foreach_mul_(same, scale.to(device))
    return total


def _total_norm(
    gradients: list[torch.Tensor], p: float, groups: tuple[dist.ProcessGroup, ...], parameters: list[torch.Tensor]
) -> torch.Tensor:
    device = next((compat.local_of(each).device for each in [*gradients, *parameters]), torch.device("cpu"))
    total = torch.zeros((), device=device)
    for cut, members in sorted(_by_cut(gradients).items(), key=lambda item: item[0][0]):
        part = _power_sum([compat.local_of(each) for each in members], p, device)
        for dimension in cut[1]:
            _combine(part, members[0].device_mesh.get_group(dimension), p)
        total = torch.maximum(total, part) if math.isinf(p) else total + part
    for group in groups:
        _combine(total, group, p)
    return total if math.isinf(p) else total ** (1.0 / p)


def _by_cut(gradients: list[torch.Tensor]) -> dict[tuple[str, tuple[int, ...], int], list[torch.Tensor]]:
    """Gradients by mesh and by the dimensions of it that cut them; in the same order on every rank."""
    found: dict[tuple[str, tuple[int, ...], int], list[torch.Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                raise ValueError(f"a gradient is not reduced yet: {gradient.placements}; redistribute it first")
            mesh = gradient.device_mesh
            # Not `is_shard`: a strided shard, which tensor parallelism leaves, is none.
            cut = tuple(number for number, placement in enumerate(gradient.placements) if not placement.is_replicate())
            key = (f"{mesh.mesh_dim_names} {tuple(mesh.shape)} {cut}", cut, hash(mesh))
        else:
            key = ("", (), 0)
        found.setdefault(key, []).append(gradient)
    return found


def _power_sum(tensors: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    norms = torch._foreach_norm([each for each in tensors if each.numel()] or [torch.zeros(1)], p)
    stacked = torch.stack([norm.to(device, torch.float32) for norm in norms])
    return stacked.max() if math.isinf(p) else (stacked**p).sum()


def _combine(part: torch.Tensor, group: dist.ProcessGroup, p: float) -> None:
    if group.size() > 1:
        carried = part.to(compat.device_for(group, part.device))  # offloaded gradients are on the host, NCCL is not
        dist.all_reduce(carried, op=dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)
        if carried is not part:
            part.copy_(carried)
