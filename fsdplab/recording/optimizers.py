"""The optimizers of a step: what they step, and all as the one that the memory's recorder looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


def together(optimizers: Sequence[Any]) -> Any:
    """The optimizer that holds the state (of DeepSpeed's engine the one inside it); several as one."""
    inner = [held for each in optimizers for held in _holding_state(each)]
    return inner[0] if len(inner) == 1 else _Together(inner)


def parameters_of(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """All parameters that these optimizers step; of DeepSpeed's engine, which steps itself, its own."""
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        if isinstance(optimizer, torch.nn.Module):
            found += optimizer.parameters()
        found += [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
    return found


def _holding_state(optimizer: Any) -> list[Any]:
    """The optimizers that have the state, such as those in DeepSpeed's engine, ZeroRedundancyOptimizer, accelerate's
    wrapper, or torchtitan's list of several.
    """
    if isinstance(optimizer, torch.nn.Module):
        return [optimizer.optimizer]
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, list) and several and all(isinstance(each, Optimizer) for each in several):
        return [held for each in several for held in _holding_state(each)]
    inner = getattr(optimizer, "optim" if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else "optimizer", None)
    return _holding_state(inner) if isinstance(inner, Optimizer) else [optimizer]


class _Together(Optimizer):
    """Several optimizers, to be looked at; it steps nothing."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all = optimizers  # Optimizer.__init__ would make groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for each in self._all for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all."""
        return {parameter: state for each in self._all for parameter, state in each.state.items()}

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` before each of them steps."""
        return _Handles([each.register_step_pre_hook(hook) for each in self._all])

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` after each of them has stepped."""
        return _Handles([each.register_step_post_hook(hook) for each in self._all])


class _Handles:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all hooks."""
        for each in self._handles:
            each.remove()
