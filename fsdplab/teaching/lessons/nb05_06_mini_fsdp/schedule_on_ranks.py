"""The part of the schedule puzzle that runs on the ranks: the learner's schedule, with their functions, on real blocks.

Every message is waited for here, so the order and the memory are real and the time is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.teaching.core.workspace import Workspace, load_function
from fsdplab.teaching.lessons.nb05_06_mini_fsdp.engine import MiniUnit, Parts
from fsdplab.teaching.lessons.nb05_06_mini_fsdp.on_ranks import loaded, no_hooks


def scheduled(payload: dict[str, Any]) -> dict[str, Any]:
    """One step of `blocks` blocks in the order of the learner's schedule: the most that was in memory, in blocks, and
    how many floats of this rank's gradient slices differ from the unsharded twin's.
    """
    Workspace(Path(payload["workspace"])).make_importable()
    blocks, width = payload["blocks"], payload["width"]
    steps = load_function(Path(payload["schedule"]), "schedule")(blocks)
    parts = loaded(payload["parts"], hooks=no_hooks)
    expected = _slices_of_the_twin(_blocks(blocks, width), parts)
    step = _Step(_blocks(blocks, width), _batch(dist.get_rank(), width), parts)
    held = [step.take(action, block) for action, block in steps]
    differing = [int((own.mine.grad != right).sum()) for own, right in zip(step.units, expected, strict=True)]
    return {"peak": max(held), "differing": sum(differing), "of": sum(len(right) for right in expected)}


def _blocks(count: int, width: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)]


def _batch(rank: int, width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(rank))


class _Step:
    """The blocks of one rank, its activations, and the actions on them."""

    def __init__(self, blocks: Sequence[nn.Module], batch: Tensor, parts: Parts) -> None:
        self.blocks, self.parts, self.x = blocks, parts, batch
        self.units = [MiniUnit(f"block {i}", list(block.parameters()), parts) for i, block in enumerate(blocks)]
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def take(self, action: str, block: int) -> float:
        """Do one action; what is in memory after it (gathered blocks and whole gradients), in blocks."""
        getattr(self, f"_{action}")(block)
        size = max(unit.whole.nbytes for unit in self.units)
        return sum(unit.gathered_bytes for unit in self.units) / size + self._gradient_bytes() / size

    def _gradient_bytes(self) -> int:
        gradients = [parameter.grad for block in self.blocks for parameter in block.parameters()]
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def _gather(self, block: int) -> None:
        self.parts.unshard(self.units[block].mine.detach(), self.units[block].whole)

    def _drop(self, block: int) -> None:
        self.parts.reshard(self.units[block].whole)

    def _forward(self, block: int) -> None:
        self.inputs[block] = self.x.detach().requires_grad_()
        self.outputs[block] = self.blocks[block](self.inputs[block])
        self.x = self.outputs[block]

    def _backward(self, block: int) -> None:
        last = block == len(self.blocks) - 1
        whole = self.outputs[block].square().mean() if last else self.outputs[block]
        whole.backward(None if last else self.inputs[block + 1].grad)

    def _reduce(self, block: int) -> None:
        self.units[block].mine.grad = self.parts.reduce(self.units[block].take_gradient())


def _slices_of_the_twin(blocks: Sequence[nn.Module], parts: Parts) -> list[Tensor]:
    """This rank's slices of the mean gradient, by the unsharded blocks on every rank's batch in turn."""
    ranks, width = dist.get_world_size(), next(blocks[0].parameters()).shape[1]
    model = nn.Sequential(*blocks)
    totals = [torch.zeros(sum(each.numel() for each in block.parameters())) for block in blocks]
    for rank in range(ranks):
        model.zero_grad()
        model(_batch(rank, width)).square().mean().backward()
        for total, block in zip(totals, blocks, strict=True):
            total += torch.cat([each.grad.flatten() for each in block.parameters() if each.grad is not None])
    return [parts.shard(total / ranks, dist.get_rank(), ranks) for total in totals]
