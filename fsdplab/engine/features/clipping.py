"""Clips gradients by their total norm: a plain scalar, equal on every rank, whatever meshes the parameters live on.

`torch.nn.utils.clip_grad_norm_` on DTensors returns a DTensor that still waits for its sum, and refuses parameters of
different meshes together. Here every mesh sums its own part (replicas counted once), in one all-reduce a mesh
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdplab.engine import compat
from fsdplab.engine.features.misuse_checks import refuse_unsharded_forms


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],  # any shapes, plain or DTensors
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
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch's: a norm of zero does not divide by zero
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}  # one kernel scales all of them
    for gradient in gradients:
        local = compat.local_of(gradient)
        alike.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), tensors in alike.items():
        torch._foreach_mul_(tensors, scale.to(device))
    return total


def _total_norm(
    gradients: list[torch.Tensor],  # any shapes, plain or DTensors
    p: float,
    groups: tuple[dist.ProcessGroup, ...],
    parameters: list[torch.Tensor],  # any shapes: the first names the device where there is no gradient
) -> torch.Tensor:
    """Return the p-norm of all gradients, a 0-d tensor on the device of the first of them."""
    device = torch.device("cpu")
    if gradients or parameters:
        device = compat.local_of([*gradients, *parameters][0]).device
    total = torch.zeros((), device=device)  # the sum of p-th powers, or the maximum
    by_cut = _by_cut(gradients)
    for key in sorted(by_cut, key=lambda key: key.name):  # every rank calls the all-reduces in the same order
        members = by_cut[key]
        part = _power_sum([compat.local_of(gradient) for gradient in members], p, device)
        # On replicas x shards only the second dimension cuts: each replica has the whole sum once.
        for dimension in key.cut:
            _combine(part, members[0].device_mesh.get_group(dimension), p)
        # Sums of powers, not norms yet. For p = 2: 9 of one mesh and 16 of another are 25, whose root is 5.
        total = torch.maximum(total, part) if math.isinf(p) else total + part
    for group in groups:
        _combine(total, group, p)
    if math.isinf(p):
        return total
    return total ** (1.0 / p)


class _Cut(NamedTuple):
    """A mesh, by its name and its hash, and those of its dimensions that cut a gradient."""

    name: str
    cut: tuple[int, ...]
    mesh: int


def _by_cut(
    gradients: list[torch.Tensor],  # any shapes, plain or DTensors
) -> dict[_Cut, list[torch.Tensor]]:
    """Group gradients by their mesh and by the dimensions of it that cut them; plain ones have neither."""
    members: dict[_Cut, list[torch.Tensor]] = {}
    for gradient in gradients:
        key = _Cut("", (), 0)
        if isinstance(gradient, DTensor):
            key = _cut_of(gradient)
        members.setdefault(key, []).append(gradient)
    return members


def _cut_of(
    gradient: DTensor,  # any shape
) -> _Cut:
    """Return the mesh of a sharded gradient and the dimensions that cut it; raise if it still waits for its sum."""
    cut = []
    for number, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError(f"a gradient is not reduced yet: {gradient.placements}; redistribute it first")
        # A strided shard, which tensor parallelism leaves, is no `is_shard`.
        if not placement.is_replicate():
            cut.append(number)
    mesh = gradient.device_mesh
    name = f"{mesh.mesh_dim_names} {tuple(mesh.shape)} {tuple(cut)}"
    return _Cut(name, tuple(cut), hash(mesh))


def _power_sum(
    tensors: list[torch.Tensor],  # any shapes: what this rank holds of the gradients
    p: float,
    device: torch.device,
) -> torch.Tensor:
    """Return the sum of the p-th powers of all elements, or their maximum where p is infinite, on `device`."""
    filled = [tensor for tensor in tensors if tensor.numel()]  # a maximum of no elements is an error
    norms = torch._foreach_norm(filled or [torch.zeros(1)], p)
    stacked = torch.stack([norm.to(device, torch.float32) for norm in norms])  # [tensors]
    if math.isinf(p):
        return stacked.max()
    # For p = 2: (3, 4) and (12,) have the norms 5 and 12, and 25 + 144 = 13^2.
    return (stacked**p).sum()


def _combine(
    part: torch.Tensor,  # 0-d, this rank's sum or maximum; written in place
    group: dist.ProcessGroup,
    p: float,
) -> None:
    """Replace `part`, 0-d, by the sum over the ranks of `group`, or the maximum where p is infinite."""
    if group.size() == 1:
        return
    operation = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    carried = part.to(compat.device_for(group, part.device))  # offloaded gradients are on the host, NCCL is not
    dist.all_reduce(carried, op=operation, group=group)
    if carried is not part:
        part.copy_(carried)
