"""Low-rank adapters on a frozen base: few parameters have a gradient."""

import torch
from torch import nn
from torch.nn import functional


class Adapted(nn.Module):
    def __init__(self, before: int, after: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(before, after).requires_grad_(False)
        self.down = nn.Linear(before, rank, bias=False)
        self.up = nn.Linear(rank, after, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.wide = Adapted(width, 4 * width)
        self.narrow = Adapted(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(functional.silu(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(32, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.last = nn.Linear(width, 32).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def model():
    return Net()


def batch(at):
    return torch.randn(128, 32, generator=at.generator), torch.randn(128, 32, generator=at.generator)


def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


units = [Block]
