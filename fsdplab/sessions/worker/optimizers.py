"""The optimizer of a run: AdamW for all parameters, or Muon for the matrices of the units and AdamW for the rest.

AdamW is the fused one everywhere: it makes no temporaries (a looped one holds three times its largest parameter, a
foreach one a copy of all), works on DTensors, and on the CPU takes a third of the time. Muon is PyTorch's own; under
the lab's engine each matrix has one owner (`engine/features/matrix_optimizer.py`), other engines step it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.workload import Task


def optimizer_of(spec: RunSpec, model: nn.Module, workload: Task, engine: str = "") -> torch.optim.Optimizer:
    """The workload's own optimizer, or that of `spec`, on parameters as an engine (that of `spec`) holds them."""
    engine = engine or spec.engine
    own = workload.optimizer([each for each in model.parameters() if each.requires_grad])
    if own is not None:
        return own
    if spec.optimizer == "muon":
        return _muon(spec, model, workload, engine)
    if spec.optimizer == "adamw-foreach":
        return torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, foreach=True)
    sharded = engine in ("lab", "torch-fsdp2")
    parameters = _by_block(model, workload.units(model)) if sharded else model.parameters()
    return torch.optim.AdamW(parameters, lr=spec.learning_rate, fused=True)


def _by_block(model: nn.Module, units: tuple[type[nn.Module], ...]) -> list[dict[str, Any]]:
    """The parameters in a group for each block and one for the rest: a first step on all of gpt-20m's DTensors at once
    spends 0.5 s on their placements, with the square of their number; groups of like blocks share what it found.
    """
    groups = _blocks(model, units)
    known = {id(parameter) for group in groups for parameter in group}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [{"params": group} for group in (rest, *groups) if group]


def _blocks(model: nn.Module, units: tuple[type[nn.Module], ...]) -> list[list[nn.Parameter]]:
    """The parameters of each block; those of a block inside of another are the outer one's."""
    taken: set[int] = set()
    groups = []
    for module in model.modules():
        if isinstance(module, units):
            groups.append([each for each in module.parameters() if id(each) not in taken])
            taken |= {id(each) for each in module.parameters()}
    return groups


def _muon(spec: RunSpec, model: nn.Module, workload: Task, engine: str) -> torch.optim.Optimizer:
    """Muon of the matrices in units, AdamW of all else. Muon's updates have the size of AdamW's, so one learning rate
    fits both (Liu et al. 2025, arXiv 2502.16982).
    """
    matrices = [p for block in _blocks(model, workload.units(model)) for p in block if p.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    muon = torch.optim.Muon(matrices, lr=spec.learning_rate, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(others, lr=spec.learning_rate, fused=True)
    if engine != "lab":
        return Together(muon, rest)
    from fsdplab.engine import whole_matrices

    return whole_matrices(muon, rest=rest, replicas=None if spec.row.cuts else dist.group.WORLD)


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters as one object, whose groups and state are theirs."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each; none of them takes a closure."""
        assert closure is None, "a closure would be run by every part"
        for part in self._parts:
            part.step()
