"""The part of lesson 14 that runs on ranks: the job, watched from outside, and its twin.

The watch knows nothing of the faults. It stands in for the functions of `torch.distributed` that the job calls, and
notes of each call when it was issued, when its result was there, and whether anybody waited for it. Calls are written
to a file at once: a rank that is ended returns nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdplab.workloads.twin import replay_gradients

PATIENCE_S = 5  # for a message that does not come
KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}


def watch(payload: dict[str, Any]) -> dict[str, Any]:
    """Train the job in the file `payload["source"]` for `payload["steps"]` steps, watched, and beside its twin.

    What is returned is plain: `pid`, `stopped` (why the rank did not come to its end, or ""), `losses`, `began` (the
    sum of each unit's parameters before the first step), `units` (bytes of each, unsharded), `held` (the most bytes of
    unsharded parameters at once), `dtype` of the parameters that the optimizer has, `still` (the part of their
    elements that have a gradient and did not move), and of the twin `twin_losses` and `ratios` of the first
    gradients.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = _module(Path(payload["source"]))
    units, optimizer = job.build(rank, ranks)
    log = CallLog(Path(payload["folder"]) / f"calls{rank}")
    seen: dict[str, Any] = {
        "pid": os.getpid(),
        "stopped": "",
        "losses": [],
        "still": [],
        "dtype": str(units[0].shard.dtype).removeprefix("torch."),
        "began": [_sum_of(unit.layer) for unit in units],
        "units": [4 * unit.size for unit in units],
    }
    dist.barrier()
    # short, so that a message that never comes ends the job in seconds
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE_S))
    first_gradients: list[torch.Tensor] = []
    try:
        for step in range(payload["steps"]):
            # shards before the step, for the part that the step leaves as it was
            before = [unit.shard.detach().clone() for unit in units]
            with log.of_step(step):
                seen["losses"].append(job.train_step(units, optimizer, step, rank))
            seen["still"].append(_still(before, units))
            if step == 0:
                first_gradients = [unit.shard.grad.float().clone() for unit in units]
    except RuntimeError as error:  # a message did not come, or a peer is gone
        seen["stopped"] = str(error).splitlines()[0]
    twin_losses, twin_gradients = _twin(job, payload["steps"], ranks)
    seen |= {"held": log.most_held, "twin_losses": twin_losses, "ratios": []}
    if seen["losses"]:
        for gradient, whole in zip(first_gradients, twin_gradients):
            seen["ratios"].append(_ratio(gradient, _own(whole, rank, ranks)))
    return seen


def _sum_of(layer: torch.nn.Module) -> float:
    """Return the sum of a layer's parameters."""
    return sum(parameter.sum().item() for parameter in layer.parameters())


def _module(path: Path) -> ModuleType:
    """Run the job's file as a module, which is not imported: it may have a fault in it."""
    module = ModuleType(path.stem)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    return module


def _still(before: list[torch.Tensor], units: Any) -> float:
    """Return the part of the elements with a gradient that the step left as they were."""
    with_gradient = stayed = 0
    for old, unit in zip(before, units):
        has_gradient = unit.shard.grad != 0
        is_equal = unit.shard.detach() == old
        with_gradient += int(has_gradient.sum())
        stayed += int((has_gradient & is_equal).sum())
    return stayed / max(1, with_gradient)


# ---- the twin


def _twin(job: ModuleType, steps: int, ranks: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return the mean losses of an unsharded model on all ranks' batches, and its first gradients, a vector a unit."""
    torch.manual_seed(0)
    layers = job.model()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    losses, first_gradients = [], []
    for step in range(steps):
        batches = [[job.batch(step, rank)] for rank in range(ranks)]
        losses.append(replay_gradients(layers, batches, job.loss_of))
        if step == 0:
            for layer in layers:
                gradients = [parameter.grad.flatten() for parameter in layer.parameters()]
                first_gradients.append(torch.cat(gradients))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses, first_gradients


def _own(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return this rank's part of a vector that is padded to a multiple of the ranks."""
    padded = F.pad(whole, (0, -len(whole) % ranks))
    return padded.chunk(ranks)[rank]


def _ratio(gradient: torch.Tensor, right: torch.Tensor) -> list[float]:
    """Return [how many times the twin's gradient this one is, the part of it that is no multiple of the twin's]."""
    factor = float((gradient * right).sum() / (right * right).sum())
    rest = (gradient - factor * right).norm() / gradient.norm().clamp(min=1e-30)
    return [factor, float(rest)]


# ---- the calls


class CallLog:
    """The collectives of one rank, a line of JSON each, in a file."""

    def __init__(self, path: Path) -> None:
        self._step = 0
        self._most_held: dict[int, int] = {}
        self._gathered: list[weakref.ref[torch.Tensor]] = []
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._number = 0

    def of_step(self, step: int) -> AbstractContextManager[Any]:
        """Note calls of the job under this step, inside the returned context."""
        self._step = step
        noting: dict[str, Any] = {name: self._noting(kind, getattr(dist, name)) for name, kind in KINDS.items()}
        return patch.multiple(dist, **noting)

    def _noting(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with each call of it noted, and its wait."""

        def call(*arguments: Any, **named: Any) -> Any:
            # the job's own line that made the call
            frame = sys._getframe(1)
            # the whole tensor: a reduce-scatter's input, an all-gather's output
            payload = arguments[1] if kind == "reduce_scatter" else arguments[0]
            number = self._number
            self._number += 1
            self._write(
                number=number,
                step=self._step,
                kind=kind,
                nbytes=payload.nbytes,
                issued=time.time_ns(),
                line=frame.f_lineno,
                # the last argument is what this rank gives
                finite=bool(arguments[-1].isfinite().all()),
            )
            work = original(*arguments, **named)
            if kind == "all_gather":
                self._hold(arguments[0])
            if work is None:
                self._write(number=number, done=time.time_ns())
                return None
            return _Waited(work, lambda: self._write(number=number, done=time.time_ns()))

        return call

    def _hold(self, whole: torch.Tensor) -> None:
        """Note the bytes of the unsharded parameters that are still referred to."""
        # a weak reference, so that the watch keeps nothing in memory
        self._gathered.append(weakref.ref(whole))
        alive, nbytes = [], 0
        for ref in self._gathered:
            tensor = ref()
            if tensor is not None:
                alive.append(ref)
                nbytes += tensor.nbytes
        self._gathered = alive
        earlier = self._most_held.get(self._step, 0)
        self._most_held[self._step] = max(earlier, nbytes)

    @property
    def most_held(self) -> int:
        """Return the most bytes at once, in the step that held least.

        On a busy machine gloo's threads let go of some late, so that other steps hold more.
        """
        return min(self._most_held.values(), default=0)

    def _write(self, **row: Any) -> None:
        """Write one line of the log; the file is flushed at its end."""
        self._file.write(json.dumps(row) + "\n")


class _Waited:
    """A message under way whose wait is noted."""

    def __init__(self, work: Any, waited: Callable[[], None]) -> None:
        self._work, self._waited = work, waited

    def wait(self) -> None:
        """Wait for the message, and note it."""
        self._work.wait()
        self._waited()
