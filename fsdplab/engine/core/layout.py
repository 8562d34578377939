"""Computes where every row of every parameter lies. Pure arithmetic, no tensors.

A unit's parameters are cut along dimension 0 as `torch.chunk` cuts: rank r of n holds rows [r*c, (r+1)*c) with
c = ceil(rows / n), so the last ranks may hold fewer rows, or none. Two orders of the same bytes matter:

    shard      one rank's chunks of all parameters, end to end, each padded to c rows: what travels
    whole      parameter after parameter, each n*c rows: what a forward reads (its first `rows` rows are real)

A gather turns n shards (rank-major) into the whole (parameter-major); a reduction goes the other way.

What travels has no gaps, so collectives have the sizes of PyTorch's. In memory every parameter begins at a multiple of
16 bytes or more: kernels read so much at a time, and are slow on other addresses or refuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

SHARDS_ALIGNED, WHOLE_ALIGNED = 16, 64  # bytes between the beginnings of parameters in memory


@dataclass(frozen=True)
class Slot:
    """One parameter's place: its shape, the rows a rank holds at most, and the bytes before it in a shard and in the
    whole.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    chunk: int
    offset: int
    whole_offset: int

    @property
    def rows(self) -> int:
        """Length of dimension 0."""
        return self.shape[0]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * self.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the parameter without padding."""
        return self.rows * self.row_bytes

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes that one rank's shard reserves for this parameter, padding included."""
        return self.chunk * self.row_bytes

    def span(self, rank: int) -> tuple[int, int]:
        """First and last-plus-one row that `rank` holds: 5 rows on 2 ranks give (0, 3) and (3, 5)."""
        return min(rank * self.chunk, self.rows), min((rank + 1) * self.chunk, self.rows)


@dataclass(frozen=True)
class Piece:
    """A part of a shard that moves as one, `words` long: a slot, or (None) the gap behind one."""

    slot: Slot | None
    words: int


@dataclass(frozen=True)
class Layout:
    """The slots of one unit over `ranks` ranks.

    Example: shapes (5, 4) and (3,) in float32 on 2 ranks reserve 3*16 + 2*4 = 56 bytes a shard, 112 in all, of which
    92 are parameters and 20 padding; the whole takes 192 bytes of memory.
    """

    slots: tuple[Slot, ...]
    ranks: int
    shard_bytes: int  # of one rank's shard, padding included
    whole_bytes: int  # of memory that the whole takes

    @classmethod
    def of(cls, entries: Sequence[tuple[str, Sequence[int], int]], ranks: int, alignment: int = 0) -> Layout:
        """Lay out (name, shape, itemsize) entries in order, slots aligned to `alignment` bytes (0: to the widest
        dtype).
        """
        alignment = alignment or max((itemsize for _, _, itemsize in entries), default=1)
        slots, offset, whole_offset = [], 0, 0
        for name, shape, itemsize in entries:
            if len(shape) == 0:
                raise ValueError(
                    f"parameter {name!r} is 0-dimensional and has no rows to shard; make it a tensor of shape (1,)"
                )
            # The rows that a rank holds at most: of 5 rows on 2 ranks the first has 3 and the last 2.
            slot = Slot(name, tuple(shape), itemsize, -(-shape[0] // ranks), offset, whole_offset)
            slots.append(slot)
            offset += _aligned(slot.chunk_bytes, alignment)
            # In the whole a parameter takes the chunks of all ranks, padding included.
            whole_offset += _aligned(ranks * slot.chunk_bytes, WHOLE_ALIGNED)
        return cls(tuple(slots), ranks, offset, whole_offset)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards: the logical size of a gather or a reduction."""
        return self.ranks * self.shard_bytes

    @cached_property
    def padding_bytes(self) -> int:
        """Bytes in `total_bytes` that hold no parameter."""
        return self.total_bytes - sum(slot.nbytes for slot in self.slots)

    def spans(self, rank: int) -> Sequence[tuple[int, int]]:
        """First and last-plus-one row that `rank` holds of each parameter."""
        if rank not in self._spans:
            self._spans[rank] = [slot.span(rank) for slot in self.slots]
        return self._spans[rank]

    @cached_property
    def _spans(self) -> dict[int, list[tuple[int, int]]]:
        return {}

    @cached_property
    def word(self) -> int:
        """Widest word (1, 2, 4 or 8 bytes) that divides every offset and chunk: copies move such words."""
        # Chunks of 48 and 6 bytes at 0 and 48: gcd(8, 48, 6) is 2, so copies move words of 2 bytes.
        divisor = 8
        for slot in self.slots:
            divisor = gcd(divisor, slot.offset, slot.chunk_bytes)
        return gcd(divisor, self.shard_bytes)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """A shard from its first word to its last: slots that hold anything, and the gaps behind them."""
        pieces = []
        # What a slot reserves ends where the next one begins, or with the shard; the rest of it is a gap.
        ends = [slot.offset for slot in self.slots[1:]] + [self.shard_bytes]
        for slot, end in zip(self.slots, ends):
            gap = end - slot.offset - slot.chunk_bytes
            pieces += [Piece(slot, slot.chunk_bytes // self.word), Piece(None, gap // self.word)]
        return tuple(piece for piece in pieces if piece.words)

    @cached_property
    def piece_words(self) -> list[int]:
        """The lengths of `pieces`."""
        return [piece.words for piece in self.pieces]


def _aligned(nbytes: int, alignment: int) -> int:
    """Round `nbytes` up to a multiple of `alignment`: 20 bytes to 32 for 16."""
    return -(-nbytes // alignment) * alignment
