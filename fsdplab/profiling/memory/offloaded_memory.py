"""Offloaded memory on CPU ranks, where the host is also the computing device: it is left out of the measurement.

On a GPU the allocator of the device never sees host memory. On CPU ranks there is one memory for both, so the split is
emulated: parameters at rest and optimizer state are left out from the beginning, and a reduced gradient leaves at the
moment its parameter gets it. Memory in use (gathered parameters, low-precision copies, messages, whole gradients)
counts, as on a card. Only one thing is missing: a card's staging copy of the slice that is being gathered in its own
dtype: one unit's, at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fsdplab.profiling.memory.block_lifetimes import AllocatorEvent
from fsdplab.profiling.memory.live_storages import address


class OffloadedTensors:
    """The offloaded tensors, and when gradients join them: `departures` are frees for the timeline."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self.departures: list[AllocatorEvent] = []

    def resting(self) -> list[torch.Tensor]:
        """Parameters at rest and the tensors of the optimizer's state."""
        states = [] if self._optimizer is None else self._optimizer.state.values()
        state = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        return [*self._model.parameters(), *state]

    def watch(self) -> list[Callable[[], None]]:
        """Record every gradient from now on; returns functions that end that."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return [parameter.register_post_accumulate_grad_hook(self._leave).remove for parameter in trained]

    def _leave(self, parameter: torch.Tensor) -> None:
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        if at := address(gradient, self._device):
            self.departures.append(AllocatorEvent(time.time_ns(), at, -gradient.untyped_storage().nbytes()))
