"""Reads how a recorded job is set up, as far as it may cost time or memory: optimizer, threads, DDP's options, dtypes.

None of it is seen in a trace. It is read once, around the step whose memory is measured.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdplab.recording.gradients import Gradients, local_bytes
from fsdplab.recording.rows import Place
from fsdplab.recording.subject import all_holding_state, fsdp2_units

_OF_A_GROUP = ("params", "param_names")  # what makes a group another one, besides its options
_MOST_BUFFER_BYTES = 100_000_000  # buffers that are larger are not compared


class Observed:
    """Reads a model and its optimizers: `begin` before a step, `before_backward` in it, `end` after it."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], place: Place) -> None:
        self._model = model
        self._optimizers = optimizers
        self._place = place
        self.gradients = Gradients(model, optimizers)
        self._buffers: list[torch.Tensor] = []  # copies of their values before the step
        self._asleep: dict[str, int] | None = None  # layers that evaluate while the model is trained, by class
        self._has_anomaly_mode = False
        self._forwards = Counter[bool]()  # of the model while it trains, by whether they build a graph
        self._hook: Any = None

    def begin(self) -> None:
        """Count forwards from now on, and copy the values of buffers that DDP sends in each of them."""
        # a hook would have a compiled model compiled again
        if not is_compiled(self._model):
            self._hook = self._model.register_forward_pre_hook(self._forward)
        buffers = list(self._model.buffers())
        # an attribute of DDP alone
        if getattr(self._model, "broadcast_buffers", False) and local_bytes(buffers) <= _MOST_BUFFER_BYTES:
            self._buffers = [buffer.detach().clone() for buffer in buffers]

    def before_backward(self) -> None:
        """Look at the modes that are set when the first backward of the step begins, and at the gradients."""
        self.gradients.before_backward()
        if self._asleep is None:
            self._has_anomaly_mode = torch.is_anomaly_enabled()
            # the whole model may evaluate in a step that trains it, by mistake
            self._asleep = {} if self._model.training else _asleep(self._model)

    def _forward(self, model: nn.Module, args: object) -> None:
        if model.training:
            self._forwards[torch.is_grad_enabled()] += 1

    def end(self) -> None:
        """Count no more forwards, and look at the gradients."""
        if self._hook is not None:
            self._hook.remove()
        self.gradients.end()

    def as_report(self, autocast: str) -> dict[str, Any]:
        """Return everything, for the rank's report."""
        return {
            "autocast": autocast,
            "threads": torch.get_num_threads(),
            "core_numbers": _cores(),
            "cores_of_the_machine": os.cpu_count() or 1,
            "ranks_of_a_node": self._place.of_a_node,
            "asleep": self._asleep or {},
            "anomaly_mode": self._has_anomaly_mode,
            "splits_tensors": _splits_tensors(self._model),
            "forwards": self._forwards[True],
            "forwards_without_graph": self._forwards[False],
            **self.gradients.as_report(),
            **self._optimizer(),
            **self._ddp(),
            **self._fsdp1(),
            **self._fsdp2(),
        }

    def _optimizer(self) -> dict[str, Any]:
        """Return its class, whether it steps one tensor after the other, by its choice or as it is told to, and how
        many groups of parameters it has, of how many kinds of options.
        """
        names, is_told_to, number = set(), False, 0
        looping: dict[str, int] = {}  # class -> parameters that it steps one after the other
        groups = 0
        kinds = set[str]()  # the options of groups; as text, since a value may be a tensor
        for optimizer in all_holding_state(self._optimizers):
            names.add(type(optimizer).__name__)
            for group in getattr(optimizer, "param_groups", ()):
                groups += 1
                kinds.add(repr({name: value for name, value in group.items() if name not in _OF_A_GROUP}))
                # a flat parameter of FSDP1 holds several
                of_group = sum(len(getattr(parameter, "_param_infos", ())) or 1 for parameter in group["params"])
                number += of_group
                if self._loops(group):
                    name = type(optimizer).__name__
                    looping[name] = looping.get(name, 0) + of_group
                    # None is torch's choice, False the job's
                    is_told_to = is_told_to or group["foreach"] is False
        return {
            "optimizer": ", ".join(sorted(names)),
            "optimizer_loops": bool(looping),
            "looping": looping,
            "told_to_loop": is_told_to,
            "parameters": number,
            "groups": groups,
            "kinds_of_groups": len(kinds),
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
            "buffer_bytes": local_bytes(buffers),
            "buffers_change": any(changed) or len(changed) != len(buffers),
            "bucket_bytes": int(model.bucket_bytes_cap),
            "has_comm_hook": bool(getattr(model, "_comm_hooks", ())),
        }

    def _fsdp1(self) -> dict[str, Any]:
        """Count the elements of FSDP1's units in which anything is trained, and those of them that are trained: it
        reduces the gradient of a unit as a whole.
        """
        reduced, trained = 0, 0
        for part in self._model.modules():
            flat = getattr(getattr(part, "_handle", None), "flat_param", None)
            # with use_orig_params=False all parameters of a unit are trained, or none
            parameters = getattr(flat, "_params", None)
            if flat is None or not parameters:
                continue
            # of whole parameters, which a rank has slices of
            of_unit = sum(numel for numel, each in zip(flat._numels, parameters) if each.requires_grad)
            trained += of_unit
            reduced += sum(flat._numels) if of_unit else 0
        return {"reduced_elements": reduced, "trained_elements": trained} if reduced else {}

    def _fsdp2(self) -> dict[str, Any]:
        units = fsdp2_units(self._model)
        if not units:
            return {}
        # the units that each one's forward gathers ahead, as `set_modules_to_forward_prefetch` sets them
        prefetched = [getattr(unit._get_fsdp_state(), "_states_to_forward_prefetch", ()) for unit in units]
        return {"prefetches_forward": any(prefetched)}


def _splits_tensors(model: nn.Module) -> bool:
    """Return whether parameters are sharded in more ways than FSDP2 or DDP shard them, as tensor parallelism does."""
    for parameter in model.parameters():
        sharded_by = [each for each in getattr(parameter, "placements", ()) if not each.is_replicate()]
        # under DDP a parameter is no DTensor of its own
        if len(sharded_by) > (0 if isinstance(model, nn.parallel.DistributedDataParallel) else 1):
            return True
    return False


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile or torch.jit has the model itself, and not only something inside of it."""
    if isinstance(model, torch.jit.ScriptModule):
        return True
    return type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None


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


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
