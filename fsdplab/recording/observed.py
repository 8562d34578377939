"""How a recorded job is set up, as far as it may cost time or memory: its optimizer, threads, DDP's options, dtypes.

None of it is seen in a trace. It is read once, around the step whose memory is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdplab.recording.rows import Place
from fsdplab.recording.subject import fsdp2_units, holding_state, parameters_of

_MOST_BUFFER_BYTES = 100_000_000  # buffers that are larger are not compared


class Observed:
    """What is read of a model and its optimizers: `begin` before a step, `before_backward` in it, `end` after it."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], place: Place) -> None:
        self._model, self._optimizers, self._place = model, optimizers, place
        self._buffers: list[torch.Tensor] = []
        self._kept: int | None = None
        self._unused = 0

    def begin(self) -> None:
        """The step begins: keep the values of buffers that DDP sends in each forward."""
        buffers = list(self._model.buffers())
        if getattr(self._model, "broadcast_buffers", False) and _bytes(buffers) <= _MOST_BUFFER_BYTES:
            self._buffers = [each.detach().clone() for each in buffers]

    def before_backward(self) -> None:
        """The first backward of the step begins: gradients that are there already are those of the step before."""
        if self._kept is None:
            self._kept = _bytes(each.grad for each in parameters_of(self._optimizers) if each.grad is not None)

    def end(self) -> None:
        """The step has ended, and its gradients may still be there."""
        parameters = [each for each in parameters_of(self._optimizers) if each.requires_grad]
        self._unused = sum(each.grad is None for each in parameters)

    def as_report(self, autocast: str) -> dict[str, Any]:
        """Everything, for the rank's report."""
        return {
            "autocast": autocast,
            "threads": torch.get_num_threads(),
            "cores": _cores(),
            "ranks_of_a_node": self._place.of_a_node,
            "kept_gradient_bytes": self._kept or 0,
            "unused_parameters": self._unused,
            **self._optimizer(),
            **self._ddp(),
            **self._fsdp2(),
        }

    def _optimizer(self) -> dict[str, Any]:
        """Its class, and whether it steps one tensor after the other."""
        inner = [held for each in self._optimizers for held in holding_state(each)]
        groups = [group for each in inner for group in getattr(each, "param_groups", ())]
        loops = any(self._loops(group) for group in groups)
        names = sorted({type(each).__name__ for each in inner})
        number = sum(len(group["params"]) for group in groups)
        return {"optimizer": ", ".join(names), "optimizer_loops": loops, "parameters": number}

    def _loops(self, group: dict[str, Any]) -> bool:
        """Whether a group steps its tensors one by one although its optimizer could do otherwise."""
        if "foreach" not in group or group.get("fused"):
            return False
        return group["foreach"] is False or (group["foreach"] is None and self._place.device.type == "cpu")

    def _ddp(self) -> dict[str, Any]:
        if not isinstance(self._model, nn.parallel.DistributedDataParallel):
            return {}
        model = self._model
        buffers = list(model.buffers())
        changed = [not torch.equal(old, new) for old, new in zip(self._buffers, buffers)]
        return {
            "find_unused_parameters": model.find_unused_parameters,
            "broadcast_buffers": model.broadcast_buffers,
            "buffer_bytes": _bytes(buffers),
            "buffers_change": any(changed) or len(changed) != len(buffers),
            "bucket_bytes": int(model.bucket_bytes_cap),
            "has_comm_hook": bool(getattr(model, "_comm_hooks", ())),
        }

    def _fsdp2(self) -> dict[str, Any]:
        units = fsdp2_units(self._model)
        ahead = [getattr(unit._get_fsdp_state(), "_states_to_forward_prefetch", ()) for unit in units]
        return {"prefetches_forward": any(ahead)} if units else {}


def _bytes(tensors: Sequence[torch.Tensor] | Iterator[torch.Tensor]) -> int:
    """Bytes of what this rank holds of some tensors."""
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
