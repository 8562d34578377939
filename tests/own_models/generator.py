"""The generator of a GAN against a fixed critic: transposed convolutions from noise to a picture."""

import torch
from torch import nn
from torch.nn import functional


class Up(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )


class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256 * 4 * 4)
        self.up = nn.ModuleList([Up(256, 128), Up(128, 64), Up(64, 32)])
        self.last = nn.Conv2d(32, 3, 3, padding=1)
        self.critic = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(64 * 8 * 8, 1),
        )  # fmt: skip
        self.critic.requires_grad_(False)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        x = self.first(noise).view(-1, 256, 4, 4)
        for up in self.up:
            x = up(x)
        return self.critic(self.last(x).tanh())


def model():
    return Adversary()


def batch(at):
    return torch.randn(8, 64, generator=at.generator)


def loss(model, batch):
    return functional.softplus(-model(batch)).mean()


units = [Up]
