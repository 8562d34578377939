"""Two recurrent layers over a sequence of measurements; what comes next is predicted."""

import torch
from torch import nn
from torch.nn import functional


class Recurrent(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.last = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)[0]
        return self.last(x)


def model():
    return Recurrent()


def batch(at):
    return torch.randn(8, 65, 16, generator=at.generator)


def loss(model, batch):
    return functional.mse_loss(model(batch[:, :-1]), batch[:, 1:])


units = [nn.LSTM]
