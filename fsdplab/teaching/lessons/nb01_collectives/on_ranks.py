"""The part of lesson 01 that runs on the ranks: compose collectives, count and time them.

`reduce_scatter` here is the lab's own: an all-to-all, then each rank sums its block in rank order. gloo's own moves
twice the bytes (it is a whole all-reduce inside), which `timed` shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import compat
from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.functions_in_use import function_of


def watch(payload: dict[str, Any]) -> dict[str, list[float]]:
    """Return the values of this rank before and after each collective: small whole numbers.

    There are `payload["block"]` elements a rank.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # rank 0 has 1 2 3, rank 1 10 20 30: in a sum each digit is one rank's
    start = 10.0**rank * torch.arange(1, n * payload["block"] + 1)  # [n * block]
    block_sum = reduce_scatter(start)  # [block]
    whole = all_gather(block_sum)
    at_once = start.clone()
    dist.all_reduce(at_once)
    return {
        "start": start.tolist(),
        "reduce_scatter": block_sum.tolist(),
        "all_gather": whole.tolist(),
        "all_reduce": at_once.tolist(),
    }


def sent(payload: dict[str, Any]) -> list[int]:
    """Return the bytes of each message that this rank sends while the learner's ring carries floats.

    `payload["elements"]` are those of a rank, `payload["exercise"]` is the ring's, `payload["workspace"]` the learner's
    folder.
    """
    open_course(workspace=payload["workspace"])
    ring_all_gather = function_of(payload["exercise"])
    block = torch.full((payload["elements"],), float(dist.get_rank()))
    with WireLog() as log:
        ring_all_gather(block)
    return [call.nbytes for call in log.calls if call.kind == "send"]


def reduce_scatter(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's block [m] of the sum over ranks of `whole` [n * m]."""
    received = torch.empty_like(whole)
    total = whole.new_empty(whole.numel() // dist.get_world_size())
    return _exchange_and_sum(whole, received, total)


def _exchange_and_sum(whole: torch.Tensor, received: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Send each rank its block, and add up what arrives in rank order: whole and received [n * m], total [m]."""
    dist.all_to_all_single(received, whole)
    total.zero_()
    for part in received.view(dist.get_world_size(), -1):
        total += part
    return total


def all_gather(block: torch.Tensor) -> torch.Tensor:
    """Return every rank's block [m], joined in rank order: [n * m]."""
    whole = block.new_empty(dist.get_world_size() * block.numel())
    compat.all_gather_single(whole, block)
    return whole


def timed(payload: dict[str, Any]) -> dict[str, dict[int, list[float]]]:
    """Return the seconds of every repeat on this rank, `[collective][bytes]`.

    Ranks leave a barrier together before each.
    """
    seconds: dict[str, dict[int, list[float]]] = {}
    for nbytes in payload["sizes"]:
        for name, call in _calls(nbytes // 4).items():
            seconds.setdefault(name, {})[nbytes] = _repeats(call, payload["repeats"])
    return seconds


def _repeats(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of so many calls."""
    call()  # the first call also opens connections
    took = []
    for _ in range(repeats):
        # ranks that begin together, else the first one's time is waiting
        dist.barrier()
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return took


def _calls(elements: int) -> dict[str, Callable[[], object]]:
    """Return each collective on a payload of so many floats, with its buffers made."""
    whole, received = torch.ones(elements), torch.zeros(elements)
    block = torch.zeros(elements // dist.get_world_size())
    return {
        "all_gather": lambda: compat.all_gather_single(received, block),
        "reduce_scatter": lambda: _exchange_and_sum(whole, received, block),
        "gloo's reduce_scatter": lambda: compat.reduce_scatter_single(block, whole),
        "all_reduce": lambda: dist.all_reduce(received),
    }
