"""Reads how a recorded job is set up, as far as it may cost time or memory: optimizer, threads, DDP's options, dtypes.

None of it is seen in a trace. It is read once, around the step whose memory is measured.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdplab.recording.rows import Place
from fsdplab.recording.subject import all_holding_state, fsdp2_units, parameters_of

_MOST_BUFFER_BYTES = 100_000_000  # buffers that are larger are not compared


class Observed:
    """Reads a model and its optimizers: `begin` before a step, `before_backward` in it, `end` after it."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], place: Place) -> None:
        self._model = model
        self._optimizers = optimizers
        self._place = place
        self._buffers: list[torch.Tensor] = []  # copies of their values before the step
        self._kept_gradient_bytes: int | None = None
        self._unused = 0  # parameters without a gradient
        self._asleep: dict[str, int] = {}  # layers that evaluate while the model is trained, by class
        self._has_anomaly_mode = False

    def begin(self) -> None:
        """Copy the values of buffers that DDP sends in each forward, before the step."""
        buffers = list(self._model.buffers())
        # an attribute of DDP alone
        if getattr(self._model, "broadcast_buffers", False) and _bytes(buffers) <= _MOST_BUFFER_BYTES:
            self._buffers = [buffer.detach().clone() for buffer in buffers]

    def before_backward(self) -> None:
        """Count, at the first backward of the step, the gradients that are still there from the step before."""
        if self._kept_gradient_bytes is None:
            self._has_anomaly_mode = torch.is_anomaly_enabled()
            # the whole model may evaluate in a step that trains it, by mistake
            if not self._model.training:
                self._asleep = _asleep(self._model)
            gradients = [parameter.grad for parameter in parameters_of(self._optimizers)]
            self._kept_gradient_bytes = _bytes(gradient for gradient in gradients if gradient is not None)

    def end(self) -> None:
        """Count the parameters without a gradient, after the step."""
        parameters = [parameter for parameter in parameters_of(self._optimizers) if parameter.requires_grad]
        self._unused = sum(parameter.grad is None for parameter in parameters)

    def as_report(self, autocast: str) -> dict[str, Any]:
        """Return everything, for the rank's report."""
        return {
            "autocast": autocast,
            "threads": torch.get_num_threads(),
            "cores": _cores(),
            "ranks_of_a_node": self._place.of_a_node,
            "kept_gradient_bytes": self._kept_gradient_bytes or 0,
            "unused_parameters": self._unused,
            "asleep": self._asleep,
            "anomaly_mode": self._has_anomaly_mode,
            **self._optimizer(),
            **self._ddp(),
            **self._fsdp2(),
        }

    def _optimizer(self) -> dict[str, Any]:
        """Return its class, and whether it steps one tensor after the other, by its choice or as it is told to."""
        names, loops, is_told_to, number = set(), False, False, 0
        for optimizer in all_holding_state(self._optimizers):
            names.add(type(optimizer).__name__)
            for group in getattr(optimizer, "param_groups", ()):
                loops = loops or self._loops(group)
                # None is torch's choice, False the job's
                is_told_to = is_told_to or group.get("foreach") is False
                number += len(group["params"])
        return {
            "optimizer": ", ".join(sorted(names)),
            "optimizer_loops": loops,
            "told_to_loop": loops and is_told_to,
            "parameters": number,
        }

    def _loops(self, group: dict[str, Any]) -> bool:
        """Return whether a group steps its tensors one by one although its optimizer could do otherwise."""
        if "foreach" not in group or group.get("fused"):
            return False
        if group["foreach"] is None:  # torch's choice
            return self._place.device.type == "cpu"
        return group["foreach"] is False

    def _ddp(self) -> dict[str, Any]:
        if not isinstance(self._model, nn.parallel.DistributedDataParallel):
            return {}
        model = self._model
        buffers = list(model.buffers())
        # buffers that no step changes need no broadcast
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
        if not units:
            return {}
        # the units that each one's forward gathers ahead, as `set_modules_to_forward_prefetch` sets them
        prefetched = [getattr(unit._get_fsdp_state(), "_states_to_forward_prefetch", ()) for unit in units]
        return {"prefetches_forward": any(prefetched)}


def _asleep(model: nn.Module) -> dict[str, int]:
    """Count by class the layers that do something else while a model is trained, and are set to evaluate."""
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    counts = Counter[str]()
    for layer in model.modules():
        if not isinstance(layer, (_BatchNorm, _DropoutNd)) or layer.training:
            continue
        if getattr(layer, "p", 1) > 0:  # a dropout of nothing does the same in both modes
            counts[type(layer).__name__] += 1
    return dict(counts)


def _bytes(tensors: Sequence[torch.Tensor] | Iterator[torch.Tensor]) -> int:
    """Sum the bytes of what this rank holds of some tensors."""
    nbytes = 0
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        nbytes += tensor.numel() * tensor.element_size()
    return nbytes


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
