"""Where a unit's slices live at rest: on the device that computes, unless an offload policy says otherwise."""

from __future__ import annotations

import torch

from fsdplab.engine.core.pending import Pending


class ShardStorage:
    """Memory of one device for the slices at rest; other storages (host memory, files) override what differs."""

    away = False  # whether slices leave the memory that computes: then they are never views of what is gathered

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        """`nbytes` zeroed bytes that live as long as somebody holds them."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def will_read(self, flat: torch.Tensor) -> None:
        """A gather is about to read `flat`, which `make` returned."""

    def done_reading(self, flat: torch.Tensor) -> None:
        """The gather has read `flat`."""

    def bring(self, flat: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`flat` on the device that computes: itself if it lives there."""
        return flat if flat.device == device else flat.to(device, non_blocking=True)

    def begin_take(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to move a reduced gradient slice to where its parameter lives: where it will be, and what to wait for
        before reading it there.
        """
        return gradient if gradient.device == self.device else gradient.to(self.device), Pending(lambda: None)
