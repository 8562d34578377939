"""Parameters that a step does not use: none of them has a gradient where no rank used it, as in PyTorch's FSDP2 and in
a plain model, so that an optimizer with weight decay leaves it alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdplab.engine import STRATEGIES, MixedPrecisionPolicy, shard_model
from tests.surface import Net, close, gradients, loss_of, mesh_of, on_both, sharded, wholes

quick = pytest.mark.quick
FIRST = pytest.param("full_shard", marks=quick)
ROWS = [name for name in STRATEGIES if name != "hybrid_shard"]


class Spare(Net):
    """A root with a layer and a single row that only the ranks in `users` use."""

    def __init__(self, *users: int) -> None:
        super().__init__()
        self.users, self.spare, self.row = users, nn.Linear(8, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.row * self.spare(x) if dist.get_rank() in self.users else x


def twenty_steps(strategy: str, transport: str, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = shard_model(Spare(), strategy, mesh=mesh_of(), transport=transport, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(20):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept, fresh = dict(model.named_parameters()), Spare()
    for name in ("spare.weight", "spare.bias", "row"):
        (value,) = wholes([kept[name]])
        assert torch.equal(value, fresh.get_parameter(name)), f"{name} drifted on rank {dist.get_rank()}"
        assert kept[name] not in optimizer.state
    assert not torch.equal(wholes([kept["first.weight"]])[0], fresh.first.weight)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("strategy", [FIRST, *(name for name in ROWS if name != "full_shard")])
def test_what_nobody_uses_is_not_decayed(ranks, strategy: str, transport: str) -> None:
    ranks(2, twenty_steps, strategy, transport, None)


def test_nor_in_bf16(ranks) -> None:
    ranks(2, twenty_steps, "full_shard", "shm", torch.bfloat16)
    ranks(1, twenty_steps, "full_shard", "auto", torch.bfloat16)


def used_on_one_rank(user: int, strategy: str, transport: str) -> list[bool]:
    """Whoever uses a parameter, every rank has its rows of the gradient; also a rank that holds no row."""
    model, twin = shard_model(Spare(user), strategy, mesh=mesh_of(), transport=transport), Spare(user)
    loss_of(model).backward()
    loss_of(twin).backward()
    for parameter in twin.parameters():
        value = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(value)
        parameter.grad = value / dist.get_world_size()
    present = [parameter.grad is not None for parameter in model.parameters()]
    close(gradients(model), {name: parameter.grad for name, parameter in twin.named_parameters()})
    return present


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("user", [0, 1])
@pytest.mark.parametrize("strategy", [FIRST, "zero2", "no_shard"])
def test_what_one_rank_uses_has_a_gradient_on_all(ranks, strategy: str, user: int, transport: str) -> None:
    for present in ranks(2, used_on_one_rank, user, strategy, transport):
        assert all(present)


def accumulated(strategy: str) -> None:
    """Used in the first micro-batch and not in the second: what was accumulated is reduced."""
    model, twin = shard_model(Spare(0, 1), strategy, mesh=mesh_of()), Spare(0, 1)
    for each in (model, twin):
        each.users = (0, 1)
        if each is model:
            model.set_requires_gradient_sync(False)
        loss_of(each, 0).backward()
        each.users = ()
        if each is model:
            model.set_requires_gradient_sync(True)
        loss_of(each, 1).backward()
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    close(gradients(model), {name: parameter.grad for name, parameter in twin.named_parameters()})


@pytest.mark.parametrize("strategy", [FIRST, "zero1", "no_shard"])
def test_what_an_earlier_micro_batch_used_counts(ranks, strategy: str) -> None:
    ranks(2, accumulated, strategy)


# ---- beside PyTorch's FSDP2


def unused_in_a_used_unit(fsdp: Any) -> dict[str, bool]:
    model = sharded(fsdp, Spare())
    loss_of(model).backward()
    return {name: parameter.grad is None for name, parameter in model.named_parameters()}


class Aside(Net):
    """A unit that runs in every forward, and whose output no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.aside(x)
        return x


def a_unit_without_gradients(fsdp: Any) -> Any:
    if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        return "this torch has no such setting"
    model = Aside()
    fsdp.fully_shard(model.aside, mesh=mesh_of())
    model = sharded(fsdp, model)
    counts = []
    for counted in (False, True):
        model.set_reduce_scatter_unused_params(counted)
        with CommDebugMode() as seen:
            loss_of(model).backward()
        counts.append(sum(n for op, n in seen.get_comm_counts().items() if "reduce_scatter" in str(op)))
        assert (model.aside.weight.grad is not None) == counted
        model.zero_grad()
    assert counts[1] == counts[0] + 1
    return counts


def zeros_where_asked(fsdp: Any) -> Any:
    if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        return "this torch has no such setting"
    model = sharded(fsdp, Spare())
    model.set_reduce_scatter_unused_params(True)
    loss_of(model).backward()
    spare = model.spare.weight.grad
    assert isinstance(spare, DTensor) and spare.to_local().eq(0).all()
    return {name: parameter.grad is None for name, parameter in model.named_parameters()}


def test_beside_fsdp2(ranks) -> None:
    on_both(ranks, 2, unused_in_a_used_unit, a_unit_without_gradients, zeros_where_asked)
