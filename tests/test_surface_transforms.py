"""`torch.func` around sharded models: the first gather happens inside a transform, gradients pass through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.surface import Net, close, data, gradients, on_both, sharded, twin_gradients, wholes


def tangent(model: nn.Module, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and its directional derivative along ones."""
    x = data(seed)
    return torch.func.jvp(lambda inside: model(inside), (x,), (torch.ones_like(x),))


def first_forward_inside(fsdp: Any) -> Any:
    """Nothing has been gathered before the transform begins; the values are the twin's."""
    answers = []
    for transform in (
        tangent,
        lambda model: torch.func.vmap(lambda row: model(row))(data()),
        lambda model: torch.func.grad(lambda x: model(x).square().sum())(data()),
        lambda model: torch.func.jacfwd(lambda row: model(row))(data()[0]),
        lambda model: torch.func.jacrev(lambda row: model(row))(data()[0]),
    ):
        got, expected = transform(sharded(fsdp)), transform(Net())
        torch.testing.assert_close(got, expected)
        answers.append(got)
    return answers


def gradients_through_a_tangent(fsdp: Any) -> Any:
    """Losses of the output, of the tangent alone, and of both: two steps each, parameters dropped in between."""
    answers = []
    for of in (
        lambda out, along: out.square().mean() + along.square().mean(),
        lambda out, along: along.square().mean(),
        lambda out, along: out.square().mean(),
    ):
        model, twin = sharded(fsdp, reshard_after_forward=True), Net()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for step in range(2):
            of(*tangent(model, step)).backward()
            expected = twin_gradients(twin, step, loss=lambda each, step=step, of=of: of(*tangent(each, step)))
            close(gradients(model), expected)
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
        answers.append(wholes([*model.parameters()]))
    return answers


def test_transforms(ranks) -> None:
    on_both(ranks, 2, first_forward_inside, gradients_through_a_tangent)
