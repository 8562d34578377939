"""The part of lessons 03 and 04 that runs on the ranks: train a GPT in several ways, and beside its unsharded twin.

`train` takes real text and a real GPT through the ways one after the other on the same ranks, from the same weights.
Imports torch and the workloads only, so that ranks start quickly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.lessons.by_hand.trainers import WAYS, Trainer, make_optimizer
from fsdplab.workloads import ByteText, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

NOISE = 1e-6  # a gradient with a smaller norm is rounding


def batch(text: ByteText, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The batch of `rank` at `step` of every by-hand training: two sequences of 32 bytes."""
    return text.batch(step, rank, ranks, batch_size=2, sequence_length=32)


def train(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Train `payload["model"]` once in each of `payload["ways"]`, and beside the twin; what happened on this rank, by
    way.

    A way is a dict with `kind` (a name in WAYS), `optimizer`, `steps` (fewer than the twin's, or None) and what the
    kind needs, such as the `exercise` whose function is in use.
    """
    open_course(workspace=payload["workspace"])
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
        "lab": (len(watched.lab), sum(each.wire_bytes for each in watched.lab)),
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
