"""Ways to copy, save, pickle, move and print sharded parameters, as averages of weights and plain checkpoints do."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from fsdplab import engine
from fsdplab.engine import STRATEGIES, compat, shard_model
from tests.surface import Net, loss_of, mesh_of, on_both, sharded, whole, wholes


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy of the state": lambda model: copy.deepcopy(model.state_dict()),
    "deepcopy of a detached parameter": lambda model: {n: copy.deepcopy(p.detach()) for n, p in named(model)},
    "deepcopy of a parameter": lambda model: {n: copy.deepcopy(p) for n, p in named(model)},
    "clone": lambda model: {n: p.detach().clone() for n, p in named(model)},
    "torch.save of the state": lambda model: saved(model.state_dict()),
    "torch.save of a parameter": lambda model: {n: saved(p) for n, p in named(model)},
    "pickle": lambda model: pickle.loads(pickle.dumps(dict(model.state_dict()))),
    "to another dtype and back": lambda model: {n: v.double().float() for n, v in model.state_dict().items()},
    "cpu": lambda model: {n: v.cpu() for n, v in model.state_dict().items()},
}


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def copies(fsdp: Any) -> Any:
    """What each way gave, before and after a backward: values and placements; and whether all can be printed."""
    model, found = sharded(fsdp), {}
    for gradients in (False, True):
        for way, make in WAYS.items():
            if gradients and way == "deepcopy of a parameter":
                continue  # copies the gradient too, whose slices neither engine gives a storage of their own
            made = make(model)
            assert not any(value is parameter for value, (_, parameter) in zip(made.values(), named(model)))
            found[way, gradients] = {name: (str(value.placements), whole(value)) for name, value in made.items()}
        loss_of(model).backward()
    printed = [len(repr(parameter)) > 20 and len(repr(parameter.grad)) > 20 for parameter in model.parameters()]
    return found, all(printed)


def test_copies_beside_fsdp2(ranks) -> None:
    on_both(ranks, 2, copies)


def averaged(strategy: str) -> None:
    """An exponential average of the weights: a copy that follows, and never writes to the model."""
    model = shard_model(Net(), strategy, mesh=mesh_of())
    average = copy.deepcopy(model.state_dict())
    before = wholes(list(average.values()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    for kept, value in zip(wholes(list(average.values())), before):
        assert torch.equal(kept, value), f"{strategy}: the copy changes with the model on rank {dist.get_rank()}"
    for name, value in model.state_dict().items():
        average[name].lerp_(value, 0.5)
    now = wholes(list(model.state_dict().values()))
    for kept, value, then in zip(wholes(list(average.values())), now, before):
        torch.testing.assert_close(kept, torch.lerp(then, value, 0.5))


def test_an_average_of_the_weights(ranks) -> None:
    for strategy in STRATEGIES:
        if strategy != "hybrid_shard":
            ranks(2, averaged, strategy)


def bytes_saved() -> tuple[int, int]:
    model = sharded(engine)
    file = io.BytesIO()
    torch.save({name: value.to_local() for name, value in model.state_dict().items()}, file)
    return file.tell(), sum(value.to_local().nbytes for value in model.state_dict().values())


def test_a_slice_is_saved_without_its_neighbours(ranks) -> None:
    """Every slice has a storage of its own size: a file does not hold a unit once for each of its parameters."""
    for size, held in ranks(2, bytes_saved):
        assert size < held + 800 * 20, "a file holds more than the slices, their names and shapes"


def outlives_its_model() -> None:
    model = sharded(engine)
    expected = wholes(list(model.parameters()))
    state = model.state_dict()
    del model
    for value, then in zip(wholes(list(state.values())), expected):
        assert torch.equal(value, then)
    assert all(isinstance(value, DTensor) for value in state.values())


def test_a_state_outlives_its_model(ranks) -> None:
    ranks(2, outlives_its_model)


def test_what_has_no_memory_stays_as_it_is():
    with FakeTensorMode():
        fake = torch.empty(4, 4)[1:3]
        assert compat.own_storage(fake) is fake
    meta = compat.own_storage(torch.empty(4, 4, device="meta")[1:3])
    assert meta.is_meta and meta.shape == (2, 4) and meta.storage_offset() == 0
    rows = torch.arange(16.0).view(4, 4)[1:3]
    own = compat.own_storage(rows)
    assert own.storage_offset() == 0 and own.untyped_storage().nbytes() == rows.nbytes
    assert own.data_ptr() == rows.data_ptr() and torch.equal(own, rows)


def shared_with_processes() -> None:
    """PyTorch's engine ends in a segmentation fault; the remedy gives whole tensors in shared memory."""
    model = shard_model(Net(), "full_shard", mesh=mesh_of())
    with pytest.raises(RuntimeError, match="share the tensors of get_model_state_dict"):
        model.share_memory()
    whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for value, expected in zip(whole_state.values(), Net().parameters(), strict=True):
        assert torch.equal(value.clone().share_memory_(), expected)


def test_memory_is_not_shared_with_processes(ranks) -> None:
    ranks(2, shared_with_processes)
