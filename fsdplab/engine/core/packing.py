"""Between parameters and what travels: gradients into slices, slices into whole parameters.

Copies, and no arithmetic. A gradient that is missing travels as negative zeros, which change no sum; `average.py` says
how ranks learn from a sum that nobody had one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdplab.engine.core.gathered import WORDS, Gathered
from fsdplab.engine.core.layout import Layout, Slot

Dtypes = Sequence[torch.dtype]


def unpack(staging: torch.Tensor, whole: Gathered) -> None:
    """Copy n slices (rank-major) into the whole."""
    slices = staging.view(WORDS[whole.layout.word]).view(whole.layout.ranks, -1)
    _spread(slices, 1, whole.layout, whole.places())


def unpack_from(rank: int, part: torch.Tensor, whole: Gathered) -> None:
    """Copy the slice of one rank to its rows in the whole."""
    _spread(part.view(WORDS[whole.layout.word]), 0, whole.layout, whole.places_of(rank))


def _spread(source: torch.Tensor, dim: int, layout: Layout, places: list[torch.Tensor]) -> None:
    if places:  # else nothing travels
        torch.split_with_sizes_copy(source, layout.piece_words, dim, out=places)


def cut_out(rank: int, whole: Gathered, part: torch.Tensor) -> None:
    """Copy the rows of one rank out of the whole into its slice."""
    layout = whole.layout
    pieces = part.view(WORDS[layout.word]).split_with_sizes(layout.piece_words)
    torch._foreach_copy_(list(pieces), whole.places_of(rank))


def same_order(one: Layout, other: Layout) -> bool:
    """Whether every element has the same index in a slice of both, each of one dtype."""
    ends = [*((a.offset, b.offset) for a, b in zip(one.slots, other.slots)), (one.slice_bytes, other.slice_bytes)]
    a, b = one.slots[0].itemsize, other.slots[0].itemsize
    return len(one.slots) == len(other.slots) and all(first * b == second * a for first, second in ends)


def chunks(slice_: torch.Tensor, layout: Layout, dtypes: Dtypes) -> list[torch.Tensor]:
    """The first slots of a slice (bytes), one a dtype, in that dtype; those that hold nothing are left out."""
    if len(set(dtypes)) == 1:
        size = dtypes[0].itemsize
        if layout.slice_bytes % size == 0 and len(dtypes) == len(layout.slots):
            lengths = [piece.words * layout.word // size for piece in layout.pieces]
            parts = slice_.view(dtypes[0]).split_with_sizes(lengths)
            return [part for part, piece in zip(parts, layout.pieces) if piece.slot is not None]
    filled = ((slot, dtype) for slot, dtype in zip(layout.slots, dtypes) if slot.chunk_bytes)
    return [slice_[slot.offset : slot.offset + slot.chunk_bytes].view(dtype) for slot, dtype in filled]


def mark_missing(part: torch.Tensor) -> None:
    """Fill the place of a gradient that is missing."""
    part.fill_(-0.0)


def pack(layout: Layout, gradients: Sequence[torch.Tensor | None], send: torch.Tensor) -> None:
    """Copy whole gradients into n slices (rank-major), casting to `send`'s dtype; padding becomes zeros, None negative
    zeros.
    """
    given = dict(zip(layout.slots, gradients, strict=True))
    gaps = [layout.word * piece.words // send.element_size() for piece in layout.pieces if piece.slot is None]
    zeros = iter(send.new_zeros(layout.ranks * sum(gaps)).split([layout.ranks * gap for gap in gaps]) if gaps else ())
    columns = []
    for piece in layout.pieces:
        if piece.slot is None:
            columns.append(next(zeros))
        else:
            gradient = given[piece.slot]
            columns.append(_missing(layout, piece.slot, send) if gradient is None else gradient)
    if len({column.dtype for column in columns}) > 1:
        columns = [column.to(send.dtype) for column in columns]
    if columns:
        torch._chunk_cat(columns, dim=0, num_chunks=layout.ranks, out=send.view(layout.ranks, -1))


def _missing(layout: Layout, slot: Slot, like: torch.Tensor) -> torch.Tensor:
    """Negative zeros for every row that travels, those that are padding too."""
    marked = like.new_empty(1)
    mark_missing(marked)
    return marked.expand(layout.ranks * slot.chunk, *slot.shape[1:])
