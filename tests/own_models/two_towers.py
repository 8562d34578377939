"""Two towers of different make, pictures and bags of words, whose results are compared with each other as CLIP's."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 256), *(Layer(256) for _ in range(3)))
        self.words = nn.Embedding(5000, 128)
        self.texts = nn.Sequential(*(Layer(128) for _ in range(3)), nn.Linear(128, 256))
        self.warmth = nn.Parameter(torch.ones(1))

    def forward(self, pictures: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen = functional.normalize(self.pictures(pictures), dim=-1)
        read = functional.normalize(self.texts(self.words(words).mean(1)), dim=-1)
        return self.warmth.exp() * seen @ read.t()


def model():
    return Towers()


def batch(at):
    pictures = torch.randn(64, 3, 32, 32, generator=at.generator)
    return {"pictures": pictures, "words": torch.randint(5000, (64, 20), generator=at.generator)}


def loss(model, batch):
    scores = model(**batch)
    which = torch.arange(len(scores))
    return (functional.cross_entropy(scores, which) + functional.cross_entropy(scores.t(), which)) / 2


units = [Layer]
