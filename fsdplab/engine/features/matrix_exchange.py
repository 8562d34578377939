"""Carries the parts of matrices to their owners, and the parts of the results back: one all-to-all each way a bucket.

What is sent is packed into one buffer, in the order of the ranks that it goes to. Every rank makes the same plan from
shapes alone (`core/owners.py`), so nobody asks anybody how much comes. Where all ranks hold whole matrices nothing goes
to the owners, and the results are all-gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.owners import Bucket, Matrix, elements_sent
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import CollectiveLabel, Departure, Link, departure
from fsdplab.engine.transport.streams import HostStream, Job, comm_stream

LABEL = CollectiveLabel("optimizer", "optimizer")


@dataclass(frozen=True)
class Exchange:
    """Matrices of one dtype over one process group, on `device`, which the group's backend serves."""

    group: dist.ProcessGroup | None  # None: this process alone
    matrices: tuple[Matrix, ...]
    dtype: torch.dtype
    device: torch.device
    link: Link | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def to_owners(self, bucket: Bucket, parts: Iterable[torch.Tensor]) -> Arriving:
        """Send this rank's `parts` of the matrices of `bucket` to their owners; each is packed as it comes."""
        plan, mine = self._plan(bucket), self._owned(bucket)
        pieces = [(owner, matrix.sent(self.rank, owner)) for matrix, owner in plan]
        sizes = [sum(numel for owner, numel in pieces if owner == rank) for rank in range(self.ranks)]
        send = self._buffer(sum(sizes))
        for place, part in zip(_cut(send, sizes, pieces), parts):
            if place.numel():
                place.view(part.shape).copy_(part)
            del part  # so that one at a time takes memory
        comes = [sum(matrix.sent(rank, self.rank) for matrix in mine) for rank in range(self.ranks)]
        if all(matrix.dim is None for matrix, _ in plan):  # everything is here
            return Arriving(Pending(lambda: None), send, comes)
        return self._all_to_all(bucket, send, sizes, comes, there=True)

    def assemble(self, bucket: Bucket, arrived: Arriving) -> Iterator[torch.Tensor]:
        """The whole matrices that this rank owns, one by one in the bucket's order, once their parts are there."""
        arrived.work.wait()
        mine = self._owned(bucket)
        pieces = [(rank, matrix.sent(rank, self.rank)) for matrix in mine for rank in range(self.ranks)]
        places = iter(_cut(arrived.buffer, arrived.sizes, pieces))
        for matrix in mine:
            shapes = [matrix.shape if matrix.dim is None else matrix.part(rank) for rank in range(self.ranks)]
            parts = [place.view(shape) for shape, place in zip(shapes, places) if place.numel()]
            yield parts[0] if len(parts) == 1 else torch.cat(parts, matrix.dim or 0)

    def back(self, bucket: Bucket, results: Sequence[torch.Tensor]) -> Arriving:
        """Send every rank its parts of `results`, the updates of the matrices that this rank owns."""
        plan, mine = self._plan(bucket), self._owned(bucket)
        if self.ranks > 1 and all(matrix.dim is None for matrix, _ in plan):
            return self._all_gather(plan, results)
        sizes = [sum(prod(matrix.part(rank)) for matrix in mine) for rank in range(self.ranks)]
        send = self._buffer(sum(sizes))
        pieces = [_part_of(matrix, result, rank) for rank in range(self.ranks) for matrix, result in zip(mine, results)]
        for place, piece in zip(send.split([piece.numel() for piece in pieces]), pieces):
            if piece.numel():
                place.view(piece.shape).copy_(piece)
        comes = [
            sum(prod(matrix.part(self.rank)) for matrix, owner in plan if owner == rank) for rank in range(self.ranks)
        ]
        return self._all_to_all(bucket, send, sizes, comes, there=False)

    def parts_in(self, bucket: Bucket, arrived: Arriving) -> list[torch.Tensor]:
        """This rank's part of every update of the bucket, once they are there."""
        arrived.work.wait()
        shapes = [matrix.part(self.rank) for matrix, _ in self._plan(bucket)]
        places = _cut(arrived.buffer, arrived.sizes, list(zip(bucket.owners, map(prod, shapes))))
        return [place.view(shape) for place, shape in zip(places, shapes)]

    def _plan(self, bucket: Bucket) -> list[tuple[Matrix, int]]:
        """The matrices of a bucket, each with its owner."""
        return [(self.matrices[number], owner) for number, owner in zip(bucket.numbers, bucket.owners)]

    def _owned(self, bucket: Bucket) -> list[Matrix]:
        """Those that this rank owns."""
        return [matrix for matrix, owner in self._plan(bucket) if owner == self.rank]

    # ---- moving bytes

    def _buffer(self, numel: int) -> torch.Tensor:
        buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        events.tag("communication_buffers", buffer, LABEL.unit)
        return buffer

    def _all_to_all(
        self, bucket: Bucket, send: torch.Tensor, sizes: list[int], comes: list[int], there: bool
    ) -> Arriving:
        """`sizes[rank]` elements of `send` go to each rank, and `comes[rank]` come from it."""
        moved = [elements_sent(self.matrices, bucket, rank)[not there] for rank in range(self.ranks)]
        if not any(moved):
            return Arriving(Pending(lambda: None), send, comes)
        received, width = self._buffer(sum(comes)), self.dtype.itemsize

        def issue(asynchronous: bool) -> object:
            out, source = received.view(torch.uint8), send.view(torch.uint8)
            bytes_in, bytes_out = [count * width for count in comes], [count * width for count in sizes]
            with events.span("all_to_all", LABEL.unit):
                return dist.all_to_all_single(out, source, bytes_in, bytes_out, group=self.group, async_op=asynchronous)

        whole = sum(self.matrices[number].numel for number in bucket.numbers) * width
        leaves = departure(LABEL, "all_to_all", whole // self.ranks, moved[self.rank] * width, 0, self.dtype, self.link)
        return Arriving(self._run(issue, leaves, send, received), received, comes)

    def _all_gather(self, plan: Sequence[tuple[Matrix, int]], results: Sequence[torch.Tensor]) -> Arriving:
        """Gather the updates of all owners, each padded to the longest."""
        owned = [sum(matrix.numel for matrix, owner in plan if owner == rank) for rank in range(self.ranks)]
        longest, width = max(owned), self.dtype.itemsize
        send, received = self._buffer(longest), self._buffer(self.ranks * longest)
        torch.cat([result.reshape(-1) for result in results] or [send[:0]], out=send[: owned[self.rank]])

        def issue(asynchronous: bool) -> object:
            out, source = received.view(torch.uint8), send.view(torch.uint8)
            with events.span("all_gather", LABEL.unit):
                return compat.all_gather_single(out, source, group=self.group, async_op=asynchronous)

        padding = (self.ranks * longest - sum(owned)) * width
        sent = longest * (self.ranks - 1) * width
        leaves = departure(LABEL, "all_gather", self.ranks * longest * width, sent, padding, self.dtype, self.link)
        return Arriving(self._run(issue, leaves, send, received), received, [longest] * self.ranks)

    def _run(self, issue: Callable[[bool], object], leaves: Departure, *buffers: torch.Tensor) -> Pending:
        stream = comm_stream(self.device, "matrices") if compat.has_streams(self.device) else HostStream()
        return stream.run(Job(issue, lambda: None, leaves, buffers))


@dataclass
class Arriving:
    """Elements that are on their way into `buffer`, `sizes[rank]` from each rank, in that order."""

    work: Pending
    buffer: torch.Tensor
    sizes: list[int] = field(default_factory=list)


def _cut(buffer: torch.Tensor, sizes: Sequence[int], pieces: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The place of each piece (its rank, its elements) in a buffer with `sizes[rank]` elements of each rank in turn."""
    begins = [0, *accumulate(sizes)]
    places = []
    for rank, numel in pieces:
        places.append(buffer[begins[rank] : begins[rank] + numel])
        begins[rank] += numel
    return places


def _part_of(matrix: Matrix, whole: torch.Tensor, rank: int) -> torch.Tensor:
    if matrix.dim is None:
        return whole
    return whole.narrow(matrix.dim, sum(matrix.lengths[:rank]), matrix.lengths[rank])
