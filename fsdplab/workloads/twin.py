"""Replays a training without sharding (the twin): one process that computes what all ranks together must compute.

It replays each rank's micro-batches in rank order, sums the ranks' gradients in that order and divides by their number.
A twin on the full batch would differ: it rounds differently, and ten Adam steps amplify the rounding to 2e-5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Batch = tuple[Any, ...]  # what the loss takes beside the model
LossOf = Callable[..., torch.Tensor]
Gradients = list["torch.Tensor | None"]
Buffers = dict[tuple[nn.Module, str], torch.Tensor]  # by the module that holds it and its name there


def replay_gradients(model: nn.Module, batches_by_rank: Sequence[Sequence[Batch]], loss_of: LossOf) -> float:
    """Leave the averaged gradients on `model.parameters()` and return the mean loss.

    `batches_by_rank[r]` holds rank r's micro-batches, such as (tokens, targets). The loss of each, `loss_of(model,
    *batch)`, is divided by their number, as a training loop with accumulation does. Gradients must be None or zero
    before the call.
    """
    replayed = (_replay(model, batches, loss_of) for batches in batches_by_rank)
    return _averaged(model, replayed, len(batches_by_rank))


class SideBySide:
    """Replays several ranks' batches at a time, a thread each: the same bits as `replay_gradients` in less time.

    Each thread computes with modules of its own over the same parameters; gradients are still summed in rank order. For
    models on the CPU that draw no random numbers in their forward (threads would draw them in any order). `at_once`
    gradients of the whole model live at a time. With `buffers` one rank is replayed after the other, each with its own.
    """

    def __init__(self, model: nn.Module, at_once: int, buffers: BuffersByRank | None = None) -> None:
        self._buffers = buffers
        self._model = model
        self._others = [_over_same_parameters(model) for _ in range(at_once - 1)]
        self._threads = ThreadPoolExecutor(at_once)

    def replay_gradients(self, batches_by_rank: Sequence[Sequence[Batch]], loss_of: LossOf) -> float:
        """Leave the averaged gradients on the model that was given and return the mean loss."""
        if self._buffers is None:
            replayed = self._replayed(batches_by_rank, loss_of)
        else:
            replayed = self._one_by_one(batches_by_rank, loss_of)
        return _averaged(self._model, replayed, len(batches_by_rank))

    def _one_by_one(
        self, batches_by_rank: Sequence[Sequence[Batch]], loss_of: LossOf
    ) -> Iterator[tuple[float, Gradients]]:
        assert self._buffers is not None
        for rank, batches in enumerate(batches_by_rank):
            with self._buffers.of(rank):
                yield _replay(self._model, batches, loss_of)

    def _replayed(
        self, batches_by_rank: Sequence[Sequence[Batch]], loss_of: LossOf
    ) -> Iterator[tuple[float, Gradients]]:
        models = [self._model, *self._others]
        # two threads for four ranks: ranks 0 and 1, then 2 and 3
        for first in range(0, len(batches_by_rank), len(models)):
            some = batches_by_rank[first : first + len(models)]
            # `map` yields in the order of ranks, whichever thread is done first
            yield from self._threads.map(_replay, models, some, [loss_of] * len(some))


class BuffersByRank:
    """Keeps a set of a model's buffers for each rank: a forward that changes them, as batch norm does, changes its
    rank's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_rank: dict[int, Buffers] = {}
        self._initial = self._copied(self._current())

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Give the model the buffers of `rank` inside; what its forward makes of them is kept for the next time."""
        # a rank's first replay begins with the buffers of the model as it was built
        buffers = self._by_rank.get(rank) or self._copied(self._initial)
        for (module, name), tensor in buffers.items():
            module._buffers[name] = tensor
        yield
        self._by_rank[rank] = self._current()

    def _current(self) -> Buffers:
        buffers = {}
        for module in self._model.modules():
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    buffers[module, name] = tensor
        return buffers

    def _copied(self, buffers: Buffers) -> Buffers:
        """Copy each tensor once, however many modules share it."""
        copies = {id(tensor): tensor.clone() for tensor in buffers.values()}
        return {place: copies[id(tensor)] for place, tensor in buffers.items()}


def _over_same_parameters(model: nn.Module) -> nn.Module:
    """Copy the modules. Their parameters have the same memory, and gradients of their own."""
    memo = {}
    for parameter in model.parameters():
        # what `deepcopy` finds in its memo it takes in place of a copy
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _replay(model: nn.Module, batches: Sequence[Batch], loss_of: LossOf) -> tuple[float, Gradients]:
    """Return one rank's loss and gradients; the model keeps none."""
    losses = 0.0
    for batch in batches:
        # gradients of micro-batches add up to that of their mean
        loss = loss_of(model, *batch) / len(batches)
        loss.backward()
        losses += loss.item()
    gradients: Gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return losses, gradients


def _averaged(model: nn.Module, replayed: Iterable[tuple[float, Gradients]], ranks: int) -> float:
    """Leave on the parameters the sum of the ranks' gradients, in rank order, by the number of ranks."""
    totals: Gradients = [None for _ in model.parameters()]
    losses = 0.0
    # one rank's gradients after the other: their sum rounds alike each time, and few are alive at once
    for loss, gradients in replayed:
        losses += loss
        totals = [_plus(total, gradient) for total, gradient in zip(totals, gradients)]
    for total, parameter in zip(totals, model.parameters()):
        # stays None where no rank has a gradient, as a rank's own would
        parameter.grad = None if total is None else total.div_(ranks)
    return losses / ranks


def _plus(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return total
    if total is None:
        return gradient
    return total.add_(gradient)
