"""Backwards that are ended by hand give the gradients of backwards that end by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import fully_shard
from fsdplab.engine.shard import units_of


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model[0])
    return fully_shard(model)


def backwards(model: nn.Module) -> None:
    for micro in range(3):
        model(torch.ones(2, 8) * (1 + micro + dist.get_rank())).square().mean().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def by_hand(async_op: bool) -> bool:
    """Whether accumulating whole gradients and finalising equals the last backward's own reduction."""
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


def refused() -> list[str]:
    model, messages = sharded(), []
    model(torch.ones(2, 8))
    for act in (
        lambda: model[0].set_manual_backward_finalization(True),
        lambda: model.set_keep_unsharded_storage(True),
    ):
        try:
            act()
        except (RuntimeError, NotImplementedError) as error:
            messages.append(str(error))
    model.set_keep_unsharded_storage(False)
    return messages


def test_what_cannot_be_is_refused(ranks) -> None:
    for root, keep in ranks(2, refused):
        assert "must be called on the root" in root and "takes False only" in keep
