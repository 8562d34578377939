"""What a run trains, as one value: a model, each rank's batches, the loss, and the modules that are its units.

Engines, the bench and the unsharded twin take a `Workload` and know nothing else of what they train; a preset on a text
(`OnText`) is one kind of it.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .models import block_types, build_model, loss_of
from .text import ByteText


@dataclass(frozen=True)
class At:
    """Which batch: that of one micro-batch of one rank's step, counted from 0, for a run with this seed."""

    step: int
    rank: int
    world_size: int
    micro_batch: int = 0
    seed: int = 0
    device: torch.device = torch.device("cpu")

    @property
    def generator(self) -> torch.Generator:
        """Random numbers of this batch alone, from the CPU: the same on every device and in every run."""
        text = f"{self.seed}/{self.step}/{self.rank}/{self.micro_batch}"
        return torch.Generator(device="cpu").manual_seed(zlib.crc32(text.encode()))


class Workload(ABC):
    """A model to train and what it is trained on; every rank makes an equal one."""

    name: str

    @abstractmethod
    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        """The model with values that `seed` alone sets; on the meta device its shapes."""

    @abstractmethod
    def batch(self, at: At) -> Any:
        """One rank's micro-batch, on the device of `at`; a function of `at` alone."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar; the forward goes through `model(...)`, so hooks run."""

    @abstractmethod
    def units(self, model: nn.Module) -> tuple[type[nn.Module], ...]:
        """The classes to shard, a unit for each instance."""

    def data(self) -> list[Tensor]:
        """Tensors that batches are cut from: memory that no training needs."""
        return []


@dataclass(frozen=True)
class OnText(Workload):
    """A preset that learns to say the next byte of a text: `batch_size` sequences of `sequence_length` tokens."""

    name: str
    text: ByteText
    batch_size: int
    sequence_length: int

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        return build_model(self.name, device=device, seed=seed)

    def batch(self, at: At) -> tuple[Tensor, Tensor]:
        """Tokens and targets: int64 [batch_size, sequence_length]."""
        drawn = self.text.batch(
            at.step, at.rank, at.world_size, self.batch_size, self.sequence_length, at.micro_batch, at.seed
        )
        return drawn[0].to(at.device), drawn[1].to(at.device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, *batch)

    def units(self, model: nn.Module) -> tuple[type[nn.Module], ...]:
        return block_types(model)

    def data(self) -> list[Tensor]:
        return [self.text.data]
