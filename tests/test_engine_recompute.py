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
from fsdplab.engine.features.recompute import CHECKPOINTS, recompute_of

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
