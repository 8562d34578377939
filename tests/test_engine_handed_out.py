"""Memory that the engine has handed out belongs to whoever holds it: whatever replaces a sharded parameter, what was
replaced keeps its values, and the model computes with what was put in, exactly as an unsharded twin does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fsdplab.engine import fully_shard, shard_model
from fsdplab.engine.module import bound
from tests.ranks import transports
from tests.surface import mesh_of, wholes

STRATEGIES = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard")
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
State = dict[str, torch.Tensor]


class Tower(nn.Module):
    """Blocks, and a root with rows that two ranks do not divide and fewer rows than ranks; tied on request."""

    def __init__(self, tied: bool = False, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(blocks))
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x) * self.scale


X = torch.linspace(-1, 1, 10).view(2, 5)


def pair(strategy: str, transport: str, tied: bool = False, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A sharded model and its unsharded twin."""
    return shard_model(Tower(tied), strategy, transport=transport, mesh=mesh_of(), **options), Tower(tied)


def step(model: nn.Module, lr: float = 0.125) -> float:
    """One step of SGD on all parameters that the model has now; its loss. All ranks have the same data."""
    loss = model(X).float().square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=lr)
            parameter.grad = None
    return loss.item()


def scaled(state: State, factor: float) -> State:
    return {name: value * factor for name, value in state.items()}


def values(state: Any) -> list[torch.Tensor]:
    """The full values of a state dict or a module."""
    held = state.state_dict() if isinstance(state, nn.Module) else state
    return [value.clone() for value in wholes(list(held.values()))]


# ---- ways to replace parameters; each does the same to a model and to its twin, and returns what it has seen


@torch.no_grad()
def averaged_and_back(model: nn.Module) -> Any:
    """By reference, twice from one held state dict, which follows the model while it trains."""
    seen = []
    held = model.state_dict()
    for _ in range(2):
        model.load_state_dict(scaled(held, 0.5), assign=True)
        seen += [model(X), values(held)]
        model.load_state_dict(held, assign=True)
        with torch.enable_grad():
            model.requires_grad_(True)
            seen += [step(model), values(held)]
    return seen, values(model)


@torch.no_grad()
def what_was_put_in(model: nn.Module) -> Any:
    """A model that trains on tensors that were assigned writes to those, which others hold."""
    other = scaled(model.state_dict(), 0.5)
    model.load_state_dict(other, assign=True)
    with torch.enable_grad():
        model.requires_grad_(True)
        losses = [step(model), step(model)]
    return losses, values(other), values(model)


@torch.no_grad()
def one_parameter(model: nn.Module) -> Any:
    """`setattr`: what was replaced is held here, the others are not touched."""
    seen = [model(X)]
    held = model.blocks[0].weight
    before = model.state_dict()
    model.blocks[0].weight = nn.Parameter(held.detach() * 2)
    seen += [model(X), values({"": held.detach()}), values(before)]
    model.blocks[0].weight = held
    return seen, model(X), values(before)


@torch.no_grad()
def swapped(model: nn.Module) -> Any:
    """`torch.utils.swap_tensors`: the other parameter has the memory of the first."""
    other = nn.Parameter(model.blocks[1].weight.detach() * 3)
    torch.utils.swap_tensors(model.blocks[1].weight, other)
    seen = [model(X), values({"": other.detach()})]
    torch.utils.swap_tensors(model.blocks[1].weight, other)
    return seen, model(X), values({"": other.detach()})


@torch.no_grad()
def called_with_others(model: nn.Module) -> Any:
    """`functional_call` without gradients, in a loop that trains."""
    seen: list[Any] = []
    for _ in range(2):
        seen.append(functional_call(model, scaled(model.state_dict(), 0.5), (X,)))
        seen += [values(model), model(X)]
        with torch.enable_grad():
            seen.append(step(model))
    return seen, values(model)


def called_with_gradients(model: nn.Module) -> Any:
    """The gradients go to what was passed; afterwards the model has its own parameters, and trains them."""
    passed = {name: (value * 0.5).requires_grad_() for name, value in model.state_dict().items()}
    given = dict(passed)
    loss = functional_call(model, passed, (X,)).square().mean()
    loss.backward()
    gradients = [value.clone() for value in wholes([value.grad for value in given.values()])]
    untouched = [parameter.grad is None for parameter in model.parameters()]
    return loss.item(), gradients, untouched, step(model), values(model)


@torch.no_grad()
def while_unsharded(model: nn.Module) -> Any:
    """After a forward that no backward has followed yet, when units that are not resharded show whole parameters."""
    other = nn.Parameter(model.state_dict()["last.weight"].detach() * 2)
    with torch.enable_grad():
        model(X)
    model.last.weight = other
    return model(X), values({"": other.detach()}), values(model)


def between_forward_and_backward(model: nn.Module) -> Any:
    """The gradients go to what the forward used; the next forward uses what was put in."""
    old = dict(model.named_parameters())
    loss = model(X).square().mean()
    state = scaled(model.state_dict(), 0.5)
    model.load_state_dict(state, assign=True)
    loss.backward()
    gradients = [value.clone() for value in wholes([parameter.grad for parameter in old.values()])]
    return loss.item(), gradients, step(model), values(model)


@torch.no_grad()
def given_other_memory(model: nn.Module) -> Any:
    """`set_` and `.data =` on the local tensor."""
    seen = []
    for index, way in enumerate(("set_", "data")):
        parameter = model.blocks[index].bias
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        held, other = local.detach(), local.detach() + 1
        if way == "set_":
            local.set_(other)
        else:
            local.data = other
        seen += [model(X), values({"": parameter.detach()})]
        assert not torch.equal(held, other) or not held.numel(), "what was there before was written to"
    return seen, values(model)


WAYS: tuple[Callable[[nn.Module], Any], ...] = (
    averaged_and_back, what_was_put_in, one_parameter, swapped, called_with_others, called_with_gradients,
    while_unsharded, between_forward_and_backward, given_other_memory,
)  # fmt: skip


def equal(got: Any, expected: Any, where: str) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=lambda text: f"{where}: {text}")


def as_the_twin(strategy: str, transport: str) -> None:
    for way in WAYS:
        model, twin = pair(strategy, transport)
        equal(way(model), way(twin), f"{strategy}, {transport}, {way.__name__}")
        equal([step(model), values(model)], [step(twin), values(twin)], f"{way.__name__}, a step later")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_replaces_parameters_does_what_it_does_to_the_twin(ranks, strategy: str) -> None:
    for transport in transports():
        ranks(2, as_the_twin, strategy, transport)


def in_low_precision(transport: str) -> None:
    """Shards that are cast on their way are never views of what is gathered."""
    for strategy in STRATEGIES:
        model, _ = pair(strategy, transport, mp_policy=BF16)
        with torch.no_grad():
            before, held = model(X), model.state_dict()
            model.load_state_dict(scaled(held, 0.5), assign=True)
            between = model(X)
            functional_call(model, scaled(held, 2.0), (X,))
            equal(model(X), between, strategy)
            model.load_state_dict(held, assign=True)
            equal(model(X), before, strategy)
        assert not torch.equal(before, between)


def test_in_low_precision(ranks) -> None:
    for transport in transports():
        ranks(2, in_low_precision, transport)


# ---- where shards lie afterwards


def apart(model: nn.Module) -> list[bool]:
    return [unit.memory._apart for unit in bound(model).units.values()]


@torch.no_grad()
def moved_in(transport: str) -> None:
    """What was put in lies apart while others hold it, and in the unit's own buffer once they have let it go: on one
    rank earlier than on the other.
    """
    for strategy in STRATEGIES:
        model, twin = pair(strategy, transport)
        model(X)
        assert apart(model) == [False] * 3
        state = scaled(model.state_dict(), 0.5)
        model.load_state_dict(state, assign=True)
        twin.load_state_dict(scaled(twin.state_dict(), 0.5))
        equal(model(X), twin(X), strategy)
        assert apart(model) == [True] * 3
        if bound(model).root.memory.config.axes.mesh.get_local_rank() == 0:
            state.clear()
        equal(model(X), twin(X), strategy)
        assert apart(model) == [bool(state)] * 3
        state.clear()
        equal(model(X), twin(X), strategy)
        assert apart(model) == [False] * 3, f"{strategy}: what nobody else holds still lies apart"
        with torch.enable_grad():
            model.requires_grad_(True)
            equal([step(model), values(model)], [step(twin), values(twin)], strategy)


def test_what_nobody_else_holds_moves_in(ranks) -> None:
    for transport in transports():
        ranks(2, moved_in, transport)


@torch.no_grad()
def made_elsewhere(transport: str) -> None:
    """`to_empty` and `to`, of a model whose state somebody holds."""
    for strategy in STRATEGIES:
        model, _ = pair(strategy, transport)
        expected, held = model(X), model.state_dict()
        before = values(held)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.fill_(7.0)
        model(X)
        equal(values(held), before, strategy)
        model.load_state_dict(held)
        equal(model(X), expected, strategy)
        model.to(torch.float64)
        model(X.double())
        equal(values(held), before, strategy)


def test_a_held_state_outlives_to_empty_and_to(ranks) -> None:
    for transport in transports():
        ranks(2, made_elsewhere, transport)


# ---- tied parameters


@torch.no_grad()
def tied_and_replaced(strategy: str, transport: str) -> None:
    model, twin = pair(strategy, transport, tied=True)
    for each in (model, twin):
        each.load_state_dict(scaled(each.state_dict(), 0.5), assign=True)
    equal(model(X), twin(X), strategy)
    assert model.first.weight is model.last.weight, "one parameter in both places, as before"
    other = nn.Parameter(model.first.weight.detach() * 2)
    model.last.weight = other
    with pytest.raises(
        RuntimeError, match=r"'weight' of Linear is tied to 'weight' of Linear, and one .* put the same"
    ):
        model(X)
    model.first.weight = other
    twin.first.weight = twin.last.weight = nn.Parameter(twin.first.weight.detach() * 2)
    equal(model(X), twin(X), strategy)


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "full_shard"])
def test_tied_parameters_stay_tied_or_it_is_said(ranks, strategy: str) -> None:
    for transport in transports():
        ranks(2, tied_and_replaced, strategy, transport)


# ---- what cannot be right is refused


def refused(transport: str) -> None:
    def model() -> nn.Module:
        return pair("full_shard", transport)[0]

    def says(text: str, act: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError, match=text) as caught:
            act()
        assert "\n" not in str(caught.value)

    first = model()
    first.blocks[0].weight.data = first.blocks[0].weight.detach() * 2
    says("the .data of parameter 'weight' was set, which changes nothing", lambda: first(X))

    first = model()
    first.unshard()
    first.last.weight.data = torch.zeros(5, 5)
    first.reshard()
    says("memory of the unsharded parameter 'last.weight' was replaced", lambda: first(X))

    first = model()
    weights = {name: parameter * 0.5 for name, parameter in first.named_parameters()}
    says("result of a computation that autograd has recorded", lambda: functional_call(first, weights, (X,)))

    first = model()
    first.last.weight = nn.Parameter(first.last.weight.detach().redistribute(placements=first.scale.placements)[:4])
    says("replaced by a DTensor of shape", lambda: first(X))

    first = model()
    loss = first(X).sum()
    first.load_state_dict(scaled(first.state_dict(), 0.5), assign=True)
    first(X)
    says("were replaced, and another forward has used the new ones", loss.backward)

    first = model()
    torch.nn.utils.parametrizations.weight_norm(first.last)
    says("has no parameter 'weight' any more", lambda: first(X))


def test_what_cannot_be_right_is_refused_in_one_line(ranks) -> None:
    for transport in transports():
        ranks(2, refused, transport)


@torch.no_grad()
def parametrized(transport: str) -> None:
    """Parameters of a parametrization, put there before sharding, are parameters like others."""
    for strategy in STRATEGIES:
        models = [Tower(), Tower()]
        for each in models:
            torch.nn.utils.parametrizations.weight_norm(each.last)
        model, twin = shard_model(models[0], strategy, transport=transport, mesh=mesh_of()), models[1]
        for each in (model, twin):
            each.held = each.state_dict()
            each.load_state_dict(scaled(each.held, 0.5), assign=True)
        equal(model(X), twin(X), strategy)
        for each in (model, twin):
            each.load_state_dict(each.held, assign=True)
        equal([model(X), values(model)], [twin(X), values(twin)], strategy)


def test_parametrizations(ranks) -> None:
    for transport in transports():
        ranks(2, parametrized, transport)


def on_one_rank() -> None:
    for way in WAYS:
        model, twin = fully_shard(Tower()), Tower()
        equal(way(model), way(twin), way.__name__)


def test_on_one_rank(ranks) -> None:
    ranks(1, on_one_rank)
