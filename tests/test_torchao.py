"""torchao's 8-bit AdamW and its float8 all-gather (`fsdp_pre_all_gather`) on this engine as on PyTorch's FSDP2.

torchao is no dependency: `pip install torchao` brings these tests to life.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdplab.engine
from fsdplab.engine import events

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
pytestmark = pytest.mark.peers
STEPS = 4
WIDTH = 256  # torchao quantizes the state of parameters of 4,096 elements and more, in blocks of 256


def imported(name: str) -> str:
    importlib.import_module(name)
    return name


class ImportedByTheMother:
    """An argument for `ranks`: the process that forks the ranks imports torchao when it reads it."""

    def __reduce__(self) -> Any:
        return imported, ("torchao.optim",)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    )


def trained(
    engine: str, convert: Callable[[nn.Module], object], optimizer_of: Callable[..., torch.optim.Optimizer],
    after: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:  # fmt: skip
    """The losses of a few steps, averaged over the ranks; `after` is called behind each optimizer step."""
    model, fully_shard = blocks(), torch_fully_shard if engine == "torch" else fsdplab.engine.fully_shard
    convert(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer, losses = optimizer_of(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        dist.all_reduce(loss.detach_())
        losses.append(loss.item())
    return losses, model, optimizer


def eight_bits(_: object, engine: str) -> tuple[list[float], set[str], list[torch.Tensor]]:
    from torchao.optim import AdamW8bit

    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step; a forked rank should not
        losses, model, optimizer = trained(engine, lambda model: None, AdamW8bit)
    kinds = {
        type(each.to_local()).__name__ for state in optimizer.state.values() for each in state.values() if each.ndim
    }
    return losses, kinds, [parameter.full_tensor() for parameter in model.parameters()]


def test_adamw_of_8_bits_has_the_bits_it_has_on_fsdp2(ranks) -> None:
    ours, theirs = (ranks(2, eight_bits, ImportedByTheMother(), engine)[0] for engine in ("lab", "torch"))
    assert ours[0] == theirs[0] and ours[0][-1] < ours[0][0]
    assert "OptimState8bit" in ours[1] and ours[1] == theirs[1]
    assert all(map(torch.equal, ours[2], theirs[2]))


def float8(_: object, engine: str, precomputed: bool) -> tuple[list[float], int]:
    """Losses, and for this engine the bytes that its gathers send in the last step; products are emulated on CPUs."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    sent: list[int] = []
    note = lambda event: sent.append(event.wire_bytes) if getattr(event, "kind", "") == "all_gather" else None  # noqa: E731
    after = precompute_float8_dynamic_scale_for_fsdp if precomputed else lambda model: None
    stop = events.subscribe(note)
    losses, *_ = trained(
        engine, lambda model: convert_to_float8_training(model, config=config), torch.optim.AdamW, after
    )
    events.flush()
    stop()
    return losses, sum(sent)


@pytest.mark.parametrize("precomputed", [False, True])
def test_weights_are_gathered_in_float8_as_on_fsdp2(ranks, precomputed: bool) -> None:
    ours, theirs = (ranks(2, float8, ImportedByTheMother(), engine, precomputed)[0] for engine in ("lab", "torch"))
    assert ours[0] == theirs[0]
    weights, biases = 4 * WIDTH * WIDTH, 4 * WIDTH
    gathers = 2 * STEPS  # in forward and in backward; a rank of two sends its half
    assert 0 < ours[1] <= gathers * (weights * 1 + biases * 4) / 2 * 1.02, "a weight of float8 has one byte"
