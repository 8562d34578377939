"""What trips users of sharding engines, said aloud instead of trained on silently.

An optimizer built before sharding steps parameters that no module shows any more. `to_empty` leaves buffers that no
state dict holds (rotary tables) as garbage. A model cast to bfloat16 before it is sharded has no float32 masters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def watching_meta_buffers(module: nn.Module, below: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Have the next forward of `module` warn of buffers of `below`, named by their prefixes, that get memory here
    (`to_empty`), and that nobody has written to by then.
    """
    were_meta = [
        (prefix + attribute, each, attribute)
        for prefix, each in below
        for attribute, buffer in each._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    yield
    now = [(name, each._buffers[attribute]) for name, each, attribute in were_meta]
    unwritten = [
        (name, weakref.ref(buffer), buffer._version)
        for name, buffer in now
        if buffer is not None and not buffer.is_meta
    ]

    @compat.not_compiled
    def warn_once(module: nn.Module, _: Any) -> None:
        hook.remove()
        _warn_of_unwritten(unwritten, module.modules())

    if unwritten:
        hook = module.register_forward_pre_hook(warn_once, prepend=True)


def _warn_of_unwritten(buffers: Unwritten, modules: Iterable[nn.Module]) -> None:
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
