"""Allocates the buffers of a unit's parameters, stored and unsharded, and copies between them and what is sent.

The unsharded buffer takes memory when an all-gather has arrived and frees it with the reshard. An all-gather under way
takes only what is sent. The views through which parameters are copied into the buffer are made once and kept: they name
places in a storage, whether it holds memory now or not.

Copies, and no arithmetic. A gradient that is missing is sent as negative zeros, which change no sum; `average.py` says
how ranks learn from a sum that nobody had one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import torch

from fsdplab.engine import events
from fsdplab.engine.core.layout import Layout, Piece, Slot
from fsdplab.engine.core.pending import Pending

Dtypes = Sequence[torch.dtype]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ShardStorage:
    """Memory of one device for the shards at rest; other storages (host memory, files) override what differs."""

    away = False  # whether shards leave the memory that computes: then they are never views of what is gathered

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        """Return zeroed bytes, [nbytes] (uint8), that live as long as somebody holds them."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def will_read(
        self,
        flat: torch.Tensor,  # [shard_bytes] (uint8), as `make` returned it
    ) -> None:
        """Prepare for a gather that is about to read `flat`."""

    def done_reading(
        self,
        flat: torch.Tensor,  # [shard_bytes] (uint8), as `make` returned it
    ) -> None:
        """Release what only the gather needed, which has read `flat`."""

    def send(
        self,
        write: Callable[[torch.Tensor], object],  # fills the tensor that it is given
        target: torch.Tensor,  # [shard_bytes] (uint8), on the device that computes
    ) -> Pending:
        """Have `write` fill `target` from shards at rest; return what to wait for before reading `target`, which has an
        event unless that is done in the order of the current stream.
        """
        return Pending(lambda: None, write(target))

    def await_copies(self) -> None:
        """Return once `send` has read the shards at rest: the host may write to them."""

    def take(
        self,
        gradients: Iterable[torch.Tensor],  # any shapes: this rank's rows of each average
    ) -> tuple[Iterable[torch.Tensor], Pending]:
        """Begin to move reduced gradients to where their parameters rest; return where each will be, and what to wait
        for before reading them there.
        """
        return gradients, Pending(lambda: None)


class UnshardedBuffer:
    """A buffer of `layout.whole_bytes` bytes on `device`, parameter after parameter; events call it `category`."""

    def __init__(
        self, layout: Layout, device: torch.device, unit: str = "", category: str = "unsharded_parameters"
    ) -> None:
        if device.type == "cpu":
            _keep_free_memory()
        self.layout = layout
        self.device = device
        self._unit = unit
        self._category = category
        self._tensor: torch.Tensor | None = None  # made once; its storage is freed and allocated again
        self._places: list[torch.Tensor] = []  # of the pieces of all shards
        self._of_rank: dict[int, list[torch.Tensor]] = {}  # of the pieces of one rank's shard

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as bytes, [whole_bytes], allocated."""
        if self._tensor is None:
            self._tensor = torch.zeros(self.layout.whole_bytes, dtype=torch.uint8, device=self.device)
        # Freed by a reshard: the same storage takes memory again, so parameters and views are valid again.
        elif self._tensor.untyped_storage().nbytes() == 0:
            self._tensor.untyped_storage().resize_(self.layout.whole_bytes)
        else:
            return self._tensor
        events.tag(self._category, self._tensor, self._unit)
        return self._tensor

    def announce(self, unit: str) -> None:
        """Tag what it holds, for whoever subscribed since; from now on it is of `unit`, who gets its name late."""
        self._unit = unit
        if self._tensor is not None:
            events.tag(self._category, self._tensor, unit)

    def free(self) -> None:
        """Give the memory back; parameters and views keep naming their places in it."""
        if self._tensor is not None:
            self._tensor.untyped_storage().resize_(0)

    def lay_out(self, layout: Layout) -> None:
        """Take another layout for the next gather, while nothing is in it."""
        if layout == self.layout:
            return
        self._places, self._of_rank = [], {}
        if self._tensor is not None and layout.whole_bytes != self.layout.whole_bytes:
            # The tensor object stays, since parameters are views of its storage. It takes another length, for which
            # its storage must have memory for a moment.
            self._tensor.untyped_storage().resize_(layout.whole_bytes)
            self._tensor.set_(self._tensor.untyped_storage(), 0, (layout.whole_bytes,), (1,))
            self.free()
        self.layout = layout

    def places(self) -> list[torch.Tensor]:
        """Return where the pieces of all shards belong: [ranks, words of the piece] each, in the layout's order.

        Gaps between slots are pieces too, whose places nobody reads.
        """
        whole = self.tensor
        if not self._places:  # assigned once it is complete: an interrupted wait is done again
            words = whole.view(WORDS[self.layout.word])
            self._places = [self._place(words, piece) for piece in self.layout.pieces]
        return self._places

    def _place(
        self,
        words: torch.Tensor,  # [whole_bytes / word], the whole as words of the layout
        piece: Piece,
    ) -> torch.Tensor:
        """Return where one piece of all shards belongs, [ranks, words of the piece], in the `words` of the whole."""
        layout = self.layout
        shape = (layout.ranks, piece.words)
        if piece.slot is None:  # a gap, which is copied with the rest: somewhere where nobody looks
            return words.new_empty(shape)
        start = piece.slot.whole_offset // layout.word
        stop = start + layout.ranks * piece.words
        return words[start:stop].view(shape)

    def places_of(self, rank: int) -> list[torch.Tensor]:
        """Return where the pieces of the shard of one rank belong: [words of the piece] each."""
        places = self.places()
        if rank not in self._of_rank:
            self._of_rank[rank] = [place[rank] for place in places]
        return self._of_rank[rank]


@cache
def _keep_free_memory() -> None:
    """Have glibc keep up to 64 MB of free memory at the end of its heap, once a process: what it gives back takes a
    page fault for each 4 KiB to get again, unit after unit. It keeps twice the largest block, below 32 MiB, that was
    freed so far; nobody writes to this one, so it takes no memory.
    """
    bytes(31 << 20)  # of `calloc`, of which no profiler of tensors knows


def unpack(
    staging: torch.Tensor,  # [ranks * shard elements] in any dtype, rank after rank
    whole: UnshardedBuffer,
) -> None:
    """Copy all shards into the whole."""
    words = staging.view(WORDS[whole.layout.word])
    shards = words.view(whole.layout.ranks, -1)  # [ranks, words of a shard]
    _spread(shards, 1, whole.layout, whole.places())


def unpack_from(
    rank: int,
    part: torch.Tensor,  # [shard_bytes] (uint8)
    whole: UnshardedBuffer,
) -> None:
    """Copy the shard of one rank to its rows in the whole."""
    words = part.view(WORDS[whole.layout.word])
    _spread(words, 0, whole.layout, whole.places_of(rank))


def _spread(
    source: torch.Tensor,  # [words of a shard], or [ranks, words of a shard]
    dim: int,
    layout: Layout,
    places: list[torch.Tensor],  # [words of a piece] each, or [ranks, words of a piece]
) -> None:
    """Copy the pieces of `source`, words that follow each other along `dim`, to their places."""
    if places:  # else nothing travels
        torch.split_with_sizes_copy(source, layout.piece_words, dim, out=places)


def cut_out(
    rank: int,
    whole: UnshardedBuffer,
    part: torch.Tensor,  # [shard_bytes] (uint8), written in place
) -> None:
    """Copy the rows of one rank out of the whole into its shard."""
    layout = whole.layout
    words = part.view(WORDS[layout.word])
    # [words of the piece] each, the gaps between parameters too.
    pieces = words.split_with_sizes(layout.piece_words)
    torch._foreach_copy_(list(pieces), whole.places_of(rank))


_COLUMNS = 1 << 9  # words that have a weight each: a table of 4 kB
_ROWS = 1 << 4  # of so many words, mixed at once: what is mixed stays in a core's cache


@cache
def _weights(device: torch.device, count: int) -> torch.Tensor:
    """Return `count` random words, the same on every rank."""
    generator = torch.Generator().manual_seed(0x5EED + count)
    least, most = -(1 << 63), (1 << 63) - 1
    words = torch.randint(least, most, (count,), generator=generator)
    return words.to(device)


def fingerprint(
    tensors: Iterable[torch.Tensor],  # any shapes, contiguous, on one device
) -> torch.Tensor:
    """Return a number (int64, 0-d) that other values have with a probability below 1e-9.

    The tensors are contiguous and on one device. Their 64-bit words are mixed with their upper halves, weighted at
    random and summed modulo 2^64. Nothing is copied.
    """
    total: torch.Tensor | None = None
    for tensor in tensors:
        for words in _in_rows(tensor.reshape(-1).view(torch.uint8)):
            column_weights = _weights(words.device, _COLUMNS)[: words.shape[1]]
            row_weights = _weights(words.device, _ROWS)[: len(words)]
            # Upper bits reach the lower ones first: a product modulo 2^64 passes bits on to higher ones only.
            mixed = (words >> 33).bitwise_xor_(words).mul_(column_weights)
            part = (mixed.sum(1) * row_weights).sum()
            if total is not None:
                part = total * 0x9E3779B97F4A7C1 + part  # the factor makes the order of the parts count
            total = part
    if total is None:
        return torch.zeros((), dtype=torch.int64)
    return total


def _in_rows(
    values: torch.Tensor,  # [bytes] (uint8)
) -> Iterator[torch.Tensor]:
    """Yield `values` [bytes] as matrices of words, [up to _ROWS, up to _COLUMNS]; the last bytes are a word each."""
    # 5,003 bytes are 625 words and 3 bytes; of the words 512 fill a row, and 113 are a shorter one.
    in_words = len(values) // 8 * 8
    words = values[:in_words].view(torch.int64)
    in_rows = len(words) // _COLUMNS * _COLUMNS
    yield from words[:in_rows].view(-1, _COLUMNS).split(_ROWS)
    for rest in (words[in_rows:], values[in_words:].to(torch.int64)):
        if len(rest):
            yield rest.view(1, -1)


def same_order(one: Layout, other: Layout) -> bool:
    """Whether every element has the same index in a shard of both layouts, each of which has one dtype."""
    if len(one.slots) != len(other.slots):
        return False
    size, other_size = one.slots[0].itemsize, other.slots[0].itemsize
    for slot, other_slot in zip(one.slots, other.slots):
        # offset / size == other offset / other size, in whole numbers
        if slot.offset * other_size != other_slot.offset * size:
            return False
    return one.shard_bytes * other_size == other.shard_bytes * size


def chunks(
    shard: torch.Tensor,  # [shard_bytes] (uint8)
    layout: Layout,
    dtypes: Dtypes,  # of each slot
) -> list[torch.Tensor]:
    """Return the first slots of a shard, [elements] each, one a dtype and in that dtype; empty ones are left out."""
    in_one_dtype = len(set(dtypes)) == 1 and layout.shard_bytes % dtypes[0].itemsize == 0
    if in_one_dtype and len(dtypes) == len(layout.slots):  # one call cuts all of them
        lengths = [piece.words * layout.word // dtypes[0].itemsize for piece in layout.pieces]
        parts = shard.view(dtypes[0]).split_with_sizes(lengths)  # the gaps between slots too
        return [part for part, piece in zip(parts, layout.pieces) if piece.slot is not None]
    filled = []
    for slot, dtype in zip(layout.slots, dtypes):
        if slot.chunk_bytes:
            filled.append(shard[slot.offset : slot.offset + slot.chunk_bytes].view(dtype))
    return filled


def missing(
    like: torch.Tensor,  # any shape, of the dtype and on the device of what is sent
) -> torch.Tensor:
    """Return one element of what is sent in place of a gradient that is missing."""
    return like.new_full((1,), -0.0)


def pack(
    layout: Layout,
    gradients: Sequence[torch.Tensor | None],  # [rows, *others] each, whole; None: missing
    send: torch.Tensor,  # [ranks * shard elements], rank after rank
) -> None:
    """Copy unsharded gradients into `send`, and cast them to its dtype. Padding becomes zeros, None negative zeros."""
    gradient_of = dict(zip(layout.slots, gradients, strict=True))
    gaps = []  # elements between slots, on all ranks
    for piece in layout.pieces:
        if piece.slot is None:
            gaps.append(layout.ranks * piece.words * layout.word // send.element_size())
    zeros = iter(())
    if gaps:
        zeros = iter(send.new_zeros(sum(gaps)).split(gaps))
    # What one kernel cuts into as many chunks as there are ranks, and pads: of (5, 4) and (3,) on 2 ranks, chunk 0 is
    # 3 rows of 4 and 2 elements, chunk 1 is 2 rows and a row of zeros, an element and a zero.
    columns: list[torch.Tensor] = []
    for piece in layout.pieces:
        if piece.slot is None:
            columns.append(next(zeros))
            continue
        gradient = gradient_of[piece.slot]
        if gradient is None:
            gradient = _every_row(layout, piece.slot, missing(send))
        columns.append(gradient)
    if len({column.dtype for column in columns}) > 1:
        columns = [column.to(send.dtype) for column in columns]
    if columns:
        torch._chunk_cat(columns, dim=0, num_chunks=layout.ranks, out=send.view(layout.ranks, -1))


def _every_row(
    layout: Layout,
    slot: Slot,
    element: torch.Tensor,  # [1]
) -> torch.Tensor:
    """Return `element` in every row that is sent, those that are padding too."""
    return element.expand(layout.ranks * slot.chunk, *slot.shape[1:])


def pack_part(
    layout: Layout,
    gradients: Sequence[torch.Tensor | None],  # [rows, *others] each, whole; None: missing
    rank: int,
    target: torch.Tensor,  # [elements], written in place
    first: int = 0,  # the element of the shard at which `target` begins
) -> None:
    """Copy elements [first, first + len(target)) of the shard of `rank` out of unsharded gradients, in the dtype of
    `target`: so no buffer need hold the shards of all ranks. Padding becomes zeros, None negative zeros.
    """
    size = target.element_size()
    columns: list[torch.Tensor] = []  # what one kernel writes end to end
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        # Where the slot begins in `target`, and which of its elements lie there: with first=5 and a target of 4, a slot
        # of 6 elements from 2 on begins at -3, and its elements 3, 4 and 5 are the first three of `target`.
        begin = slot.offset // size - first
        length = slot.chunk_bytes // size
        low = max(0, -begin)
        high = min(length, len(target) - begin)
        if low < high:
            columns += _columns(slot, gradient, rank, slice(low, high), target)
    if len({column.dtype for column in columns}) > 1:
        columns = [column.to(target.dtype) for column in columns]
    if columns:
        torch._chunk_cat(columns, dim=0, num_chunks=1, out=target.view(1, -1))


def _columns(
    slot: Slot,
    gradient: torch.Tensor | None,  # [rows, *others], whole; None: missing
    rank: int,
    part: slice,  # of the elements that the shard reserves for this slot
    like: torch.Tensor,  # any shape, of the dtype and device of what is sent
) -> list[torch.Tensor]:
    """Return the elements `part` of what the shard of `rank` holds of one gradient, with the padding behind it."""
    if gradient is None:
        return [missing(like).expand(part.stop - part.start)]
    start, stop = slot.span(rank)
    rows = gradient[start:stop]
    filled = rows.numel()  # elements with values; those behind them are padding
    if part.start or part.stop < filled:
        rows = rows.reshape(-1)[part]
    columns = []
    if rows.numel():
        columns.append(rows)
    padding = part.stop - max(part.start, filled)
    if padding > 0:
        columns.append(like.new_zeros(padding))
    return columns
