"""What the exercises of lesson 03 observe on the ranks: two steps of a small GPT, its gradients and its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.exercise import Call
from fsdplab.workloads import ByteText, build_model, loss_of
from fsdplab.workloads.shapes import gpt

# The model of a check: all rows divide by 3, the number of its ranks.
SMALL = gpt("small", layers=2, width=24, heads=2, vocabulary=258, context=36)
RATE = 0.5  # of the plain SGD
STEPS = 2  # what is left over from the first shows in the second


@dataclass(frozen=True)
class Step:
    """One step on this rank: every gradient by its parameter's name, and what was sent during backward and after it."""

    gradients: dict[str, Tensor | None]
    during: Sequence[Call]
    after: Sequence[Call]

    @property
    def messages(self) -> list[Call]:
        """Return all calls of the step."""
        return [*self.during, *self.after]


def two_steps(attach: Callable[[nn.Module], Any]) -> list[Step]:
    """Train two steps with a function attached to the model; what `attach` returns is called after every backward."""
    model = build_model(SMALL)
    finish = attach(model)
    text, optimizer = ByteText.from_standard_library(), torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    for number in range(STEPS):
        tokens, targets = text.batch(number, dist.get_rank(), dist.get_world_size(), batch_size=2, sequence_length=32)
        with WireLog() as log:
            loss_of(model, tokens, targets).backward()
            # what the learner's hooks sent while backward ran; `finish` sends the rest
            sent = len(log.calls)
            if callable(finish):
                finish()
        steps.append(Step(compared(model), log.calls[:sent], log.calls[sent:]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # what a learner left in a list must not fail before values are compared
    return steps


def compared(model: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of all gradients by name, as they are compared; None where there is none.

    A key's bias has only rounding noise (softmax ignores it) and is left out.
    """
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("key.bias"):
            continue
        gradient = parameter.grad
        gradients[name] = None if gradient is None else gradient.clone()
    return gradients


def gradients_by_step(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the facts of an exercise on gradients: `{"gradients of step 0": {"head.weight": ..., ...}, ...}`."""
    return {f"gradients of step {number}": step.gradients for number, step in enumerate(steps)}
