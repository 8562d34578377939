"""Memory whose content nobody promises holds nonsense while a learner's function is checked.

`torch.empty` often returns zeros, and gloo's `reduce` leaves the sum on ranks that are promised nothing, so that a
wrong function is right by luck on one machine and wrong on the next. Here it is wrong on all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NUMBER = 113  # in place of a whole number


class NonsenseInNewMemory(TorchDispatchMode):
    """`with NonsenseInNewMemory(): torch.empty(2)` is [nan, nan]; the result of `dist.reduce` is nonsense on all ranks
    but `dst`.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace == "aten" and name in _EMPTY:
            _spoil(made)
        elif func.namespace == "c10d" and name == "reduce_":
            tensors, work = args[0], made[1] if isinstance(made, (list, tuple)) else made
            work.wait()
            if dist.get_rank() != args[3]:
                for tensor in tensors:
                    _spoil(tensor)
        return made


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.device.type != "meta" and tensor.numel():
        inexact = tensor.is_floating_point() or tensor.is_complex()
        tensor.fill_(float("nan") if inexact else tensor.dtype == torch.bool or _NUMBER)
