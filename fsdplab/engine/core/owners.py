"""Chooses the rank that computes with each whole matrix, and what is sent for it, for optimizers such as Muon.

Every matrix has one owner. The ranks send it their parts, it computes the update of the whole matrix, and sends every
rank its part of that. Owners are balanced by what computing costs, and matrices travel in buckets: one all-to-all there
and one back for each. On n ranks that hold equal parts of matrices of P elements together, a rank sends
P (n-1) / n^2 elements there and as many back on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, int]
BUCKET_BYTES = 8 << 20


@dataclass(frozen=True)
class Matrix:
    """A matrix of which the ranks hold parts: `lengths[rank]` rows or columns, along dimension `dim` (0 or 1).

    With `dim=None` every rank holds all of it: nothing travels to the owner, and all of the update comes back.

    >>> Matrix((4, 3), 0, (2, 2)).part(1)
    (2, 3)
    """

    shape: Shape
    dim: int | None
    lengths: tuple[int, ...]

    @classmethod
    def sharded(cls, shape: Shape, dim: int, ranks: int) -> Matrix:
        """Cut a matrix as `Shard(dim)` of a DTensor does: chunks of equal length; the last may be short or empty."""
        chunk = -(-shape[dim] // ranks)
        lengths = []  # of 5 rows on 4 ranks: 2, 2, 1, 0
        for rank in range(ranks):
            behind = shape[dim] - rank * chunk
            lengths.append(max(0, min(chunk, behind)))
        return cls(shape, dim, tuple(lengths))

    @classmethod
    def replicated(cls, shape: Shape, ranks: int) -> Matrix:
        """Describe a matrix that every rank holds."""
        return cls(shape, None, (0,) * ranks)

    @classmethod
    def held_by(cls, rank: int, shape: Shape, ranks: int) -> Matrix:
        """Describe a matrix that one rank holds alone, such as an expert of a stack that is cut between experts."""
        return cls(shape, 0, tuple(shape[0] if other == rank else 0 for other in range(ranks)))

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)

    @property
    def holder(self) -> int | None:
        """The rank that has all of it while no other has; None where there is no such rank."""
        if self.dim is None or self.shape[self.dim] not in self.lengths:
            return None
        return max(range(len(self.lengths)), key=self.lengths.__getitem__)

    def part(self, rank: int) -> Shape:
        """Return the shape of what `rank` gets back."""
        if self.dim is None:
            return self.shape
        rows, columns = self.shape
        if self.dim == 0:
            return self.lengths[rank], columns
        return rows, self.lengths[rank]

    def sent(self, rank: int, owner: int) -> int:
        """Return how many elements `rank` contributes for `owner` to compute with."""
        if self.dim is None:  # the owner has all of it
            return self.numel if rank == owner else 0
        return prod(self.part(rank))


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together: their numbers, and the owner of each."""

    numbers: tuple[int, ...]
    owners: tuple[int, ...]


def newton_schulz_flops(shape: Shape, steps: int = 5) -> float:
    """Floating-point operations to orthogonalise a matrix: two products with its Gram matrix a step, and its square.

    >>> newton_schulz_flops((2, 3), steps=1)
    64.0
    """
    # With X of short x long a step makes X X^T (2 s^2 l), its square (2 s^3) and their product with X (2 s^2 l).
    short, long = sorted(shape)
    return float(steps) * 2 * short * short * (2 * long + short)


def buckets_of(matrices: Sequence[Matrix], costs: Sequence[float], ranks: int, bucket_elements: int) -> list[Bucket]:
    """Owners, balanced by `costs`, the largest first; a bucket is full once it has `bucket_elements`, and a matrix for
    every rank, so that all of them compute.

    The largest matrix that is left goes to the rank that has least to do (Graham 1969: the slowest rank has at most 4/3
    of the best possible), so every bucket is balanced about as well as all of them. A matrix that one rank holds
    alone is its own.
    """
    load = [0.0] * ranks  # what each rank has to compute so far
    for matrix, cost in zip(matrices, costs):
        if matrix.holder is not None:
            load[matrix.holder] += cost
    buckets: list[Bucket] = []
    numbers: list[int] = []
    owners: list[int] = []
    elements = 0
    # Costs 5, 4, 3, 3 on 2 ranks: owners 0, 1, 1, 0, so the ranks compute 8 and 7.
    for number in sorted(range(len(matrices)), key=lambda number: -costs[number]):
        owner = matrices[number].holder
        if owner is None:
            owner = min(range(ranks), key=load.__getitem__)
            load[owner] += costs[number]
        numbers.append(number)
        owners.append(owner)
        elements += matrices[number].numel
        if elements >= bucket_elements and len(numbers) >= ranks:
            buckets.append(Bucket(tuple(numbers), tuple(owners)))
            numbers, owners, elements = [], [], 0
    if numbers:  # the last one may not be full
        buckets.append(Bucket(tuple(numbers), tuple(owners)))
    return buckets


def elements_sent(matrices: Sequence[Matrix], bucket: Bucket, rank: int) -> tuple[int, int]:
    """Return how many elements `rank` sends to other ranks for a bucket: to the owners, and back from it.

    >>> matrices = [Matrix.sharded((4, 4), 0, 2), Matrix.sharded((4, 4), 0, 2)]
    >>> elements_sent(matrices, Bucket((0, 1), (0, 1)), rank=0)
    (8, 8)
    """
    there = back = 0
    for number, owner in zip(bucket.numbers, bucket.owners):
        matrix = matrices[number]
        if owner != rank:
            there += matrix.sent(rank, owner)
        else:
            # The owner sends every other rank its part of the update.
            back += sum(prod(matrix.part(other)) for other in range(len(matrix.lengths)) if other != rank)
    return there, back
