"""`Tensor.grad_dtype`: gradients in another dtype than their parameter's, where torch has it (PyTorch's engine keeps it
from 2.15 on).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import MixedPrecisionPolicy, fully_shard
from tests.surface import Net, close, data, gradients, mesh_of, sharded, twin_gradients

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 brought grad_dtype")


class Lab:
    """The engine as a program of `surface` sees it."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def fully_shard(self, module: nn.Module, **options: Any) -> nn.Module:
        return fully_shard(module, **options, **self.options)


def low(wanted: torch.dtype | None) -> Net:
    """In bfloat16, with gradients in `wanted` for one block and in bfloat16 for all else."""
    model = Net().bfloat16()
    for parameter in model.blocks[1].parameters():
        parameter.grad_dtype = wanted
    return model


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(data(seed).bfloat16()).float().square().mean()


def kept(transport: str, wanted: torch.dtype | None) -> None:
    """Through reductions at once, through accumulation, and into the optimizer's hands."""
    model, twin = sharded(Lab(transport=transport), low(wanted), mesh=mesh_of()), low(wanted)
    for accumulated in (False, True):
        for seed in range(2):
            model.set_requires_gradient_sync(seed == 1 or not accumulated)
            loss(model, seed).backward()
        for name, parameter in model.named_parameters():
            dtype = wanted if "blocks.1." in name and wanted is not None else torch.bfloat16
            assert (parameter.dtype, parameter.grad.dtype) == (torch.bfloat16, dtype), name
        expected = twin_gradients(twin, 0, 1, loss=lambda each: loss(each, 0) + loss(each, 1))
        close(gradients(model), {name: one / 2 for name, one in expected.items()}, atol=0.02, rtol=0.05)
        model.zero_grad(), twin.zero_grad()
    assert model.blocks[1].up.weight.grad_dtype is wanted


@pytest.mark.parametrize("wanted", [torch.float32, None])
def test_gradients_keep_the_dtype_that_was_set(ranks, wanted: torch.dtype | None) -> None:
    for transport in ("gloo", "shm"):
        ranks(2, kept, transport, wanted)


class Complex(nn.Module):
    """A complex weight, beside a real one or alone."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64))
        self.real = nn.Linear(8, 8) if beside else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.real(x).to(torch.complex64) @ self.weight.T).abs()


def complex_kept(transport: str) -> None:
    """Reduced at once and accumulated; PyTorch's engine refuses the first and drops imaginary parts in the second."""
    for beside in (False, True):
        model, twin = Complex(beside), Complex(beside)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh_of(), mp_policy=policy, transport=transport)
        for seeds in ((0,), (0, 1)):
            for seed in seeds:
                model.set_requires_gradient_sync(seed == seeds[-1])
                with warnings.catch_warnings(action="error"):  # "Casting complex values to real discards ..."
                    model(data(seed)).square().mean().backward()
                twin(data(seed)).square().mean().backward()
            dist.all_reduce(expected := twin.weight.grad / dist.get_world_size())
            torch.testing.assert_close(gradients(model)["weight"], expected)
            model.zero_grad(), twin.zero_grad()


def test_complex_gradients_keep_their_imaginary_parts(ranks) -> None:
    for transport in ("gloo", "shm"):
        ranks(2, complex_kept, transport)
