"""Slices at rest that peers on the same machine read where they lie.

A slice that is gathered as it is need not be copied to a slot first: it rests in shared memory, and an all-gather says
only where. Its owner may write to it again (the optimizer, a loaded checkpoint) once every peer has read it; the ends
of forwards and backwards wait for that (`Slots.settle`). The memory has no name; a peer maps it when it first reads it
and lets it go together with its own slice of the same unit.
"""

from __future__ import annotations

import mmap
import os
import weakref
from itertools import count

import torch

from fsdplab.engine.core.shard_storage import ShardStorage

_numbers = count(1)


class Arena(mmap.mmap):
    """Anonymous shared memory of this rank, and its peers' memory for the same slices as far as it was read."""

    place: tuple[int, int]  # what peers are told: the descriptor, and a number that tells a reused one
    theirs: dict[int, tuple[tuple[int, int], mmap.mmap]]

    def __new__(cls, nbytes: int) -> Arena:
        descriptor = os.memfd_create("fsdplab-slices")
        os.ftruncate(descriptor, nbytes)
        self = super().__new__(cls, descriptor, nbytes)
        self.place, self.theirs = (descriptor, next(_numbers)), {}
        weakref.finalize(self, os.close, descriptor)
        return self

    def of(self, peer: int, process: int, place: tuple[int, int]) -> torch.Tensor:
        """The bytes that the rank `peer`, process `process`, keeps at `place`."""
        known = self.theirs.get(peer)
        if known is None or known[0] != place:
            descriptor = os.open(f"/proc/{process}/fd/{place[0]}", os.O_RDWR)
            try:
                known = self.theirs[peer] = place, mmap.mmap(descriptor, len(self))
            finally:
                os.close(descriptor)
        return torch.frombuffer(known[1], dtype=torch.uint8)


class SharedStorage(ShardStorage):
    """Host memory that peers may map; `arena_under` finds what a slice rests in."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        if nbytes == 0:
            return super().make(nbytes, unit)
        arena = Arena(nbytes)
        made = torch.frombuffer(arena, dtype=torch.uint8)
        self._arenas[made.data_ptr()] = arena
        return made

    def arena_under(self, flat: torch.Tensor | None) -> Arena | None:
        """The arena whose bytes are exactly those of `flat`."""
        if flat is None:
            return None
        arena = self._arenas.get(flat.data_ptr())
        return arena if arena is not None and len(arena) == flat.nbytes else None
