"""Calls the hooks that users register on parameters with the gradients that they were written for.

registered                gradient
before sharding           of the whole parameter, on this rank, before it is reduced: what the hook was written for
after sharding            of the sharded parameter (a DTensor), once it is reduced and before it is added to `.grad`
post-accumulate, either   `.grad` of the sharded parameter, once the reduced gradient has been added

A hook on a parameter that is kept whole at rest (`no_shard`) follows the same table. So a hook that is linear in the
gradient (a mask, a factor) has the same effect as without sharding, whenever it was registered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch

Hook = Callable[[torch.Tensor], "torch.Tensor | None"]


class HooksOfWhole:
    """The hooks that a parameter had before it was sharded; the handles that its user holds still remove them."""

    def __init__(self, hooks: Mapping[int, Hook]) -> None:
        self._hooks = hooks

    @classmethod
    def of(
        cls,
        original: torch.Tensor,  # any shape: the parameter before sharding
        move: bool,
    ) -> HooksOfWhole:
        """Take the hooks of `original`. `move`: take them off it, since it stays a parameter of the model, whose own
        hooks see the reduced gradient.
        """
        hooks = original._backward_hooks
        if move and hooks is not None:
            original._backward_hooks = None
        return cls(OrderedDict() if hooks is None else hooks)

    def put_on(
        self,
        whole: torch.Tensor,  # any shape: the gathered form
        dtype: torch.dtype,  # of the parameter, in which the hooks expect gradients
    ) -> None:
        """Have autograd call them with gradients of `whole`, in the `dtype` that the parameter had."""
        if not self._hooks:
            return

        def call(
            gradient: torch.Tensor,  # of the shape and dtype of `whole`
        ) -> torch.Tensor:
            # In mixed precision the gradient is bfloat16, and the hooks were written for float32.
            changed = apply_hooks(self._hooks, gradient.to(dtype))
            return changed.to(gradient.dtype)

        whole.register_hook(call)


def apply_hooks(
    hooks: Mapping[int, Hook],
    gradient: torch.Tensor,  # any shape
) -> torch.Tensor:
    """Return what `hooks` make of `gradient`, one after the other; one that returns None leaves it as it is."""
    for hook in list(hooks.values()):
        changed = hook(gradient)
        if changed is None:
            continue
        if type(changed) is not type(gradient) or changed.shape != gradient.shape:
            raise RuntimeError(
                f"a hook on a sharded parameter returned a {type(changed).__name__} of shape {tuple(changed.shape)}"
                f" for a gradient that is a {type(gradient).__name__} of shape {tuple(gradient.shape)}; return one of"
                " the same type and shape"
            )
        gradient = changed
    return gradient
