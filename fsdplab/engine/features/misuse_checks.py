"""What trips users of sharding engines, said aloud instead of trained on silently.

An optimizer built before sharding steps parameters that no module shows any more. `to_empty` leaves buffers that no
state dict holds (rotary tables) as garbage. A model cast to bfloat16 before it is sharded has no float32 masters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdplab.engine import compat
from fsdplab.engine.core.policy import MixedPrecisionPolicy

Unwritten = list[tuple[str, "weakref.ref[torch.Tensor]", int]]
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _refuse_replaced(optimizer: Optimizer, *_: Any) -> None:
    """Raise a `RuntimeError` for an optimizer that holds parameters of before sharding; looks once a set of them."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:
        return
    held = (p for group in optimizer.param_groups for p in group["params"])
    replaced = (p for p in held if hasattr(p, "_replaced_by_shard"))
    dead = sum(p.grad is None or p.grad is p._replaced_by_shard for p in replaced)  # else another model trains it
    if dead:
        raise RuntimeError(
            f"this optimizer ({type(optimizer).__name__}) was built before the model was sharded: {dead} of its {count}"
            " parameters are no longer part of the model; build it after fully_shard or shard_model"
        )
    _checked[optimizer] = count


@cache
def watch_optimizers() -> None:
    """Have every optimizer's step check its parameters, from now on: who only imports the engine is left alone."""
    register_optimizer_step_pre_hook(_refuse_replaced)


def warn_of_low_masters(params: Iterable[tuple[str, torch.Tensor]], policy: MixedPrecisionPolicy) -> None:
    """Warn where mixed precision was asked for and a trained parameter is kept in no more than what it computes in."""
    low = policy.param_dtype
    if low not in (torch.bfloat16, torch.float16):
        return
    names = [name for name, parameter in params if parameter.requires_grad and parameter.dtype is low]
    if names:
        dtype = str(low).removeprefix("torch.")
        warnings.warn(
            f"{len(names)} parameters ({names[0]}, ...) are {dtype} already, so the optimizer updates {dtype} masters"
            " and small updates are lost; keep the model in float32 and let mp_policy cast it",
            stacklevel=4,
        )


def meta_buffers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, attribute) of every buffer on the meta device."""
    for prefix, module in modules:
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield prefix + attribute, module, attribute


def left_empty(were_meta: Iterable[tuple[str, nn.Module, str]]) -> Unwritten:
    """Those buffers that have memory now, and nobody's values."""
    now = [(name, module._buffers[attribute]) for name, module, attribute in were_meta]
    return [
        (name, weakref.ref(buffer), buffer._version)
        for name, buffer in now
        if buffer is not None and not buffer.is_meta
    ]


def warn_before_forward(module: nn.Module, buffers: Unwritten) -> None:
    """Have the next forward of `module` warn of those `buffers` that nobody has written to by then."""

    @compat.not_compiled
    def warn_once(module: nn.Module, _: Any) -> None:
        hook.remove()
        warn_of_unwritten(buffers, module.modules())

    if buffers:
        hook = module.register_forward_pre_hook(warn_once, prepend=True)


def warn_of_unwritten(buffers: Unwritten, modules: Iterable[nn.Module]) -> None:
    """Warn of buffers that still hold what `to_empty` left in them."""
    shown = {id(buffer) for module in modules for buffer in module._buffers.values()}
    names = [
        name for name, reference, version in buffers
        if (buffer := reference()) is not None and id(buffer) in shown and buffer._version == version
    ]  # fmt: skip
    if names:
        warnings.warn(
            f"buffers {', '.join(names)} hold garbage: to_empty gave them memory and nothing wrote to them since;"
            " compute them again (a reset_parameters, or register them from the configuration) or load them from a"
            " state dict",
            stacklevel=2,
        )
