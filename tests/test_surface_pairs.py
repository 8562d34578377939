"""Two features at once, as training programs combine them, with PyTorch's engine and with the lab's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.surface import Block, Net, data, gradients, loss_of, mesh_of, on_both, sharded, shown

# ---- what is trained changes while modules show unsharded parameters


def partly_frozen(fsdp: Any, keeps: bool | None) -> nn.Module:
    """A model of which only the last layer trains; `keeps` is its `reshard_after_forward`."""
    model = Net()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    return sharded(fsdp, model, reshard_after_forward=keeps)


def trained_after_unshard(fsdp: Any) -> Any:
    """Unfrozen after `unshard()`: the unsharded parameters have gradients, and the sharded ones get them."""
    answers = []
    for keeps in (None, True, False):
        model = partly_frozen(fsdp, keeps)
        for unit in (model, *model.blocks):
            unit.unshard()
        model.requires_grad_(True)
        loss_of(model).backward()
        first = gradients(model)
        model.zero_grad()
        loss_of(model, 1).backward()
        answers.append((first, gradients(model), [parameter.requires_grad for parameter in model.parameters()]))
    return answers


def trained_between_micro_batches(fsdp: Any) -> Any:
    """Unfrozen while units stay unsharded after a backward; what later micro-batches train is reduced."""
    answers = []
    for keeps in (None, True, False):
        model = partly_frozen(fsdp, keeps)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        loss_of(model).backward()
        model.blocks[1].requires_grad_(True)
        loss_of(model, 1).backward()
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        loss_of(model, 2).backward()
        answers.append(gradients(model))
    return answers


def trained_after_a_forward_alone(fsdp: Any) -> Any:
    """Unfrozen after a forward that no backward followed and that left the units unsharded."""
    model = partly_frozen(fsdp, False)
    loss_of(model)
    model.requires_grad_(True)
    loss_of(model, 1).backward()
    return gradients(model)


def held_while_unsharded(fsdp: Any) -> Any:
    """Sharded parameters that somebody holds are frozen between a forward and its backward."""
    answers = []
    for keeps in (None, True, False):
        model = sharded(fsdp, reshard_after_forward=keeps)
        held = dict(model.named_parameters())
        loss = loss_of(model)
        for name, parameter in held.items():
            parameter.requires_grad_("blocks.1" not in name)
        loss.backward()
        first = gradients(model)
        model.zero_grad()
        loss_of(model, 1).backward()
        answers.append((first, gradients(model)))
    return answers


@pytest.mark.full
def test_what_is_trained_changes_while_parameters_are_unsharded(ranks) -> None:
    on_both(
        ranks, 2, trained_after_unshard, trained_between_micro_batches, trained_after_a_forward_alone,
        held_while_unsharded,
    )  # fmt: skip


# ---- a list of modules that somebody calls and of modules that only hold others


class Heads(nn.Module):
    """A norm and a list of heads, of which one may be a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(8, 4) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return [head(x) for head in self.heads]


def losses(model: nn.Module, seed: int) -> torch.Tensor:
    """The heads' losses, with a weight each."""
    return sum(weight * head.square().mean() for weight, head in enumerate(model(data(seed)), 1))


def norm_and_heads(fsdp: Any) -> Any:
    """The list of heads has no forward; the norm's forward gathers them, and they stay until the root's has ended."""
    answers = []
    for keeps, inner in ((None, False), (True, False), (False, False), (True, True)):
        model = Heads()
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh_of(), reshard_after_forward=keeps)
        if inner:
            fsdp.fully_shard(model.heads[1], mesh=mesh_of())
        fsdp.fully_shard([model.norm, model.heads], mesh=mesh_of(), reshard_after_forward=keeps)
        fsdp.fully_shard(model, mesh=mesh_of())
        losses(model, 0).backward()
        answers.append(gradients(model))
        model.zero_grad()
        with torch.no_grad():
            answers.append(model(data(1)))
        model.set_requires_gradient_sync(False)
        losses(model, 2).backward()
        model.set_requires_gradient_sync(True)
        model(data(3))[1].sum().backward()
        answers.append(gradients(model))
        answers.append([type(model.heads).__name__, sorted(model.state_dict())])
    return answers


@pytest.mark.full
def test_a_list_of_modules_may_hold_containers(ranks) -> None:
    on_both(ranks, 2, norm_and_heads)


# ---- evaluation of what is kept unsharded, by some ranks more often than by others


def as_long_as_each_likes(fsdp: Any) -> Any:
    """Ranks generate different numbers of tokens, between training steps; all is unsharded after the first."""
    model, answers = sharded(fsdp), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.set_reshard_after_forward(False)
        with torch.no_grad():
            tokens = [model(data(step))]
            for _ in range(1 + 2 * dist.get_rank()):
                tokens.append(model(tokens[-1]))
        for unit in (model, *model.blocks):
            unit.reshard()
        model.set_reshard_after_forward(True)
        loss = loss_of(model, step)
        loss.backward()
        answers.append((tokens, loss.detach(), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return answers


def on_rank_0_alone(fsdp: Any) -> Any:
    """All is unsharded by hand, and rank 0 generates; units stay so that are not resharded after their forward."""
    answers = []
    for at_first in (True, False):
        model = sharded(fsdp, reshard_after_forward=None if at_first else False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for unit in (model, *model.blocks):
                unit.unshard()
                if at_first:
                    unit.set_reshard_after_forward(False, recurse=False)
            with torch.no_grad():
                token = data(step)
                for _ in range(3 if dist.get_rank() == 0 else 0):
                    token = model(token)
            answers.append((token, shown(model)))
            for unit in (model, *model.blocks):
                unit.reshard()
                if at_first:
                    unit.set_reshard_after_forward(unit is not model, recurse=False)
            loss = loss_of(model, step)
            loss.backward()
            answers.append((loss.detach(), gradients(model), shown(model)))
            optimizer.step()
            optimizer.zero_grad()
    return answers


@pytest.mark.full
def test_ranks_may_evaluate_as_often_as_each_likes(ranks) -> None:
    on_both(ranks, 2, as_long_as_each_likes, on_rank_0_alone)


# ---- mixed precision and containers that pytree takes for leaves


class Pair(NamedTuple):
    """A named tuple."""

    value: torch.Tensor
    name: str


class NamedPair(Pair):
    """Its subclass, with a method."""


class Triple(tuple):
    """A tuple of another class."""


class Within(nn.Module):
    """A layer that takes its input out of a container, and returns its output in one."""

    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(8, 8), kind

    def forward(self, given: Any) -> tuple[Any, torch.dtype]:
        value = next(iter(given))
        return self.kind(self.layer(value.to(self.layer.weight.dtype))), value.dtype


def cast_within(fsdp: Any) -> Any:
    """Inputs are cast to `param_dtype`, and outputs to `output_dtype`; gradients flow through tuples."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    answers = []
    for kind in (lambda value: NamedPair(value, "pair"), lambda value: Triple((value, 1)), lambda value: {value}):
        model = Within(kind)
        fsdp.fully_shard(model, mesh=mesh_of(), mp_policy=policy)
        given = data().requires_grad_()
        answer, seen = model(kind(given * 1))
        value = next(iter(answer))
        answers.append((type(answer).__name__, str(value.dtype), str(seen)))
        if not isinstance(answer, set):  # torch asks none of its outputs
            value.square().sum().backward()
            answers.append((given.grad, gradients(model)))
    return answers


@pytest.mark.full
def test_values_are_cast_within_tuples_and_sets(ranks) -> None:
    on_both(ranks, 2, cast_within)
