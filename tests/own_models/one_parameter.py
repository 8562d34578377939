"""One matrix holds nearly all parameters; nothing repeats, so there is one unit beside the root."""

import torch
from torch import nn
from torch.nn import functional


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(0.01 * torch.randn(2048, 1536))
        self.scale = nn.Parameter(torch.ones(1536))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.matrix) * self.scale


def model():
    return nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), Wide(), nn.Tanh(), nn.Linear(1536, 4))


def batch(at):
    return torch.randn(64, 64, generator=at.generator), torch.randn(64, 4, generator=at.generator)


def loss(model, batch):
    return functional.huber_loss(model(batch[0]), batch[1])


units = [Wide]
