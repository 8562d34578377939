"""A loss that is computed from none of a model's output tensors trains all the same, as it does without sharding."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdplab.engine import fully_shard, shard_model
from tests.each_strategy import STRATEGIES
from tests.ranks import transports
from tests.surface import close, data, gradients, mesh_of, twin_gradients, wholes


class Opaque:
    """An output that `pytree` does not know."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.up(x).tanh()
        return x + self.down(self.kept)


class OwnWeights(nn.Module):
    """Keeps what it computes from a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 8)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = (x @ self.weight).tanh()
        return self.kept + x


class Model(nn.Module):
    """`returned` makes the output of the logits."""

    def __init__(self, returned: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(), OwnWeights(), Block()])
        self.head, self.returned = nn.Linear(8, 8), returned

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.returned(self, self.head(x))


def kept_as_attribute(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    model.loss = logits.square().mean()
    return logits.detach()


def nothing(model: nn.Module, logits: torch.Tensor) -> None:
    model.loss = logits.square().mean()


# name -> (what the forward returns, the loss of what it returned)
LOSSES: dict[str, tuple[Callable[[nn.Module, torch.Tensor], Any], Callable[[nn.Module, Any], torch.Tensor]]] = {
    "object": (lambda _, logits: Opaque(logits), lambda _, out: out.logits.square().mean()),
    "UserDict": (lambda _, logits: UserDict(logits=logits), lambda _, out: out["logits"].square().mean()),
    "function": (lambda _, logits: lambda: logits, lambda _, out: out().square().mean()),
    "attribute": (kept_as_attribute, lambda model, _: model.loss),
    "nothing": (nothing, lambda model, _: model.loss),
    "beside a tensor": (lambda _, logits: (logits, Opaque(logits)), lambda _, out: out[1].logits.square().mean()),
    "kept": (lambda _, logits: logits, lambda model, _: model.blocks[1].kept.square().mean()),
    "kept of its own": (lambda _, logits: logits, lambda model, _: model.blocks[2].kept.square().mean()),
    "kept as well": (
        lambda _, logits: logits,
        lambda model, out: out.square().mean() + sum(block.kept.square().mean() for block in model.blocks),
    ),
}
Shard = Callable[[nn.Module, str], nn.Module]


def step(model: nn.Module, name: str, seed: int) -> None:
    LOSSES[name][1](model, model(data(seed))).backward()


def trains(shard: Shard, transport: str, names: tuple[str, ...]) -> None:
    """Three steps of SGD give the gradients, and leave the weights, of the unsharded twin."""
    for name in names:
        model, twin = shard(Model(LOSSES[name][0]), transport), Model(LOSSES[name][0])
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
        for seed in range(3):
            step(model, name, seed)
            expected = twin_gradients(twin, loss=lambda each: LOSSES[name][1](each, each(data(seed))))  # noqa: B023
            close(gradients(model), expected, rtol=0, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for got, wanted in zip(wholes(list(model.parameters())), twin.parameters()):
            assert torch.equal(got, wanted), name


def by_strategy(strategy: str, units: Any, transport: str) -> None:
    def shard(model: nn.Module, over: str) -> nn.Module:
        return shard_model(model, strategy, units=units, mesh=mesh_of(), transport=over)

    trains(shard, transport, tuple(LOSSES))


@pytest.mark.parametrize("units", ["root", "auto"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_from_none_of_the_outputs_trains(ranks, strategy: str, units: str) -> None:
    for transport in transports():
        ranks(2, by_strategy, strategy, units, transport)


def by_fully_shard(transport: str) -> None:
    for after in (None, True, False):

        def whole(model: nn.Module, over: str, after: bool | None = after) -> nn.Module:
            return fully_shard(model, reshard_after_forward=after, transport=over)

        def each_module(model: nn.Module, over: str, after: bool | None = after) -> nn.Module:
            for module in (*model.blocks, model.head, model):
                fully_shard(module, reshard_after_forward=after, transport=over)
            return model

        trains(whole, transport, tuple(LOSSES))
        trains(each_module, transport, tuple(LOSSES))


def test_with_fully_shard(ranks) -> None:
    for transport in transports():
        ranks(2, by_fully_shard, transport)
