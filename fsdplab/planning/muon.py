"""What Muon's step sends, holds and computes: the matrices of the blocks, each with one owner (engine/core/owners.py).

All other parameters are AdamW's. What travels is bfloat16: the momentum to the owners, the updates back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdplab.engine.core.owners import BUCKET_BYTES, Bucket, Matrix, buckets_of, elements_sent, newton_schulz_flops
from fsdplab.workloads.shapes import ModelShape, Parameter

from .traffic import Traffic

_BYTES = 2  # of an element that travels


def matrices_of(parameters: Sequence[Parameter]) -> list[tuple[int, int]]:
    """Return the shapes of a block's parameters that Muon steps."""
    return [(parameter.shape[0], parameter.shape[1]) for parameter in parameters if parameter.is_matrix]


def state_bytes(shape: ModelShape, itemsize: int = 4) -> float:
    """Return bytes of state an element of the model, on average: one moment for matrices, two for the rest."""
    in_a_block = sum(rows * columns for rows, columns in matrices_of(shape.block))
    in_matrices = shape.layers * in_a_block
    return itemsize * (2 - in_matrices / shape.parameters)


@dataclass(frozen=True)
class OwnersStep:
    """One step of Muon over `ranks`, which hold equal parts of its matrices, or with `whole` all of them."""

    matrices: tuple[Matrix, ...]
    buckets: tuple[Bucket, ...]
    ranks: int
    whole: bool

    @classmethod
    def of(cls, shape: ModelShape, ranks: int, whole: bool) -> OwnersStep:
        """Make the step of all blocks of a model."""
        return cls.of_matrices(matrices_of(shape.block) * shape.layers, ranks, whole)

    @classmethod
    def of_matrices(cls, shapes: Sequence[tuple[int, int]], ranks: int, whole: bool) -> OwnersStep:
        """Make the step of matrices in the order of the units that hold them."""
        return _step_of(tuple(shapes), ranks, whole)

    def traffic(self) -> list[Traffic]:
        """List the collectives of the rank that sends most. An all-to-all's payload is what one rank holds of it."""
        if self.ranks == 1:
            return []
        if self.whole:
            return [self._gathered(bucket) for bucket in self.buckets]
        busiest = max(range(self.ranks), key=self._elements_sent)
        rows = []
        for bucket, both_ways in zip(self.buckets, self._sent(busiest)):
            elements = sum(self.matrices[number].numel for number in bucket.numbers)
            payload = _BYTES * elements // self.ranks
            for sent in both_ways:  # the momentum to the owners, and the updates back
                rows.append(Traffic("optimizer", "all_to_all", 1, payload, _BYTES * sent, 0))
        return rows

    def _sent(self, rank: int) -> list[tuple[int, int]]:
        """Elements that a rank sends of each bucket: to the owners, and back."""
        return [elements_sent(self.matrices, bucket, rank) for bucket in self.buckets]

    def _elements_sent(self, rank: int) -> int:
        return sum(to_owners + back for to_owners, back in self._sent(rank))

    def _gathered(self, bucket: Bucket) -> Traffic:
        """Return the all-gather of updates, each owner's padded to the longest."""
        owned = self._owned(bucket)
        longest = max(owned)
        total = _BYTES * self.ranks * longest
        sent = _BYTES * (self.ranks - 1) * longest
        padding = total - _BYTES * sum(owned)
        return Traffic("optimizer", "all_gather", 1, total, sent, padding)

    def _owned(self, bucket: Bucket) -> list[int]:
        """Elements of a bucket that each rank owns."""
        owned = [0] * self.ranks
        for number, owner in zip(bucket.numbers, bucket.owners):
            owned[owner] += self.matrices[number].numel
        return owned

    @property
    def flops(self) -> float:
        """The arithmetic of the rank that computes most."""
        load = [0.0] * self.ranks
        for bucket in self.buckets:
            for number, owner in zip(bucket.numbers, bucket.owners):
                load[owner] += newton_schulz_flops(self.matrices[number].shape)
        return max(load)

    @property
    def held(self) -> tuple[int, int]:
        """Bytes on rank 0 at the fullest moment of the step: of packed matrices, and of others.

        While a bucket is computed, its matrices are there, the next are on their way, and so are the updates of those
        before; besides, the results so far, and what Newton-Schulz makes of the largest matrix.
        """
        there = [self._owned(bucket)[0] for bucket in self.buckets]
        on_their_way = [self._packed(bucket) for bucket in self.buckets]
        if not self.whole and self.ranks > 1:
            # parts of other ranks arrive beside what is sent; else what is sent is what is received
            on_their_way = [sent + received for sent, received in zip(on_their_way, there)]
        on_their_way.append(0)  # behind the last bucket
        moments = [(0, 0)]
        updates_before = (0, 0)
        for place, bucket in enumerate(self.buckets):
            packed_before, received_before = updates_before
            around = there[place] + on_their_way[place + 1] + received_before
            updates = self._back(bucket)
            moments.append((around + packed_before, there[place] + self._scratch(bucket)))
            moments.append((around + sum(updates), there[place]))
            updates_before = updates
        packed, other = max(moments, key=sum)
        return _BYTES * packed, _BYTES * other

    def _packed(self, bucket: Bucket) -> int:
        """Elements of momentum that rank 0 packs for the owners of a bucket."""
        return sum(self.matrices[number].sent(0, owner) for number, owner in zip(bucket.numbers, bucket.owners))

    def _scratch(self, bucket: Bucket) -> int:
        """Elements that Newton-Schulz makes of the largest matrix of a bucket that rank 0 owns."""
        largest = 0
        for number, owner in zip(bucket.numbers, bucket.owners):
            if owner == 0:
                largest = max(largest, _scratch(self.matrices[number].shape))
        return largest

    def _back(self, bucket: Bucket) -> tuple[int, int]:
        """Elements of updates that rank 0 packs, and that it receives."""
        owned = self._owned(bucket)
        if self.whole:
            return max(owned), self.ranks * max(owned)
        received = 0
        for number in bucket.numbers:
            rows, columns = self.matrices[number].part(0)
            received += rows * columns
        return owned[0], received


def _scratch(shape: tuple[int, int]) -> int:
    """Elements that an iteration of Newton-Schulz holds: the matrix before and after it, a Gram matrix and its square;
    and the matrix as it was put together.
    """
    short, long = sorted(shape)
    return 3 * short * long + 2 * short * short


@lru_cache(maxsize=64)
def _step_of(shapes: tuple[tuple[int, int], ...], ranks: int, whole: bool) -> OwnersStep:
    if whole:
        matrices = tuple(Matrix.replicated(shape, ranks) for shape in shapes)
    else:
        matrices = tuple(Matrix.sharded(shape, 0, ranks) for shape in shapes)
    costs = [newton_schulz_flops(shape) for shape in shapes]
    buckets = buckets_of(matrices, costs, ranks, BUCKET_BYTES // _BYTES)
    return OwnersStep(matrices, tuple(buckets), ranks, whole)
