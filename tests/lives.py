"""Lives of models in which everything goes wrong: seeded sequences of steps, exceptions, interruptions and new models.

A life is drawn from its seed alone, so every rank lives it alike, over gloo and over shared memory, and tells the same
numbers. Two things are drawn by each rank for itself: how long it keeps what it has dropped (an exception keeps the
frames of a forward, and with them a model), and where an interrupted step is interrupted. Interrupted steps come to
nothing and are left out over gloo, whose ranks cannot go on after one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.engine import MixedPrecisionPolicy, shard_model
from fsdplab.engine.module import bound
from fsdplab.engine.transport.shared_memory.slots import Word

WIDTH, BLOCKS, ACTIONS = 12, 4, 10
STRATEGIES = ("full_shard", "full_shard", "shard_grad_op", "zero1", "no_shard")


class Raised(Exception):
    """What the user's own code raises."""


class RaisesInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Raised("backward")


class Chain(nn.Module):
    """Blocks one after the other; raises before, behind or in the backward of the one that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 0 * index) for index in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        self.where: tuple[str, int] = ("", 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            self._raise("before", index)
            x = RaisesInBackward.apply(x) if self.where == ("backward", index) else x
            x = torch.tanh(block(x))
            self._raise("behind", index)
        return self.head(x)

    def _raise(self, kind: str, index: int) -> None:
        if self.where == (kind, index):
            raise Raised(f"{kind} {index}")


class Interrupt(TorchDispatchMode):
    """Raises KeyboardInterrupt at one operator, of those that run while `may`."""

    def __init__(self, at: int, may: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.left, self.may = at, may

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= self.may()
        if self.left == 0:
            self.left = -1
            raise KeyboardInterrupt
        return function(*args, **kwargs or {})


@contextmanager
def interrupted_wait(at: int, may: Callable[[], bool]) -> Iterator[None]:
    """KeyboardInterrupt in a sleep of this rank."""
    left, sleep = [at], Word.sleep

    def interrupted(self: Word, seen: int) -> None:
        left[0] -= may()
        if left[0] == 0:
            left[0] = -1
            raise KeyboardInterrupt
        sleep(self, seen)

    Word.sleep = interrupted
    try:
        yield
    finally:
        Word.sleep = sleep


class Life:
    """One model after the other, trained through whatever happens to it."""

    def __init__(self, transport: str, draw: random.Random, own: random.Random) -> None:
        self.transport, self.draw, self.own = transport, draw, own
        self.kept: list[list[Any]] = []  # [how many actions it stays, what]
        self.left = False  # whether a step has raised and nothing was done about it: then a forward comes next
        self.build()

    def build(self) -> None:
        """A new model in place of the last."""
        draw = self.draw
        torch.manual_seed(draw.randrange(1000))
        strategy, low = draw.choice(STRATEGIES), draw.random() < 0.3
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low and strategy != "no_shard" else None
        options = {} if policy is None else {"mp_policy": policy}
        self.model = shard_model(Chain(), strategy, prefetch=draw.randrange(4), transport=self.transport, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def data(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * self.draw.randrange(10**6) + dist.get_rank())
        return torch.randn(3, WIDTH, generator=generator)

    def act(self) -> Any:
        """One more action; what can be observed of it."""
        for each in self.kept:
            each[0] -= 1
        self.kept = [each for each in self.kept if each[0] > 0]
        actions = (
            self.train, self.train, self.evaluate, self.forward_only, self.accumulate, self.raise_in_step,
            self.raise_in_step, self.drop, self.by_hand, self.interrupt_by_hand, self.interrupt_step, self.write,
        )  # fmt: skip
        action, self.left = self.train if self.left else self.draw.choice(actions), False
        return action()

    def train(self) -> Any:
        return self._step(self.data())

    def _step(self, x: torch.Tensor) -> Any:
        loss = self.model(x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> Any:
        return self.model(self.data()).float().clone()

    def forward_only(self) -> Any:
        return self.model(self.data()).float().detach().clone()

    def accumulate(self) -> Any:
        self.model.set_requires_gradient_sync(False)
        self.model(self.data()).float().sum().backward()
        self.model.set_requires_gradient_sync(True)
        return self.train()

    @torch.no_grad()
    def write(self) -> Any:
        for parameter in self.optimizer.param_groups[0]["params"]:  # the slices, whatever the model shows
            parameter.mul_(0.9)

    def raise_in_step(self) -> Any:
        self.model.where = self.draw.choice(("before", "behind", "backward")), self.draw.randrange(BLOCKS)
        afterwards = self.draw.choice(("nothing", "reset", "build"))
        try:
            self.model(self.data()).float().square().mean().backward()
        except Raised as error:
            self._keep(error)
        self.model.where = ("", 0)
        self.model.zero_grad()
        self.left = afterwards == "nothing"
        if afterwards == "reset":
            self.model.reset_iter_state()
        if afterwards == "build":
            self._keep(self.model)
            self.build()

    def drop(self) -> Any:
        """A new model, where the old one has a gather under way."""
        for block in self.draw.sample(list(self.model.blocks), self.draw.randrange(3)):
            self._keep(block.unshard(async_op=True))
        self._keep(self.model)
        self.build()

    def _keep(self, what: Any) -> None:
        """Let go of it after as many actions as this rank has drawn for itself."""
        self.kept.append([self.own.randrange(5), what])
        if self.own.random() < 0.3:
            self.kept[-1] = [0, None]

    def by_hand(self) -> Any:
        block = self.draw.choice(self.model.blocks)
        handle = block.unshard(async_op=self.draw.random() < 0.5)
        if handle is not None:
            handle.wait()
        seen = block.weight.detach().float().clone()
        block.reshard()
        return seen

    def interrupt_by_hand(self) -> Any:
        """A wait for a gather, interrupted on some ranks; then once more."""
        block = self.draw.choice(self.model.blocks)
        handle = block.unshard(async_op=True)
        try:
            with Interrupt(self.own.randrange(6)):
                handle.wait()
        except KeyboardInterrupt:
            handle.wait()
        seen = block.weight.detach().float().clone()
        block.reshard()
        return seen

    def interrupt_step(self) -> Any:
        """A step that is interrupted somewhere on some ranks and comes to nothing; then one that does not."""
        lost, x, build = self.data(), self.data(), self.draw.random() < 0.5
        if self.transport == "shm":
            self._interrupted(lost)
        if build:
            self._keep(self.model)
            self.build()
        for _ in range(3):
            try:
                return self._step(x)
            except RuntimeError as error:
                self._recovered(error)
        raise AssertionError("three steps in a row have failed")

    def _interrupted(self, x: torch.Tensor) -> None:
        runtime = bound(self.model)
        unfinished = lambda: runtime.forward_of is not None or runtime.in_backward
        interrupt, most = self.own.choice(((Interrupt, 200), (interrupted_wait, 30)))
        at = self.own.choice((10**9, self.own.randrange(1, most)))
        try:
            with interrupt(at, unfinished):
                self.model(x).float().square().mean().backward()
        except (KeyboardInterrupt, RuntimeError) as error:
            self._recovered(error)
        self.model.zero_grad()

    def _recovered(self, error: BaseException) -> None:
        text = str(error)
        if isinstance(error, RuntimeError) and "reset_iter_state()" not in text and "out of step" not in text:
            raise error
        self._keep(error)
        self.model.reset_iter_state()
        self.model.zero_grad()


def lived(transport: str, seed: int, models: int) -> list[Any]:
    """What can be observed of a life of several models, and their parameters at its end."""
    draw, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    lives = [Life(transport, draw, own) for _ in range(models)]
    seen = [draw.choice(lives).act() for _ in range(ACTIONS)]
    for life in lives:
        seen.append([life.train(), *(getattr(p, "_local_tensor", p).detach().clone() for p in life.model.parameters())])
    return seen


def same_lives(seeds: list[int]) -> int:
    """Every life is the same over gloo and over shared memory; how many were lived."""
    for seed in seeds:
        expected, got = lived("gloo", seed, 1 + seed % 2), lived("shm", seed, 1 + seed % 2)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"seed {seed}: {text}")
    return len(seeds)
