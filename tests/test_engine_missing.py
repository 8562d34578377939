"""A gradient that some ranks lack: all ranks agree on whether another has it, whatever values it has, and a backward
reads that from the device once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import CPUOffloadPolicy, MixedPrecisionPolicy, shard_model
from tests.ranks import transports
from tests.surface import mesh_of, wholes

quick = pytest.mark.quick
TRANSPORTS = [pytest.param("shm", marks=quick), "gloo"]
ROWS = 8
TINY = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}  # the smallest above zero


class Sparse(nn.Module):
    """Weights that only the ranks in `users` use; their gradient there is `slope` times the loss's."""

    def __init__(self, slope: torch.Tensor, *users: int) -> None:
        super().__init__()
        self.slope, self.users = slope, users
        self.always, self.spare = (
            nn.Parameter(torch.ones(ROWS)),
            nn.Parameter(torch.ones(len(slope), dtype=slope.dtype)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.always
        return x + (self.spare * self.slope).sum().to(x.dtype) if dist.get_rank() in self.users else x


class Chain(nn.Module):
    """Several units of such weights, one after the other."""

    def __init__(self, units: int, *users: int, slope: torch.Tensor | None = None) -> None:
        super().__init__()
        slope = torch.arange(float(ROWS)) if slope is None else slope
        self.blocks = nn.ModuleList(Sparse(slope, *users) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def lab(model: nn.Module, strategy: str, transport: str, **options: Any) -> nn.Module:
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if strategy == "hybrid_shard" else (ranks,)
    names = ("replicate", "shard") if strategy == "hybrid_shard" else None
    options = {"mesh": mesh_of(*shape, names=names), "transport": transport} | options
    return shard_model(model, strategy, **options)


def present(model: nn.Module) -> list[bool]:
    return [parameter.grad is not None for name, parameter in model.named_parameters() if "spare" in name]


def zeros_of_both_signs(strategy: str, transport: str, last: int) -> list[bool]:
    """Rank 0 multiplies its loss by zero: its gradient is -0.0 in all shards but that of rank `last`."""
    slope = -torch.ones(ROWS)
    slope.tensor_split(dist.get_world_size())[last].neg_()
    model = lab(Chain(2, 0, slope=slope), strategy, transport)
    (model(torch.ones(ROWS)).sum() * (0.0 if dist.get_rank() == 0 else 1.0)).backward()
    found = present(model)
    for parameter in model.parameters():
        assert parameter.grad is None or wholes([parameter.grad])[0].isfinite().all()
    return found


STRATEGIES = {2: ("full_shard", "no_shard"), 4: ("full_shard", "zero2", "hybrid_shard")}  # by the number of ranks


def in_turn(program: Callable[..., list[bool]], calls: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The calls of `program` after which this rank lacks a gradient."""
    return [call for call in calls if not all(program(*call))]


@pytest.mark.parametrize("world", [pytest.param(2, marks=quick), 4])
def test_ranks_agree_where_a_gradient_is_negative_zero(ranks, world: int) -> None:
    calls = [(name, over, last) for name in STRATEGIES[world] for over in transports() for last in (0, world - 1)]
    assert ranks(world, in_turn, zeros_of_both_signs, calls) == [[]] * world


def negative_zeros_only(strategy: str, transport: str) -> list[bool]:
    """Every gradient is -0.0 everywhere, which is a gradient all the same."""
    model = lab(Chain(2, 0, slope=-torch.ones(ROWS)), strategy, transport)
    (model(torch.ones(ROWS)).sum() * (0.0 if dist.get_rank() == 0 else 1.0)).backward()
    return present(model)


@quick
def test_a_gradient_of_negative_zeros_is_one(ranks) -> None:
    calls = [(name, over) for name in ("full_shard", "no_shard") for over in transports()]
    assert ranks(2, in_turn, negative_zeros_only, calls) == [[], []]


def tiny(strategy: str, transport: str, dtype: torch.dtype, divide: float, accumulated: bool) -> list[bool]:
    """The sum is the smallest negative number, and its average rounds to -0.0. `accumulated`: replicas reduce it with
    the next backward, in which no rank has a gradient.
    """
    slope = torch.full((ROWS,), -TINY[dtype], dtype=dtype)
    model = lab(Chain(2, 0, slope=slope), strategy, transport)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(divide)
    if accumulated:
        model.set_requires_all_reduce(False)
        model(torch.ones(ROWS)).mean().backward()
        model.set_requires_all_reduce(True)
        for block in model.blocks:
            block.users = ()
    model(torch.ones(ROWS)).mean().backward()
    return present(model)


@pytest.mark.parametrize("world", [pytest.param(2, marks=quick), 4])
def test_an_average_that_rounds_to_zero_is_a_gradient(ranks, world: int) -> None:
    """The sum of fewer ranks too, which replicas have divided already or will divide."""
    calls = list(product(STRATEGIES[world], transports(), TINY, (3.0, 4.0), (False,)))
    calls += [("hybrid_shard", over, dtype, 3.0, True) for over in transports() for dtype in TINY if world == 4]
    assert ranks(world, in_turn, tiny, calls) == [[]] * world


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The calls that read values of tensors on the host: on a GPU each would wait for the device."""
    seen: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: (seen.append(name), real(*args, **kwargs))[1]

    names = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")
    with mock.patch.multiple(torch.Tensor, **{name: noted(name) for name in names}):
        yield seen


def reads(strategy: str, transport: str, *users: int) -> tuple[int, list[bool]]:
    model = lab(Chain(5, *users), strategy, transport)
    loss = model(torch.ones(ROWS)).sum()
    with host_reads() as seen:
        loss.backward()
    return len(seen), present(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "zero2"])
def test_a_backward_reads_once_what_it_lacks(ranks, strategy: str, transport: str) -> None:
    """A rank that lacks nothing reads nothing, and so does one whose peers do not matter."""
    assert ranks(2, reads, strategy, transport, 0) == [(0, [True] * 5), (1, [True] * 5)]
    assert ranks(2, reads, strategy, transport, 0, 1) == [(0, [True] * 5)] * 2
    assert ranks(2, reads, strategy, transport) == [(1, [False] * 5)] * 2
    assert ranks(1, reads, strategy, transport) == [(0, [False] * 5)]


def values(strategy: str, transport: str, options: dict[str, Any], steps: int) -> None:
    """What the ranks that lack a gradient get is what the others get, and is added to what is there."""
    called: list[int] = []
    model = lab(Chain(3, 1), strategy, transport, **options)
    for block in model.blocks:
        block.spare.register_post_accumulate_grad_hook(lambda parameter: called.append(len(called)))
    for _ in range(steps):
        model(torch.ones(ROWS)).sum().backward()
    assert len(called) == 3 * steps
    for block in model.blocks:
        expected = torch.arange(float(ROWS)) * ROWS * steps / dist.get_world_size()
        torch.testing.assert_close(wholes([block.spare.grad])[0].float(), expected)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"mp_policy": HALF}],
    ids=["", "off", "bf16"],
)
def test_what_another_rank_has_is_handed_out(ranks, options: dict[str, Any], transport: str) -> None:
    ranks(2, values, "full_shard", transport, options, 2)


@pytest.mark.parametrize("strategy", [pytest.param("no_shard", marks=quick), "zero1", "shard_grad_op"])
def test_under_every_strategy(ranks, strategy: str) -> None:
    ranks(2, values, strategy, "shm", {}, 2)


class Complex(nn.Module):
    def __init__(self, *users: int) -> None:
        super().__init__()
        self.users = users
        self.blocks = nn.ModuleList([])
        self.always, self.spare = (nn.Parameter(torch.ones(ROWS, dtype=torch.complex64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.always
        return x * self.spare if dist.get_rank() in self.users else x


def complex_numbers(strategy: str, transport: str, *users: int) -> list[bool]:
    model = shard_model(Complex(*users), strategy, mesh=mesh_of(), transport=transport)
    (model(torch.ones(ROWS, dtype=torch.complex64)).real.sum() * 0.0).backward()
    return present(model)


@pytest.mark.parametrize("strategy", [pytest.param("full_shard", marks=quick), "no_shard"])
def test_complex_gradients(ranks, strategy: str) -> None:
    for transport in transports():
        assert ranks(2, complex_numbers, strategy, transport, 1) == [[True], [True]]
        assert ranks(2, complex_numbers, strategy, transport) == [[False], [False]]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


def abandoned() -> list[list[bool]]:
    """A backward that raises after units were reduced hands out nothing later."""
    model = lab(Chain(4, 0), "full_shard", "gloo")
    x = torch.ones(ROWS, requires_grad=True)
    loss = model(Raises.apply(x)).sum()
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    for block in model.blocks:
        block.users = ()
    found = [present(model)]
    model.zero_grad()
    model(torch.ones(ROWS)).sum().backward()
    return [*found, present(model)]


@quick
def test_an_abandoned_backward_hands_nothing_to_the_next(ranks) -> None:
    mine, other = ranks(2, abandoned)
    assert other[0] == [False] * 4 and mine[1] == other[1] == [False] * 4
