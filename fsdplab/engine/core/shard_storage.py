"""Where a unit's slices live at rest: on the device that computes, unless an offload policy says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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

    def send(self, write: Callable[[torch.Tensor], object], target: torch.Tensor) -> Pending | None:
        """Have `write` fill `target`, on the device that computes, from slices at rest; what to wait for before reading
        `target`, or None where the current stream's order is enough.
        """
        write(target)
        return None

    def settle(self) -> None:
        """Return once `send` has read the slices at rest: the host may write to them."""

    def take(self, gradients: Iterable[torch.Tensor]) -> tuple[Iterable[torch.Tensor], Pending]:
        """Begin to move reduced gradients to where their parameters rest: where each will be, and what to wait for
        before reading them there.
        """
        return gradients, Pending(lambda: None)
