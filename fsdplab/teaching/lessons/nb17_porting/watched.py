"""What a training loop does between two losses, for a report on a loop whose losses differ: which optimizer stepped,
how it was set, and which gradients it was given. Those of the first step are compared with a model that is not sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplab.workloads import loss_of

LIMIT = 0.1  # of the norm of all gradients
ASKED = "SGD(lr=0.5)"


class Step(NamedTuple):
    """One `optimizer.step`: how many forwards came before it, whether it holds other parameters than the model's, its
    settings, and what its gradients are: a name and a factor.
    """

    forwards: int
    strangers: bool
    optimizer: str
    gradients: tuple[str, float]


class Watched:
    """`with Watched(model, twin, micro_batches, steps): ...` notes every step; all ranks make one together."""

    def __init__(self, model: nn.Module, twin: nn.Module, micro_batches: Sequence[Any], steps: int) -> None:
        self._model, self._asked, self._count = model, steps, len(micro_batches)
        self._forwards, self.steps = 0, list[Step]()

        # what the twin computes on this rank: the loss of each micro-batch, and [micro-batch][parameter] gradients
        self._parts: list[float] = []
        gradients: list[list[Tensor]] = []
        for micro_batch in micro_batches:
            loss, of_micro_batch = _backward(twin, micro_batch)
            self._parts.append(loss)
            gradients.append(of_micro_batch)

        # what a right loop has when its optimizer steps, and what a wrong one may have instead
        averaged = []
        for of_micro_batch in gradients:
            averaged.append([_mean_over_ranks(gradient) for gradient in of_micro_batch])
        self._right = [total / self._count for total in _summed(averaged)]
        self._others = {"first": averaged[0], "last": averaged[-1], "own": _summed(gradients)}
        self._norm = _norm(self._right)
        self._loss_of_all = _mean_over_ranks(torch.tensor(self._mean)).item()

    @property
    def _mean(self) -> float:
        """Return this rank's loss of a step."""
        return sum(self._parts) / self._count

    def __enter__(self) -> Watched:
        # micro-batches are counted by their forwards
        forward = self._model.register_forward_pre_hook(self._forward)
        self._hooks = (forward, register_optimizer_step_pre_hook(self._stepped))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        # what the last step left, for a norm that was clipped too late
        gradients = [_local(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None]
        square = torch.tensor(_norm(gradients) ** 2)
        self._norm_left = 0.0  # of all ranks' gradients at the end
        if not error[0]:
            sum_of_squares = _mean_over_ranks(square) * dist.get_world_size()
            self._norm_left = float(sum_of_squares) ** 0.5

    def _forward(self, *_: object) -> None:
        self._forwards += 1

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note a step of any optimizer of torch, before it is taken."""
        parameters = list(self._model.parameters())
        # `fully_shard` makes new parameters: an optimizer that was built before holds the old ones
        known = {id(parameter) for parameter in parameters}
        group = optimizer.param_groups[0]
        has_strangers = any(id(parameter) not in known for parameter in group["params"])

        settings = [f"lr={group['lr']}"]
        for name in ("momentum", "weight_decay", "maximize"):
            if group.get(name):
                settings.append(f"{name}={group[name]}")
        description = f"{type(optimizer).__name__}({', '.join(settings)})"
        gradients = self._compared([parameter.grad for parameter in parameters])
        self.steps.append(Step(self._forwards, has_strangers, description, gradients))

    def _compared(self, gradients: Sequence[Tensor | None]) -> tuple[str, float]:
        """Return which gradients these are, and how many times as large: `("right", 1.0)`."""
        # the optimizer would skip these parameters
        if any(gradient is None for gradient in gradients):
            return "none", 0.0
        local = [_local(gradient) for gradient in gradients]
        for name, candidates in {"right": self._right, **self._others}.items():
            factor = _multiple(local, _shards_like(candidates, local))
            if factor:
                return name, factor
        # each parameter may have a factor of its own
        pairs = zip(local, _shards_like(self._right, local), strict=True)
        if all(_multiple([gradient], [right]) for gradient, right in pairs):
            return "each", 0.0
        return "other", 0.0

    def why_first(self, loss: float) -> str:
        """Return what the loss of the first step is, where it is not the mean over this rank's micro-batches."""
        known = {
            "this is the sum over the micro-batches; a step's loss is their mean": self._mean * self._count,
            "this was divided by the number of micro-batches twice": self._mean / self._count,
            "this is the loss of the last micro-batch alone; a step's loss is the mean over all": self._parts[-1],
            "this is the loss of the first micro-batch alone; a step has several, and all train": self._parts[0],
            "this is the mean over all ranks; each rank returns its own loss": self._loss_of_all,
        }
        for sentence, value in known.items():
            if abs(loss - value) < 1e-5 * value:
                return sentence
        if len(self.steps) > self._asked:
            return self._too_often
        if abs(loss - self._mean) < 1e-2 * self._mean:
            return "nearly the right one, before anything is trained: another dtype than fp32 computes here"
        return "a step's loss is the sum over its micro-batches, each divided by their number"

    @property
    def _too_often(self) -> str:
        return f"{len(self.steps)} times `optimizer.step()` in {self._asked} steps: once, after all micro-batches"

    def why_later(self) -> str:
        """Return what is wrong between the first loss and the second; nothing where no optimizer of torch stepped."""
        return next(self._complaints(), "")

    def _complaints(self) -> Iterator[str]:
        """Yield what is wrong, the likeliest cause first."""
        if not self.steps:
            return
        first = self.steps[0]
        if len(self.steps) > self._asked:
            yield self._too_often
        if first.forwards < self._count:
            yield f"{first.forwards} of the first step's {self._count} micro-batches was used before `optimizer.step()`"
        if first.strangers:
            yield "the optimizer holds the parameters from before `fully_shard`, which nobody uses: build it afterwards"
        if first.optimizer != ASKED:
            yield f"the optimizer is {first.optimizer}; {ASKED} is asked for"
        name, factor = first.gradients
        yield _OTHER[name] if name in _OTHER else self._of_the_norm(factor)

    def _of_the_norm(self, factor: float) -> str:
        """Return what is wrong with gradients that are `factor` times the mean over ranks and micro-batches."""
        # clipping multiplies by LIMIT / norm, and leaves a smaller norm as it is
        norm, limit = factor * self._norm, min(LIMIT, self._norm)
        norm_of_shards = _norm([_shard(gradient, None) for gradient in self._right])
        if _close(norm, limit):
            return (
                "the first step is right and a later one is not: gradients of the step before are added where"
                " `zero_grad` is not called in every step"
            )
        if _close(factor * norm_of_shards, LIMIT):
            return "clipped by the norm of this rank's shards: the norm is that of all ranks' shards together"
        if self._norm <= LIMIT:
            return (
                f"gradients are {factor:.3g} times what they should be when the optimizer steps: each micro-batch's"
                f" loss is divided by their number before its backward, and a norm below {LIMIT} is left as it is"
            )
        wrong = f"the norm of all gradients is {norm:.3g} when the optimizer steps, and it should be clipped to {LIMIT}"
        if _close(self._norm_left, LIMIT):  # clipped too late
            return f"{wrong}: `clip_grad_norm_` comes before `optimizer.step()`"
        return wrong


_OTHER = {
    "none": "no gradient is there when the optimizer steps: set_requires_gradient_sync(True) before the backward of the"
    " last micro-batch, whose reduction brings the sum of all",
    "first": "only the first micro-batch's gradients arrive: set_requires_gradient_sync is False for all but the last",
    "last": "only the last micro-batch's gradients arrive: `zero_grad` comes once a step, before the first of them",
    "own": "these are this rank's gradients alone, without the other ranks'",
    "each": "each parameter was clipped by itself: the norm is that of all parameters together, and so is the factor",
    "other": "the gradients of the first step are no multiple of the mean over ranks and micro-batches: clipping a norm"
    " takes all of them times one factor",
}


def _backward(model: nn.Module, micro_batch: Any) -> tuple[float, list[Tensor]]:
    """Return the loss of a micro-batch, and its gradients in the order of the parameters.

    The gradients are returned and not left in the model, so that micro-batches can be compared.
    """
    loss = loss_of(model, *micro_batch)
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def _summed(gradients: Sequence[Sequence[Tensor]]) -> list[Any]:
    """Return the sum over micro-batches of each parameter's gradient; `gradients` is [micro-batch][parameter]."""
    return [sum(of_parameter) for of_parameter in zip(*gradients, strict=True)]


def _mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of a tensor over all ranks; the tensor itself stays."""
    summed = value.clone()
    dist.all_reduce(summed)
    return summed / dist.get_world_size()


def _local(tensor: Any) -> Tensor:
    """Return a DTensor's rows on this rank; a plain tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _shard(whole: Tensor, like: Tensor | None) -> Tensor:
    """Return this rank's rows, or all where `like` has all."""
    if like is not None and like.shape == whole.shape:
        return whole
    rank, rows = dist.get_rank(), -(-len(whole) // dist.get_world_size())  # rounded up
    # of 5 rows on 2 ranks: 3 and 2, as torch.chunk cuts them
    return whole[rank * rows : (rank + 1) * rows]


def _shards_like(wholes: Sequence[Tensor], local: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of each tensor, or all where the local one has all."""
    return [_shard(whole, like) for whole, like in zip(wholes, local, strict=True)]


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of several tensors together."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def _multiple(gradients: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return by what factor all gradients are the right ones; 0 where one factor is not enough.

    The factor is the best one in the sense of least squares; what is left over must be below 0.1 % of the gradients.
    """
    flat, right_flat = _flat(gradients), _flat(right)
    factor = float(flat @ right_flat / (right_flat @ right_flat))
    distance = (flat - factor * right_flat).norm()
    return factor if distance < 1e-3 * flat.norm() else 0.0


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors to one vector of float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _close(got: float, expected: float) -> bool:
    """Return whether a number is the expected one within 0.1 %."""
    return abs(got - expected) < 1e-3 * expected
