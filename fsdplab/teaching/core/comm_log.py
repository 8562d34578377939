"""A ledger for the learner's own code: the `torch.distributed` calls of a function, with bytes and peers.

The log uses Python's dispatcher, which sees every c10d operation, so it does not matter whether the code has
`dist.send`, `from torch.distributed import isend` or `batch_isend_irecv`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .exercise import Call

_KINDS = {
    "recv_": "recv",
    "recv_any_source_": "recv",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
}


_TO_ONE_RANK = {"reduce", "gather"}
_ANYTHING_ELSE = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "send"}


def to_one_rank_only(calls: Iterable[Call]) -> str:
    """Return the likely cause where only `dist.reduce` or `dist.gather` was called; else nothing.

    These leave a result on one rank alone.
    """
    kinds = set(kinds_of(calls))
    # with another collective beside it the result may reach all ranks
    if not kinds & _TO_ONE_RANK or kinds & _ANYTHING_ELSE:
        return ""
    used = (kinds & _TO_ONE_RANK).pop()
    return (
        f"`dist.{used}` leaves its result on one rank only (`dst`); here every rank needs one, so take a collective"
        " that gives all ranks something: all_reduce the whole sum, reduce_scatter its own rows, all_gather all rows"
    )


def kinds_of(calls: Iterable[Call]) -> list[str]:
    """Return what was called, each kind once, without barriers."""
    return list(dict.fromkeys(call.kind for call in calls if call.kind != "barrier"))


_ADDING = {"reduce_scatter", "all_reduce", "reduce"}
_CARRYING = {"all_to_all", "send", "recv"}  # unsharded gradients can travel by these and be added up afterwards


def nothing_added_up(calls: Iterable[Call]) -> str:
    """Return the likely cause where a sum over the ranks is wanted and no collective adds up; else nothing."""
    kinds = kinds_of(calls)
    if any(kind in _ADDING | _CARRYING for kind in kinds):
        return ""
    if not kinds:
        return "no collective was called, so nothing came from the other ranks: a reduce_scatter adds up over ranks"
    return f"only {' and '.join(kinds)} was called, which adds nothing up over the ranks: a reduce_scatter does"


_TIMES = {"all_reduce": 2, "recv": 0, "barrier": 0}


def bytes_sent(call: Call, ranks: int) -> float:
    """Return the bytes that one rank sends in a call, by the textbook.

    2 b (n-1)/n for an all_reduce of b bytes, b for a send, b (n-1)/n for another collective. A reduce_scatter's b is
    logged as its output, one block of n: `bytes_sent(Call("reduce_scatter", 4), 3) == 8`.
    """
    if call.kind == "send":
        return call.nbytes
    # logged are a reduce-scatter's 4 bytes of output: the whole is 12 bytes on 3 ranks, of which 8 are sent
    whole = call.nbytes * (ranks if call.kind == "reduce_scatter" else 1)
    return _TIMES.get(call.kind, 1) * whole * (ranks - 1) / ranks


class WireLog(TorchDispatchMode):
    """`with WireLog() as log: ...`, then `log.calls`: one `Call` an operation, in the order of issue.

    `nbytes` counts the first tensor argument: what is sent by `send`, received by `recv`, the output of a gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            # c10d::send(tensors, group, dst, tag), and recv_ with src at the same place
            peer = args[2] if name in ("send", "recv_") else None
            self.calls.append(Call(_KINDS.get(name, name), _bytes_of(args[0]), peer))
        return func(*args, **(kwargs or {}))


def _bytes_of(argument: object) -> int:
    """Return the bytes of all tensors in an argument."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(argument))


def _tensors(argument: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument, in nested lists too."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _tensors(item)
