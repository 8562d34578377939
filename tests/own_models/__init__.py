"""Ten models that are no language models, each a file as a user writes it: `model()`, `batch(at)`, `loss(model, batch)`
and `units`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fsdplab.workloads.workload import At

NAMES = (
    "convolutions", "unet", "vision_transformer", "lstm", "experts", "generator", "embeddings", "one_parameter", "lora",
    "two_towers",
)  # fmt: skip


@dataclass(frozen=True)
class OwnModel:
    """One of the files as a workload."""

    name: str

    @property
    def file(self) -> ModuleType:
        """The file as a module."""
        return importlib.import_module(f"tests.own_models.{self.name}")

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with torch.device(device):
            return self.file.model()

    def batch(self, at: At) -> Any:
        return self.file.batch(at)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.file.loss(model, batch)
