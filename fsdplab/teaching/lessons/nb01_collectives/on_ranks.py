"""The part of lesson 01 that runs on the ranks: compose collectives, compare bits, time them.

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
from fsdplab.teaching.core.in_use import function_of


def watch(payload: dict[str, Any]) -> dict[str, list[float]]:
    """The values of this rank before and after each collective: `payload["block"]` elements a rank, small whole
    numbers.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    start = 10.0**rank * torch.arange(1, n * payload["block"] + 1)
    mine = reduce_scatter(start)
    whole, at_once = all_gather(mine), start.clone()
    dist.all_reduce(at_once)
    held = {"start": start, "reduce_scatter": mine, "all_gather": whole, "all_reduce": at_once}
    return {name: tensor.tolist() for name, tensor in held.items()}


def compose(payload: dict[str, Any]) -> dict[str, Any]:
    """Compare reduce-scatter + all-gather with all-reduce, bit by bit, on random floats of this rank."""
    elements = payload["elements"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    start = torch.randn(elements, generator=generator)
    in_two, at_once = all_gather(reduce_scatter(start)), start.clone()
    dist.all_reduce(at_once)
    differing = int((in_two.view(torch.int32) != at_once.view(torch.int32)).sum())
    return {"differing_bits_in": differing, "largest": float((in_two - at_once).abs().max())}


def sent(payload: dict[str, Any]) -> list[int]:
    """Bytes of each message that this rank sends while the learner's ring carries `payload["elements"]` floats a rank.

    `payload["exercise"]` is the ring's, `payload["workspace"]` the learner's folder.
    """
    open_course(workspace=payload["workspace"])
    ring_all_gather = function_of(payload["exercise"])
    with WireLog() as log:
        ring_all_gather(torch.full((payload["elements"],), float(dist.get_rank())))
    return [call.nbytes for call in log.calls if call.kind == "send"]


def reduce_scatter(whole: torch.Tensor) -> torch.Tensor:
    """This rank's block [m] of the sum over ranks of `whole` [n * m]."""
    return _exchange_and_sum(whole, torch.empty_like(whole), whole.new_empty(whole.numel() // dist.get_world_size()))


def _exchange_and_sum(whole: torch.Tensor, received: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    dist.all_to_all_single(received, whole)
    total.zero_()
    for part in received.view(dist.get_world_size(), -1):
        total += part
    return total


def all_gather(mine: torch.Tensor) -> torch.Tensor:
    """Every rank's block [m], joined in rank order: [n * m]."""
    whole = mine.new_empty(dist.get_world_size() * mine.numel())
    compat.all_gather_single(whole, mine)
    return whole


def timed(payload: dict[str, Any]) -> dict[str, dict[int, list[float]]]:
    """Seconds of every repeat on this rank, `[collective][bytes]`; ranks leave a barrier together before each."""
    found: dict[str, dict[int, list[float]]] = {}
    for nbytes in payload["sizes"]:
        for name, call in _calls(nbytes // 4).items():
            found.setdefault(name, {})[nbytes] = _repeats(call, payload["repeats"])
    return found


def _repeats(call: Callable[[], object], repeats: int) -> list[float]:
    call()  # the first call also opens connections
    took = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return took


def _calls(elements: int) -> dict[str, Callable[[], object]]:
    """Each collective on a payload of so many floats, with its buffers made."""
    whole, received = torch.ones(elements), torch.zeros(elements)
    mine = torch.zeros(elements // dist.get_world_size())
    return {
        "all_gather": lambda: compat.all_gather_single(received, mine),
        "reduce_scatter": lambda: _exchange_and_sum(whole, received, mine),
        "gloo's reduce_scatter": lambda: compat.reduce_scatter_single(mine, whole),
        "all_reduce": lambda: dist.all_reduce(received),
    }
