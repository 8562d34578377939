"""The models that the checks of notebook 20 shard: blocks that tell a probe when they compute, and the unsharded twin.

A probe is called inside a block's forward and backward, so between the learner's hooks: it sees the parameters as the
block does, and what is in memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from fsdplab.workloads.twin import replay_gradients

Probe = Callable[[str, str, nn.Module], None]  # (phase, unit, module)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a net; in `checkpointed` and `frozen` are numbers of blocks."""

    blocks: int = 8
    width: int = 48
    hidden: int = 192
    words: int = 32
    checkpointed: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()


EVEN = Sizes()  # 4 divides every first dimension
PARTLY_FROZEN = Sizes(frozen=(2, 4))
UNEVEN = Sizes(blocks=6, width=45, hidden=181, words=9, checkpointed=(1, 3), frozen=(2, 4))  # 9 rows: 3, 3, 3, none
BATCH, LENGTH = 1, 4  # few, so that activations are small beside parameters


class _Told(torch.autograd.Function):
    """The identity, which tells the probe that a backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        # a view, so that the output is a tensor of its own
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return gradient, None


class Part(nn.Module):
    """A module that tells a probe of its forward and of its backward; learners set attributes of their own on it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.probed_as, self.probe = name, _nobody

    def _in_forward(self) -> None:
        """Tell the probe that this part computes."""
        self.probe("forward", self.probed_as, self)

    def _told(self, x: Tensor) -> Tensor:
        """Return x so that the probe is called when the backward passes it."""
        # without gradients no backward passes here
        if not x.requires_grad:
            return x
        return _Told.apply(x, lambda: self.probe("backward", self.probed_as, self))


def _nobody(phase: str, unit: str, module: nn.Module) -> None:
    """Do nothing, as the probe of a part that nobody watches."""
    return None


class Block(Part):
    """A norm and a feed-forward part, added to the input, [batch, length, width]."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        super().__init__(name)
        self.norm = nn.LayerNorm(sizes.width)
        self.up, self.down = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block of x, [batch, length, width]."""
        self._in_forward()
        return self._told(x + self.down(gelu(self.up(self.norm(x)))))


class Net(Part):
    """An embedding, blocks, a norm and a head: tokens [batch, length] to logits."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        super().__init__("root")
        torch.manual_seed(seed)
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleList(Block(f"block {number}", sizes) for number in range(sizes.blocks))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.words)
        for number in sizes.frozen:
            self.blocks[number].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, length, words] of tokens int64 [batch, length]."""
        self._in_forward()
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            # its forward runs a second time in the backward, with the parameters of that moment
            if number in self.sizes.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self._told(self.head(self.norm(x)))

    def told_to(self, probe: Probe) -> None:
        """Call `probe(phase, unit, module)` from now on."""
        for part in (self, *self.blocks):
            part.probe = probe

    @property
    def units(self) -> list[Part]:
        """Return the modules that `fully_shard` is called on, in that order: the blocks, then the root."""
        return [*self.blocks, self]

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block's parameters, unsharded."""
        return sum(parameter.numel() * 4 for parameter in self.blocks[0].parameters())


def batch(sizes: Sizes, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets) of a rank at a step, int64 [1, 4] each."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    # one word more than the tokens, since the targets are the words that follow
    drawn = torch.randint(0, sizes.words, (BATCH, LENGTH + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return cross_entropy(net(tokens).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class TwinStep:
    """One step of the twin: each rank's loss and gradients, the mean gradients, and the parameters after the step."""

    losses: list[float]
    of_rank: list[dict[str, Tensor]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def twin_steps(
    sizes: Sizes, ranks: int, steps: int, optimizer_of: Callable[[Any], torch.optim.Optimizer]
) -> list[TwinStep]:
    """Train on one process: each rank's batch in turn, gradients averaged in rank order."""
    net, done = Net(sizes), []
    optimizer = optimizer_of(net.parameters())
    for step in range(steps):
        batches = [batch(sizes, step, rank) for rank in range(ranks)]
        losses, gradients_of_rank = [], []
        for rank_batch in batches:
            # what this rank has before any reduction: a usual wrong answer
            loss, gradients = _alone(net, rank_batch)
            losses.append(loss)
            gradients_of_rank.append(gradients)
        replay_gradients(net, [[rank_batch] for rank_batch in batches], loss_of)
        mean_gradients = _gradients(net)
        optimizer.step()
        optimizer.zero_grad()
        parameters = {name: value.detach().clone() for name, value in net.named_parameters()}
        done.append(TwinStep(losses, gradients_of_rank, mean_gradients, parameters))
    return done


def _alone(net: Net, given: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of one rank's batch; nothing stays in the net."""
    loss = loss_of(net, *given)
    loss.backward()
    gradients = _gradients(net)
    net.zero_grad()
    return loss.item(), gradients


def _gradients(net: Net) -> dict[str, Tensor]:
    """Return copies of all gradients by name."""
    return {name: value.grad.clone() for name, value in net.named_parameters() if value.grad is not None}
