"""Carries the parts of matrices to their owners, and the parts of the results back: one all-to-all each way a bucket.

What is sent is packed into one buffer, in the order of the ranks that it goes to. Every rank makes the same plan from
shapes alone (`core/owners.py`), so nobody asks anybody how much comes. Where all ranks hold whole matrices nothing goes
to the owners, and the results are all-gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.owners import Matrix, Shape
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import CollectiveLabel, Link, departure
from fsdplab.engine.transport.streams import HostStream, Job, comm_stream

LABEL = CollectiveLabel("optimizer", "optimizer")


class Piece(NamedTuple):
    """What rank `source` sends to rank `target` of one matrix, or of its update."""

    source: int
    target: int
    shape: Shape


class Arriving(NamedTuple):
    """The pieces that come to this rank, in the order of the matrices: to be read once `work` was waited for."""

    work: Pending
    pieces: list[torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """The matrices of one bucket, and the owner of each; `device` is one that the group's backend serves."""

    group: dist.ProcessGroup | None  # None: this process alone
    dtype: torch.dtype
    device: torch.device
    link: Link | None
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        """The number of ranks in the group."""
        return 1 if self.group is None else self.group.size()

    def to_owners(
        self,
        parts: Iterable[torch.Tensor],  # [rows, columns] of this rank's part of each matrix
    ) -> Arriving:
        """Send this rank's `parts` of the matrices to their owners; each is packed as it comes."""
        # The pieces of all ranks, also those between others: each rank picks its own, and sees whether anything moves.
        # A matrix (5, 4) of rank 1 on 2 ranks: Piece(0, 1, (3, 4)) and Piece(1, 1, (2, 4)), which stays where it is.
        pieces = []
        for matrix, owner in zip(self.matrices, self.owners):
            for rank in range(self.ranks):
                shape = (0, 0)
                if matrix.sent(rank, owner):
                    shape = matrix.part(rank)
                pieces.append(Piece(rank, owner, shape))
        return self._all_to_all(pieces, parts)

    def assemble(self, arrived: Arriving) -> Iterator[torch.Tensor]:
        """Yield the whole matrices, [rows, columns], that this rank owns, once their parts are there."""
        arrived.work.wait()
        pieces = iter(arrived.pieces)
        for matrix in self._owned():
            pieces_of_matrix = islice(pieces, self.ranks)  # one a rank
            parts = [piece for piece in pieces_of_matrix if piece.numel()]
            if len(parts) == 1:
                yield parts[0]  # a view of what was received: nothing is copied
            else:
                yield torch.cat(parts, matrix.dim or 0)

    def back(
        self,
        results: Sequence[torch.Tensor],  # [rows, columns] each, in the order of the matrices that this rank owns
    ) -> Arriving:
        """Send every rank its parts of `results`, the updates of the matrices that this rank owns."""
        pieces = []
        for matrix, owner in zip(self.matrices, self.owners):
            for rank in range(self.ranks):
                pieces.append(Piece(owner, rank, matrix.part(rank)))
        # Where every rank gets all of every update, all-to-all would send the same bytes to each of them.
        every_rank_gets_all = all(matrix.dim is None for matrix in self.matrices)
        if self.ranks > 1 and every_rank_gets_all:
            return self._all_gather(pieces, results)
        return self._all_to_all(pieces, self._parts_of(results))

    def _parts_of(
        self,
        results: Sequence[torch.Tensor],  # [rows, columns] each, one for each matrix that this rank owns
    ) -> Iterator[torch.Tensor]:
        """Yield the parts of all ranks of each result, one at a time."""
        for matrix, whole in zip(self._owned(), results):
            for rank in range(self.ranks):
                yield _part_of(matrix, whole, rank)

    def _owned(self) -> list[Matrix]:
        """Return the matrices that this rank owns."""
        return [matrix for matrix, owner in zip(self.matrices, self.owners) if owner == self.rank]

    # ---- moving bytes

    def _all_to_all(
        self,
        pieces: Sequence[Piece],
        values: Iterable[torch.Tensor],  # [rows, columns] of each piece of this rank
    ) -> Arriving:
        """Send `values`, one for each piece of this rank; those of empty pieces stay here."""
        # (rank, shape) of what this rank sends and receives, empty pieces too: they keep the order of the matrices.
        goes = [(piece.target, piece.shape) for piece in pieces if piece.source == self.rank]
        comes = [(piece.source, piece.shape) for piece in pieces if piece.target == self.rank]
        counts_out = self._counts(goes)
        counts_in = self._counts(comes)
        send = self._buffer(sum(counts_out))
        places = _cut(send, counts_out, goes)
        for place, value in zip(places, values):
            if place.numel():
                place.copy_(value)
            del value  # so that one at a time takes memory
        if not any(piece.source != piece.target and prod(piece.shape) for piece in pieces):
            # Nothing leaves its rank: all ranks see that in the same plan.
            return Arriving(Pending(lambda: None), _cut(send, counts_in, comes))

        received = self._buffer(sum(counts_in))
        width = self.dtype.itemsize  # the collective moves bytes
        bytes_in = [count * width for count in counts_in]
        bytes_out = [count * width for count in counts_out]

        def collective(
            out: torch.Tensor,  # [bytes] (uint8), rank after rank
            source: torch.Tensor,  # [bytes] (uint8), rank after rank
            **options: Any,
        ) -> object:
            return dist.all_to_all_single(out, source, bytes_in, bytes_out, **options)

        # Summed over the ranks, logical bytes are those of all matrices once.
        logical = sum(matrix.numel for matrix in self.matrices) * width // self.ranks
        wire = sum(bytes_out) - bytes_out[self.rank]  # what stays on this rank does not travel
        work = self._run("all_to_all", collective, received, send, logical, wire)
        return Arriving(work, _cut(received, counts_in, comes))

    def _all_gather(
        self,
        pieces: Sequence[Piece],
        results: Sequence[torch.Tensor],  # [rows, columns] each, one for each matrix that this rank owns
    ) -> Arriving:
        """Gather the updates of all owners, each padded to the longest."""
        comes = [(piece.source, piece.shape) for piece in pieces if piece.target == self.rank]
        counts = self._counts(comes)  # elements of the updates that each rank owns
        longest = max(counts)
        send = self._buffer(longest)
        received = self._buffer(self.ranks * longest)
        _pack(results, send[: counts[self.rank]])
        logical = received.nbytes
        # Each rank sends n - 1 buffers of that length, as in a ring.
        wire = received.nbytes - send.nbytes
        padding = logical - sum(counts) * self.dtype.itemsize
        work = self._run("all_gather", compat.all_gather_single, received, send, logical, wire, padding)
        return Arriving(work, _cut(received, [longest] * self.ranks, comes))

    def _run(
        self,
        kind: str,
        collective: Callable[..., object],
        received: torch.Tensor,  # [elements from all ranks], written by the collective
        send: torch.Tensor,  # [elements to all ranks]
        logical: int,
        wire: int,
        padding: int = 0,
    ) -> Pending:
        """Issue a collective from `send` into `received`; the sizes are bytes, for the ledger."""

        def issue(asynchronous: bool) -> object:
            with events.span(kind, LABEL.unit):
                out, source = received.view(torch.uint8), send.view(torch.uint8)
                return collective(out, source, group=self.group, async_op=asynchronous)

        leaves = departure(LABEL, kind, logical, wire, padding, self.dtype, self.link)
        job = Job(issue, lambda: None, leaves, (send, received))
        if compat.has_streams(self.device):
            return comm_stream(self.device, "matrices").run(job)
        return HostStream().run(job)

    def _buffer(self, numel: int) -> torch.Tensor:
        """Allocate a buffer of `numel` elements."""
        buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        events.tag("communication_buffers", buffer, LABEL.unit)
        return buffer

    def _counts(self, parts: Sequence[tuple[int, Shape]]) -> list[int]:
        """Return how many elements `parts`, (rank, shape), have of each rank."""
        counts = [0] * self.ranks
        for rank, shape in parts:
            counts[rank] += prod(shape)
        return counts


def _pack(
    results: Sequence[torch.Tensor],  # [rows, columns] each
    packed: torch.Tensor,  # [elements of all results], written in place
) -> None:
    """Write `results` one after another into `packed`, of one dimension."""
    # A transposed matrix is copied to become flat: here the copies end before the collective begins.
    flat = [result.reshape(-1) for result in results]
    if flat:
        torch.cat(flat, out=packed)


def _cut(
    buffer: torch.Tensor,  # [sum(counts)], rank after rank
    counts: Sequence[int],  # elements of each rank
    parts: Sequence[tuple[int, Shape]],  # (rank, shape), in the order of the matrices
) -> list[torch.Tensor]:
    """Return the place of each part, (rank, shape), in a buffer with `counts[rank]` elements of each rank in turn."""
    # Where the next part of each rank begins: counts (6, 4) begin at 0 and 6, and the last number is the end.
    offsets = [0, *accumulate(counts)]
    places = []
    for rank, shape in parts:
        numel = prod(shape)
        places.append(buffer[offsets[rank] : offsets[rank] + numel].view(shape))
        offsets[rank] += numel
    return places


def _part_of(
    matrix: Matrix,
    whole: torch.Tensor,  # [rows, columns]
    rank: int,
) -> torch.Tensor:
    """Return the rows or columns of `whole` that `rank` holds; all of it where every rank does."""
    if matrix.dim is None:
        return whole
    first = sum(matrix.lengths[:rank])  # rows or columns of the ranks before it
    return whole.narrow(matrix.dim, first, matrix.lengths[rank])
