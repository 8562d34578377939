"""Describes what a run trains as one value: a model, each rank's batches, the loss, and the modules that are units.

Engines, the bench and the unsharded twin take a `Task` and know nothing else of what they train. A preset on a text
(`OnText`) is one kind of it, a model of one's own (`fsdplab.Workload`) another.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .models import block_types, build_model, loss_of
from .text import ByteText
from .units import Units, of_classes


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
    def place(self) -> str:
        """`seed/step/rank/micro-batch`, which no other batch has."""
        return f"{self.seed}/{self.step}/{self.rank}/{self.micro_batch}"

    @property
    def generator(self) -> torch.Generator:
        """Random numbers of this batch alone, from the CPU: the same on every device and in every run."""
        # crc32: Python's own hash of a text is another in each process
        return torch.Generator(device="cpu").manual_seed(zlib.crc32(self.place.encode()))


class Drawn(NamedTuple):
    """A micro-batch and where it belongs, so that its loss draws the same random numbers wherever it is computed."""

    at: At
    content: Any


class Task(ABC):
    """A model to train and what it is trained on; every rank makes an equal one."""

    name: str
    built_on_meta: bool = False  # whether an engine may shard what `build("meta", seed)` returns, and `fill` it then
    draws: bool = False  # whether forward may draw random numbers or change buffers, as dropout and batch norm do

    @abstractmethod
    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        """Return the model with values that `seed` alone sets; on the meta device its shapes."""

    def fill(self, model: nn.Module, device: torch.device | str, seed: int) -> nn.Module:
        """Give parameters on the meta device, whole or sharded, memory on `device` and their values."""
        raise NotImplementedError(f"{self.name} is built whole")

    @abstractmethod
    def batch(self, at: At) -> Any:
        """Return one rank's micro-batch, on the device of `at`; a function of `at` alone."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch, a scalar; the forward goes through `model(...)`, so hooks run."""

    def units(self, model: nn.Module) -> tuple[type[nn.Module], ...]:
        """Return the classes to shard, a unit for each instance."""
        # each class once, in the order in which it is found
        return tuple(dict.fromkeys(type(module) for module in self.found_units(model).modules))

    def found_units(self, model: nn.Module) -> Units:
        """Return the modules to shard as a unit each, and a sentence on how they were chosen."""
        return of_classes(model, self.units(model))

    def drawn(self, at: At) -> Any:
        """Return one rank's micro-batch as `seeded_loss` takes it: a `Drawn` where the forward may draw."""
        return Drawn(at, self.batch(at)) if self.draws else self.batch(at)

    def seeded_loss(self, model: nn.Module, drawn: Any) -> Tensor:
        """Return the loss of what `drawn` returned: the same on a rank and in the twin, whatever its forward draws."""
        if not self.draws:
            return self.loss(model, drawn)
        # dropout draws from torch's global generators, which this seeds on every device
        torch.manual_seed(zlib.crc32(f"loss/{drawn.at.place}".encode()))
        return self.loss(model, drawn.content)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return the workload's own optimizer; None: the run's."""
        return None

    def tokens(self, drawn: Any) -> int | None:
        """Tokens in a micro-batch; None where it has none."""
        return None

    def samples(self, drawn: Any) -> int | None:
        """Samples in a micro-batch, where they are not tokens; None where that is unknown."""
        return None

    def notes(self, model: nn.Module) -> list[str]:
        """Sentences on the model for the record."""
        return []

    def data(self) -> list[Tensor]:
        """Tensors that batches are cut from: memory that no training needs."""
        return []


@dataclass(frozen=True)
class ReadsText(Task):
    """A model that learns to say the next byte of a text: `batch_size` sequences of `sequence_length` tokens."""

    name: str
    text: ByteText
    batch_size: int
    sequence_length: int

    def batch(self, at: At) -> tuple[Tensor, Tensor]:
        """Tokens and targets: int64 [batch_size, sequence_length]."""
        drawn = self.text.batch(
            at.step, at.rank, at.world_size, self.batch_size, self.sequence_length, at.micro_batch, at.seed
        )
        return drawn[0].to(at.device), drawn[1].to(at.device)

    def tokens(self, drawn: Any) -> int:
        tokens, _ = drawn.content if self.draws else drawn
        return tokens.numel()

    def data(self) -> list[Tensor]:
        return [self.text.data]


class OnText(ReadsText):
    """A preset on a text."""

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        return build_model(self.name, device=device, seed=seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, *batch)

    def units(self, model: nn.Module) -> tuple[type[nn.Module], ...]:
        return block_types(model)
