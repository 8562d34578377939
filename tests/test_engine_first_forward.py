"""What is said once, before a model trains: weights that differ between ranks, parameters that came after sharding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import fully_shard, set_initial_weights_check, shard_model
from tests.each_strategy import in_turn
from tests.ranks import transports
from tests.surface import Collectives, Net, close, data, gradients, loss_of, mesh_of, twin_gradients

pytestmark = pytest.mark.quick


@contextmanager
def said() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(each.message) for each in caught)


def mesh_for(strategy: str) -> Any:
    return mesh_of(2, 2, names=("replicate", "shard")) if strategy == "hybrid_shard" else mesh_of()


def weights(strategy: str, transport: str) -> None:
    """Ranks that draw other weights are told, those that draw or load the same are not; at the first forward alone."""
    mesh = mesh_for(strategy)
    options = {"strategy": strategy, "mesh": mesh, "transport": transport}
    with said() as texts:
        same = shard_model(Net(), **options)
        with Collectives() as first:
            loss_of(same).backward()
        with Collectives() as second:
            loss_of(same).backward()
    assert texts == [] and len(first.seen) == len(second.seen)

    with said() as texts:
        other = shard_model(Net(seed=dist.get_rank()), **options)
        assert texts == []
        for _ in range(2):
            loss_of(other).backward()
    expected = "replicas" if strategy in ("no_shard", "hybrid_shard") else "between ranks before sharding"
    assert any(expected in text and "manual_seed" in text for text in texts), texts
    assert all("\n" not in text for text in texts) and len(texts) == (2 if strategy == "hybrid_shard" else 1)

    with said() as texts:
        loaded = shard_model(Net(seed=dist.get_rank()), **options)
        loaded.load_state_dict(same.state_dict())
        loss_of(loaded).backward()
    assert texts == []

    set_initial_weights_check(False)
    with said() as texts:
        loss_of(shard_model(Net(seed=dist.get_rank()), **options)).backward()
    set_initial_weights_check(True)
    assert texts == []


def test_initial_weights_that_differ(ranks) -> None:
    ranks(2, in_turn, weights)
    ranks(4, in_turn, weights, [("hybrid_shard", transport) for transport in transports()])


def one_replica_loads() -> None:
    """A replica that loaded other weights after sharding is found; an evaluation beforehand decides nothing."""
    model = shard_model(Net(), "no_shard", mesh=mesh_of())
    if dist.get_rank() == 1:
        model.load_state_dict(Net(seed=5).state_dict())
    with said() as texts:
        with torch.no_grad():
            loss_of(model)
        assert not texts
        loss_of(model).backward()
    assert len(texts) == 1 and "differ between replicas" in texts[0]


def on_meta() -> None:
    """One rank has loaded the weights and the others wait for them on the meta device: nothing to say."""
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Net()
    fully_shard(model)
    if dist.get_rank():
        model.to_empty(device="cpu")
    reference = fully_shard(Net())
    model.load_state_dict(reference.state_dict())
    with said() as texts:
        loss_of(model).backward()
    assert texts == []


@pytest.mark.parametrize("program", [one_replica_loads, on_meta])
def test_weights_that_are_loaded_after_sharding(ranks, program: Callable[[], None]) -> None:
    ranks(2, program)


class Adapted(nn.Module):
    """A linear layer with a low-rank one beside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapters(strategy: str, transport: str) -> None:
    """An adapter that is put in after sharding is said to be trained apart; before the first forward and after it."""
    model = shard_model(Net(), strategy, mesh=mesh_of(), transport=transport)
    with said() as texts:
        model.last = Adapted(model.last)
        for _ in range(2):
            loss_of(model).backward()
        assert not texts
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert len(texts) == 1 and "last.down.weight" in texts[0] and "ignored_params" in texts[0], texts

    model = shard_model(Net(), strategy, mesh=mesh_of(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with said() as texts:
        loss_of(model).backward()
        optimizer.step()
        model.first = Adapted(model.first)
        optimizer.add_param_group({"params": [*model.first.down.parameters(), *model.first.up.parameters()]})
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
    assert len(texts) == 1 and "first.down.weight" in texts[0], texts


def remedies(strategy: str, transport: str) -> None:
    """What the warning advises says nothing any more; the first two train as the unsharded twin does."""
    torch.manual_seed(1)
    down, up = torch.randn(2, 8), torch.randn(8, 2)

    def adapted() -> nn.Module:
        model = Net()
        model.last = Adapted(model.last)
        with torch.no_grad():
            model.last.down.weight.copy_(down), model.last.up.weight.copy_(up)
        return model

    options = {"mesh": mesh_of(), "transport": transport}
    before = shard_model(adapted(), strategy, **options)
    after = shard_model(Net(), strategy, **options)
    after.last = adapted_last = adapted().last
    adapted_last.layer = Net().last
    for part in (adapted_last.down, adapted_last.up, adapted_last.layer):
        fully_shard(part, transport=transport)
    apart = adapted()
    shard_model(apart, strategy, ignored_params={apart.last.down.weight, apart.last.up.weight}, **options)
    for model in (before, apart) if strategy != "full_shard" else (before, after, apart):
        with said() as texts:
            loss_of(model).backward()
            torch.optim.SGD(model.parameters(), 0.1)
        assert texts == [], texts
        if model is not apart:
            close(gradients(model), twin_gradients(adapted()))


def test_an_adapter_that_is_put_in_after_sharding(ranks) -> None:
    ranks(2, in_turn, adapters)
    ranks(2, in_turn, remedies)


def alone() -> None:
    """One rank has nobody to differ from."""
    with said() as texts:
        model = fully_shard(Net())
        model.last = Adapted(model.last)
        model(data()).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert texts == []


def test_one_rank(ranks) -> None:
    ranks(1, alone)
