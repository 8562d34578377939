"""The part of lesson 06 that runs on the ranks: whole models under three engines, and a schedule of the learner's.

The engines are the learner's, the lab's own (`shard_model`), and the unsharded twin. All read the same text from the
same seeds, so that their losses and parameters can be compared bit by bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdplab.engine import events, shard_model
from fsdplab.profiling import MemoryRecorder
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.functions_in_use import functions
from fsdplab.teaching.lessons.nb06_whole_model.engine import Log, MiniFSDP, MiniUnit, Parts, Wanted
from fsdplab.workloads import ByteText, block_types, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

Work = dict[str, Any]
PARTS = ("05.shard", "05.unshard", "05.reshard", "05.guarded", "05.reduce")
LOSSES, ROUNDING = "loss minus the twin's, by step", 1e-6


def parts(**given: Callable[..., Any]) -> Parts:
    """Return the learner's functions where their checks passed, else the references.

    Those in `given` are taken as they are.
    """
    ids = PARTS if "hooks" in given else (*PARTS, "06.hooks")
    return Parts(**functions(*ids), **given)


# ---- whole models


@dataclass
class Library:
    """A model under a library's engine, with what a training calls of MiniFSDP."""

    model: nn.Module
    log: Any = field(default_factory=Log)

    def parameters(self) -> Iterable[Tensor]:
        """Return all that the optimizer sees."""
        return self.model.parameters()

    def finish_backward(self) -> None:
        """Do nothing: a library ends its backward by itself."""

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return every parameter of the model, whole."""
        return {name: parameter.full_tensor().detach() for name, parameter in self.model.named_parameters()}


Engine = MiniFSDP | Library


def under(name: str, model: nn.Module, is_unit: Wanted | None, prefetch: int) -> Engine:
    """Return the model under the learner's engine, the lab's, torch's DDP or its `fully_shard`.

    Blocks are units unless `is_unit` says otherwise, and `prefetch` is the lab's.
    """
    if name == "my_fsdp":
        return MiniFSDP(model, is_unit or blocks_of(model), parts())
    if name == "DDP":
        return Library(DistributedDataParallel(model))
    if name == "lab":
        listener = Listener()
        events.subscribe(listener)
        units = is_unit or block_types(model)
        return Library(shard_model(model, "full_shard", units=units, prefetch=prefetch), listener)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [module for module in model.modules() if isinstance(module, block_types(model))]
    # blocks first: what is left over is the root's
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh)
    return Library(model)


def blocks_of(model: nn.Module) -> Wanted:
    """Return a choice of units: every block is one."""
    return lambda name, module: isinstance(module, block_types(model))


def batch(text: ByteText, work: Work, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank at a step: tokens and targets, int64 [batch_size, sequence_length] of `work`."""
    return text.batch(step, rank, work["ranks"], work["batch_size"], work["sequence_length"], seed=work["seed"])


def optimizer_of(work: Work, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return `work["optimizer"]`, AdamW unless it says SGD.

    Adam hides a gradient's wrong factor, which a check must not.
    """
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, work.get("optimizer", "AdamW"))
    return kind(parameters, lr=work["learning_rate"], fused=True)


def trained(engine: Engine, work: Work, peak_of: str = "") -> tuple[list[float], int]:
    """Train, and return this rank's losses and the most bytes that it held in the second step.

    The bytes are 0 unless `peak_of` names the engine.
    """
    text = ByteText.from_standard_library()
    optimizer = optimizer_of(work, engine.parameters())
    rank = dist.get_rank()
    losses, peak = [], 0
    for step in range(work["steps"]):
        engine.log.step = step
        if not peak_of or step != 1:
            losses.append(one_step(engine, optimizer, batch(text, work, step, rank)))
            continue
        recorder = MemoryRecorder(
            model=engine.model, optimizer=optimizer, engine=peak_of, device=torch.device("cpu"), ignore=[text.data]
        )
        with recorder:
            losses.append(one_step(engine, optimizer, batch(text, work, step, rank)))
        peak = recorder.timeline.peak_total
    return losses, peak


def one_step(engine: Engine, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """Take one step of training; return this rank's loss."""
    loss = loss_of(engine.model, *batch)
    loss.backward()
    engine.finish_backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def twin_trained(work: Work) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Train without ranks, and return the losses by rank and the parameters.

    A step takes each of `work["ranks"]` batches in turn, and averages gradients in rank order.
    """
    text, model = ByteText.from_standard_library(), build_model(work["model"], seed=work["seed"])
    optimizer, ranks = optimizer_of(work, model.parameters()), range(work["ranks"])
    by_rank: list[list[float]] = [[] for _ in ranks]

    def noted(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        min(by_rank, key=len).append(loss.item())  # ranks are replayed in order
        return loss

    for step in range(work["steps"]):
        replay_gradients(model, [[batch(text, work, step, rank)] for rank in ranks], noted)
        optimizer.step()
        optimizer.zero_grad()
    return by_rank, {name: value.detach() for name, value in model.named_parameters()}


def train_all(payload: dict[str, Any]) -> dict[str, Any]:
    """Train under every engine of `payload["engines"]` in turn; return this rank's losses and rows of the log.

    Where the twin is among the engines there are differences from it, and with `payload["peaks"]` the most bytes that
    the rank held.
    """
    open_course(workspace=payload["workspace"])
    work: Work = payload["work"]
    is_unit = None
    if payload["own_units"]:
        is_unit = functions("06.choose_units")["choose_units"]
    results: dict[str, Any] = {}
    if "twin" in payload["engines"]:
        # first, since the engines are compared with its parameters
        results["twin"], twin_parameters = twin_trained(work)
    for name in payload["engines"]:
        if name == "twin":
            continue
        model = build_model(work["model"], seed=work["seed"])
        engine = under(name, model, is_unit, payload["prefetch"])
        losses, peak = trained(engine, work, name if payload["peaks"] else "")
        ledger = getattr(engine.log, "ledger", None)
        results[name] = {"losses": losses, "peak": peak, "rows": engine.log.rows, "ledger": ledger}
        if "twin" in results:
            results[name]["differs"] = difference(engine.whole_parameters(), twin_parameters)
        del model, engine
        gc.collect()  # a model under hooks is garbage in cycles, and would count under the next engine
    return results


def difference(parameters: dict[str, Tensor], twins: dict[str, Tensor]) -> dict[str, Any]:
    """Return the largest difference over all parameters, and how many floats differ at all."""
    distances = [(parameters[name] - twins[name]).abs() for name in twins]
    return {
        "largest": max(float(distance.max()) for distance in distances),
        "floats": sum(int((distance > 0).sum()) for distance in distances),
        "of": sum(distance.numel() for distance in distances),
    }


class Listener:
    """The lab's events as rows like those of the learner's log, and its ledger."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []
        self._held: dict[str, int] = {}

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Collective):
            self.ledger.append(
                {
                    "step": self.step,
                    "unit": event.unit,
                    "phase": event.phase,
                    "kind": event.kind,
                    "logical_bytes": event.logical_bytes,
                    "wire_bytes": event.wire_bytes,
                }
            )
        elif isinstance(event, events.Tag) and event.category == "unsharded_parameters":
            # a unit is unsharded when its parameters are tagged so, and resharded when its state changes
            self._held[event.unit] = event.nbytes
            self._row(event.unit, "unshard", "")
        elif isinstance(event, events.Transition) and event.after == "sharded":
            self._held[event.unit] = 0
            self._row(event.unit, "reshard", event.phase)

    def _row(self, unit: str, what: str, phase: str) -> None:
        """Add a row to the log, with the bytes that each unit has unsharded now."""
        self.rows.append({"step": self.step, "phase": phase, "unit": unit, "what": what, "unsharded": dict(self._held)})


def one_backward(is_unit: Callable[..., bool], preset: str) -> MiniFSDP:
    """Run one forward and backward of a model under the learner's engine, on random tokens, with no optimizer."""
    model = build_model(preset, seed=0)
    engine = MiniFSDP(model, is_unit, parts())
    tokens = torch.randint(0, model.config.vocabulary, (1, 16), generator=torch.Generator().manual_seed(0))
    loss_of(model, tokens, tokens).backward()
    engine.finish_backward()
    return engine


def largest_gathered(rows: list[dict[str, Any]]) -> int:
    """Return the most bytes that all units together had unsharded at any moment."""
    return max((sum(row["unsharded"].values()) for row in rows), default=0)


# ---- what the checks see


def beside_the_twin(hooks: Callable[..., Any], work: Work) -> dict[str, Any]:
    """Train a small GPT under the learner's engine with these hooks, and the twin beside it.

    Returns what differs, and what one step did. The twin runs here and not in the notebook's process: another number of
    threads sums in another order.
    """
    model = build_model(work["model"], seed=work["seed"])
    engine = MiniFSDP(model, blocks_of(model), parts(hooks=hooks))
    losses, _ = trained(engine, work)
    last_step = work["steps"] - 1
    rows = [row for row in engine.log.rows if row["step"] == last_step]
    # before the parameters are made whole, which unshards
    unsharded_after = sum(unit.gathered_bytes for unit in engine.units)
    parameters = engine.whole_parameters()
    losses_by_rank, twin_parameters = twin_trained(work)

    distances = []
    for loss, expected in zip(losses, losses_by_rank[dist.get_rank()], strict=True):
        distance = loss - expected
        distances.append(0.0 if abs(distance) <= ROUNDING else distance)
    differing = []
    for name, value in twin_parameters.items():
        # a key's bias moves all scores of a query alike, so its gradient is mere rounding
        if name.endswith("key.bias"):
            continue
        largest = (parameters[name] - value).abs().max()
        if not largest <= ROUNDING:  # `not <=`: NaN differs too
            differing.append(name)
    return {
        LOSSES: distances,
        "unshards in a step": sum(row["what"] == "unshard" for row in rows),
        "reductions in a step": sum(row["what"] == "reduce" for row in rows),
        "bytes unsharded after a step": unsharded_after,
        "bytes unsharded at the peak": largest_gathered(rows),
        "parameters that differ from the twin's": differing,
    }


# ---- the puzzle on real blocks, where every message is waited for: order and memory are real, time is not looked at


def scheduled(payload: dict[str, Any]) -> dict[str, Any]:
    """Take one step of `blocks` blocks in the order of the learner's schedule.

    Returns the most that was in memory, in blocks (`peak`), and how many floats of this rank's sharded gradients differ
    from the unsharded twin's (`differing`, `of`).
    """
    open_course(workspace=payload["workspace"])
    blocks, width = payload["blocks"], payload["width"]
    functions_in_use = parts(hooks=lambda *arguments: ())
    # [("unshard", 0), ("forward", 0), ...], as the learner's function returns it
    actions = functions("06.schedule")["schedule"](blocks)
    expected = _slices_of_the_twin(_blocks(blocks, width), functions_in_use)
    step = _Step(_blocks(blocks, width), _batch(dist.get_rank(), width), functions_in_use)
    peak = max([step.take(action, block) for action, block in actions])
    differing = 0
    for unit, right in zip(step.units, expected, strict=True):
        differing += int((unit.mine.grad != right).sum())
    return {"peak": peak, "differing": differing, "of": sum(len(right) for right in expected)}


def _blocks(count: int, width: int) -> list[nn.Sequential]:
    """Return equal blocks, with the same weights on every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)]


def _batch(rank: int, width: int) -> Tensor:
    """Return the input of a rank, float32 [8, width]."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(rank))


class _Step:
    """The blocks of one rank, its activations, and the actions on them."""

    def __init__(self, blocks: Sequence[nn.Module], batch: Tensor, parts: Parts) -> None:
        self.blocks, self.parts = blocks, parts
        self.x = batch  # the input of the next block
        self.units = []
        for number, block in enumerate(blocks):
            self.units.append(MiniUnit(f"block {number}", list(block.parameters()), parts))
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def take(self, action: str, block: int) -> float:
        """Do one action; return what is in memory after it (unsharded blocks and unsharded gradients), in blocks."""
        getattr(self, f"_{action}")(block)
        # `whole` keeps its shape when its memory is given back, so this is a block's size
        size = max(unit.whole.nbytes for unit in self.units)
        unsharded = sum(unit.gathered_bytes for unit in self.units)
        return unsharded / size + self._gradient_bytes() / size

    def _gradient_bytes(self) -> int:
        """Return the bytes of unsharded gradients on this rank."""
        nbytes = 0
        for block in self.blocks:
            for parameter in block.parameters():
                if parameter.grad is not None:
                    nbytes += parameter.grad.nbytes
        return nbytes

    def _unshard(self, block: int) -> None:
        self.parts.unshard(self.units[block].mine.detach(), self.units[block].whole)

    def _reshard(self, block: int) -> None:
        self.parts.reshard(self.units[block].whole)

    def _forward(self, block: int) -> None:
        """Compute a block, and keep its input and output for the backward."""
        # cut off from the block before, so that each block's backward can be called by itself
        self.inputs[block] = self.x.detach().requires_grad_()
        self.outputs[block] = self.blocks[block](self.inputs[block])
        self.x = self.outputs[block]

    def _backward(self, block: int) -> None:
        """Compute a block's gradients; the last block begins with the loss."""
        output = self.outputs[block]
        if block == len(self.blocks) - 1:
            output.square().mean().backward()
        else:
            # the gradient of this block's output is that of the next block's input
            output.backward(self.inputs[block + 1].grad)

    def _reduce(self, block: int) -> None:
        """Leave this rank's shard of the mean gradient in the unit."""
        self.units[block].mine.grad = self.parts.reduce(self.units[block].take_gradient())


def _slices_of_the_twin(blocks: Sequence[nn.Module], parts: Parts) -> list[Tensor]:
    """Return this rank's shards of the mean gradient, by the unsharded blocks on every rank's batch in turn."""
    ranks, width = dist.get_world_size(), next(blocks[0].parameters()).shape[1]
    batches = [[(_batch(rank, width),)] for rank in range(ranks)]
    replay_gradients(nn.Sequential(*blocks), batches, lambda model, x: model(x).square().mean())
    shards = []
    for block in blocks:
        mean = torch.cat([parameter.grad.flatten() for parameter in block.parameters()])
        shards.append(parts.shard(mean, dist.get_rank(), ranks))
    return shards
