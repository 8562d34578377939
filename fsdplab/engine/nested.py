"""Finds and replaces the tensors inside a forward's inputs and outputs: any nesting of lists, tuples, dicts,
dataclasses and registered pytree nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from operator import setitem
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of nested arguments or outputs, in the order of `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    parts, _ = _opened(tree)
    for part in parts:
        yield from tensors_in(part)


def map_tensors(
    tree: Any,
    function: Callable[[torch.Tensor], torch.Tensor],  # is given tensors of any shape
) -> Any:
    """Return `tree` with `function` of every tensor in its place.

    A container whose tensors all stay is returned itself: a module may write to a list that it was given.

    >>> map_tensors({"ids": [torch.ones(1)], "scale": 2.0}, lambda tensor: tensor + 1)
    {'ids': [tensor([2.])], 'scale': 2.0}
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    parts, rebuild = _opened(tree)
    mapped = [map_tensors(part, function) for part in parts]
    if all(new is old for new, old in zip(mapped, parts)):  # a leaf, which has no parts, too
        return tree
    return rebuild(mapped)


def _opened(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the parts of `tree`, and a function that makes one like it of other parts; a leaf has no parts."""
    kind = type(tree)

    # The usual kinds, without asking pytree.
    if kind is tuple or kind is list:
        return list(tree), kind
    if kind is dict:
        return list(tree.values()), lambda new: dict(zip(tree, new))  # the keys in their order

    # One level of what is registered with pytree, which returns a leaf as its own only child.
    children, shape = tree_flatten(tree, is_leaf=lambda part: part is not tree)
    if len(children) != 1 or children[0] is not tree:
        return children, lambda new: tree_unflatten(new, shape)

    # Subclasses and sets, which pytree takes for leaves.
    if isinstance(tree, tuple) and hasattr(tree, "_make"):  # of a named tuple
        return list(tree), tree._make
    if isinstance(tree, tuple | set):
        return list(tree), kind
    if isinstance(tree, dict):
        return list(tree.values()), lambda new: _changed(tree, zip(tree, new), setitem)
    if isinstance(tree, list):
        return list(tree), lambda new: _changed(tree, enumerate(new), setitem)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        parts = [getattr(tree, name) for name in names]
        set_field = object.__setattr__  # which sets fields of frozen ones too
        return parts, lambda new: _changed(tree, zip(names, new), set_field)
    return [], lambda _: tree


def _changed(tree: Any, items: Iterable[tuple[Any, Any]], put: Callable[[Any, Any, Any], None]) -> Any:
    """Return a copy with other items or fields: no class but its own can make one, and `__post_init__` is not run."""
    copied = copy.copy(tree)
    for key, value in items:
        put(copied, key, value)
    return copied


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Return `tree` with its floating-point tensors in `dtype`."""

    def cast(
        tensor: torch.Tensor,  # any shape
    ) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(tree, cast)
