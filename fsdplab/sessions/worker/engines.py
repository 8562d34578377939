"""One builder for each engine: from a RunSpec to a model, an optimizer and one step of training.

All engines train the same model from the same weights with the same optimizer. All differences between engines are in
this file; each is used as its documentation says, with its defaults.

bf16 means computing in bfloat16 with float32 masters and float32 reduction. DDP and the twin have no masters of their
own: DDP runs under autocast, its usual form; the twin casts its parameters inside the forward, which is what sharding
engines do.

AdamW is the fused one everywhere: it makes no temporaries (a looped one holds three times its largest parameter, a
foreach one a copy of all), works on DTensors, and on the CPU takes a third of the time. Muon is PyTorch's own; under
the lab's engine each matrix has one owner (`engine/features/matrix_optimizer.py`), other engines step it as it is.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from fsdplab.sessions.launch.mailbox import BUILDING
from fsdplab.sessions.spec import UNITS, EngineChoice, RunSpec, Sharding, WorkloadPart
from fsdplab.sessions.worker.rank_process import RankContext
from fsdplab.workloads import ByteText
from fsdplab.workloads.compiled import compile_modules
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.own.carried import workload_from
from fsdplab.workloads.own.hugging_face import CausalLM
from fsdplab.workloads.own.reading import workload_in
from fsdplab.workloads.own.sources import FILE, HUGGING_FACE, VALUE, kind_of, source_of
from fsdplab.workloads.twin import BuffersByRank, SideBySide
from fsdplab.workloads.units import Units, named_class, of_classes, parameters_in, words_of
from fsdplab.workloads.workload import At, OnText, Task

_DDP_BUFFERS = (
    "DDP sends rank 0's buffers to all ranks before each forward (its default), so where the loss depends on a buffer"
    " that changes, its losses are not the twin's."
)
Accumulate = Callable[[bool], AbstractContextManager[Any]]
LossOf = Callable[[nn.Module, Any], Tensor]
TrainStep = Callable[[Sequence[Sequence[Any]]], float]


@dataclass(frozen=True)
class Held:
    """A model as an engine holds it. A micro-batch is trained inside `accumulate(last)`: gradients travel with the last
    one of a step. `notes` are sentences on how the engine treats this model.
    """

    model: nn.Module
    accumulate: Accumulate = lambda last: nullcontext()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingSetup:
    """A model ready to train. `train_step(batches)` does one whole step and returns its mean loss; `batches[i]` are the
    micro-batches of the i-th rank that this process plays: one for every engine but the twin, which plays all. `facts`
    are of a model of one's own, for its record.
    """

    model: nn.Module
    optimizer: Any
    train_step: TrainStep
    facts: Mapping[str, Any] = field(default_factory=dict)


def workload_of(part: WorkloadPart) -> Task:
    """What the run trains; of a model of one's own the same object each time, as its file is imported once."""
    kind = kind_of(part.model)
    if kind == FILE:
        return workload_in(Path(part.model))
    if kind == VALUE:
        return workload_from(Path(part.model))
    if kind == HUGGING_FACE:
        source = source_of(part.model)
        return CausalLM(source.name, _text(part.text), part.batch_size, part.sequence_length, source.path)
    return OnText(part.model, _text(part.text), part.batch_size, part.sequence_length)


@cache
def _text(path: str | None) -> ByteText:
    """Read once a process: the engines of a bench train on the same."""
    return ByteText.from_path(path) if path else ByteText.from_standard_library()


def micro_batches(spec: RunSpec, workload: Task, step: int, rank: int, device: torch.device) -> list[Any]:
    """Those of one rank's step, as `seeded_loss` takes them."""
    at = partial(At, step, rank, spec.world_size, seed=spec.seed, device=device)
    return [workload.drawn(at(micro_batch=number)) for number in range(spec.micro_batches)]


def build(spec: RunSpec, context: RankContext) -> TrainingSetup:
    """The setup of `spec.engine` on this rank; the weights depend on `spec.seed` alone."""
    workload = workload_of(spec)
    context.heartbeat.enter(BUILDING)
    late = workload.built_on_meta and spec.engine in ("lab", "torch-fsdp2")  # which take slices of it
    model = workload.build("meta" if late else context.device, spec.seed)
    if workload.draws and not late:
        check_equal(model, context.device)
    facts = facts_of(model, workload, units_of(spec, model, workload)) if spec.own_model else {}
    if spec.compile == "blocks" and spec.engine != "twin":  # the twin is what others are compared with
        compile_modules(units_of(spec, model, workload).modules or [model])
    if spec.engine == "twin":
        setup = _twin(spec, context, model, workload)
    elif spec.engine.startswith("deepspeed"):
        setup = _deepspeed(spec, context, model, workload)
    else:
        mine = held(spec, context.device, model, workload)
        if late:
            workload.fill(mine.model, context.device, spec.seed)
        setup = _trained(context, mine, optimizer_of(spec, model, workload), workload)
        facts = facts and {**facts, "notes": [*facts["notes"], *mine.notes]}
    return replace(setup, facts=facts)


def held(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    """`model` in the hands of `spec.engine` (the lab's or one of torch's), over all ranks of the process group."""
    return _HOLDERS[spec.engine](spec, device, model, workload)


def one_step(
    mine: Held, optimizer: torch.optim.Optimizer, batches: Sequence[Any], loss_of: LossOf, enter: Callable[[str], None]
) -> Tensor:
    """Forward and backward of every micro-batch, then the optimizer; the mean loss, still on the device. `enter` is
    called with each phase.
    """
    losses = []
    for index, batch in enumerate(batches, start=1):
        with mine.accumulate(index == len(batches)):
            enter("forward")
            loss = loss_of(mine.model, batch) / len(batches)
            enter("backward")
            loss.backward()
        losses.append(loss.detach())
    enter("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses[1:], losses[0])


def _trained(context: RankContext, mine: Held, optimizer: torch.optim.Optimizer, workload: Task) -> TrainingSetup:
    def train_step(batches_by_rank: Sequence[Sequence[Any]]) -> float:
        (batches,) = batches_by_rank
        return one_step(mine, optimizer, batches, workload.seeded_loss, context.heartbeat.enter).item()

    _refuse_to_train_nothing(optimizer)
    return TrainingSetup(mine.model, optimizer, train_step)


def _refuse_to_train_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Have the first step of `optimizer` raise where none of its parameters has a gradient."""

    is_first = True

    def check(*_: Any) -> None:
        nonlocal is_first
        if not is_first:  # the hook stays: one that removed itself would change what the optimizer is iterating over
            return
        is_first = False
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(parameter.grad is None for parameter in parameters):
            raise ModelError(
                f"none of the {len(parameters)} parameters that the optimizer steps has a gradient after the first"
                " backward, so the run would train nothing; compute the loss from what the model returns, without"
                " detach() or torch.no_grad()"
            )

    optimizer.register_step_pre_hook(check)


def _dtypes(spec: EngineChoice) -> dict[str, torch.dtype]:
    """What all engines call these dtypes: bf16 computes and gathers in bfloat16, and reduces in float32."""
    return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if spec.precision == "bf16" else {}


def _lab(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from fsdplab.engine import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, shard_model

    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if spec.offload == "cpu" else OffloadPolicy()
    sharded = shard_model(
        model,
        spec.strategy,
        units=as_argument(units_of(spec, model, workload).modules),
        mesh=_mesh(spec, device),
        mp_policy=MixedPrecisionPolicy(**_dtypes(spec)),
        offload_policy=offload,
        checkpoint=spec.checkpoint,
        prefetch=spec.prefetch,
        transport=spec.transport,
    )

    def announce(last: bool) -> AbstractContextManager[Any]:
        sharded.set_is_last_backward(last)
        if spec.row.reduces_once:  # they stay whole anyway, so they travel once a step
            sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return Held(sharded, announce)


def units_of(spec: Sharding, model: nn.Module, workload: Task) -> Units:
    """The modules below the root that are units of the run."""
    if spec.units == "model":
        return Units([], "The whole model is one unit, as asked.")
    if spec.units == "linear":
        return of_classes(model, (nn.Linear,))
    return workload.found_units(model) if spec.units in UNITS else named_class(model, spec.units)


def as_argument(modules: Sequence[nn.Module]) -> Literal["root"] | Callable[[str, nn.Module], bool]:
    """The `units` argument of `shard_model`."""
    chosen = {id(module) for module in modules}
    return (lambda _, module: id(module) in chosen) if chosen else "root"


def _mesh(spec: Sharding, device: torch.device) -> DeviceMesh:
    """All ranks in a line; for a strategy with groups, replicas x ranks of a shard group."""
    if not spec.row.in_groups:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    replicas = dist.get_world_size() // spec.shard_size
    return init_device_mesh(device.type, (replicas, spec.shard_size), mesh_dim_names=("replicate", "shard"))


def _ddp(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from torch.nn.parallel import DistributedDataParallel

    shown = Tried(unused=False, changes_buffers=False)  # a preset uses all of its parameters
    if workload.draws:
        shown = tried(model, workload, micro_batches(spec, workload, 0, dist.get_rank(), device)[0], device)
    seen = _Autocast(model, device.type) if spec.precision == "bf16" else model
    replicated = DistributedDataParallel(
        seen, device_ids=None if device.type == "cpu" else [device.index], find_unused_parameters=shown.unused
    )
    notes = (_DDP_BUFFERS,) if shown.changes_buffers else ()
    return Held(replicated, lambda last: nullcontext() if last else replicated.no_sync(), notes)


def _fsdp1(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = {id(module) for module in units_of(spec, model, workload).modules}
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[spec.row.torch_fsdp1],
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        device_id=device,
        use_orig_params=True,
        mixed_precision=MixedPrecision(**_dtypes(spec)) if spec.precision == "bf16" else None,
    )
    return Held(sharded)


def _fsdp2(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shard = partial(
        fully_shard,
        mesh=_mesh(spec, device),
        mp_policy=MixedPrecisionPolicy(**_dtypes(spec)),
        reshard_after_forward=None if spec.row.reshards_after_forward else False,
    )
    for module in units_of(spec, model, workload).modules:
        shard(module)
    return Held(shard(model))


def _twin(spec: RunSpec, context: RankContext, model: nn.Module, workload: Task) -> TrainingSetup:
    seen = _CastParameters(model) if spec.precision == "bf16" else model
    # a twin whose memory is measured computes on one thread: the profiler sees no other, and one set of gradients is
    # what it needs
    spread = context.device.type == "cpu" and not (spec.memory or workload.draws) and hasattr(os, "sched_getaffinity")
    buffers = BuffersByRank(model) if workload.draws else None
    replay = SideBySide(seen, min(spec.world_size, len(os.sched_getaffinity(0))) if spread else 1, buffers)
    optimizer = optimizer_of(spec, model, workload)

    def train_step(batches_by_rank: Sequence[Sequence[Any]]) -> float:
        context.heartbeat.enter("replay")
        played = [[(batch,) for batch in batches] for batches in batches_by_rank]
        loss = replay.replay_gradients(played, workload.seeded_loss)
        context.heartbeat.enter("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return TrainingSetup(model, optimizer, train_step)


def _deepspeed(spec: RunSpec, context: RankContext, model: nn.Module, workload: Task) -> TrainingSetup:
    from fsdplab.sessions.worker.deepspeed_engine import deepspeed_setup

    stage = int(spec.engine.removeprefix("deepspeed-"))
    return TrainingSetup(
        *deepspeed_setup(stage, spec, context, model, optimizer_of(spec, model, workload), workload.seeded_loss)
    )


class _Autocast(nn.Module):
    """The model with its forward under bfloat16 autocast."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        super().__init__()
        self.model = model
        self.device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.model(*args, **kwargs)


class _CastParameters(nn.Module):
    """The model computed with bfloat16 copies of its float32 parameters; gradients arrive at the masters in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        low = {name: in_bf16(parameter)[0] for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, low, *in_bf16(args, kwargs))


def in_bf16(*values: Any) -> Any:
    """The values with all floating-point tensors in them cast to bfloat16, as sharding engines cast a unit's inputs."""
    return tree_map_only(Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, values)


_HOLDERS: dict[str, Callable[[RunSpec, torch.device, nn.Module, Task], Held]] = {
    "lab": _lab,
    "torch-ddp": _ddp,
    "torch-fsdp1": _fsdp1,
    "torch-fsdp2": _fsdp2,
}


# ---- what ranks look at before an engine takes a model of one's own: equal weights, unused parameters, its facts


def facts_of(model: nn.Module, workload: Task, units: Units) -> dict[str, Any]:
    """The model as the record keeps it: its parameters, its units, and what is said of it."""
    return {
        "parameters": parameters_in([model]),
        "units": words_of(units.modules) or "the whole model",
        "notes": [*workload.notes(model), units.sentence],
    }


def check_equal(model: nn.Module, device: torch.device) -> None:
    """ModelError on every rank unless all of them have built the same values: engines send slices, and none checks."""
    text = "".join(f"{name} {tuple(each.shape)} {_sum(each)};" for name, each in model.state_dict().items())
    mine = zlib.crc32(text.encode())
    bounds = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if bounds[0] != -bounds[1]:
        raise ModelError(
            "model() has other values on another rank; build it from torch's, numpy's and Python's random numbers,"
            " which are seeded before, and from nothing that differs between processes"
        )


def _sum(value: Any) -> float:
    return value.detach().abs().double().sum().item() if isinstance(value, torch.Tensor) and value.numel() else 0.0


class Tried(NamedTuple):
    """What a first loss shows of a model: parameters without a gradient on some rank, and buffers that it changes."""

    unused: bool
    changes_buffers: bool


def tried(model: nn.Module, workload: Task, drawn: Any, device: torch.device) -> Tried:
    """What DDP must be told before it takes the model, which afterwards is as it was, its buffers too."""
    kept = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    for module, name, buffer in kept:
        module._buffers[name] = None if buffer is None else buffer.clone()
    workload.seeded_loss(model, drawn).backward()
    unused = any(each.grad is None for each in model.parameters() if each.requires_grad)
    changed = any(_differ(module._buffers[name], buffer) for module, name, buffer in kept)
    model.zero_grad(set_to_none=True)
    for module, name, buffer in kept:
        module._buffers[name] = buffer
    found = torch.tensor([unused, changed], dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Tried(*map(bool, found.tolist()))


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    return one.shape != other.shape or not torch.equal(one, other)


# ---- the optimizer: AdamW for all parameters, or Muon for the matrices of the units and AdamW for the rest


def optimizer_of(spec: RunSpec, model: nn.Module, workload: Task, engine: str = "") -> torch.optim.Optimizer:
    """The workload's own optimizer, or that of `spec`, on parameters as an engine (that of `spec`) holds them."""
    engine = engine or spec.engine
    own = workload.optimizer([each for each in model.parameters() if each.requires_grad])
    if own is not None:
        return own
    if spec.optimizer == "muon":
        return _muon(spec, model, workload, engine)
    if spec.optimizer == "adamw-foreach":
        return torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, foreach=True)
    sharded = engine in ("lab", "torch-fsdp2")
    parameters = _by_block(model, workload.units(model)) if sharded else model.parameters()
    return torch.optim.AdamW(parameters, lr=spec.learning_rate, fused=True)


def _by_block(model: nn.Module, units: tuple[type[nn.Module], ...]) -> list[dict[str, Any]]:
    """The parameters in a group for each block and one for the rest: a first step on all of gpt-20m's DTensors at once
    spends 0.5 s on their placements, with the square of their number; groups of like blocks share what it found.
    """
    groups = _blocks(model, units)
    known = {id(parameter) for group in groups for parameter in group}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [{"params": group} for group in (rest, *groups) if group]


def _blocks(model: nn.Module, units: tuple[type[nn.Module], ...]) -> list[list[nn.Parameter]]:
    """The parameters of each block; those of a block inside of another are the outer one's."""
    taken: set[int] = set()
    groups = []
    for module in model.modules():
        if isinstance(module, units):
            groups.append([each for each in module.parameters() if id(each) not in taken])
            taken |= {id(each) for each in module.parameters()}
    return groups


def _muon(spec: RunSpec, model: nn.Module, workload: Task, engine: str) -> torch.optim.Optimizer:
    """Muon of the matrices in units, AdamW of all else. Muon's updates have the size of AdamW's, so one learning rate
    fits both (Liu et al. 2025, arXiv 2502.16982).
    """
    matrices = [p for block in _blocks(model, workload.units(model)) for p in block if p.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    muon = torch.optim.Muon(matrices, lr=spec.learning_rate, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(others, lr=spec.learning_rate, fused=True)
    if engine != "lab":
        return Together(muon, rest)
    from fsdplab.engine import whole_matrices

    return whole_matrices(muon, rest=rest, replicas=None if spec.row.cuts else dist.group.WORLD)


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters as one object, whose groups and state are theirs."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each; none of them takes a closure."""
        assert closure is None, "a closure would be run by every part"
        for part in self._parts:
            part.step()
