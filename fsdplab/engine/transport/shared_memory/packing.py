"""Gradients packed for one peer at a time: shared memory needs no buffer that holds the slices of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.packing import mark_missing


def pack_rank(
    layout: Layout, gradients: Sequence[torch.Tensor | None], rank: int, target: torch.Tensor, scale: float
) -> None:
    """Copy the rows of `rank` from whole gradients into its slice, `target`, times `scale`; padding becomes
    zeros, None negative zeros.
    """
    size = target.element_size()
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        column = target[slot.offset // size : (slot.offset + slot.chunk_bytes) // size]
        start, stop = slot.span(rank)
        if gradient is None:
            mark_missing(column)
            continue
        used = (stop - start) * slot.row_bytes // slot.itemsize
        if used:
            scaled_copy(gradient[start:stop].reshape(-1), column[:used], scale)
        if used < column.numel():
            column[used:].zero_()


def pack_range(
    layout: Layout, gradients: Sequence[torch.Tensor | None], first: int, target: torch.Tensor, scale: float
) -> None:
    """Copy elements [first, first + len(target)) of all gradients, end to end (one rank's layout), into `target`."""
    size, last = target.element_size(), first + target.numel()
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        start = slot.offset // size
        low, high = max(first, start), min(last, start + slot.chunk_bytes // size)
        if low >= high:
            continue
        place = target[low - first : high - first]
        if gradient is None:
            mark_missing(place)
        else:
            scaled_copy(gradient.reshape(-1)[low - start : high - start], place, scale)


def scaled_copy(source: torch.Tensor, target: torch.Tensor, scale: float) -> None:
    """`target = source * scale`, in one pass where the dtypes agree."""
    if scale == 1.0:
        target.copy_(source)
    elif source.dtype == target.dtype:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source).mul_(scale)


def power_of_two(divide: float) -> float:
    """`divide` where that is a power of two, which is exact before a sum and costs no pass; otherwise 1.

    >>> power_of_two(4.0), power_of_two(3.0)
    (4.0, 1.0)
    """
    return divide if math.frexp(divide)[0] == 0.5 else 1.0
