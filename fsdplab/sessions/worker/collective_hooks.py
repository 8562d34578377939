"""Observes every collective when it is issued, by wrapping the functions of `torch.distributed`.

The engine's ledger is written when a collective is complete; a rank that hangs never completes it. So the report of a
hang, and the count of a learner's collectives, need the moment before. Calls of `dist.all_reduce(...)` are observed:
the lab's engine, PyTorch's FSDP, a learner's function. DDP's are not, as its reducer is C++.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Not in the list: batch_isend_irecv and the collectives on objects, which call these.
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "gather",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "send", "recv", "isend",
    "irecv",
)  # fmt: skip
# P2POp accepts only the functions of distributed_c10d, so these are replaced there too.
_ALSO_INSIDE = ("isend", "irecv")

OnIssue = Callable[[str, int], None]
_inside = threading.local()  # recv calls irecv: only the outermost is announced


@contextmanager
def watch_collectives(on_issue: OnIssue) -> Iterator[None]:
    """Call `on_issue(name, nbytes)` before every collective; nbytes is its payload: the larger of what goes in and what
    comes out.

    An all-gather of 4 floats on 2 ranks is `("all_gather_into_tensor", 32)`, a barrier `("barrier", 0)`.
    """
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, original in originals.items():
        _replace(name, _announcing(name, original, on_issue))
    try:
        yield
    finally:
        for name, original in originals.items():
            _replace(name, original)


def _replace(name: str, function: Callable[..., Any]) -> None:
    setattr(dist, name, function)
    if name in _ALSO_INSIDE:
        setattr(distributed_c10d, name, function)


def _announcing(name: str, original: Callable[..., Any], on_issue: OnIssue) -> Callable[..., Any]:
    @functools.wraps(original)
    def announced(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "collective", False):
            return original(*args, **kwargs)
        on_issue(name, max(map(_nbytes, (*args, *kwargs.values())), default=0))
        _inside.collective = True
        try:
            return original(*args, **kwargs)
        finally:
            _inside.collective = False

    announced.only_counts = True  # type: ignore[attr-defined]  # the engine need not make buffers for it
    return announced


def _nbytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(map(_nbytes, argument))
    return 0
