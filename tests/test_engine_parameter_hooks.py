"""Hooks on parameters act on gradients as they do without sharding, whether registered before sharding or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.each_strategy import in_turn, sharded
from tests.ranks import transports
from tests.surface import Net, close, data, gradients, loss_of, twin_gradients, wholes

pytestmark = pytest.mark.quick


def mask_of(parameter: torch.Tensor) -> torch.Tensor:
    """Ones and zeros by turns, of the kind and shape of `parameter`."""
    return (torch.arange(parameter.shape[0]) % 2).view(-1, *[1] * (parameter.ndim - 1)).expand(parameter.shape).float()


def put_masks(model: nn.Module) -> list[Any]:
    """A hook on every parameter that masks its gradient, and one that doubles what is left."""
    handles = []
    for parameter in model.parameters():
        mask = mask_of(parameter)
        handles.append(parameter.register_hook(lambda gradient, mask=mask: gradient * mask))
        handles.append(parameter.register_hook(lambda gradient: gradient * 2))
    return handles


def masks_from_before(strategy: str, transport: str) -> None:
    model, twin = Net(), Net()
    handles = put_masks(model)
    put_masks(twin)
    sharded(model, strategy, transport)
    for seed in range(2):
        for each in (model, twin):
            each.zero_grad()
        loss_of(model, seed).backward()
        close(gradients(model), twin_gradients(twin, seed), rtol=0, atol=0)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    loss_of(model).backward()
    close(gradients(model), twin_gradients(Net()), rtol=0, atol=0)


def test_masks_from_before_sharding(ranks) -> None:
    ranks(2, in_turn, masks_from_before)


def factors_from_after(strategy: str, transport: str) -> None:
    """Such a hook sees a gradient of the kind of its parameter, once in a backward, and may be removed."""
    model, twin = sharded(Net(), strategy, transport), Net()
    seen: list[bool] = []

    def halve(parameter: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        mask = torch.ones_like(parameter) * 0.5

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(type(gradient) is type(mask) and gradient.shape == parameter.shape)
            return gradient * mask

        return hook

    handles = [parameter.register_hook(halve(parameter)) for parameter in model.parameters()]
    for parameter in twin.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    for _ in range(2):  # the second is added to the first
        loss_of(model).backward()
    assert seen == [True] * (2 * len(handles))
    expected = twin_gradients(twin)
    close(gradients(model), {name: 2 * gradient for name, gradient in expected.items()}, rtol=0, atol=0)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    loss_of(model).backward()
    close(gradients(model), twin_gradients(Net()), rtol=0, atol=0)


def test_hooks_from_after_sharding(ranks) -> None:
    ranks(2, in_turn, factors_from_after)


def post_accumulate(before: bool) -> Callable[[str, str], None]:
    def program(strategy: str, transport: str) -> None:
        """The hook sees the accumulated gradient, which it may change, and may step."""
        model, twin = Net(), Net()
        called: list[torch.Tensor] = []

        def hook(parameter: torch.Tensor) -> None:
            called.append(parameter)
            parameter.grad.mul_(0.25)

        def put() -> None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(hook)

        if before:
            put()
        sharded(model, strategy, transport)
        if not before:
            put()
        loss_of(model).backward()
        assert {id(each) for each in called} == {id(each) for each in model.parameters()}
        assert len(called) == len(list(model.parameters()))
        expected = {name: gradient * 0.25 for name, gradient in twin_gradients(twin).items()}
        close(gradients(model), expected, rtol=0, atol=0)

    return program


def post_accumulate_before(strategy: str, transport: str) -> None:
    post_accumulate(before=True)(strategy, transport)


def post_accumulate_after(strategy: str, transport: str) -> None:
    post_accumulate(before=False)(strategy, transport)


@pytest.mark.parametrize("program", [post_accumulate_before, post_accumulate_after])
def test_post_accumulate_hooks(ranks, program: Callable[[str, str], None]) -> None:
    ranks(2, in_turn, program)


def on_unsharded_ones(strategy: str, transport: str) -> None:
    """A hook that is registered between a forward and its backward stays, and sees what autograd computes."""
    model, twin = sharded(Net(), strategy, transport, units="root"), Net()
    for step in range(2):
        losses = loss_of(model), loss_of(twin)
        if step == 0:
            for each in (model, twin):
                for parameter in each.parameters():
                    parameter.register_hook(lambda gradient: gradient * 4)
        for each in (model, twin):
            each.zero_grad()
        losses[0].backward()
        close(gradients(model), twin_gradients(twin, loss=lambda _: losses[1]), rtol=0, atol=0)  # noqa: B023


def test_hooks_on_unsharded_parameters(ranks) -> None:
    ranks(2, in_turn, on_unsharded_ones)


def frozen_for_a_while(strategy: str, transport: str) -> None:
    """A hook from before sharding acts also where the parameter was frozen at its first gather."""
    model, twin = Net(), Net()
    for each in (model, twin):
        put_masks(each)
        each.last.requires_grad_(False)
    sharded(model, strategy, transport)
    for each in (model, twin):
        loss_of(each).backward()
        each.last.requires_grad_(True)
        each.zero_grad()
    loss_of(model).backward()
    close(gradients(model), twin_gradients(twin), rtol=0, atol=0)


def test_parameters_that_are_trained_later(ranks) -> None:
    ranks(2, in_turn, frozen_for_a_while)


def with_options(transport: str) -> None:
    """In low precision a hook from before sees the dtype that its parameter had; offloaded gradients have arrived."""
    low, seen = MixedPrecisionPolicy(torch.bfloat16, torch.float32), set()
    model = Net()
    for parameter in model.parameters():
        mask = mask_of(parameter)
        parameter.register_hook(lambda gradient, mask=mask: (seen.add(gradient.dtype), gradient * mask)[1])
    fully_shard(model, mp_policy=low, transport=transport)
    loss_of(model).backward()
    assert seen == {torch.float32}
    for gradient in wholes([parameter.grad for parameter in model.parameters()]):
        assert not gradient[::2].any() and gradient[1::2].any()

    model, twin = Net(), Net()
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False), transport=transport)
    for each in (model, twin):
        for parameter in each.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
    loss_of(model).backward()
    close(gradients(model), twin_gradients(twin), rtol=0, atol=0)


def test_with_mixed_precision_and_offload(ranks) -> None:
    for transport in transports():
        ranks(2, with_options, transport)


def of_another_kind() -> None:
    model = fully_shard(Net())
    model.last.weight.register_hook(lambda gradient: gradient.to_local())
    with pytest.raises(RuntimeError, match="a hook on a sharded parameter returned a Tensor"):
        loss_of(model).backward()


def test_a_hook_that_returns_another_kind_is_refused(ranks) -> None:
    ranks(2, of_another_kind)


def with_accumulation(strategy: str, transport: str) -> None:
    """Micro-batches that are reduced together: one call of a hook from after sharding for all of them."""
    model, twin = Net(), Net()
    put_masks(model)
    put_masks(twin)
    sharded(model, strategy, transport)
    calls: list[int] = []
    model.last.weight.register_hook(lambda _: calls.append(1))
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model(data(micro)).square().mean().backward()
    close(gradients(model), twin_gradients(twin, 0, 1), rtol=1e-6, atol=1e-7)
    assert len(calls) == 1 and dist.get_world_size() == 2


def test_with_gradient_accumulation(ranks) -> None:
    ranks(2, in_turn, with_accumulation)
