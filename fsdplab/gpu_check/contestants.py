"""Engines side by side in one process at world size 1: the same model, weights, optimizer and batches, in bf16 over
fp32 masters; how one of their steps is timed; and how the lab is made to communicate there all the same.

    lab             full_shard of this project; at world size 1 a gather is the cast to bf16
    torch-fsdp2     PyTorch's fully_shard, defaults
    torch-ddp       PyTorch's DistributedDataParallel under bf16 autocast, its usual form, defaults
    alone           no engine at all and bf16 parameters without masters: the least that any engine could do
    lab-gathering   the lab made to gather and reduce over the group of one rank (NCCL copies)

The first three are those of a run (`sessions/worker/engines.py`), and so is the step, but that its loss is not read.
Checkpointing recomputes whole blocks; a compiled block is one graph (`workloads.compiled`), inside what is recomputed.
Under DDP too: its option to cut graphs at its buckets is off.

The host's time ends when the step's last launch has returned, before anybody synchronises: what is left of the step is
the GPU's head start. Where the GPU is so far behind that its queue of launches is full, the host waits for room, and
that counts too. On CPU both times are one.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.engine.core.transport import Transport
from fsdplab.engine.emulation.link import Link, behind
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.gloo import GlooTransport
from fsdplab.engine.transport.staged import StagedTransport
from fsdplab.sessions import RunSpec
from fsdplab.sessions.worker.engines import Held, adamw, held, one_step
from fsdplab.workloads import ByteText, build_model, reset_buffers
from fsdplab.workloads.compiled import compile_blocks

_SEED = 0
_SYNCHRONISED = "synchronizing CUDA operation"  # torch's words, from 1.10 on


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


@dataclass(frozen=True)
class Contestant:
    """An engine that holds a model; `step` trains it once and reads nothing back."""

    engine: str
    held: Held
    optimizer: torch.optim.Optimizer

    @property
    def model(self) -> nn.Module:
        """The model as the engine left it."""
        return self.held.model

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, optimizer; the loss, on the device."""
        return one_step(self.held, self.optimizer, [(tokens, targets)], lambda phase: None)


def built(engine: str, case: Case, device: torch.device) -> Contestant:
    """A contestant with fresh weights; `SpecError` for an engine that is none of the five.
    Needs a process group of one.
    """
    model, spec = fresh(case.model, device), _spec(engine, case, device)
    if case.compiled:
        # a dry run needs graphs, not machine code
        compile_blocks(model, "inductor" if device.type == "cuda" else "aot_eager")
    if case.checkpoint != spec.checkpoint:
        _recompute_blocks(model)
    mine = _alone(model) if engine == "alone" else held(spec, device, model)
    if engine == "lab-gathering":
        made_to_gather(mine.model, device)
    return Contestant(engine, mine, adamw(spec, mine.model))


def _spec(engine: str, case: Case, device: torch.device) -> RunSpec:
    """The run of which the contestant is one rank. Only the lab has a setting for checkpointing, in a run as here."""
    known = "lab" if engine in ("lab-gathering", "alone") else engine
    return RunSpec(
        engine=known,
        strategy="no_shard" if known == "torch-ddp" else "full_shard",
        checkpoint=case.checkpoint if engine.startswith("lab") else "none",
        model=case.model, batch_size=case.batch, sequence_length=case.sequence, world_size=1, precision="bf16",
        device=device.type, memory=False,
    )  # fmt: skip


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
    """A model whose values are drawn on `device`: fast at any size, equal for all engines of one machine.

    A run draws them on the CPU, equal on all machines, which takes long for a model of 3 B.
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


def _alone(model: nn.Module) -> Held:
    for parameter in model.parameters():  # not `model.to`, which would round the rotary tables too
        parameter.data = parameter.data.to(torch.bfloat16)
    return Held(model)


def _recompute_blocks(model: Any) -> None:
    """For engines without a setting of their own: PyTorch's wrapper around each block, which is then a unit."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    model.block_type = CheckpointWrapper


# ---- At world size 1 no engine communicates. To see streams, buffers and overlap on a single GPU, the lab's units get
# a transport over the group of one rank: NCCL then copies where it would send, and all else is as with many ranks.


@contextmanager
def group_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, NCCL on CUDA and gloo on CPU, for the time of the block."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def made_to_gather(
    model: nn.Module, device: torch.device, link: Link | None = None, ranks: int | None = None
) -> nn.Module:
    """Have the units of `model`, sharded over the group of one, gather and reduce; with `link` as slowly as `ranks`
    ranks behind it.

    Call it before the first forward.
    """
    transport: Transport = (StagedTransport if device.type == "cuda" else GlooTransport)(dist.group.WORLD, device)
    if link is not None:
        transport = behind(transport, link, ranks)
    for unit in units_of(model):
        unit.config = replace(unit.config, shard=transport)
    return model


# ---- how long a step takes, how long the host is busy with it, and whether the host ever waits inside it


@dataclass(frozen=True)
class Timed:
    """One step, in seconds: until the device was done, and until the host had launched everything."""

    step_s: float
    host_s: float


def synchronise(device: torch.device) -> None:
    """Wait for all work of the device; nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], device: torch.device) -> Timed:
    """Run `call` on an idle device and time it; the device is idle again afterwards."""
    synchronise(device)
    start = time.perf_counter()
    call()
    launched = time.perf_counter()
    synchronise(device)
    return Timed(time.perf_counter() - start, launched - start)


def host_syncs(call: Callable[[], Any], device: torch.device) -> list[str] | None:
    """Where the host waited for the device while `call` ran, one `file:line` each; None on CPU, which has no streams.

    Counted by torch's own sync debug mode: copies to the host, `.item()`, `nonzero`; what a library does past torch is
    not seen.
    """
    if device.type != "cuda":
        return None
    synchronise(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronise(device)
    return synchronisations([(str(each.message), each.filename, each.lineno) for each in heard])


def synchronisations(heard: Sequence[tuple[str, str, int]]) -> list[str]:
    """Of warnings (message, file, line) those that tell of a synchronisation, as `file:line` below the last two
    folders.
    """
    return [f"{'/'.join(file.split('/')[-2:])}:{line}" for message, file, line in heard if _SYNCHRONISED in message]


def medians(steps: Sequence[Timed]) -> dict[str, float]:
    """`step_s`, `step_s_min` and `host_s` of timed steps."""
    return {
        "step_s": statistics.median(each.step_s for each in steps),
        "step_s_min": min(each.step_s for each in steps),
        "host_s": statistics.median(each.host_s for each in steps),
    }
