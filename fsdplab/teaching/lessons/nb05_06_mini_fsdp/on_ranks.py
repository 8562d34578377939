"""The part of lessons 05 and 06 that runs on the ranks: one layer's life, and whole models under three engines.

The three are the learner's, the lab's own (`shard_model`), and the unsharded twin. All read the same text from the same
seeds, so that their losses and parameters can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import events, shard_model
from fsdplab.teaching.core.workspace import Workspace, load_function
from fsdplab.teaching.lessons.nb05_06_mini_fsdp.engine import MiniFSDP, Parts
from fsdplab.workloads import ByteText, block_types, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

Work = dict[str, Any]


def loaded(paths: dict[str, str], **given: Callable[..., Any]) -> Parts:
    """The learner's functions from their files, `{"shard": path, ...}`; those in `given` as they are."""
    return Parts(
        **{name: load_function(Path(path), name) for name, path in paths.items() if name not in given}, **given
    )


def no_hooks(*arguments: object) -> tuple[()]:
    """Stands for `hooks` where nothing calls them."""
    return ()


def read_dropped(payload: None) -> float:
    """Read a tensor whose memory was given back. This ends the process."""
    whole = torch.ones(1000, 1000)
    whole.untyped_storage().resize_(0)
    return whole.sum().item()


# ---- one layer


def layer_life(payload: dict[str, Any]) -> dict[str, Any]:
    """One Linear's training step on this rank with the learner's functions, and how far it is from the whole layer's.

    `payload`: workspace, parts, rows, columns. Returns the bytes held after each moment, and the largest differences.
    """
    Workspace(Path(payload["workspace"])).make_importable()
    parts = loaded(payload["parts"], hooks=no_hooks)
    layer, twin, inputs = _layer_and_twin(payload["rows"], payload["columns"])
    moments, outputs, gradients = _life(layer, inputs[dist.get_rank()], parts)
    expected, whole_gradient = _of_the_twin(twin, inputs)
    mine = parts.shard(whole_gradient, dist.get_rank(), dist.get_world_size())
    differences = {"output": outputs - expected[dist.get_rank()], "gradient slice": gradients - mine}
    return {"moments": moments, "differences": {name: float(value.abs().max()) for name, value in differences.items()}}


def _layer_and_twin(rows: int, columns: int) -> tuple[nn.Linear, nn.Linear, list[torch.Tensor]]:
    torch.manual_seed(0)
    layer, twin = nn.Linear(columns, rows, bias=False), nn.Linear(columns, rows, bias=False)
    twin.load_state_dict(layer.state_dict())
    return layer, twin, [torch.randn(8, columns, requires_grad=True) for _ in range(dist.get_world_size())]


def _life(layer: nn.Linear, x: torch.Tensor, parts: Parts) -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]:
    """The life in time order, (moments, output, this rank's slice of the mean gradient)."""
    weight, whole = layer.weight, layer.weight.data
    moments: list[dict[str, Any]] = []
    reduced: torch.Tensor | None = None

    def note(moment: str) -> None:
        gradient = 0 if weight.grad is None else weight.grad.nbytes
        held = {
            "parameter_slices": mine.nbytes,
            "gathered_parameters": whole.untyped_storage().nbytes(),
            "whole_gradients": gradient,
        }
        moments.append({"moment": moment, **held, "gradient_slices": 0 if reduced is None else reduced.nbytes})

    mine = parts.shard(whole, dist.get_rank(), dist.get_world_size())
    parts.reshard(whole)
    note("shard (at rest)")
    parts.unshard(mine, whole)
    note("unshard")
    y = layer(x)
    note("forward")
    parts.reshard(whole)
    note("reshard")
    parts.unshard(mine, whole)
    note("unshard again")
    y.square().sum().backward()
    note("backward")
    parts.reshard(whole)
    note("reshard again")
    reduced = parts.reduce(weight.grad)
    note("reduce")
    weight.grad = None
    note("at rest again")
    return moments, y.detach(), reduced


def _of_the_twin(twin: nn.Linear, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The whole layer's outputs for every rank's input, and the mean of its gradients."""
    outputs, total = [], torch.zeros_like(twin.weight)
    for x in inputs:
        twin.weight.grad = None
        outputs.append(twin(x))
        outputs[-1].square().sum().backward()
        total += twin.weight.grad
    return [output.detach() for output in outputs], total / len(inputs)


# ---- whole models


def batch(text: ByteText, work: Work, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a rank at a step."""
    return text.batch(step, rank, work["ranks"], work["batch_size"], work["sequence_length"], seed=work["seed"])


def optimizer_of(work: Work, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """`work["optimizer"]`, AdamW unless it says SGD: Adam hides a gradient's wrong factor, which a check must not."""
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, work.get("optimizer", "AdamW"))
    return kind(parameters, lr=work["learning_rate"], fused=True)


def trained(parts: Parts, work: Work, is_unit: Callable[..., bool] | None = None) -> tuple[MiniFSDP, list[float]]:
    """Train under the learner's engine (blocks as units unless told otherwise); the engine and this rank's losses."""
    text, model = ByteText.from_standard_library(), build_model(work["model"], seed=work["seed"])
    engine = MiniFSDP(model, is_unit or (lambda name, module: isinstance(module, block_types(model))), parts)
    optimizer, losses = optimizer_of(work, engine.parameters()), []
    for step in range(work["steps"]):
        engine.log.step = step
        loss = loss_of(model, *batch(text, work, step, dist.get_rank()))
        loss.backward()
        engine.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return engine, losses


def one_backward(parts: Parts, is_unit: Callable[..., bool], work: Work) -> MiniFSDP:
    """One forward and backward of a model under the learner's engine, on random tokens and with no optimizer."""
    model = build_model(work["model"], seed=work["seed"])
    engine = MiniFSDP(model, is_unit, parts)
    tokens = torch.randint(0, model.config.vocabulary, (1, 16), generator=torch.Generator().manual_seed(0))
    loss_of(model, tokens, tokens).backward()
    engine.finish_backward()
    return engine


def largest_gathered(rows: list[dict[str, Any]]) -> int:
    """Most bytes that all units together had gathered at any moment."""
    return max((sum(row["gathered"].values()) for row in rows), default=0)


def train_all(payload: dict[str, Any]) -> dict[str, Any]:
    """Train under every engine of `payload["engines"]` in turn:
    losses, rows of the log, and differences from the twin.
    """
    Workspace(Path(payload["workspace"])).make_importable()
    work, units = payload["work"], payload["units"]
    is_unit = load_function(Path(units), "choose_units") if units else None
    done: dict[str, Any] = {}
    if "mine" in payload["engines"]:
        engine, losses = trained(loaded(payload["parts"]), work, is_unit)
        done["mine"] = {"losses": losses, "rows": engine.log.rows, "parameters": engine.whole_parameters()}
    if "lab" in payload["engines"]:
        done["lab"] = lab_trained(work, is_unit, payload["prefetch"])
    if "twin" in payload["engines"]:
        done["twin"] = twin_trained(work)
    parameters = {name: run.pop("parameters") for name, run in done.items()}
    for name in [name for name in ("mine", "lab") if name in done and "twin" in done]:
        done[name]["differs"] = difference(parameters[name], parameters["twin"])
    return done


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The largest difference over all parameters, and how many floats differ at all."""
    apart = {name: (ours[name] - theirs[name]).abs() for name in theirs}
    floats = sum(value.numel() for value in apart.values())
    return {
        "largest": max(float(v.max()) for v in apart.values()),
        "floats": sum(int((v > 0).sum()) for v in apart.values()),
        "of": floats,
    }


def lab_trained(work: Work, is_unit: Callable[..., bool] | None, prefetch: int) -> dict[str, Any]:
    """The same training under the lab's own engine, followed by its events."""
    text, model = ByteText.from_standard_library(), build_model(work["model"], seed=work["seed"])
    shard_model(model, "full_shard", units=is_unit or block_types(model), prefetch=prefetch)
    optimizer, losses, seen = (
        torch.optim.AdamW(model.parameters(), lr=work["learning_rate"], fused=True),
        [],
        Listener(),
    )
    stop = events.subscribe(seen)
    for step in range(work["steps"]):
        seen.step = step
        loss = loss_of(model, *batch(text, work, step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stop()
    parameters = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "rows": seen.rows, "ledger": seen.ledger, "parameters": parameters}


class Listener:
    """The lab's events as rows like those of the learner's log, and its ledger."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []
        self._held: dict[str, int] = {}

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Collective):
            bytes_of = {"logical_bytes": event.logical_bytes, "wire_bytes": event.wire_bytes}
            self.ledger.append(
                {"step": self.step, "unit": event.unit, "phase": event.phase, "kind": event.kind, **bytes_of}
            )
        elif isinstance(event, events.Tag) and event.category == "gathered_parameters":
            self._held[event.unit] = event.nbytes
            self._row(event.unit, "unshard", "")
        elif isinstance(event, events.Transition) and event.after == "sharded":
            self._held[event.unit] = 0
            self._row(event.unit, "reshard", event.phase)

    def _row(self, unit: str, what: str, phase: str) -> None:
        self.rows.append({"step": self.step, "phase": phase, "unit": unit, "what": what, "gathered": dict(self._held)})


def twin_trained(work: Work) -> dict[str, Any]:
    """The same training without ranks: each of `work["ranks"]` batches in turn, gradients averaged in rank order."""
    text, model = ByteText.from_standard_library(), build_model(work["model"], seed=work["seed"])
    optimizer, ranks = optimizer_of(work, model.parameters()), range(work["ranks"])
    by_rank: list[list[float]] = [[] for _ in ranks]

    def noted(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens, targets)
        min(by_rank, key=len).append(loss.item())  # ranks are replayed in order
        return loss

    for step in range(work["steps"]):
        replay_gradients(model, [[batch(text, work, step, rank)] for rank in ranks], noted)
        optimizer.step()
        optimizer.zero_grad()
    return {"by_rank": by_rank, "parameters": {name: value.detach() for name, value in model.named_parameters()}}
