"""Activation checkpointing as one argument: the same gradients, no more traffic, fewer activations, more arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.engine import events, shard_model
from fsdplab.engine.features.recompute import _ATTENTIONS, CHECKPOINTS, recompute_of

BLOCKS, PRODUCTS = 3, 4


class Block(nn.Module):
    """`PRODUCTS` matrix products with wide activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(PRODUCTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Products(TorchDispatchMode):
    """Counts forward matrix products: those with a bias."""

    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def step(strategy: str, choice: str) -> tuple[list[bool], int, dict[str, int]]:
    """Whether gradients equal the unsharded model's; forward products run; collectives of a step."""
    twin = Net()
    model = shard_model(Net(), strategy, units=[Block], checkpoint=choice)
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    twin(x).square().sum().backward()
    seen: Counter[str] = Counter()
    stop = events.subscribe(lambda e: seen.update([e.kind]) if isinstance(e, events.Collective) else None)
    with Products() as products:
        model(x).square().sum().backward()
    stop()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    whole = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g  # noqa: E731
    return [torch.equal(whole(mine.grad), other.grad) for mine, other in pairs], products.count, dict(seen)


@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
def test_the_same_gradients_and_traffic_for_every_choice(ranks, strategy: str) -> None:
    found = {choice: ranks(2, step, strategy, choice)[0] for choice in CHECKPOINTS}
    once = BLOCKS * PRODUCTS + 1
    again = {"none": 0, "full": BLOCKS * PRODUCTS, "selective": BLOCKS * PRODUCTS // 2}
    for choice, (equal, products, collectives) in found.items():
        assert all(equal), choice
        assert products == once + again[choice], choice
        assert collectives == found["none"][2], choice


def kept_bytes(choice: str) -> int:
    """Bytes of CPU memory that a forward leaves for its backward."""
    model = shard_model(Net(), "no_shard", units=[Block], checkpoint=choice)
    x = torch.randn(512, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        out = model(x)
    assert out.requires_grad
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


def test_fewer_activations_are_kept(ranks) -> None:
    none, selective, full = (ranks(1, kept_bytes, choice)[0] for choice in ("none", "selective", "full"))
    assert full < selective < none


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown checkpoint 'some'; expected one of none, full, selective"):
        recompute_of("some")
    assert recompute_of("none") is None


# ---- which operators are attention


def fused_attentions() -> set[str]:
    """The operators of this torch that `scaled_dot_product_attention` may end in, each with an output to keep."""
    found = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_scaled_dot_product_")}
    apart = torch._C._dispatch_has_kernel_for_dispatch_key  # a composite one is seen as the operators it is made of
    return {name for name in found if not name.endswith("_backward") and not apart(name, "CompositeImplicitAutograd")}


def test_every_fused_attention_of_this_torch_is_kept() -> None:
    found = fused_attentions()
    assert "aten::_scaled_dot_product_cudnn_attention" in found and len(found) >= 6
    assert found - _ATTENTIONS == set(), "selective recomputation would compute these again"


def test_a_new_fused_attention_would_be_noticed() -> None:
    library = torch.library.Library("aten", "FRAGMENT")
    library.define("_scaled_dot_product_lab_attention(Tensor query) -> Tensor")
    try:
        assert fused_attentions() - _ATTENTIONS == {"aten::_scaled_dot_product_lab_attention"}
    finally:
        library._destroy()


class Attentions(TorchDispatchMode):
    """Counts calls of the fused attention of CPUs."""

    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("choice", "times"), [("selective", 1), ("full", 2)])
def test_attention_is_computed_again_by_full_alone(choice: str, times: int) -> None:
    attend = lambda module, x: torch.nn.functional.scaled_dot_product_attention(x, x, x)  # noqa: E731
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with Attentions() as attentions:
        recompute_of(choice)(attend, None, x).sum().backward()
    assert attentions.count == times
