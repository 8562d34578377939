"""The job of lesson 14: full sharding by hand. Each fault of the lesson is one changed line of this file.

A unit keeps a shard of its parameters as one vector. The forward keeps the input of each unit and nothing else; the
backward computes the unit again, with gradients (that is activation checkpointing, and it needs no hooks).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

WIDTHS = (24, 64, 128, 96, 24)


def model() -> nn.ModuleList:
    """Four layers of different sizes, so that no two units have as many bytes."""
    return nn.ModuleList(nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:]))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Other data on each rank: x [8, 24], and what the model is to learn."""
    x = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, x.flip(1)


def loss_of(layers: nn.ModuleList, x: Tensor, target: Tensor) -> Tensor:
    """The loss of a model that nobody has sharded: the twin's."""
    for layer in layers:
        x = torch.tanh(layer(x))
    return F.mse_loss(x, target)


class Unit:
    """The parameters of one layer: a shard of them, and all of them while they are unsharded."""

    def __init__(self, layer: nn.Module, rank: int, ranks: int) -> None:
        self.layer, self.ranks = layer, ranks
        whole = nn.utils.parameters_to_vector(layer.parameters()).detach()
        whole = F.pad(whole, (0, -len(whole) % ranks))
        self.size = len(whole)
        self.shard = nn.Parameter(whole.chunk(ranks)[rank].clone().to(torch.float32))
        self.whole = torch.empty(0)

    def unshard(self) -> None:
        """Bring all rows here, unless they are here."""
        if not len(self.whole):
            self.whole = torch.empty(self.size)
            dist.all_gather_into_tensor(self.whole, self.shard.detach().float())

    def reshard(self) -> None:
        """Free the rows of the others."""
        self.whole = torch.empty(0)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        """The layer with the parameters in the vector `whole`."""
        named, begin = {}, 0
        for name, each in self.layer.named_parameters():
            named[name] = whole[begin : begin + each.numel()].view(each.shape)
            begin += each.numel()
        return torch.tanh(functional_call(self.layer, named, x))

    def backward(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the input; that of the parameters is kept."""
        x, whole = x.detach().requires_grad_(), self.whole.detach().requires_grad_()
        gradient, self.gradient = torch.autograd.grad(self.forward(x, whole), (x, whole), gradient)
        return gradient

    def reduce(self) -> None:
        """Begin the sum over the ranks; each gets its rows of it."""
        self.sum = torch.zeros(self.size // self.ranks)
        self.work = dist.reduce_scatter_tensor(self.sum, self.gradient, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, and leave the mean as the shard's gradient."""
        self.work.wait()
        self.shard.grad = (self.sum / self.ranks).to(self.shard.dtype)


def build(rank: int, ranks: int) -> tuple[list[Unit], torch.optim.Optimizer]:
    """The units of this rank and their optimizer."""
    torch.manual_seed(0)
    units = [Unit(layer, rank, ranks) for layer in model()]
    return units, torch.optim.AdamW([unit.shard for unit in units], lr=1e-3)


def train_step(units: list[Unit], optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    """One step; the loss of this rank."""
    x, target = batch(step, rank)
    inputs = []
    for unit in units:
        unit.unshard()
        inputs.append(x)
        x = unit.forward(x, unit.whole).detach()
        unit.reshard()
    x.requires_grad_()
    loss = F.mse_loss(x, target)
    (gradient,) = torch.autograd.grad(loss, x)
    for unit in reversed(units):
        unit.unshard()
        gradient = unit.backward(inputs.pop(), gradient)
        unit.reshard()
    for unit in reversed(units):
        unit.reduce()
    for unit in units:
        unit.finish()
    optimizer.step()
    return loss.item()
