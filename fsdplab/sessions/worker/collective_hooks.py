"""Observes every collective when it is issued, by wrapping the functions of `torch.distributed`, and refuses one that
names a rank which is not there.

The engine's ledger is written when a collective is complete; a rank that hangs never completes it. So the report of a
hang, and the count of a learner's collectives, need the moment before. Calls of `dist.all_reduce(...)` are observed:
the lab's engine, PyTorch's FSDP, a learner's function. DDP's are not, as its reducer is C++.

Gloo ends the process, or waits for ever, where a message goes to rank 2 of a group of 2. All functions that take a
rank, those on objects and `P2POp` too, have it translated by one function of torch: the check is there.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdplab.engine import events

# Not in the list: batch_isend_irecv and the collectives on objects, which call these.
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
)
# P2POp accepts only the functions of distributed_c10d, so these are replaced there too.
_ALSO_INSIDE = ("isend", "irecv")

_TRANSLATES_RANKS = "_canonicalize_group_rank"

OnIssue = Callable[[str, int], None]
_inside = threading.local()  # recv calls irecv: only the outermost is announced


class NoSuchRank(ValueError):
    """A call named a rank that its group does not have."""


@contextmanager
def watch_collectives(on_issue: OnIssue) -> Iterator[None]:
    """Call `on_issue(name, nbytes)` before every collective; nbytes is its payload: the larger of what goes in and what
    comes out.

    An all-gather of 4 floats on 2 ranks is `("all_gather_into_tensor", 32)`, a barrier `("barrier", 0)`. Inside, a call
    that names a rank outside its group raises `NoSuchRank`.
    """
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    translate = getattr(distributed_c10d, _TRANSLATES_RANKS)
    setattr(distributed_c10d, _TRANSLATES_RANKS, _checking(translate))
    for name, original in originals.items():
        _replace(name, _announcing(name, original, on_issue))
    try:
        yield
    finally:
        setattr(distributed_c10d, _TRANSLATES_RANKS, translate)
        for name, original in originals.items():
            _replace(name, original)


def _checking(translate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(translate)
    def checked(group: Any, *args: Any, **kwargs: Any) -> Any:
        # torch translates between a rank of the world and one of a group; either may be asked for
        rank = translate(group, *args, **kwargs)
        of_world = kwargs.get("return_global", False)
        group = dist.group.WORLD if of_world else group
        if not isinstance(group, dist.ProcessGroup) or not isinstance(rank, int) or 0 <= rank < group.size():
            return rank
        # P2POp translates in its constructor, before any collective is called
        caller = getattr(_inside, "collective", "") or sys._getframe(1).f_code.co_name.replace("__init__", "P2POp")
        raise NoSuchRank(
            f"rank {group.rank()} named rank {rank} in {caller}, which does not exist: there are ranks 0 to"
            f" {group.size() - 1}; the rank after the last is 0, so write (rank + 1) % world_size and (rank - 1) %"
            " world_size for neighbours"
        )

    return checked


def _replace(name: str, function: Callable[..., Any]) -> None:
    setattr(dist, name, function)
    if name in _ALSO_INSIDE:
        setattr(distributed_c10d, name, function)


def _announcing(name: str, original: Callable[..., Any], on_issue: OnIssue) -> Callable[..., Any]:
    @functools.wraps(original)
    def announced(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "collective", ""):
            return original(*args, **kwargs)
        # an all-gather's largest argument is its output, a reduce-scatter's its input
        on_issue(name, max(map(_nbytes, (*args, *kwargs.values())), default=0))
        _inside.collective = name
        try:
            return original(*args, **kwargs)
        except NoSuchRank as error:
            raise error.with_traceback(None) from None  # the caller's line, without torch's own
        finally:
            _inside.collective = ""

    return events.counts_only(announced)


def _nbytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(map(_nbytes, argument))
    return 0
