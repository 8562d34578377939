"""The unsharded twin: one process that computes what all ranks together must compute.

It replays each rank's micro-batches in rank order, sums the ranks' gradients in that order and divides by their number.
A twin on the full batch would differ: it rounds differently, and ten Adam steps amplify the rounding to 2e-5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

Batch = tuple[Any, ...]  # what the loss takes beside the model
LossOf = Callable[..., torch.Tensor]
Gradients = list["torch.Tensor | None"]


def replay_gradients(model: nn.Module, batches_by_rank: Sequence[Sequence[Batch]], loss_of: LossOf) -> float:
    """Leave the averaged gradients on `model.parameters()` and return the mean loss.

    `batches_by_rank[r]` holds rank r's micro-batches, such as (tokens, targets). The loss of each, `loss_of(model,
    *batch)`, is divided by their number, as a training loop with accumulation does. Gradients must be None or zero
    before the call.
    """
    return _averaged(model, (_replay(model, batches, loss_of) for batches in batches_by_rank), len(batches_by_rank))


class SideBySide:
    """`replay_gradients` with several ranks' batches at a time, a thread each: the same bits in less time.

    Each thread computes with modules of its own over the same parameters; gradients are still summed in rank order. For
    models on the CPU that draw no random numbers in their forward (threads would draw them in any order). `at_once`
    gradients of the whole model live at a time.
    """

    def __init__(self, model: nn.Module, at_once: int) -> None:
        self._model, self._others = model, [_over_same_parameters(model) for _ in range(at_once - 1)]
        self._threads = ThreadPoolExecutor(at_once)

    def replay_gradients(self, batches_by_rank: Sequence[Sequence[Batch]], loss_of: LossOf) -> float:
        """As the function above, on the model that was given."""
        return _averaged(self._model, self._replayed(batches_by_rank, loss_of), len(batches_by_rank))

    def _replayed(
        self, batches_by_rank: Sequence[Sequence[Batch]], loss_of: LossOf
    ) -> Iterator[tuple[float, Gradients]]:
        models = [self._model, *self._others]
        for first in range(0, len(batches_by_rank), len(models)):
            some = batches_by_rank[first : first + len(models)]
            yield from self._threads.map(_replay, models, some, [loss_of] * len(some))


def _over_same_parameters(model: nn.Module) -> nn.Module:
    return copy.deepcopy(
        model,
        {id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad) for parameter in model.parameters()},
    )


def _replay(model: nn.Module, batches: Sequence[Batch], loss_of: LossOf) -> tuple[float, Gradients]:
    """One rank's loss and gradients; the model keeps none."""
    losses = 0.0
    for batch in batches:
        loss = loss_of(model, *batch) / len(batches)
        loss.backward()
        losses += loss.item()
    gradients: Gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return losses, gradients


def _averaged(model: nn.Module, replayed: Iterable[tuple[float, Gradients]], ranks: int) -> float:
    totals: Gradients = [None for _ in model.parameters()]
    losses = 0.0
    for loss, gradients in replayed:
        losses += loss
        totals = [_plus(total, gradient) for total, gradient in zip(totals, gradients)]
    for total, parameter in zip(totals, model.parameters()):
        parameter.grad = None if total is None else total.div_(ranks)
    return losses / ranks


def _plus(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if total is None or gradient is None:
        return total if gradient is None else gradient
    return total.add_(gradient)
