"""What the composition tests share: both engines under one name, data, a training loop, and how near two trainings are.

How near to expect. Cutting a layer changes the order in which its sums are taken, so the first gradients agree with the
unsharded twin's to about 4e-7 of their norm, and AdamW, which divides small gradients by their size, lets single
parameters (key biases first) drift by up to 1e-5 in five steps of 1e-3. The two engines take all sums of a 2 x 2 mesh
in the same order: they must agree to the last bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, _redistribute, debug

from fsdplab.engine import fully_shard as lab_fully_shard
from fsdplab.workloads.twin import replay_gradients
from tests.ranks import RankPool

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
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


class OnSlices(torch.optim.AdamW):
    """AdamW on the slices that this rank holds: to the bit what it is on DTensors, whose dispatch of each of its
    operators would take longer than all the rest of a test.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sharded = list(parameters)
        super().__init__([nn.Parameter(_slice(each.detach())) for each in self._sharded], lr=1e-3)

    def step(self, closure: None = None) -> None:
        for mine, sharded in zip(self.param_groups[0]["params"], self._sharded):
            placed_alike = not isinstance(sharded, DTensor) or sharded.grad.placements == sharded.placements
            assert placed_alike, f"a parameter is {sharded.placements}, its gradient {sharded.grad.placements}"
            mine.grad = _slice(sharded.grad)
        super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for sharded in self._sharded:
            sharded.grad = None


def _slice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return OnSlices(model.parameters())


@dataclass(frozen=True)
class Twin:
    """What the unsharded model came to: replayed once, however many ranks and engines are compared with it."""

    losses: list[list[list[float]]]  # by step, data-parallel rank and micro-batch
    model: nn.Module  # at the end
    first_gradients: nn.Module  # gradients of the first step, in `.grad`


def replay(file: str, model: nn.Module, ranks: int, loss_of: Loss, rows: int, micro_batches: int) -> None:
    """Write the `Twin` of three steps on the batches of `ranks`, `rows` sequences in each."""
    losses, first, optimizer = [], {}, adamw(model)
    for step in range(3):
        batches = [
            list(zip(*(part.chunk(micro_batches) for part in tokens_of(step, rank, rows)))) for rank in range(ranks)
        ]
        losses.append([[loss_of(model, *micro).item() for micro in micros] for micros in batches])
        replay_gradients(model, batches, loss_of)
        first = first or {name: parameter.grad for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    torch.save((losses, model, first), file)


def twins_in(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`replayed(build, name, ranks, loss_of, rows=2, micro_batches=1)` is the file of that `Twin`, for a module."""

    @functools.cache
    def replayed(
        build: Callable[..., nn.Module], name: Any, count: int, loss: Loss, rows: int = 2, micro_batches: int = 1
    ) -> str:
        file = str(tmp_path_factory.mktemp("twin") / "twin.pt")
        ranks(1, _build_and_replay, file, build, name, count, loss, rows, micro_batches)
        return file

    return replayed


def _build_and_replay(file: str, build: Callable[..., nn.Module], name: Any, *rest: Any) -> None:
    replay(file, build(name), *rest)


def twin_in(file: str) -> Twin:
    losses, model, gradients = torch.load(file, weights_only=False)
    first = copy.deepcopy(model)
    for name, parameter in first.named_parameters():
        parameter.grad = gradients[name]
    return Twin(losses, model, first)


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
