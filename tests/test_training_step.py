"""Optimizer steps as trainings take them, on two real ranks, equal to the unsharded twin to the last bit: gradients of
two micro-batches, clipped by their total norm, then a step of an optimizer with two groups whose state is offloaded.

Inputs are small integers and the loss is linear in each parameter, so sums of gradients are exact in any order. Losses
are computed from unsharded parameters: a rank that computed with parameters of before a step would differ.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from fsdplab.engine import STRATEGIES, clip_grad_norm_, offload_optimizer, shard_model

pytestmark = pytest.mark.quick("accumulation, clipping and offloading are tried on real ranks")
STEPS, MICRO_BATCHES = 3, 2
MOST_NORM = (1.0, 1e9, 1.0)  # by step: the second leaves gradients as they are
IN_HOST_MEMORY = CPUOffloadPolicy(pin_memory=False)


class Heads(nn.Module):
    """Four linear layers on the same input: two are units of their own, and two are the root's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(4, 3, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 2)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([each(inputs) for each in (self.first, *self.blocks, self.last)], dim=1)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    inputs = torch.randint(-3, 4, (8, 4), generator=draw).float()
    weights = torch.randint(-3, 4, (8, 16), generator=draw).float()
    return (model(inputs) * weights).sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices, as is usual, and none for biases."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": biases, "weight_decay": 0.0}], lr=0.1, weight_decay=0.1)


def twin_step(twin: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> tuple[list[list[torch.Tensor]], float]:
    """The losses of each rank, and the norm of the mean gradient in double precision; gradients are left unclipped."""
    ranks = range(dist.get_world_size())
    losses = [[loss_of(twin, step, micro, rank) / MICRO_BATCHES for micro in range(MICRO_BATCHES)] for rank in ranks]
    (sum(loss for of_rank in losses for loss in of_rank) / len(ranks)).backward()
    gradients = [parameter.grad.double().flatten() for parameter in twin.parameters()]
    return losses, torch.cat(gradients).norm().item()


def own_part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rows of the twin's tensor that this rank holds of the parameter `like`."""
    if not isinstance(like, DTensor):
        return tensor
    shards = like.device_mesh.size(like.device_mesh.ndim - 1)
    chunks = tensor.chunk(shards)
    place = like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
    return chunks[place] if place < len(chunks) else tensor[:0]


def unsharded_weights(model: Heads) -> list[torch.UntypedStorage]:
    """Fills with the memory of the blocks' weights, as a forward reads them."""
    found: list[torch.UntypedStorage] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: found.append(module.weight.untyped_storage()))
    return found


def shards_parameters(strategy: str) -> bool:
    """Whether parameters are sharded: hybrid_shard has groups of one rank here."""
    return STRATEGIES[strategy].shard_parameters and strategy != "hybrid_shard"


def train_beside_twin(strategy: str, policy: OffloadPolicy, reshard_after_backward: bool = True) -> None:
    row, rank = STRATEGIES[strategy], dist.get_rank()
    model, twin = Heads(), Heads()
    mesh = init_device_mesh("cpu", (2, 1)) if strategy == "hybrid_shard" else None
    shard_model(model, strategy, mesh=mesh, offload_policy=policy)
    model.set_reshard_after_backward(reshard_after_backward)
    shards, unsharded = dict(model.named_parameters()), unsharded_weights(model)
    optimizer, twins = offload_optimizer(optimizer_of(model), IN_HOST_MEMORY, part_bytes=1), optimizer_of(twin)
    for step in range(STEPS):
        expected, expected_norm = twin_step(twin, twins, step)
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            model.set_requires_gradient_sync(last or row.shard_gradients)
            model.set_is_last_backward(last)
            loss = loss_of(model, step, micro, rank) / MICRO_BATCHES
            assert loss == expected[rank][micro], f"the loss of step {step}, micro-batch {micro}"
            loss.backward()
        norm = clip_grad_norm_(shards.values(), MOST_NORM[step])
        assert norm.item() == pytest.approx(expected_norm, rel=1e-6), f"the norm of step {step}"
        for parameter in twin.parameters():
            parameter.grad.mul_(torch.clamp(MOST_NORM[step] / (norm + 1e-6), max=1.0))
        for each in (optimizer, twins):
            each.step()
            each.zero_grad()
        compare(shards, dict(twin.named_parameters()), step)
        freed = [storage.nbytes() == 0 for storage in unsharded]
        frees = shards_parameters(strategy) and reshard_after_backward
        assert freed == [frees] * len(freed), f"unsharded parameters after step {step}: {freed}"


def compare(shards: dict[str, nn.Parameter], twins: dict[str, nn.Parameter], step: int) -> None:
    """Every row that this rank holds equals the twin's."""
    for name, parameter in shards.items():
        here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(here, own_part(twins[name].detach(), parameter)), f"{name} after step {step}"


def each_beside_twin() -> None:
    """Every strategy; with shards in host memory; and units that stay unsharded while the optimizer steps."""
    cases = [(strategy, OffloadPolicy(), True) for strategy in STRATEGIES]
    cases += [(strategy, IN_HOST_MEMORY, True) for strategy in STRATEGIES if shards_parameters(strategy)]
    cases += [("full_shard", OffloadPolicy(), False)]
    for case in cases:
        try:
            train_beside_twin(*case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_accumulated_clipped_and_offloaded_steps_equal_the_twin(ranks) -> None:
    ranks(2, each_beside_twin)
