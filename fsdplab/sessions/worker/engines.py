"""Builds each engine: from a RunSpec to a model, an optimizer and one step of training.

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
    """Return what the run trains; of a user's own model the same object each time, as its file is imported once."""
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
    """Read the text once a process: the engines of a bench train on the same."""
    if path:
        return ByteText.from_path(path)
    return ByteText.from_standard_library()


def micro_batches(spec: RunSpec, workload: Task, step: int, rank: int, device: torch.device) -> list[Any]:
    """Draw those of one rank's step, as `seeded_loss` takes them."""
    at = partial(At, step, rank, spec.world_size, seed=spec.seed, device=device)
    return [workload.drawn(at(micro_batch=number)) for number in range(spec.micro_batches)]


def build(spec: RunSpec, context: RankContext) -> TrainingSetup:
    """Build the setup of `spec.engine` on this rank; the weights depend on `spec.seed` alone."""
    workload = workload_of(spec)
    context.heartbeat.enter(BUILDING)
    # engines that take slices of a model on the meta device: it is filled when it is sharded
    filled_later = workload.built_on_meta and spec.engine in ("lab", "torch-fsdp2")
    model = workload.build("meta" if filled_later else context.device, spec.seed)
    if workload.draws and not filled_later:
        check_equal(model, context.device)
    facts: dict[str, Any] = {}
    if spec.own_model:
        facts = facts_of(model, workload, units_of(spec, model, workload))
    if spec.compile == "blocks" and spec.engine != "twin":  # the twin is what others are compared with
        compile_modules(units_of(spec, model, workload).modules or [model])
    if spec.engine == "twin":
        setup = _twin(spec, context, model, workload)
    elif spec.engine.startswith("deepspeed"):
        setup = _deepspeed(spec, context, model, workload)
    else:
        engine_model = held(spec, context.device, model, workload)
        if filled_later:
            workload.fill(engine_model.model, context.device, spec.seed)
        setup = _trained(context, engine_model, optimizer_of(spec, model, workload), workload)
        if facts:
            facts["notes"] += engine_model.notes
    return replace(setup, facts=facts)


def held(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    """Give `model` to `spec.engine` (the lab's or one of torch's), over all ranks of the process group."""
    return _HOLDERS[spec.engine](spec, device, model, workload)


def one_step(
    trained: Held,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    loss_of: LossOf,
    enter: Callable[[str], None],
) -> Tensor:
    """Run forward and backward of every micro-batch, then the optimizer; return the mean loss, still on the device.
    `enter` is called with each phase.
    """
    losses = []
    for index, batch in enumerate(batches, start=1):
        with trained.accumulate(index == len(batches)):
            enter("forward")
            # gradients add up over micro-batches: divided, they are those of the mean loss
            loss = loss_of(trained.model, batch) / len(batches)
            enter("backward")
            loss.backward()
        losses.append(loss.detach())
    enter("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    # each loss was divided above, so their sum is the mean
    return sum(losses[1:], losses[0])


def _trained(context: RankContext, trained: Held, optimizer: torch.optim.Optimizer, workload: Task) -> TrainingSetup:
    def train_step(batches_by_rank: Sequence[Sequence[Any]]) -> float:
        # this process is one rank; only the twin plays several
        (batches,) = batches_by_rank
        # `item` waits for the device, so the step has ended when the caller reads the clock
        return one_step(trained, optimizer, batches, workload.seeded_loss, context.heartbeat.enter).item()

    _refuse_to_train_nothing(optimizer)
    return TrainingSetup(trained.model, optimizer, train_step)


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
    """Return the dtypes by the names of all engines: bf16 computes and gathers in bfloat16, and reduces in float32."""
    if spec.precision != "bf16":
        return {}
    return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _lab(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from fsdplab.engine import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, shard_model

    offload = OffloadPolicy()
    if spec.offload == "cpu":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
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
    """Return the modules below the root that are units of the run."""
    if spec.units == "model":
        return Units([], "The whole model is one unit, as asked.")
    if spec.units == "linear":
        return of_classes(model, (nn.Linear,))
    if spec.units in UNITS:
        return workload.found_units(model)
    return named_class(model, spec.units)


def as_argument(modules: Sequence[nn.Module]) -> Literal["root"] | Callable[[str, nn.Module], bool]:
    """Return the `units` argument of `shard_model`."""
    chosen = {id(module) for module in modules}
    if not chosen:
        return "root"
    return lambda _, module: id(module) in chosen


def _mesh(spec: Sharding, device: torch.device) -> DeviceMesh:
    """Place all ranks in a line; for a strategy with groups, replicas x ranks of a shard group."""
    if not spec.row.in_groups:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    # 8 ranks with a shard size of 4: a mesh of 2 x 4
    replicas = dist.get_world_size() // spec.shard_size
    return init_device_mesh(device.type, (replicas, spec.shard_size), mesh_dim_names=("replicate", "shard"))


def _ddp(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from torch.nn.parallel import DistributedDataParallel

    shown = Tried(unused=False, changes_buffers=False)  # a preset uses all of its parameters
    if workload.draws:
        first_batch = micro_batches(spec, workload, 0, dist.get_rank(), device)[0]
        shown = tried(model, workload, first_batch, device)
    if spec.precision == "bf16":
        model = _Autocast(model, device.type)
    device_ids = None if device.type == "cpu" else [device.index]
    # searching for unused parameters costs a walk of the graph a step, so it is on only where a rank has some
    replicated = DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=shown.unused)

    def accumulate(last: bool) -> AbstractContextManager[Any]:
        # without the all-reduce of the others, gradients are added up on the rank until the last micro-batch
        return nullcontext() if last else replicated.no_sync()

    notes = (_DDP_BUFFERS,) if shown.changes_buffers else ()
    return Held(replicated, accumulate, notes)


def _fsdp1(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = {id(module) for module in units_of(spec, model, workload).modules}
    mixed = None
    if spec.precision == "bf16":
        mixed = MixedPrecision(**_dtypes(spec))
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[spec.row.torch_fsdp1],
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        device_id=device,
        # the optimizer gets the module's parameters in place of flat ones
        use_orig_params=True,
        mixed_precision=mixed,
    )
    # by its default FSDP1 reduces the gradients of every micro-batch
    return Held(sharded)


def _fsdp2(spec: RunSpec, device: torch.device, model: nn.Module, workload: Task) -> Held:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shard = partial(
        fully_shard,
        mesh=_mesh(spec, device),
        mp_policy=MixedPrecisionPolicy(**_dtypes(spec)),
        # None is the default of FSDP2: all units but the root reshard after the forward
        reshard_after_forward=None if spec.row.reshards_after_forward else False,
    )
    for module in units_of(spec, model, workload).modules:
        shard(module)
    # the root comes last: it takes the parameters that no unit has
    return Held(shard(model))


def _twin(spec: RunSpec, context: RankContext, model: nn.Module, workload: Task) -> TrainingSetup:
    computing = _CastParameters(model) if spec.precision == "bf16" else model
    threads = 1
    # a twin whose memory is measured computes on one thread: the profiler sees no other, and one set of gradients is
    # what it needs
    in_order = spec.memory or workload.draws
    if context.device.type == "cpu" and not in_order and hasattr(os, "sched_getaffinity"):
        threads = min(spec.world_size, len(os.sched_getaffinity(0)))
    buffers = BuffersByRank(model) if workload.draws else None
    replay = SideBySide(computing, threads, buffers)
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

    # the engine's name ends with the stage of ZeRO: deepspeed-3 shards parameters too
    stage = int(spec.engine.removeprefix("deepspeed-"))
    optimizer = optimizer_of(spec, model, workload)
    return TrainingSetup(*deepspeed_setup(stage, spec, context, model, optimizer, workload.seeded_loss))


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
        # the cast is a node of the graph, and its backward casts each gradient to float32
        low = {name: in_bf16(parameter)[0] for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, low, *in_bf16(args, kwargs))


def in_bf16(*values: Any) -> Any:
    """Cast all floating-point tensors in the values to bfloat16, as sharding engines cast a unit's inputs."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, values)


_HOLDERS: dict[str, Callable[[RunSpec, torch.device, nn.Module, Task], Held]] = {
    "lab": _lab,
    "torch-ddp": _ddp,
    "torch-fsdp1": _fsdp1,
    "torch-fsdp2": _fsdp2,
}


# ---- what ranks look at before an engine takes a model of one's own: equal weights, unused parameters, its facts


def facts_of(model: nn.Module, workload: Task, units: Units) -> dict[str, Any]:
    """Describe the model as the record keeps it: its parameters, its units, and what is said of it."""
    return {
        "parameters": parameters_in([model]),
        "units": words_of(units.modules) or "the whole model",
        "notes": [*workload.notes(model), units.sentence],
    }


def check_equal(model: nn.Module, device: torch.device) -> None:
    """Raise ModelError on every rank unless all of them have built the same values: no engine checks that."""
    text = ""
    # names, shapes and sums stand for all values: 100 MB of weights are a few KB of text
    for name, value in model.state_dict().items():
        text += f"{name} {tuple(value.shape)} {_sum(value)};"
    checksum = zlib.crc32(text.encode())
    # the largest checksum and the negative of the smallest one: they add up to 0 where all are equal
    bounds = torch.tensor([checksum, -checksum], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if bounds[0] != -bounds[1]:
        raise ModelError(
            "model() has other values on another rank; build it from torch's, numpy's and Python's random numbers,"
            " which are seeded before, and from nothing that differs between processes"
        )


def _sum(value: Any) -> float:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 0.0
    return value.detach().abs().double().sum().item()


class Tried(NamedTuple):
    """What a first loss shows of a model: parameters without a gradient on some rank, and buffers that it changes."""

    unused: bool
    changes_buffers: bool


def tried(model: nn.Module, workload: Task, drawn: Any, device: torch.device) -> Tried:
    """Find out what DDP must be told before it takes the model, which afterwards is as it was, its buffers too."""
    before = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            before.append((module, name, buffer))
    for module, name, buffer in before:
        module._buffers[name] = None if buffer is None else buffer.clone()
    # the loss may write into buffers in place, which are copies now
    workload.seeded_loss(model, drawn).backward()
    unused = any(parameter.grad is None for parameter in model.parameters() if parameter.requires_grad)
    changed = any(_differ(module._buffers[name], buffer) for module, name, buffer in before)
    model.zero_grad(set_to_none=True)
    for module, name, buffer in before:
        module._buffers[name] = buffer
    # what happens on one rank counts for all of them
    on_any = torch.tensor([unused, changed], dtype=torch.int64, device=device)
    dist.all_reduce(on_any, dist.ReduceOp.MAX)
    return Tried(*map(bool, on_any.tolist()))


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    return one.shape != other.shape or not torch.equal(one, other)


# ---- the optimizer: AdamW for all parameters, or Muon for the matrices of the units and AdamW for the rest


def optimizer_of(spec: RunSpec, model: nn.Module, workload: Task, engine: str = "") -> torch.optim.Optimizer:
    """Make the workload's own optimizer, or that of `spec`, on parameters as an engine (that of `spec`) holds them."""
    engine = engine or spec.engine
    of_workload = workload.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    if of_workload is not None:
        return of_workload
    if spec.optimizer == "muon":
        return _muon(spec, model, workload, engine)
    if spec.optimizer == "adamw-foreach":
        return torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, foreach=True)
    parameters: Any = model.parameters()
    # the engines whose parameters are DTensors
    if engine in ("lab", "torch-fsdp2"):
        parameters = _by_block(model, workload.units(model))
    return torch.optim.AdamW(parameters, lr=spec.learning_rate, fused=True)


def _by_block(model: nn.Module, units: tuple[type[nn.Module], ...]) -> list[dict[str, Any]]:
    """Put the parameters in a group for each block and one for the rest.

    A first step on all of gpt-20m's DTensors at once spends 0.5 s on their placements, with the square of their number;
    groups of like blocks share what it found.
    """
    groups = _blocks(model, units)
    in_blocks = {id(parameter) for group in groups for parameter in group}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in in_blocks]
    return [{"params": group} for group in (rest, *groups) if group]


def _blocks(model: nn.Module, units: tuple[type[nn.Module], ...]) -> list[list[nn.Parameter]]:
    """Return the parameters of each block; those of a block inside of another are the outer one's."""
    taken: set[int] = set()
    groups = []
    for module in model.modules():
        if isinstance(module, units):
            # `modules` yields an outer block before those inside of it
            groups.append([parameter for parameter in module.parameters() if id(parameter) not in taken])
            taken |= {id(parameter) for parameter in module.parameters()}
    return groups


def _muon(spec: RunSpec, model: nn.Module, workload: Task, engine: str) -> torch.optim.Optimizer:
    """Make Muon of the matrices in units, and AdamW of all else. Muon's updates have the size of AdamW's, so one
    learning rate fits both (Liu et al. 2025, arXiv 2502.16982).
    """
    matrices = matrices_of(workload, model)
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    # embeddings, the head, norms and biases are left to AdamW
    muon = torch.optim.Muon(matrices, lr=spec.learning_rate, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(others, lr=spec.learning_rate, fused=True)
    if engine != "lab":
        return Together(muon, rest)
    from fsdplab.engine import whole_matrices

    # where every rank holds whole matrices, all ranks share the work; else those of a shard group do
    return whole_matrices(muon, rest=rest, replicas=None if spec.row.cuts else dist.group.WORLD)


def matrices_of(workload: Task, model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that Muon steps: those in blocks, whatever the run's units are."""
    matrices: list[nn.Parameter] = []
    for block in _blocks(model, workload.units(model)):
        matrices += [parameter for parameter in block if parameter.ndim == 2]
    return matrices


class Together(torch.optim.Optimizer):
    """Joins several optimizers of different parameters into one, whose groups and state are theirs."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            # state is kept by parameter, and no two parts share one: one dict serves all
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each of them; none takes a closure."""
        assert closure is None, "a closure would be run by every part"
        for part in self._parts:
            part.step()
