"""Reads from the optimizers' state which parameters have had no gradient since the job began, or only zeros.

An optimizer makes a parameter's state when it first steps it, and its averages of gradients are zeros as long as these
are. So the state tells of all steps, also of those before a checkpoint from which the job went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdplab.recording.gradients import local
from fsdplab.recording.subject import all_holding_state

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")  # parts of names that no program of a user's has


def untrained(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the bytes of all parameters that are stepped, by name those of the parameters of which this rank has seen
    no gradient but zeros, the names of the others, and whether bytes are of this rank's parts alone; {} where the
    optimizers keep no averages of gradients.
    """
    name_of = {id(parameter): _plain(name) for name, parameter in model.named_parameters()}
    all_bytes, without, others = 0, dict[str, int](), list[str]()
    for optimizer in all_holding_state(optimizers):
        state = getattr(optimizer, "state", None)
        trained = []
        for group in getattr(optimizer, "param_groups", ()):
            trained += [each for each in group["params"] if each.requires_grad and id(each) in name_of]
        # plain SGD has no state, and tells nothing
        if not isinstance(state, Mapping) or not any(_averages(state, each) for each in trained):
            continue
        for parameter in trained:
            # of a DTensor as a whole, of FSDP1's parameters this rank's part
            nbytes = parameter.numel() * parameter.element_size()
            all_bytes += nbytes
            if _has_had_a_gradient(state, parameter):
                others.append(name_of[id(parameter)])
            else:
                without[name_of[id(parameter)]] = nbytes
    has_parts = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    found = {"bytes": all_bytes, "without": without, "with": others, "of_parts": has_parts}
    return found if all_bytes else {}


def _averages(state: Mapping[Any, Any], parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return what the state holds of a parameter element by element."""
    held = state.get(parameter, {})
    averages = []
    for value in held.values() if isinstance(held, Mapping) else ():
        # a quantised state has no sums of its own
        is_plain = isinstance(value, torch.Tensor) and type(local(value)) is torch.Tensor
        if is_plain and value.is_floating_point() and value.shape == parameter.shape:
            averages.append(value)
    return averages


def _has_had_a_gradient(state: Mapping[Any, Any], parameter: torch.Tensor) -> bool:
    if parameter not in state or not state[parameter]:
        return False
    averages = _averages(state, parameter)
    # a state of another form, such as one of rows and columns, tells nothing
    return not averages or any(bool(local(each).any()) for each in averages)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def untrained_everywhere(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameters of which no rank has seen a gradient, since each rank holds a part of a sharded one; {}
    where a rank does not tell.
    """
    if not of_ranks or not all(of_ranks):
        return {}
    names = set.intersection(*(set(found["without"]) for found in of_ranks))
    together = sum if of_ranks[0]["of_parts"] else max
    trained = set[str]()
    for found in of_ranks:
        trained.update(found["with"], found["without"].keys() - names)
    # in the order of the model
    modules = dict.fromkeys(_outermost(name, trained) for name in of_ranks[0]["without"] if name in names)
    return {
        "untrained_parameters": len(names),
        "untrained_bytes": sum(together([found["without"][name] for found in of_ranks]) for name in names),
        "untrained_modules": list(modules),
        "stepped_bytes": together([found["bytes"] for found in of_ranks]),
    }


def _outermost(name: str, trained: Iterable[str]) -> str:
    """Return the outermost module around a parameter of which no parameter is trained, else the parameter itself."""
    parts = name.split(".")
    for number in range(1, len(parts)):
        module = ".".join(parts[:number])
        if not any(each.startswith(f"{module}.") for each in trained):
            return module
    return name
