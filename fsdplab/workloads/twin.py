"""The unsharded twin: one process that computes what all ranks together must compute.

It replays each rank's micro-batches in rank order, sums the ranks' gradients in that order and divides by their number.
A twin on the full batch would not do: it rounds differently, and ten Adam steps amplify the rounding to 2e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def replay_gradients(
    model: nn.Module,
    batches_by_rank: Sequence[Sequence[Batch]],
    loss_of: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
) -> float:
    """Leave the averaged gradients on `model.parameters()` and return the mean loss.

    `batches_by_rank[r]` holds rank r's (tokens, targets) micro-batches. The loss of each is divided by their number, as a
    training loop with accumulation does. Gradients must be None or zero before the call.
    """
    ranks = len(batches_by_rank)
    totals: list[torch.Tensor | None] = [None for _ in model.parameters()]
    losses = 0.0
    for batches in batches_by_rank:
        for tokens, targets in batches:
            loss = loss_of(model, tokens, targets) / len(batches)
            loss.backward()
            losses += loss.item()
        totals = [_plus(total, parameter) for total, parameter in zip(totals, model.parameters())]
    for total, parameter in zip(totals, model.parameters()):
        parameter.grad = None if total is None else total.div_(ranks)
    return losses / ranks


def _plus(total: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    if total is None or gradient is None:
        return total if gradient is None else gradient
    return total.add_(gradient)
