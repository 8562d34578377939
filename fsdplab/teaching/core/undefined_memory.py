"""Memory whose content nobody promises holds nonsense while a learner's function is checked.

`torch.empty` often returns zeros, and gloo's `reduce` leaves the sum on ranks that are promised nothing, so that a
wrong function is right by luck on one machine and wrong on the next. Here it is wrong on all of them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NUMBER = 113  # in place of a whole number
_resize = torch.UntypedStorage.resize_


class UndefinedMemory(TorchDispatchMode):
    """`with UndefinedMemory(): torch.empty(2)` is [nan, nan]; the result of `dist.reduce` is nonsense on all ranks
    but `dst`, and so is what a storage gains by `resize_`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resize_)  # no operation that a mode sees

    def __enter__(self) -> UndefinedMemory:
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace == "aten" and name in _EMPTY:
            _spoil(made)
        elif func.namespace == "c10d" and name == "reduce_":
            tensors, root = args[0], args[3]
            # reduce writes in the background: what is filled before it ends would be written over
            work = made[1] if isinstance(made, (list, tuple)) else made
            work.wait()
            if dist.get_rank() != root:
                for tensor in tensors:
                    _spoil(tensor)
        return made


def _spoil(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, or with True or a number that nobody expects where its dtype has no NaN."""
    if tensor.device.type == "meta" or not tensor.numel():
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(_NUMBER)


def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Resize a storage as torch does, and fill what it gains with nonsense."""
    before = storage.nbytes()
    returned = _resize(storage, nbytes)
    if nbytes > before and storage.device.type != "meta":
        torch.empty(0, dtype=torch.uint8).set_(storage)[before:].fill_(0xFF)  # NaN, or -1
    return returned
