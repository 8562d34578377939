"""Tensors in what a forward takes and gives: lists, tuples, dicts and their kinds, dataclasses, and what else `pytree`
knows, nested in each other.
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
    """Every tensor of nested arguments or outputs, those in dataclasses too, in the order of `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for each in _opened(tree)[0]:
            yield from tensors_in(each)


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with `function` of every tensor in its place. What holds no other tensor then stays the object that it is:
    a module may write to a list that it was given.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    held, rebuilt = _opened(tree)
    mapped = [map_tensors(each, function) for each in held]
    return tree if all(new is old for new, old in zip(mapped, held)) else rebuilt(mapped)


def _opened(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What `tree` holds, and what makes one like it of others; a leaf holds nothing."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return list(tree), kind
    if kind is dict:
        return list(tree.values()), lambda new: dict(zip(tree, new))
    children, shape = tree_flatten(tree, is_leaf=lambda each: each is not tree)  # one level
    if len(children) != 1 or children[0] is not tree:
        return children, lambda new: tree_unflatten(new, shape)
    if isinstance(tree, dict):
        return list(tree.values()), lambda new: _changed(tree, zip(tree, new), setitem)
    if isinstance(tree, list):
        return list(tree), lambda new: _changed(tree, enumerate(new), setitem)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [each.name for each in fields(tree) if hasattr(tree, each.name)]
        # `object`'s: frozen ones too
        return [getattr(tree, name) for name in names], lambda new: _changed(tree, zip(names, new), object.__setattr__)
    return [], lambda _: tree


def _changed(tree: Any, items: Iterable[tuple[Any, Any]], put: Callable[[Any, Any, Any], None]) -> Any:
    """A copy with other items or fields: only its own class can make one, and `__post_init__` is not run again."""
    copied = copy.copy(tree)
    for key, value in items:
        put(copied, key, value)
    return copied


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with floating-point tensors in `dtype`."""
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
