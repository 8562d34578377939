"""Engines side by side in one process at world size 1: the same model, weights, optimizer and batches, in bf16 over
fp32 masters.

    lab             full_shard of this project; at world size 1 a gather is the cast to bf16
    torch-fsdp2     PyTorch's fully_shard, defaults
    torch-ddp       PyTorch's DistributedDataParallel under bf16 autocast, its usual form, defaults
    alone           no engine at all and bf16 parameters without masters: the least that any engine could do
    lab-gathering   the lab made to gather and reduce over the group of one rank (NCCL copies)

Checkpointing recomputes whole blocks; a compiled block is one graph (`workloads.compiled`), inside what is recomputed.
Under DDP too: its option to cut graphs at its buckets is off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdplab.engine import MixedPrecisionPolicy, shard_model
from fsdplab.workloads import ByteText, block_types, build_model, loss_of, reset_buffers
from fsdplab.workloads.compiled import compile_blocks

from .group_of_one import made_to_gather

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_SEED = 0


@dataclass(frozen=True)
class Case:
    """What all engines of one comparison train: a preset, `batch` sequences of `sequence` tokens, what is computed
    again, what is compiled.
    """

    model: str
    batch: int
    sequence: int
    checkpoint: str = "none"
    compiled: bool = False

    @property
    def words(self) -> str:
        """`llama-1b, compiled blocks, checkpoint full`."""
        return f"{self.model}, {'compiled blocks' if self.compiled else 'eager'}, checkpoint {self.checkpoint}"

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.sequence


@dataclass
class Contestant:
    """An engine that holds a model; `step` trains it once and reads nothing back."""

    engine: str
    model: nn.Module
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, optimizer; the loss, on the device."""
        with self.around():
            loss = loss_of(self.model, tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def built(engine: str, case: Case, device: torch.device) -> Contestant:
    """A contestant with fresh weights; `KeyError` for an engine that is none of the five.
    Needs a process group of one.
    """
    model = fresh(case.model, device)
    if case.compiled:
        # a dry run needs graphs, not machine code
        compile_blocks(model, "inductor" if device.type == "cuda" else "aot_eager")
    return _BUILDERS[engine](case, device, model)


@lru_cache(maxsize=1)
def text() -> ByteText:
    """What all contestants read; made once, so that it is there before memory is counted."""
    return ByteText.from_standard_library()


def batches_of(case: Case, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, targets), int64 [batch, sequence], step after step, without end."""
    for step in itertools.count():
        tokens, targets = text().batch(step, 0, 1, case.batch, case.sequence)
        yield tokens.to(device), targets.to(device)


def fresh(name: str, device: torch.device) -> nn.Module:
    """A model whose values are drawn on `device`: fast at any size, equal for all engines of one machine (the lab's own
    are equal on all).
    """
    model = build_model(name, device="meta").to_empty(device=device)
    stream = torch.Generator(device).manual_seed(_SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            (
                parameter.normal_(0.0, 0.02, generator=stream)
                if parameter.ndim > 1
                else parameter.fill_(float(name.endswith("weight")))
            )
    reset_buffers(model)
    return model


def _lab(case: Case, device: torch.device, model: nn.Module) -> Contestant:
    mesh = init_device_mesh(device.type, (1,))
    return Contestant(
        "lab",
        shard_model(
            model, "full_shard", units=block_types(model), mesh=mesh, mp_policy=_BF16, checkpoint=case.checkpoint
        ),
    )


def _gathering(case: Case, device: torch.device, model: nn.Module) -> Contestant:
    return Contestant("lab-gathering", made_to_gather(_lab(case, device, model).model, device))


def _fsdp2(case: Case, device: torch.device, model: nn.Module) -> Contestant:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (1,))
    for block in _recomputing(case, model).blocks:
        fully_shard(block, mesh=mesh, mp_policy=_BF16)
    return Contestant("torch-fsdp2", fully_shard(model, mesh=mesh, mp_policy=_BF16))


def _ddp(case: Case, device: torch.device, model: nn.Module) -> Contestant:
    replicated = DistributedDataParallel(
        _recomputing(case, model), device_ids=[device.index] if device.type == "cuda" else None
    )
    return Contestant("torch-ddp", replicated, lambda: torch.autocast(device.type, torch.bfloat16))


def _alone(case: Case, device: torch.device, model: nn.Module) -> Contestant:
    for parameter in model.parameters():  # not `model.to`, which would round the rotary tables too
        parameter.data = parameter.data.to(torch.bfloat16)
    return Contestant("alone", _recomputing(case, model))


def _recomputing(case: Case, model: nn.Module) -> nn.Module:
    """For engines without a setting of their own: PyTorch's wrapper around each block."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if case.checkpoint == "full":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    return model


_BUILDERS: dict[str, Callable[[Case, torch.device, nn.Module], Contestant]] = {
    "lab": _lab, "lab-gathering": _gathering, "torch-fsdp2": _fsdp2, "torch-ddp": _ddp, "alone": _alone,
}  # fmt: skip
