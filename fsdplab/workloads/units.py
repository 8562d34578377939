"""Finds the units of a model that names none: its repeated blocks, or else its largest parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from fsdplab.common.words import did_you_mean

from .errors import ModelError

_LARGE = 0.1  # of the parameters: a child, or a second kind of block, that holds less has no unit of its own
_MOST = 0.5  # of the parameters: where the root's unit holds more, that is said
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Units(NamedTuple):
    """Modules that become a unit each, and one sentence on how they were chosen."""

    modules: list[nn.Module]
    sentence: str


def repeated_block(model: nn.Module) -> Units:
    """Return the instances of the class with most parameters that a ModuleList or a Sequential holds more than once,
    and of other such classes that hold a tenth of the parameters or more: a decoder's blocks, and an encoder's.

    A model that does not repeat has its largest children as units, or none, where it has no two large ones.
    """
    # class -> its instances by id, as two containers may hold the same module
    repeated: dict[type[nn.Module], dict[int, nn.Module]] = defaultdict(dict)
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for kind, group in _by_class(container.children()).items():
            if len(group) > 1 and not issubclass(kind, _WITHOUT_FORWARD):
                repeated[kind] |= {id(module): module for module in group}
    weights = {kind: parameters_in(group.values()) for kind, group in repeated.items()}
    if not any(weights.values()):
        return _largest_children(model)
    # of 12 blocks and 24 norms in lists the blocks hold most
    first, *others = sorted(weights, key=lambda kind: weights[kind], reverse=True)
    chosen = dict(repeated[first])
    for kind in others:
        # the layers inside of a block are no further units
        if weights[kind] >= _LARGE * parameters_in([model]) and _lie_apart(repeated[kind], chosen):
            chosen |= repeated[kind]
    # in the model's order
    modules = _alone(model, [module for module in model.modules() if id(module) in chosen])
    blocks = "block" if len(_by_class(modules)) < 2 else "blocks"
    counted = words_of(modules) or f"0 x {first.__name__}"
    return Units(modules, f"The units are the repeated {blocks}: {counted}{_rest_of(model, modules)}.")


def named_class(model: nn.Module, name: str) -> Units:
    """Return all modules of the class `name`; ModelError where there is none, with the classes that there are."""
    inner = [module for module in model.modules() if module is not model]
    of_the_class = [module for module in inner if type(module).__name__ == name]
    if not of_the_class:
        known = {type(module).__name__ for module in inner}
        raise ModelError(
            f"units is {name!r}{did_you_mean(name, known)}, but the model has no module of this class; expected auto,"
            f" model, linear or one of {', '.join(sorted(known))}"
        )
    return Units(_alone(model, of_the_class), f"The units are {len(of_the_class)} x {name}, as asked.")


def of_classes(model: nn.Module, classes: Sequence[type[nn.Module]]) -> Units:
    """Return all modules of these classes; ModelError where there is none."""
    modules = []
    for module in model.modules():
        if module is not model and isinstance(module, tuple(classes)):
            modules.append(module)
    names = " and ".join(kind.__name__ for kind in classes)
    if classes and not modules:
        raise ModelError(f"units has {names}, but the model has no module of such a class; leave units out")
    return Units(_alone(model, modules), f"The units are {len(modules)} x {names}, as given.")


def parameters_in(modules: Iterable[nn.Module]) -> int:
    """Count the parameters of several modules, each parameter once."""
    counts: dict[int, int] = {}
    for module in modules:
        for parameter in module.parameters():
            # by identity: a shared parameter is written twice and counted once
            counts[id(parameter)] = parameter.numel()
    return sum(counts.values())


def _lie_apart(some: dict[int, nn.Module], others: dict[int, nn.Module]) -> bool:
    """Return whether no module of `some` is inside of one of the others, or around one."""
    inside_some = {id(part) for module in some.values() for part in module.modules()}
    inside_others = {id(part) for module in others.values() for part in module.modules()}
    return not (some.keys() & inside_others or others.keys() & inside_some)


def _rest_of(model: nn.Module, modules: Sequence[nn.Module]) -> str:
    """Return what the root's unit holds, where that is more than half of the parameters: a large embedding, perhaps."""
    total = parameters_in([model])
    in_root = 1 - parameters_in(modules) / max(1, total)
    if in_root <= _MOST:
        return ""
    part = f"{100 * in_root:.3g} %"  # 99.7 % is not all
    return f"; {part} of the parameters are in none of them, and are gathered together as the root's unit"


def _largest_children(model: nn.Module) -> Units:
    """Return the children that hold a tenth of the parameters or more; none where there are fewer than two."""
    # of 1,000,000 parameters 100,000
    least = max(1, _LARGE * parameters_in([model]))
    children = [child for child in model.children() if not isinstance(child, _WITHOUT_FORWARD)]
    large = _alone(model, [child for child in children if parameters_in([child]) >= least])
    if len(large) < 2:
        return Units([], "The model repeats no block and has no two large parts, so all of it is one unit.")
    chosen = {id(module) for module in large}
    names = [name for name, child in model.named_children() if id(child) in chosen]
    return Units(large, f"The model repeats no block; the units are its largest parts: {', '.join(names)}.")


def _by_class(modules: Iterable[nn.Module]) -> dict[type[nn.Module], list[nn.Module]]:
    groups: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in modules:
        groups[type(module)].append(module)
    return groups


def _alone(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Return those whose parameters no module outside of them holds too.

    A parameter that is shared with the rest of the model belongs to the root's unit.
    """
    # parameter -> the modules that hold it themselves
    holders: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].add(id(module))
    alone = []
    for module in modules:
        inside = {id(part) for part in module.modules()}
        # a head that shares the embedding's weight has a holder outside: it stays in the root's unit
        if all(holders[id(parameter)] <= inside for parameter in module.parameters()):
            alone.append(module)
    return alone


def words_of(modules: Sequence[nn.Module]) -> str:
    """Count the modules by class: `12 x Block`; "" for none."""
    return ", ".join(f"{len(group)} x {kind.__name__}" for kind, group in _by_class(modules).items())


def count_words(model: nn.Module) -> str:
    """Count the parameters: `1,234 parameters, 200 of them frozen`."""
    total, frozen = 0, 0
    for parameter in model.parameters():
        total += parameter.numel()
        if not parameter.requires_grad:
            frozen += parameter.numel()
    if frozen:
        return f"{total:,} parameters, {frozen:,} of them frozen"
    return f"{total:,} parameters"
