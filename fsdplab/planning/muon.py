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
    """The shapes of a block's parameters that Muon steps."""
    return [(each.shape[0], each.shape[1]) for each in parameters if each.is_matrix]


def state_bytes(shape: ModelShape, itemsize: int = 4) -> float:
    """Bytes of optimizer state an element of the model, on average: one moment for matrices, two for the rest."""
    inside = shape.layers * sum(rows * columns for rows, columns in matrices_of(shape.block))
    return itemsize * (2 - inside / shape.parameters)


@dataclass(frozen=True)
class OwnersStep:
    """One step of Muon over `ranks`, which hold equal parts of its matrices, or with `whole` all of them."""

    matrices: tuple[Matrix, ...]
    buckets: tuple[Bucket, ...]
    ranks: int
    whole: bool

    @classmethod
    def of(cls, shape: ModelShape, ranks: int, whole: bool) -> OwnersStep:
        """Of a model's blocks."""
        return cls.of_matrices(matrices_of(shape.block) * shape.layers, ranks, whole)

    @classmethod
    def of_matrices(cls, shapes: Sequence[tuple[int, int]], ranks: int, whole: bool) -> OwnersStep:
        """Of matrices in the order of the units that hold them."""
        return _step_of(tuple(shapes), ranks, whole)

    def traffic(self) -> list[Traffic]:
        """The collectives of the rank that sends most. An all-to-all's payload is what one rank holds of it."""
        if self.ranks == 1:
            return []
        if self.whole:
            return [self._gathered(bucket) for bucket in self.buckets]
        rank = max(range(self.ranks), key=lambda rank: sum(map(sum, self._sent(rank))))
        rows = []
        for bucket, both in zip(self.buckets, self._sent(rank)):
            elements = sum(self.matrices[number].numel for number in bucket.numbers)
            rows += [
                Traffic("optimizer", "all_to_all", 1, _BYTES * elements // self.ranks, _BYTES * sent, 0)
                for sent in both
            ]
        return rows

    def _sent(self, rank: int) -> list[tuple[int, int]]:
        return [elements_sent(self.matrices, bucket, rank) for bucket in self.buckets]

    def _gathered(self, bucket: Bucket) -> Traffic:
        """The all-gather of updates, each owner's padded to the longest."""
        owned = self._owned(bucket)
        total = _BYTES * self.ranks * max(owned)
        sent = _BYTES * (self.ranks - 1) * max(owned)
        return Traffic("optimizer", "all_gather", 1, total, sent, total - _BYTES * sum(owned))

    def _owned(self, bucket: Bucket) -> list[int]:
        owned = [0] * self.ranks
        for number, owner in zip(bucket.numbers, bucket.owners):
            owned[owner] += self.matrices[number].numel
        return owned

    @property
    def flops(self) -> float:
        """Of the rank that computes most."""
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
        sent = [sum(self.matrices[n].sent(0, owner) for n, owner in zip(b.numbers, b.owners)) for b in self.buckets]
        kept = (sent,) if self.whole or self.ranks == 1 else (there, sent)  # else what is sent is what is received
        moments = [(0, 0)]
        for now, bucket in enumerate(self.buckets):
            following = sum(each[now + 1] for each in kept if now + 1 < len(self.buckets))
            before = self._back(self.buckets[now - 1]) if now else (0, 0)
            around = there[now] + following + before[1]
            mine = [number for number, owner in zip(bucket.numbers, bucket.owners) if not owner]
            scratch = max((_scratch(self.matrices[number].shape) for number in mine), default=0)
            moments += [(around + before[0], there[now] + scratch), (around + sum(self._back(bucket)), there[now])]
        packed, other = max(moments, key=sum)
        return _BYTES * packed, _BYTES * other

    def _back(self, bucket: Bucket) -> tuple[int, int]:
        """Elements of updates that rank 0 packs, and that it receives."""
        owned = self._owned(bucket)
        if self.whole:
            return max(owned), self.ranks * max(owned)
        shapes = [self.matrices[number].part(0) for number in bucket.numbers]
        return owned[0], sum(rows * columns for rows, columns in shapes)


def _scratch(shape: tuple[int, int]) -> int:
    """Elements that an iteration of Newton-Schulz holds: the matrix before and after it, a Gram matrix and its square;
    and the matrix as it was put together.
    """
    short, long = sorted(shape)
    return 3 * short * long + 2 * short * short


@lru_cache(maxsize=64)
def _step_of(shapes: tuple[tuple[int, int], ...], ranks: int, whole: bool) -> OwnersStep:
    made = tuple(Matrix.replicated(each, ranks) if whole else Matrix.sharded(each, 0, ranks) for each in shapes)
    costs = [newton_schulz_flops(each) for each in shapes]
    return OwnersStep(made, tuple(buckets_of(made, costs, ranks, BUCKET_BYTES // _BYTES)), ranks, whole)
