"""The ways to train that lessons 03 and 04 compare: each is a model, its optimizer, and what happens after backward.

`alone` sends nothing, `hook` and `finish` are data parallelism with the learner's functions, `zero1` and `zero2` shard
with them; `ddp` and `lab` are torch's DistributedDataParallel and this package's engine, as users call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdplab.engine import events
from fsdplab.teaching.core.collectives_log import collectives
from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.in_use import function_of, stub_of

RATES = {"adamw": 3e-3, "sgd": 0.1}
SHARDING = ("04.rows_of", "04.reduce_rows", "04.step_and_gather")
Pairs = list[tuple[nn.Parameter, nn.Parameter]]  # (a parameter, this rank's rows of it)


def make_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW (fused: the same bits for a shard as for a whole) or plain SGD."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=RATES[name], fused=True)
    return torch.optim.SGD(parameters, lr=RATES[name])


def _nothing() -> None:
    return None


@dataclass
class Watched:
    """One step seen gradient by gradient: bytes held, ready and sent so far; and what the lab's engine issued."""

    held: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    lab: list[events.Collective] = field(default_factory=list)


@dataclass
class Trainer:
    """A model in training: `reduce()` is called after backward, `step()` after that; `pairs` where the optimizer is
    sharded.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    reduce: Callable[[], Any] = _nothing
    update: Callable[[], Any] | None = None
    pairs: Pairs = field(default_factory=list)
    whole: nn.Module | None = None  # the model itself, where `model` is a wrapper
    log: WireLog | None = None
    watched: Watched = field(default_factory=Watched)

    def step(self) -> None:
        """The optimizer's step (the learner's own where there is one), then empty gradients."""
        (self.update or self.optimizer.step)()
        self.optimizer.zero_grad()
        for parameter in self.parameters.values():
            parameter.grad = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        return dict((self.whole or self.model).named_parameters())

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, as a plain tensor."""
        plain = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {name: own.full_tensor() if isinstance(own, DTensor) else own for name, own in plain.items()}

    def gradient_norms(self) -> dict[str, float]:
        """The norm of every unsharded gradient that is there."""
        found = {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        return {name: float(grad.norm()) for name, grad in found.items() if not isinstance(grad, DTensor)}

    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments on this rank; its step counters, a number a tensor, are left out."""
        kept = (value for state in self.optimizer.state.values() for name, value in state.items() if name != "step")
        local = (
            value.to_local() if isinstance(value, DTensor) else value for value in kept if isinstance(value, Tensor)
        )
        return sum(value.numel() * value.element_size() for value in local)

    def gradient_bytes(self) -> int:
        """Bytes of gradients held now: whole ones and shards."""
        owners = [*self.parameters.values(), *(mine for _, mine in self.pairs)]
        grads = [owner.grad for owner in owners if owner.grad is not None]
        return sum(grad.numel() * grad.element_size() for grad in grads)

    @contextmanager
    def watching(self, log: WireLog) -> Iterator[Watched]:
        """Watch one step: `note` records after every gradient while this is open."""
        with collectives() as issued:
            self.log, self.watched = log, Watched(lab=issued)
            yield self.watched

    def watch_before(self) -> None:
        """Hooks that run before the learner's: a gradient is ready, and whole."""
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(self._note_ready)

    def watch_after(self) -> None:
        """Hooks that run after the learner's: what is held and sent now."""
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(self._note_after)

    def _note_ready(self, parameter: Tensor) -> None:
        before = self.watched.ready[-1] if self.watched.ready else 0
        self.watched.ready.append(before + parameter.numel() * parameter.element_size())
        self.watched.held.append(self.gradient_bytes())

    def _note_after(self, parameter: Tensor) -> None:
        self.watched.held.append(self.gradient_bytes())
        assert self.log is not None, "a step is watched"
        self.watched.sent.append(sum(call.nbytes for call in self.log.calls))


def _plain(model: nn.Module, way: dict[str, Any]) -> Trainer:
    trainer = Trainer(model, make_optimizer(way["optimizer"], list(model.parameters())))
    trainer.watch_before()
    return trainer


def alone(model: nn.Module, way: dict[str, Any]) -> Trainer:
    """Every rank trains on its own text and sends nothing."""
    trainer = _plain(model, way)
    trainer.watch_after()
    return trainer


def hook(model: nn.Module, way: dict[str, Any]) -> Trainer:
    """The learner's hook on every parameter."""
    trainer, function = _plain(model, way), function_of(way["exercise"])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(function)
    trainer.watch_after()
    return trainer


def finish(model: nn.Module, way: dict[str, Any]) -> Trainer:
    """The learner's `function(model, *arguments)` (or the stub), and the `finish` that it returns after every
    backward.
    """
    trainer, function = _plain(model, way), (stub_of if way["stub"] else function_of)(way["exercise"])
    trainer.reduce = function(model, *way["arguments"])
    trainer.watch_after()
    return trainer


def zero1(model: nn.Module, way: dict[str, Any]) -> Trainer:
    """Backward to its end, then the learner's reduce_rows for every pair, then step_and_gather."""
    trainer, reduce_rows = _sharded(model, way)
    trainer.reduce = lambda: [reduce_rows(parameter, mine) for parameter, mine in trainer.pairs]
    trainer.watch_after()
    return trainer


def zero2(model: nn.Module, way: dict[str, Any]) -> Trainer:
    """The same two functions; reduce_rows is called by a hook, as soon as a gradient is whole."""
    trainer, reduce_rows = _sharded(model, way)

    def reduce_into(mine: nn.Parameter, whole: Tensor) -> None:  # a hook must return None, whatever reduce_rows returns
        reduce_rows(whole, mine)

    for parameter, mine in trainer.pairs:
        parameter.register_post_accumulate_grad_hook(partial(reduce_into, mine))
    trainer.watch_after()
    return trainer


def _sharded(model: nn.Module, way: dict[str, Any]) -> tuple[Trainer, Callable[..., Any]]:
    """Pairs (parameter, this rank's rows), an optimizer that knows the rows only, and the learner's reduce_rows."""
    rows_of, reduce_rows, step_and_gather = map(function_of, SHARDING)
    pairs = []
    for parameter in model.parameters():
        start, stop = rows_of(len(parameter), dist.get_rank(), dist.get_world_size())
        pairs.append((parameter, nn.Parameter(parameter.detach()[start:stop])))
    trainer = Trainer(model, make_optimizer(way["optimizer"], [mine for _, mine in pairs]), pairs=pairs)
    trainer.update = lambda: step_and_gather(pairs, trainer.optimizer)
    trainer.watch_before()
    return trainer, reduce_rows


def ddp(model: nn.Module, way: dict[str, Any]) -> Trainer:
    """torch's own DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    return Trainer(wrapped, make_optimizer(way["optimizer"], list(model.parameters())), whole=model)


def lab(model: nn.Module, way: dict[str, Any]) -> Trainer:
    """This package's engine, in the strategy that the way names."""
    from fsdplab.engine import shard_model

    sharded = shard_model(model, way["strategy"])
    return Trainer(sharded, make_optimizer(way["optimizer"], list(sharded.parameters())))


WAYS: dict[str, Callable[[nn.Module, dict[str, Any]], Trainer]] = {
    "alone": alone, "hook": hook, "finish": finish, "zero1": zero1, "zero2": zero2, "ddp": ddp, "lab": lab,
}  # fmt: skip
