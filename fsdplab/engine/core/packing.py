"""Between parameters and what travels: gradients into slices, slices into whole parameters.

Copies, and no arithmetic. A gradient that is missing travels as negative zeros: they change no sum, and a sum of
nothing else is one too, so that a reduction shows which parameters had a gradient on no rank at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fsdplab.engine.core.layout import Layout

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unpack(layout: Layout, staging: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy n slices (rank-major) into the whole (parameter-major bytes)."""
    for rank, part in enumerate(staging.view(layout.ranks, -1)):
        unpack_from(layout, rank, part, whole)


def unpack_from(layout: Layout, rank: int, part: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the slice of one rank to its rows in the whole (parameter-major bytes)."""
    word = layout.word
    source, target = part.view(_WORDS[word]), whole.view(_WORDS[word])
    for slot in layout.slots:
        offset, length = slot.offset // word, slot.chunk_bytes // word
        start = layout.ranks * offset + rank * length
        target[start : start + length].copy_(source[offset : offset + length])


def mark_missing(part: torch.Tensor) -> None:
    """Fill the place of a gradient that is missing."""
    (torch.view_as_real(part) if part.is_complex() else part).fill_(-0.0)


def is_missing(part: torch.Tensor) -> bool:
    """Whether no rank had a gradient for `part` of a sum; waits for the device.

    >>> is_missing(torch.tensor([-0.0, -0.0]) + torch.tensor([-0.0, -0.0])), is_missing(torch.tensor([-0.0, 0.0]))
    (True, False)
    """
    real = torch.view_as_real(part) if part.is_complex() else part
    return bool(((real == 0) & real.signbit()).all())


def pack(layout: Layout, gradients: Sequence[torch.Tensor | None], send: torch.Tensor) -> None:
    """Copy whole gradients into n slices (rank-major), casting to `send`'s dtype; padding becomes zeros, None is
    marked as missing.
    """
    n, size = layout.ranks, send.element_size()
    target = send.view(n, -1)  # [ranks, slice]
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        columns = target[:, slot.offset // size : (slot.offset + slot.chunk_bytes) // size]  # [ranks, chunk]
        if gradient is None:
            mark_missing(columns)
        elif slot.rows == n * slot.chunk:
            columns.copy_(gradient.reshape(n, -1))
        else:
            _pack_uneven(slot.rows, slot.chunk, gradient, columns)


def _pack_uneven(rows: int, chunk: int, gradient: torch.Tensor, columns: torch.Tensor) -> None:
    flat, row = gradient.reshape(-1), gradient.numel() // max(rows, 1)
    for rank, column in enumerate(columns):
        part = flat[min(rank * chunk, rows) * row : min((rank + 1) * chunk, rows) * row]
        column[: part.numel()].copy_(part)
        column[part.numel() :].zero_()


def pack_rank(
    layout: Layout, gradients: Sequence[torch.Tensor | None], rank: int, target: torch.Tensor, scale: float
) -> None:
    """Copy the rows of `rank` from whole gradients into its slice, `target`, times `scale`; padding becomes
    zeros, None is marked as missing.
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


def halves(divide: float) -> tuple[float, float]:
    """What to multiply with before a sum and to divide by after it: a power of two is exact before, and costs no pass.

    >>> halves(4.0), halves(3.0)
    ((0.25, 1.0), (1.0, 3.0))
    """
    return (1.0 / divide, 1.0) if math.frexp(divide)[0] == 0.5 else (1.0, divide)


def half(divide: float) -> float:
    """A power of two near the square root of `divide`: half of the division, exact in any precision."""
    return 2.0 ** round(math.log2(max(divide, 1.0)) / 2)
