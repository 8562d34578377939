"""The memory of a unit's gathered parameters: it comes when a gather has arrived and goes with the reshard.

A gather that is still under way takes only what travels; the place where its forward will read is made when the bytes
are there to be moved in. The views through which they are moved are made once and kept: they name places in a storage,
whether it holds memory now or not.
"""

from __future__ import annotations

import torch

from fsdplab.engine import events
from fsdplab.engine.core.layout import Layout, Piece

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Gathered:
    """A buffer of `layout.whole_bytes` bytes on `device`, parameter after parameter; events call it `category`."""

    def __init__(
        self, layout: Layout, device: torch.device, unit: str = "", category: str = "gathered_parameters"
    ) -> None:
        self.layout, self.device = layout, device
        self._unit, self._category = unit, category
        self._tensor: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []
        self._of_rank: dict[int, list[torch.Tensor]] = {}

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as bytes, allocated."""
        if self._tensor is None:
            self._tensor = torch.zeros(self.layout.whole_bytes, dtype=torch.uint8, device=self.device)
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

    @property
    def exists(self) -> bool:
        """Whether it has ever been allocated."""
        return self._tensor is not None

    def free(self) -> None:
        """Give the memory back; parameters and views keep naming their places in it."""
        if self._tensor is not None:
            self._tensor.untyped_storage().resize_(0)

    def lay_out(self, layout: Layout) -> None:
        """Take another layout for the next gather, while nothing is in it."""
        if layout != self.layout:
            self._places, self._of_rank = [], {}
            if self._tensor is not None and layout.whole_bytes != self.layout.whole_bytes:
                self._tensor.untyped_storage().resize_(layout.whole_bytes)
                self._tensor.set_(self._tensor.untyped_storage(), 0, (layout.whole_bytes,), (1,))
                self.free()
        self.layout = layout

    def places(self) -> list[torch.Tensor]:
        """Where the pieces of all slices belong: [ranks, words of the piece] each, in the layout's order; gaps between
        slots are pieces too, whose places nobody reads.
        """
        whole = self.tensor
        if not self._places:  # assigned once it is complete: an interrupted wait is done again
            words = whole.view(WORDS[self.layout.word])
            self._places = [self._place(words, piece) for piece in self.layout.pieces]
        return self._places

    def _place(self, words: torch.Tensor, piece: Piece) -> torch.Tensor:
        shape = (self.layout.ranks, piece.words)
        if piece.slot is None:
            return words.new_empty(shape)
        start = piece.slot.whole_offset // self.layout.word
        return words[start : start + self.layout.ranks * piece.words].view(shape)

    def places_of(self, rank: int) -> list[torch.Tensor]:
        """As `places`, of the slice of one rank: [words of the piece] each."""
        whole = self.places()
        if rank not in self._of_rank:
            self._of_rank[rank] = [place[rank] for place in whole]
        return self._of_rank[rank]
