"""Raises errors for common mistakes, such as an optimizer that was built before sharding or within a step.

Such an optimizer steps parameters that no module shows any more. `to_empty` leaves buffers that no
state dict holds (rotary tables) as garbage. A model cast to bfloat16 before it is sharded has no float32 masters.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdplab.engine import compat
from fsdplab.engine.core.buffers import fingerprint
from fsdplab.engine.core.hooks import units_under
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.policy import MixedPrecisionPolicy
from fsdplab.engine.core.unit import UNSHARDED, Unit

Unwritten = list[tuple[str, "weakref.ref[torch.Tensor]", tuple[int, int]]]
_checked: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[Unit] = weakref.WeakSet()
_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_taken: weakref.WeakSet[Unit] = weakref.WeakSet()  # units whose unsharded parameters somebody has read
_searched: weakref.WeakSet[Unit] = weakref.WeakSet()  # those for which lists of them were looked for


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Raise a `RuntimeError` for an optimizer whose step would leave parameters untrained."""
    if not compat.inside_backward():  # a hook that steps within a backward comes before other units are collected
        for unit in _watched:
            if unit.memory.has_new_gradients():
                _refuse_uncollected(unit, optimizer)
        if _taken:
            _warn_of_lists()
    _refuse_strangers(optimizer)


def note_taken(units: Iterable[Unit]) -> None:
    """Note that somebody has read the parameters of `units`: of unsharded ones a list may be kept for a later clip."""
    if not compat.inside_backward():
        _taken.update(unit for unit in units if unit.state is UNSHARDED and unit not in _searched)


def _warn_of_lists() -> None:
    """Warn where a list holds unsharded parameters now that the step is over; looks once a unit, at all objects."""
    searched = [unit for unit in _taken if unit.memory.params]
    _taken.clear()
    _searched.update(searched)
    unsharded = [param.gathered for unit in searched for param in unit.memory.params if param.gathered is not None]
    holders = []
    # This looks at every object of the process, which takes long.
    for referrer in gc.get_referrers(*unsharded):
        if type(referrer) in (list, tuple) and referrer is not unsharded:
            holders.append(referrer)
    if holders:
        warnings.warn(
            f"a list holds unsharded parameters of unit {searched[0].name!r}: it was taken between a forward and its"
            " backward, and they never have gradients after a backward, so torch.nn.utils.clip_grad_norm_ of it leaves"
            " them out; take model.parameters() after the backward",
            stacklevel=4,
        )


def _refuse_uncollected(unit: Unit, optimizer: Optimizer) -> None:
    """Raise where `optimizer` steps parameters of `unit`, whose gradients no backward has collected."""
    stepped = {id(parameter) for parameter in _parameters_of(optimizer)}
    if any(id(param.at_rest) in stepped for param in unit.memory.params):
        unit.refuse_uncollected()


def _refuse_strangers(optimizer: Optimizer) -> None:
    """Raise where `optimizer` holds parameters that are none of the model's; looks once a set of them, and again when a
    sharded parameter has been replaced.
    """
    held = _parameters_of(optimizer)
    seen = len(held), ShardedParam.replacements  # what changes where there is something new to look at
    if _checked.get(optimizer) == seen:
        return
    name = type(optimizer).__name__
    # Whole parameters that were cut since, when they were marked (`ShardedParam.cut`).
    from_before = [parameter for parameter in held if _has_left(parameter, "_replaced_by_shard")]
    if from_before:
        raise RuntimeError(
            f"this optimizer ({name}) was built before the model was sharded: {len(from_before)} of its {len(held)}"
            " parameters are no longer part of the model; build it after fully_shard or shard_model"
        )
    refuse_unsharded_forms(held, f"this optimizer ({name})", "build it while the model is sharded")
    replaced = [parameter for parameter in held if _has_left(parameter, "_replaced_at_rest")]
    replaced = _not_shown(replaced)
    if replaced:
        raise RuntimeError(
            f"{len(replaced)} of the {len(held)} parameters of this optimizer ({name}) are no longer part of the model:"
            " load_state_dict(assign=True), to_empty or an assignment has replaced them; build the optimizer then,"
            " or load without assign=True"
        )
    _checked[optimizer] = seen
    for root in list(_roots):
        warn_of_late_parameters(root, {id(parameter) for parameter in held})


def _has_left(
    parameter: torch.Tensor,  # any shape
    mark: str,
) -> bool:
    """Whether `parameter` bears `mark`, the gradient that it had when it left the model, and has got none since: one
    with a new gradient is trained by another model.
    """
    return hasattr(parameter, mark) and (parameter.grad is None or parameter.grad is getattr(parameter, mark))


def _not_shown(
    parameters: list[torch.Tensor],  # any shapes
) -> list[torch.Tensor]:
    """Return those of `parameters` that no module shows again, as it does after a replacement for one forward."""
    if not parameters:
        return []
    sharded = [param for unit in _watched for param in unit.memory.params]
    shown = {id(param.at_rest) for param in sharded}
    for param in sharded:
        # `functional_call` shows another parameter for one forward, then the old one again.
        shown.update(id(module._parameters.get(attribute)) for module, attribute in param.sites())
    return [parameter for parameter in parameters if id(parameter) not in shown]


def refuse_unsharded_forms(
    parameters: Iterable[torch.Tensor],  # any shapes
    holder: str,
    remedy: str,
) -> None:
    """Raise a `RuntimeError` where `parameters` were taken while a unit was unsharded: they never have gradients."""
    held = list(parameters)
    unsharded = sum(hasattr(parameter, "_shown_during_step") for parameter in held)
    if unsharded:
        raise RuntimeError(
            f"{holder} holds {unsharded} parameters (of {len(held)}) that were taken between a forward and its"
            " backward, or after unshard(), when the model shows unsharded parameters; their gradients go to sharded"
            f" ones: {remedy} (after the backward, or after reshard()), where model.parameters() returns those"
        )


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of `optimizer`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def watch_units(units: Iterable[Unit]) -> None:
    """Have every optimizer's step look at `units` first."""
    _watched.update(units)


def mark_ignored(
    parameters: Iterable[torch.Tensor],  # any shapes
) -> None:
    """Mark `parameters`, of which each rank trains its own copy, as the user has asked; raise for names of them."""
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"ignored_params holds {parameter!r}, a {type(parameter).__name__}; expected the parameters themselves,"
                " such as {model.head.bias}"
            )
        parameter._trained_apart = True


def warn_of_late_parameters(root: nn.Module, among: Container[int] | None = None) -> None:
    """Warn once of each trained parameter below `root` that no unit holds: it was put in after sharding. `among`: the
    ids of those that matter.
    """
    _roots.add(root)
    units = units_under(root, recurse=True)
    # One rank: nothing has to be averaged.
    if all(unit.memory.config.divide == 1 for unit in units):
        return
    sharded = [param for unit in units for param in unit.memory.params]
    # By place, not by object: while a unit is unsharded the places show other parameters.
    owned = {(id(module), attribute) for param in sharded for module, attribute in param.sites()}
    late = []
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or (id(module), attribute) in owned:
                continue
            if hasattr(parameter, "_trained_apart"):  # the user has said so, or was warned already
                continue
            if among is None or id(parameter) in among:
                late.append((f"{prefix}.{attribute}".lstrip("."), parameter))
    if not late:
        return
    mark_ignored(parameter for _, parameter in late)
    warnings.warn(
        f"{len(late)} parameters ({late[0][0]}, ...) below the sharded {type(root).__name__} are in no unit: they were"
        " put in after sharding, so every rank trains its own copy and nothing averages their gradients; put them in"
        " before sharding, call fully_shard on the module that holds them, or give them to ignored_params",
        stacklevel=3,
    )


def warn_of_rewritten_weights(root: nn.Module) -> None:
    """Warn of embeddings below `root` whose forward writes to their weights: nothing of that reaches the shards."""
    if all(unit.memory.config.divide == 1 for unit in units_under(root, recurse=True)):  # one rank has all rows
        return
    for name, module in root.named_modules():
        limit = getattr(module, "max_norm", None)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and limit is not None:
            warnings.warn(
                f"the forward of {name!r} (max_norm={limit}) shortens rows of its weight, which changes the gathered"
                " copy of one rank and no shard; build it without max_norm, and shorten the rows of the sharded weight"
                f" after each step: under torch.no_grad(), weight.to_local().renorm_({module.norm_type}, 0, {limit})",
                stacklevel=3,
            )


@cache
def watch_optimizers() -> None:
    """Have every optimizer's step check its parameters, from now on: who only imports the engine is left alone."""
    register_optimizer_step_pre_hook(_before_step)


def warn_of_low_masters(
    params: Iterable[tuple[str, torch.Tensor]],  # names, and tensors of any shapes
    policy: MixedPrecisionPolicy,
) -> None:
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
    were_meta: list[tuple[str, nn.Module, str]] = []  # the buffer's whole name, its module and its attribute
    for prefix, part in below:
        for attribute, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                were_meta.append((prefix + attribute, part, attribute))
    yield
    unwritten: Unwritten = []
    for name, part, attribute in were_meta:
        buffer = part._buffers[attribute]
        if buffer is not None and not buffer.is_meta:
            unwritten.append((name, weakref.ref(buffer), _contents(buffer)))

    @compat.not_compiled
    def warn_once(module: nn.Module, _: Any) -> None:
        hook.remove()
        _warn_of_unwritten(unwritten, module.modules())

    if unwritten:
        hook = module.register_forward_pre_hook(warn_once, prepend=True)


def _contents(
    buffer: torch.Tensor,  # any shape
) -> tuple[int, int]:
    """Return what changes when somebody writes to `buffer`: its version, and a fingerprint of its bytes, since a
    collective (`dist.broadcast`) writes without raising the version. Tensors without bytes of their own have the
    version alone.
    """
    if buffer.layout is not torch.strided or buffer.is_quantized or type(buffer) is not torch.Tensor:
        return buffer._version, 0
    return buffer._version, int(fingerprint([buffer.detach().clone()]))


def _warn_of_unwritten(buffers: Unwritten, modules: Iterable[nn.Module]) -> None:
    """Warn of buffers that still hold what `to_empty` left in them."""
    shown = {id(buffer) for module in modules for buffer in module._buffers.values()}
    names = []
    for name, reference, contents in buffers:
        buffer = reference()
        if buffer is not None and id(buffer) in shown and _contents(buffer) == contents:
            names.append(name)
    if names:
        warnings.warn(
            f"buffers {', '.join(names)} hold garbage: to_empty gave them memory and nothing wrote to them since;"
            " compute them again (a reset_parameters, or register them from the configuration) or load them from a"
            " state dict",
            stacklevel=2,
        )
