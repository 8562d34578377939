"""A U-Net: convolutions down and up again with group norm, the halves joined by concatenation; it removes noise."""

import torch
from torch import nn
from torch.nn import functional


class Pair(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, widths=(32, 64, 128)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Pair(before, after) for before, after in zip((3, *widths), widths))
        self.middle = Pair(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(below, width, 2, 2) for below, width in zip((widths[-1], *widths[:0:-1]), widths[::-1])
        )
        self.joined = nn.ModuleList(Pair(2 * width, width) for width in widths[::-1])
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for pair in self.down:
            x = pair(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, pair in zip(self.up, self.joined):
            x = pair(torch.cat([up(x), kept.pop()], 1))
        return self.last(x)


def model():
    return UNet()


def batch(at):
    clean = torch.randn(2, 3, 64, 64, generator=at.generator)
    return {"noisy": clean + 0.1 * torch.randn(clean.shape, generator=at.generator), "clean": clean}


def loss(model, batch):
    return functional.mse_loss(model(batch["noisy"]), batch["clean"])


units = [Pair]
