"""A mixture of experts: which of them a token goes to depends on its value, so shapes do too."""

import torch
from torch import nn
from torch.nn import functional


class Experts(nn.Module):
    def __init__(self, width: int = 128, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.norm(x)
        weight, chosen = self.router(read).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(read[rows]) * weight[rows, None])
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.last = nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def model():
    return Net()


def batch(at):
    return torch.randn(512, 32, generator=at.generator), torch.randint(8, (512,), generator=at.generator)


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


units = [Experts]
