"""The units of a model that names none: its repeated block, or else its largest parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from fsdplab.common.words import did_you_mean

from .errors import ModelError

_LARGE = 0.1  # of the parameters: a child that holds less is no unit of its own
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Units(NamedTuple):
    """Modules that become a unit each, and one sentence on how they were chosen."""

    modules: list[nn.Module]
    sentence: str


def repeated_block(model: nn.Module) -> Units:
    """The instances of the class with most parameters that a ModuleList or a Sequential holds more than once.

    A model that does not repeat has its largest children as units, or none, where it has no two large ones.
    """
    repeated: dict[type[nn.Module], dict[int, nn.Module]] = defaultdict(dict)
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for kind, group in _by_class(container.children()).items():
                if len(group) > 1 and not issubclass(kind, _WITHOUT_FORWARD):
                    repeated[kind] |= {id(module): module for module in group}
    weights = {kind: parameters_in(group.values()) for kind, group in repeated.items()}
    largest = max(weights.values(), default=0)
    if largest:
        kind = next(each for each, weight in weights.items() if weight == largest)
        modules = _alone(model, [*repeated[kind].values()])
        return Units(modules, f"The units are the repeated block: {len(modules)} x {kind.__name__}.")
    return _largest_children(model)


def named_class(model: nn.Module, name: str) -> Units:
    """All modules of the class `name`; ModelError where there is none, with the classes that there are."""
    found = [module for module in model.modules() if module is not model and type(module).__name__ == name]
    if not found:
        known = {type(module).__name__ for module in model.modules() if module is not model}
        raise ModelError(
            f"units is {name!r}{did_you_mean(name, known)}, but the model has no module of this class; expected auto,"
            f" model, linear or one of {', '.join(sorted(known))}"
        )
    return Units(_alone(model, found), f"The units are {len(found)} x {name}, as asked.")


def of_classes(model: nn.Module, classes: Sequence[type[nn.Module]]) -> Units:
    """All modules of these classes; ModelError where there is none."""
    found = [module for module in model.modules() if module is not model and isinstance(module, tuple(classes))]
    names = " and ".join(kind.__name__ for kind in classes)
    if classes and not found:
        raise ModelError(f"units has {names}, but the model has no module of such a class; leave units out")
    return Units(_alone(model, found), f"The units are {len(found)} x {names}, as given.")


def parameters_in(modules: Iterable[nn.Module]) -> int:
    """Parameters of several modules, each counted once."""
    return sum({id(each): each.numel() for module in modules for each in module.parameters()}.values())


def _largest_children(model: nn.Module) -> Units:
    whole = parameters_in([model])
    large = [
        child
        for child in model.children()
        if not isinstance(child, _WITHOUT_FORWARD) and parameters_in([child]) >= max(1, _LARGE * whole)
    ]
    large = _alone(model, large)
    if len(large) < 2:
        return Units([], "The model repeats no block and has no two large parts, so all of it is one unit.")
    names = [name for name, child in model.named_children() if any(child is each for each in large)]
    return Units(large, f"The model repeats no block; the units are its largest parts: {', '.join(names)}.")


def _by_class(modules: Iterable[nn.Module]) -> dict[type[nn.Module], list[nn.Module]]:
    groups: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in modules:
        groups[type(module)].append(module)
    return groups


def _alone(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Those whose parameters no module outside of them holds too: a shared parameter belongs to the root's unit."""
    holders: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].add(id(module))
    within = [{id(each) for each in module.modules()} for module in modules]
    return [
        module
        for module, inside in zip(modules, within)
        if all(holders[id(parameter)] <= inside for parameter in module.parameters())
    ]


def words_of(modules: Sequence[nn.Module]) -> str:
    """`12 x Block`; "" for none."""
    return ", ".join(f"{len(group)} x {kind.__name__}" for kind, group in _by_class(modules).items())


def count_words(model: nn.Module) -> str:
    """`1,234 parameters, 200 of them frozen`."""
    parameters = [*model.parameters()]
    frozen = sum(each.numel() for each in parameters if not each.requires_grad)
    words = f"{sum(each.numel() for each in parameters):,} parameters"
    return f"{words}, {frozen:,} of them frozen" if frozen else words
