"""Backwards that are ended by hand give the gradients of backwards that end by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import fully_shard
from fsdplab.engine.shard import units_of


def sharded(**options: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def backwards(model: nn.Module) -> None:
    for micro in range(3):
        model(torch.ones(2, 8) * (1 + micro + dist.get_rank())).square().mean().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def by_hand(async_op: bool) -> bool:
    """Whether accumulating unsharded gradients and finalising equals the last backward's own reduction."""
    usual, manual = sharded(), sharded()
    for micro in range(3):
        usual.set_requires_gradient_sync(micro == 2)
        usual(torch.ones(2, 8) * (1 + micro + dist.get_rank())).square().mean().backward()
    manual.finalize_backward()  # before the first forward there is nothing to finalise
    manual.set_manual_backward_finalization(True)
    manual.set_requires_gradient_sync(False)
    manual.set_reshard_after_backward(False)
    backwards(manual)
    manual.set_requires_gradient_sync(True)
    manual.set_reshard_after_backward(True)
    handle = manual.finalize_backward(async_op=async_op)
    if async_op:
        handle.wait()
    dropped = all(unit.state == "sharded" for unit in units_of(manual))
    return dropped and all(map(torch.equal, gradients(usual), gradients(manual)))


@pytest.mark.parametrize("async_op", [False, True])
def test_finalising_by_hand(ranks, async_op: bool) -> None:
    assert ranks(2, by_hand, async_op) == [True, True]


def once_more() -> bool:
    """Whether finalising after a backward that has reduced already changes nothing."""
    model = sharded()
    model.set_manual_backward_finalization(True)
    backwards(model)
    before = gradients(model)
    model.finalize_backward()
    return all(map(torch.equal, before, gradients(model)))


def test_nothing_is_left_to_finalise_after_a_backward_that_reduced(ranks) -> None:
    assert ranks(2, once_more) == [True, True]


def refused() -> None:
    model = sharded()
    model(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model[0].set_manual_backward_finalization(True)


def test_what_cannot_be_is_refused(ranks) -> None:
    ranks(2, refused)


def kept(transport: str) -> None:
    """With its storage kept a unit is gathered to the same addresses in every step, and computes the same."""
    model, twin = (sharded(transport=transport) for _ in range(2))
    model.set_keep_unsharded_storage(True)
    places = []
    for step in range(3):
        for each in (model, twin):
            each(torch.full((2, 8), float(step))).sum().backward()
        places.append([param.gathered.data_ptr() for unit in units_of(model) for param in unit.memory.params])
        assert all(map(torch.equal, gradients(model), gradients(twin)))
    assert places[0] == places[1] == places[2] and all(places[0])
    held = [param.gathered.untyped_storage() for unit in units_of(model) for param in unit.memory.params]
    assert all(storage.nbytes() for storage in held)
    model.set_keep_unsharded_storage(False)
    model(torch.ones(2, 8)).sum().backward()
    assert not any(storage.nbytes() for storage in held)


def test_storage_that_is_kept(ranks) -> None:
    for transport in ("gloo", "shm"):
        ranks(2, kept, transport)
