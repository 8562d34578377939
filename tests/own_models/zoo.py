"""What a stranger's model brings, a workload for each: dropout, buffers, several losses, tied and frozen parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdplab import Workload

WIDTH = 32


class Block(nn.Module):
    def __init__(self, drop: float = 0.0, norm: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.norm = norm(WIDTH) if norm else nn.Identity()
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(self.norm(x)).tanh())


def stack(**how):
    return nn.Sequential(*(Block(**how) for _ in range(3)), nn.Linear(WIDTH, WIDTH))


def numbers(at, many: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(many, WIDTH, generator=at.generator)
    return x, x.sin()


def squares(model, batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


class ChangesItsMean(nn.Module):
    """Its loss depends on a buffer that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.body(x - self.mean)


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, batch: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        return {"out": self.body(batch["x"]) * scale}


class Logits:
    """An output that nobody can look into but who knows it."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: Tensor) -> Logits:
        return Logits(self.body(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(50, WIDTH), stack()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(words)))


def words(at) -> Tensor:
    return torch.randint(0, 50, (4, 8), generator=at.generator)


def next_word(model, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def frozen() -> nn.Module:
    model = stack()
    model[0].requires_grad_(False)
    model[1].inner.bias.requires_grad_(False)
    return model


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.never = stack(), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.body(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        twice = Block()
        self.blocks = nn.ModuleList([twice, Block(), twice])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OddBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.register_buffer("phase", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) * 0.1))
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x * self.phase).real[:, self.order].masked_fill(~self.mask, 0))


class Branches(nn.Module):
    """Which part is used depends on the batch, and differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(x) if x.sum() > 0 else self.two(x))


class Plain(nn.Module):
    """Nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.write(self.read(x).relu()))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


def pictures(at) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 16, 16, generator=at.generator), torch.randint(0, 10, (4,), generator=at.generator)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def loud() -> nn.Module:
    print("downloading the weights")
    return stack()


def both(model, batch) -> dict[str, Tensor]:
    return {"squares": squares(model, batch), "size": model(batch[0]).abs().mean()}


ZOO = {
    "dropout": lambda: Workload(lambda: stack(drop=0.3), numbers, squares),
    "batch norm": lambda: Workload(lambda: stack(norm=nn.BatchNorm1d), numbers, squares),
    "a buffer that changes": lambda: Workload(ChangesItsMean, numbers, squares),
    "losses in a dict": lambda: Workload(stack, numbers, both),
    "losses in a tuple": lambda: Workload(stack, numbers, lambda model, batch: (*both(model, batch).values(),)),
    "inputs in a dict": lambda: Workload(
        TakesADict, lambda at: {"x": numbers(at)[0], "deep": {"y": numbers(at)[1]}},
        lambda model, batch: (model(batch, scale=0.5)["out"] - batch["deep"]["y"]).square().mean(),
    ),
    "tied weights": lambda: Workload(Tied, words, next_word),
    "frozen parts": lambda: Workload(frozen, numbers, squares),
    "unused parts": lambda: Workload(Unused, numbers, squares),
    "shared submodules": lambda: Workload(Shared, numbers, squares),
    "complex and whole buffers": lambda: Workload(OddBuffers, numbers, squares),
    "nothing repeats": lambda: Workload(Plain, numbers, squares),
    "one layer": lambda: Workload(lambda: nn.Linear(WIDTH, WIDTH), numbers, squares),
    "batches of other shapes": lambda: Workload(stack, lambda at: numbers(at, 4 + at.step + at.rank), squares),
    "a constructor that prints": lambda: Workload(loud, numbers, squares),
    "an optimizer": lambda: Workload(
        stack, numbers, squares, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ),
    "pictures": lambda: Workload(
        Pictures, pictures, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    ),
    "sequences": lambda: Workload(
        Sequences, lambda at: (torch.randn(2, 5, WIDTH, generator=at.generator), torch.zeros(2, 5, WIDTH)), squares
    ),
}  # fmt: skip
