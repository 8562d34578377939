"""The part of lessons 03 and 04 that runs on the ranks: train a GPT in several ways, and beside its unsharded twin.

`train` takes real text and a real GPT through the ways one after the other on the same ranks, from the same weights. A
way is a model, its optimizer, and what happens after backward: `hook` and `finish` are data
parallelism with the learner's functions, `zero1` and `zero2` shard with them; `ddp` and `lab` are torch's
DistributedDataParallel and this package's engine, as users call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdplab.engine import shard_model
from fsdplab.engine.compat import local_of
from fsdplab.teaching.core.collectives_log import collectives
from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.functions_in_use import function_of, stub_of
from fsdplab.workloads import ByteText, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

RATES = {"adamw": 3e-3, "sgd": 0.1}
SHARDING = ("04.rows_of", "04.reduce_rows", "04.step_and_gather")
NOISE = 1e-6  # a gradient with a smaller norm is rounding
Way = dict[str, Any]


def make_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW (fused: the same bits for a shard as for a whole) or plain SGD."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=RATES[name], fused=True)
    return torch.optim.SGD(parameters, lr=RATES[name])


# ---- the ways to train


@dataclass
class Trainer:
    """A model in training: `reduce()` is called after backward, `update()` in place of the optimizer's step.

    `pairs` has (a parameter, this rank's rows of it) where the optimizer is sharded. `held`, `ready` and `sent` are
    bytes so far, gradient by gradient, of the step that `log` follows.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    log: WireLog
    reduce: Callable[[], Any] = lambda: None
    update: Callable[[], Any] | None = None
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a step: nothing is ready, and nothing was sent."""
        self.log.calls.clear()
        self.held.clear()
        self.ready.clear()
        self.sent.clear()

    def step(self) -> None:
        """Take the optimizer's step (the learner's own where there is one), then empty gradients."""
        update = self.update or self.optimizer.step
        update()
        # a sharded optimizer has rows only: the model's own gradients are emptied below
        self.optimizer.zero_grad()
        for parameter in self.parameters.values():
            parameter.grad = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name, without the name of a wrapper."""
        return {name.removeprefix("module."): parameter for name, parameter in self.model.named_parameters()}

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return every parameter whole, as a plain tensor."""
        wholes = {}
        for name, parameter in self.parameters.items():
            value = parameter.detach()
            # an all-gather, which all ranks call in the same order
            wholes[name] = value.full_tensor() if isinstance(value, DTensor) else value
        return wholes

    def gradient_norms(self) -> dict[str, float]:
        """Return the norm of every unsharded gradient that is there."""
        norms = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is not None and not isinstance(gradient, DTensor):
                norms[name] = float(gradient.norm())
        return norms

    def moment_bytes(self) -> int:
        """Return the bytes of the optimizer's moments on this rank; its step counters are left out."""
        nbytes = 0
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor):
                    nbytes += local_of(value).nbytes
        return nbytes

    def after_each_gradient(self, call: Callable[[nn.Parameter], None]) -> None:
        """Call a function with each parameter whose gradient is ready, before functions that are added later."""
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(call)

    def note_ready(self, parameter: nn.Parameter) -> None:
        """Note, before the learner's functions, that a gradient is ready, and whole."""
        ready_before = self.ready[-1] if self.ready else 0
        self.ready.append(ready_before + parameter.nbytes)
        self.held.append(self._gradient_bytes())

    def note_sent(self, parameter: nn.Parameter) -> None:
        """Note, after the learner's functions, what is held and sent now."""
        self.held.append(self._gradient_bytes())
        self.sent.append(sum(call.nbytes for call in self.log.calls))

    def _gradient_bytes(self) -> int:
        """Return the bytes of gradients held now: whole ones and shards."""
        owners = [*self.parameters.values(), *(rows for _, rows in self.pairs)]
        return sum(owner.grad.nbytes for owner in owners if owner.grad is not None)


def hook(trainer: Trainer, way: Way) -> None:
    """Register the learner's hook on every parameter."""
    trainer.after_each_gradient(function_of(way["exercise"]))


def finish(trainer: Trainer, way: Way) -> None:
    """Call the learner's `function(model, *arguments)` (or the stub), and after every backward what it returns."""
    find_function = stub_of if way["stub"] else function_of
    function = find_function(way["exercise"])
    trainer.reduce = function(trainer.model, *way["arguments"])


def zero1(trainer: Trainer, way: Way) -> None:
    """Run backward to its end, then call the learner's reduce_rows for every pair, then step_and_gather."""
    reduce_rows = _on_rows(trainer, way)

    def reduce() -> None:
        for parameter, rows in trainer.pairs:
            reduce_rows(parameter, rows)

    trainer.reduce = reduce


def zero2(trainer: Trainer, way: Way) -> None:
    """Use the same two functions; reduce_rows is called by a hook, as soon as a gradient is whole."""
    reduce_rows = _on_rows(trainer, way)

    def reduce_into(rows: nn.Parameter, whole: Tensor) -> None:  # a hook must return None, whatever reduce_rows returns
        reduce_rows(whole, rows)

    for parameter, rows in trainer.pairs:
        parameter.register_post_accumulate_grad_hook(partial(reduce_into, rows))


def _on_rows(trainer: Trainer, way: Way) -> Callable[..., Any]:
    """Make pairs (parameter, this rank's rows) and an optimizer of the rows only; return the learner's reduce_rows."""
    # the learner's three functions, or the references
    rows_of, reduce_rows, step_and_gather = map(function_of, SHARDING)
    for parameter in trainer.model.parameters():
        # such as 2 and 4, for rank 1 of 3 and 6 rows
        start, stop = rows_of(len(parameter), dist.get_rank(), dist.get_world_size())
        # a view: what is stepped in the rows is in the whole parameter, too
        trainer.pairs.append((parameter, nn.Parameter(parameter.detach()[start:stop])))
    trainer.optimizer = make_optimizer(way["optimizer"], [rows for _, rows in trainer.pairs])
    trainer.update = lambda: step_and_gather(trainer.pairs, trainer.optimizer)
    return reduce_rows


BY_HAND: dict[str, Callable[[Trainer, Way], None]] = {"hook": hook, "finish": finish, "zero1": zero1, "zero2": zero2}
LIBRARIES: dict[str, Callable[[nn.Module, Way], nn.Module]] = {
    "ddp": lambda model, way: DistributedDataParallel(model),
    "lab": lambda model, way: shard_model(model, way["strategy"]),
}


def trainer_of(model: nn.Module, way: Way, log: WireLog) -> Trainer:
    """Return the trainer of a way; one by hand notes what is held and sent around the learner's functions."""
    wrap = LIBRARIES.get(way["kind"])
    if wrap is not None:
        model = wrap(model, way)
    trainer = Trainer(model, make_optimizer(way["optimizer"], list(model.parameters())), log)
    attach = BY_HAND.get(way["kind"])
    if attach is not None:
        # hooks run in the order in which they are registered: ready, the learner's, sent
        trainer.after_each_gradient(trainer.note_ready)
        attach(trainer, way)
        trainer.after_each_gradient(trainer.note_sent)
    return trainer


# ---- training beside the twin


class Twin(NamedTuple):
    """The unsharded twin after all steps, its losses, and the norms of its first gradients by name."""

    model: nn.Module
    losses: list[float]
    norms: dict[str, float]


def batch(text: ByteText, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the batch of `rank` at `step` of every by-hand training: two sequences of 32 bytes.

    Tokens and targets are int64 [2, 32].
    """
    return text.batch(step, rank, dist.get_world_size(), batch_size=2, sequence_length=32)


def train(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Train `payload["model"]` once in each of `payload["ways"]`, and beside the twin.

    Returns what happened on this rank, by way. A way is a dict with `kind` (a name in BY_HAND or LIBRARIES),
    `optimizer`, `steps` (fewer than the twin's, or None) and what the kind needs, such as the `exercise` whose function
    is in use.
    """
    open_course(workspace=payload["workspace"])
    text, steps, model = ByteText.from_standard_library(), payload["steps"], payload["model"]
    twins: dict[str, Twin] = {}  # by optimizer
    for way in payload["ways"]:
        name = way["optimizer"]
        # one twin for each optimizer, whatever the ways are
        if name not in twins:
            twins[name] = _twin(build_model(model), text, steps, name)
    return [_train(build_model(model), way, text, steps, twins[way["optimizer"]]) for way in payload["ways"]]


def _train(model: nn.Module, way: Way, text: ByteText, steps: int, twin: Twin) -> dict[str, Any]:
    """Train in one way, and return how far it is from the twin.

    Collectives and gradient bytes are those of the last step.
    """
    losses: list[float] = []
    first_norms: dict[str, float] = {}
    log = WireLog()
    trainer = trainer_of(model, way, log)
    with log:
        for step in range(steps):
            trainer.begin()
            with collectives() as of_the_lab:
                loss = loss_of(trainer.model, *batch(text, step, dist.get_rank()))
                loss.backward()
                # sent while backward ran; what follows is of `reduce` and of the step
                in_backward = len(log.calls)
                trainer.reduce()
                # of the first step only, while both have the same weights
                first_norms = first_norms or trainer.gradient_norms()
                trainer.step()
            losses.append(loss.item())
    ratios = {}
    for name, norm in first_norms.items():
        # the ratio of two rounding errors means nothing
        if twin.norms[name] > NOISE:
            ratios[name] = norm / twin.norms[name]
    return {
        "losses": losses,
        "twin_losses": twin.losses,
        "calls": [(call.kind, call.nbytes) for call in log.calls],
        "calls_in_backward": in_backward,
        "moments": trainer.moment_bytes(),
        "held": trainer.held,
        "ready": trainer.ready,
        "sent": trainer.sent,
        "elements": sum(parameter.numel() for parameter in twin.model.parameters()),
        "parameters": len(twin.norms),
        "ratios": ratios,
        "lab": (len(of_the_lab), sum(collective.wire_bytes for collective in of_the_lab)),
        **_distance(trainer.whole_parameters(), twin.model),
    }


def _distance(parameters: dict[str, Tensor], twin: nn.Module) -> dict[str, Any]:
    """Return the parameters that differ from the twin's in any bit, and by how much."""
    differing, distances = [], []
    for name, twin_parameter in twin.named_parameters():
        value, right = parameters[name], twin_parameter.detach()
        if not torch.equal(value, right):
            differing.append(name)
        distances.append(float((value - right).abs().max()))
    return {"differing": differing, "largest": max(distances)}


def _twin(model: nn.Module, text: ByteText, steps: int, optimizer: str) -> Twin:
    """Train the unsharded twin on every rank's batch in turn."""
    losses: list[float] = []
    norms: dict[str, float] = {}
    update = make_optimizer(optimizer, list(model.parameters()))
    for step in range(steps):
        batches = [[batch(text, step, rank)] for rank in range(dist.get_world_size())]
        losses.append(replay_gradients(model, batches, loss_of))
        if step == 0:
            norms = {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}
        update.step()
        update.zero_grad()
    return Twin(model, losses, norms)
