"""The part of lessons 03 and 04 that runs on the ranks: drive a learner's function, train a GPT in several ways.

A driver attaches the learner's function (to a model's parameters, after a backward); its result is compared with the
unsharded twin. `train` takes real text and a real GPT through several ways of training, one after the other on the same
ranks, from the same weights. Imports torch and the workloads only, so that ranks start quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.workspace import Workspace
from fsdplab.teaching.lessons.nb03_04_by_hand.trainers import WAYS, Trainer, make_optimizer
from fsdplab.workloads import ByteText, build_model, loss_of
from fsdplab.workloads.shapes import gpt
from fsdplab.workloads.twin import replay_gradients

# The model of a check: all rows divide by 3, the number of its ranks.
SMALL = gpt("small", layers=2, width=24, heads=2, vocabulary=258, context=36)
RATE = 0.5  # of the plain SGD in a check's steps
NOISE = 1e-6  # a gradient with a smaller norm is rounding
MARK = 1  # bytes of the broadcast that a driver puts between parts of a step, for the rules to tell them apart


def batch(text: ByteText, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The batch of `rank` at `step` of every by-hand training: two sequences of 32 bytes."""
    return text.batch(step, rank, ranks, batch_size=2, sequence_length=32)


def mark() -> None:
    """Add a mark to the counted calls."""
    dist.broadcast(torch.zeros(MARK, dtype=torch.uint8), src=0)


def compared_gradients(model: nn.Module, step: int) -> dict[str, Tensor | None]:
    """Every gradient by a name that says the step; a key's bias has only rounding noise (softmax ignores it) and is
    left out.
    """
    named = ((name, parameter.grad) for name, parameter in model.named_parameters() if not name.endswith("key.bias"))
    return {f"step {step}, gradient of {name}": None if grad is None else grad.clone() for name, grad in named}


def hooked(function: Callable[[Tensor], None], steps: int) -> dict[str, Tensor | None]:
    """The gradients that a hook on every parameter leaves, step by step."""
    model = build_model(SMALL)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(function)
    return _gradients(model, steps, lambda: None)


def finished(function: Callable[..., Any], steps: int, *arguments: Any) -> dict[str, Tensor | None]:
    """The gradients after `finish()`, where `finish = function(model, *arguments)`; marks part backward from finish."""
    model = build_model(SMALL)
    finish = function(model, *arguments)

    def marked() -> None:
        mark()
        if callable(finish):
            finish()
        mark()

    return _gradients(model, steps, marked)


def _gradients(model: nn.Module, steps: int, after_backward: Callable[[], None]) -> dict[str, Tensor | None]:
    text, optimizer = ByteText.from_standard_library(), torch.optim.SGD(model.parameters(), lr=RATE)
    seen: dict[str, Tensor | None] = {}
    for step in range(steps):
        loss_of(model, *batch(text, step, dist.get_rank(), dist.get_world_size())).backward()
        after_backward()
        seen |= compared_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # what a learner left in a list must not fail before values are compared
    return seen


def train(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Train `payload["model"]` once in each of `payload["ways"]`, and beside the twin; what happened on this rank, by
    way.

    A way is a dict with `kind` (a name in WAYS), `optimizer`, `steps` (fewer than the twin's, or None) and what the
    kind needs: the files of the learner's functions.
    """
    Workspace(Path(payload["workspace"])).make_importable()
    text, steps, model = ByteText.from_standard_library(), payload["steps"], payload["model"]
    twins = {
        name: _twin(model, text, steps, name) for name in dict.fromkeys(way["optimizer"] for way in payload["ways"])
    }
    found = []
    for way in payload["ways"]:
        trainer = WAYS[way["kind"]](build_model(model), way)
        found.append(_train(trainer, text, way["steps"] or steps, twins[way["optimizer"]]))
    return found


class Twin(NamedTuple):
    """The unsharded twin after all steps, its losses, and the norms of its first gradients by name."""

    model: nn.Module
    losses: list[float]
    norms: dict[str, float]


def _train(trainer: Trainer, text: ByteText, steps: int, twin: Twin) -> dict[str, Any]:
    """One way, and how far it is from the twin; collectives and gradient bytes are those of the last step."""
    losses: list[float] = []
    first: dict[str, float] = {}
    with WireLog() as log:
        for step in range(steps):
            log.calls.clear()
            tokens, targets = batch(text, step, dist.get_rank(), dist.get_world_size())
            with trainer.watching(log) as watched:
                loss = loss_of(trainer.model, tokens, targets)
                loss.backward()
                in_backward = len(log.calls)
                trainer.reduce()
                first = first or trainer.gradient_norms()
                trainer.step()
            losses.append(loss.item())
    calls = [(call.kind, call.nbytes) for call in log.calls]
    return {
        "losses": losses, "twin_losses": twin.losses, "calls": calls, "calls_in_backward": in_backward,
        "moments": trainer.moment_bytes(), "held": watched.held, "ready": watched.ready, "sent": watched.sent,
        "elements": sum(p.numel() for p in twin.model.parameters()), "parameters": len(twin.norms),
        "ratios": {name: norm / twin.norms[name] for name, norm in first.items() if twin.norms[name] > NOISE},
        "lab_bytes": watched.lab_bytes, "lab_collectives": watched.lab_collectives,
        **_distance(trainer.whole_parameters(), twin.model),
    }  # fmt: skip


def _distance(parameters: dict[str, Tensor], twin: nn.Module) -> dict[str, Any]:
    """The parameters that differ from the twin's in any bit, by how much, and the difference between ranks."""
    pairs = {name: (parameters[name], whole.detach()) for name, whole in twin.named_parameters()}
    differing = [name for name, (own, whole) in pairs.items() if not torch.equal(own, whole)]
    largest = max(float((own - whole).abs().max()) for own, whole in pairs.values())
    apart = max(float(_spread(own)) for own, _ in pairs.values())
    return {"differing": differing, "largest": largest, "apart": apart}


def _spread(own: Tensor) -> Tensor:
    """The largest difference between this tensor's values on any two ranks."""
    high, low = own.clone(), own.clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return (high - low).max()


def _twin(model: str, text: ByteText, steps: int, optimizer: str) -> Twin:
    twin = build_model(model)
    losses: list[float] = []
    norms: dict[str, float] = {}
    update = make_optimizer(optimizer, list(twin.parameters()))
    for step in range(steps):
        played = [[batch(text, step, rank, dist.get_world_size())] for rank in range(dist.get_world_size())]
        losses.append(replay_gradients(twin, played, loss_of))
        norms = norms or {name: float(parameter.grad.norm()) for name, parameter in twin.named_parameters()}
        update.step()
        update.zero_grad()
    return Twin(twin, losses, norms)
