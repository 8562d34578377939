"""What the composition tests share: both engines under one name, data, a training loop, and how near two trainings are.

How near to expect. Cutting a layer changes the order in which its sums are taken, so the first gradients agree with the
unsharded twin's to about 4e-7 of their norm, and AdamW, which divides small gradients by their size, lets single
parameters (key biases first) drift by up to 1e-5 in five steps of 1e-3. The two engines take all sums of a 2 x 2 mesh
in the same order: they must agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, _redistribute, debug

from fsdplab.engine import fully_shard as lab_fully_shard

ENGINES = {"torch": torch_fully_shard, "lab": lab_fully_shard}
NEAR = {"rtol": 0.0, "atol": 2e-5}  # parameters after five AdamW steps of 1e-3


def mesh_of(**dimensions: int) -> DeviceMesh:
    """A CPU mesh, `mesh_of(dp=2, tp=2)`, in a process whose earlier meshes are gone.

    DTensor caches its decisions by mesh, and a mesh over process groups that were destroyed equals one over new ones.
    """
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    return init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def tokens_of(step: int, rank: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batch of a data-parallel rank: tokens and targets, int64 [rows, 16]."""
    tokens = torch.randint(0, 256, (rows, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank of its mesh."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, steps: int, backward: Callable[[int], Any], optimizer: torch.optim.Optimizer | None = None
) -> list[Any]:
    """What `backward(step)` returned at each step, an optimizer step after each."""
    optimizer, seen = optimizer or adamw(model), []
    for step in range(steps):
        seen.append(backward(step))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_near(model: nn.Module, twin: nn.Module) -> None:
    """Every parameter of `model` is the twin's of the same name, within what AdamW amplifies."""
    expected = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        here, there = whole(parameter), expected[name].detach()
        torch.testing.assert_close(here, there, **NEAR, msg=lambda text, n=name: f"{n}: {text}")


def worst_gradient(model: nn.Module, twin: nn.Module) -> float:
    """The largest |g - g_twin| / |g_twin| over the parameters;
    key biases, whose gradient is rounding noise, left out.
    """
    expected = dict(twin.named_parameters())
    pairs = [
        (whole(p.grad), expected[name].grad) for name, p in model.named_parameters() if not name.endswith("key.bias")
    ]
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def assert_same_bits(ours: nn.Module, theirs: nn.Module) -> None:
    """Same names, same DTensor placements and meshes, same local bits."""
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        assert placed(a) == placed(b), f"{name}: {placed(a)} and {placed(b)}"
        assert torch.equal(a.to_local(), b.to_local()), f"{name} differs by {(a.to_local() - b.to_local()).abs().max()}"


def placed(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Placements, mesh dimensions, whole shape and local shape of a sharded parameter."""
    return (
        parameter.placements,
        parameter.device_mesh.mesh_dim_names,
        tuple(parameter.shape),
        tuple(parameter.to_local().shape),
    )
