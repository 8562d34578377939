"""Module classes that do more than hold parameters: their own `__setattr__`, slots, properties, parametrizations,
weight norm, and parameters that are tied or made late. Every program also trains an unsharded twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fsdplab.engine as lab_engine
from tests.surface import close, data, gradients, loss_of, mesh_of, on_both, twin_gradients, wholes


def twins(fsdp: Any, build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """`build()` with each of its `blocks` a unit, and the same model unsharded."""
    model, twin = (torch.manual_seed(0) and build() for _ in range(2))
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh_of(), **options)
    return fsdp.fully_shard(model, mesh=mesh_of(), **options), twin


def trained(fsdp: Any, build: Callable[[], nn.Module], *, steps: int = 3, atol: float = 1e-5, **options: Any) -> Any:
    """Losses of three steps, which must be those of the unsharded twin, as must all gradients, and the parameters that
    come out.
    """
    (model, twin), losses = twins(fsdp, build, **options), []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5) for each in (model, twin)]
    for step in range(steps):
        loss, expected = loss_of(model, step), loss_of(twin, step)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        close(gradients(model), twin_gradients(twin, step), atol=atol, rtol=1e-4)
        losses.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] != losses[-1]
    close(
        dict(enumerate(wholes([*model.parameters()]))), dict(enumerate(wholes([*twin.parameters()]))),
        atol=atol, rtol=1e-4,
    )  # fmt: skip
    return losses


class Chain(nn.Module):
    """Blocks in a row, between a layer of the root and another."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


# ---- their own __setattr__


class Caching(nn.Module):
    """Its forward reads what its `__setattr__` has put aside, as `nn.LSTM`'s reads `_flat_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.bias = nn.Parameter(torch.zeros(8))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self.__dict__.setdefault("seen", {})[name] = value
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.seen["weight"] + self.seen["bias"])


class Recurrent(nn.Module):
    """An `nn.GRU` and an `nn.LSTM`, which keep a list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRU(8, 8), nn.LSTM(8, 8, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.gru(x.unsqueeze(1))[0])[0].squeeze(1)


class Renaming(nn.Module):
    """Stores every parameter under another name than the one that is assigned to."""

    def __init__(self) -> None:
        super().__init__()
        self.held_weight = nn.Parameter(torch.randn(8, 8) / 3)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name if name.startswith("held_") or name == "training" else f"held_{name}", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.held_weight)


def own_setattr(fsdp: Any) -> Any:
    return [
        trained(fsdp, lambda: Chain(Caching(), Caching())),
        trained(fsdp, lambda: Chain(Caching(), Caching()), reshard_after_forward=False),
        trained(fsdp, lambda: Chain(Renaming(), Caching())),
    ]


def recurrent(fsdp: Any) -> Any:
    return trained(fsdp, lambda: Chain(Recurrent(), Recurrent()))


# ---- slots, properties, containers of parameters


class Slotted(nn.Module):
    """A class with slots beside its dictionary."""

    __slots__ = ("calls", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale, self.calls = 0.5, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x)) * self.scale


class Properties(nn.Module):
    """`weight` is computed from two parameters; setting it sets both."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.ones(8))

    @property
    def weight(self) -> torch.Tensor:
        return self.direction / self.direction.norm(dim=0) * self.length

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        self.direction, self.length = nn.Parameter(value), nn.Parameter(value.norm(dim=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Containers(nn.Module):
    """A list and a dictionary of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(8, 8) / 3, torch.randn(8, 8) / 3])
        self.named = nn.ParameterDict({"gain": torch.ones(8), "shift": torch.zeros(8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.several:
            x = torch.tanh(x @ weight)
        return x * self.named["gain"] + self.named["shift"]


def slots_and_properties(fsdp: Any) -> Any:
    return trained(fsdp, lambda: Chain(Slotted(), Properties(), Containers()))


# ---- parametrizations and weight norm


class Symmetric(nn.Module):
    """A parametrization: the symmetric part of a matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def symmetric() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def parametrized(fsdp: Any) -> Any:
    return trained(
        fsdp,
        lambda: Chain(
            symmetric(),
            parametrizations.weight_norm(nn.Linear(8, 8)),
            parametrizations.orthogonal(nn.Linear(8, 8)),
            nn.utils.weight_norm(nn.Linear(8, 8)),
        ),
    )


def parametrized_and_cached(fsdp: Any) -> Any:
    """Within `parametrize.cached()` a weight is computed once a forward."""
    (model, twin), losses = twins(fsdp, lambda: Chain(symmetric(), symmetric())), []
    for step in range(2):
        with parametrize.cached():
            losses.append(loss_of(model, step))
        losses[-1].backward()
        close(gradients(model), twin_gradients(twin, step), atol=1e-5, rtol=1e-4)
        for each in (model, twin):
            each.zero_grad()
    return [loss.detach() for loss in losses]


def spectral(fsdp: Any) -> Any:
    """Spectral norm writes to its buffers in the forward: as many power iterations on both."""
    return trained(fsdp, lambda: Chain(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)), atol=1e-3)


# ---- tied parameters, and those that are made late


class Tied(nn.Module):
    """One weight that three modules show, one of them under another name and through its own `__setattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.caching = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), Caching()
        self.down.weight = self.up.weight
        self.caching.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.caching(self.down(torch.tanh(self.up(x))))


def tied(fsdp: Any) -> Any:
    return trained(fsdp, lambda: Chain(Tied(), Tied()))


class Late(nn.Module):
    """Registers a parameter when a method is called: what was made before sharding is a part of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_parameter("gain", None)

    def make(self) -> Late:
        self.gain = nn.Parameter(torch.full((8,), 0.5))
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return y if self.gain is None else y * self.gain


def lazy() -> nn.Module:
    layer = nn.LazyLinear(8)
    layer(torch.zeros(1, 8))
    return layer


def made_late(fsdp: Any) -> Any:
    return trained(fsdp, lambda: Chain(Late(), Late().make(), lazy()))


def made_after_sharding(fsdp: Any) -> Any:
    """Assigned between sharding and the first forward, as DoRA's magnitudes are: found at the first forward."""
    model, twin = twins(fsdp, lambda: Chain(Late().make(), Caching()))
    for block, attribute in ((model.blocks[0], "gain"), (model.blocks[1], "weight")):
        setattr(block, attribute, nn.Parameter(getattr(block, attribute).detach() * 2))
    with torch.no_grad():
        twin.blocks[0].gain.mul_(2), twin.blocks[1].weight.mul_(2)
    answers = []
    for step in range(2):
        loss = loss_of(model, step)
        torch.testing.assert_close(loss, loss_of(twin, step))
        loss.backward()
        close(gradients(model), twin_gradients(twin, step), atol=1e-5, rtol=1e-4)
        answers.append(loss.detach())
        for each in (model, twin):
            each.zero_grad()
    return answers


def made_in_forward(fsdp: Any) -> Any:
    """A parameter that the first forward makes is nobody's: it stays plain and its gradient this rank's own."""

    class InForward(Late):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.gain is None:
                self.make()
            return super().forward(x)

    (model, _), losses = twins(fsdp, lambda: Chain(InForward(), Late())), []
    for step in range(2):
        losses.append(loss_of(model, step))
        losses[-1].backward()
    gain = model.blocks[0].gain
    return [loss.detach() for loss in losses], type(gain).__name__, gain.grad, data(0).shape


def forward_replaced(fsdp: Any) -> Any:
    """Libraries with faster kernels replace a class's `forward`, after it was sharded or between two models."""

    class Scaled(nn.Linear):
        pass

    def sharded() -> nn.Module:
        torch.manual_seed(0)
        return fsdp.fully_shard(Scaled(8, 8), mesh=mesh_of())

    first = sharded()
    answers = [first(data()).detach()]
    Scaled.forward = lambda self, x: 2 * nn.Linear.forward(self, x)
    answers += [model(data()).detach() for model in (first, sharded())]
    torch.testing.assert_close(answers[1:], [2 * answers[0]] * 2)
    return answers


def test_classes(ranks):
    on_both(
        ranks, 2, own_setattr, recurrent, slots_and_properties, parametrized, parametrized_and_cached, spectral, tied,
        made_late, made_after_sharding, made_in_forward, forward_replaced,
    )  # fmt: skip


def parametrized_too_late(_):
    """PyTorch's engine fails in the first forward, of a parameter mixed up with a slice; ours says what to do."""
    model = lab_engine.fully_shard(nn.Linear(8, 8), mesh=mesh_of())
    parametrize.register_parametrization(model, "weight", Symmetric())
    with pytest.raises(RuntimeError, match="has no parameter 'weight' any more.*first, then shard"):
        model(data())


def replaced_by_a_whole_one(_):
    """PyTorch's engine trains the old parameter without a word; ours says what to do."""
    model = lab_engine.fully_shard(nn.Linear(8, 8), mesh=mesh_of())
    model.weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(RuntimeError, match="'weight' of FSDPLinear.*replaced by a plain tensor.*before fully_shard"):
        model(data())


def test_parameters_changed_too_late(ranks):
    ranks(2, parametrized_too_late, None)
    ranks(2, replaced_by_a_whole_one, None)
