"""Finds what a job trains from the optimizers that stepped: the model, the engine by its class, the strategy; and joins
the optimizers to the one that the memory's recorder looks at.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fsdplab.common.names import STRATEGY_ROWS

_TRAINERS = (
    ("transformers.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Lightning"),
    ("lightning.pytorch.trainer.trainer", "Lightning"),
    ("torchtitan.trainer", "torchtitan"),
    ("torchtitan.train", "torchtitan"),
    ("accelerate.accelerator", "accelerate"),
)
LAB = "lab"  # this project's own engine
PLAIN = "plain"  # no engine that is known: one process, or a job that averages gradients itself


@dataclass(frozen=True)
class Subject:
    """The root module (an empty one where none holds the optimizer's parameters), its engine and its strategy.

    `settings` is what else a record's spec says: precision, ranks of a shard group.
    """

    model: nn.Module
    engine: str
    strategy: str
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()

    def as_spec(self) -> dict[str, Any]:
        """Return what a record's spec says of it."""
        known = {"model": self.name, "engine": self.engine, "strategy": self.strategy, "trainer": self.trainer}
        return {**known, **self.settings}

    @property
    def trainer(self) -> str:
        """What runs the loop, by what the job has imported: `Trainer`, `Lightning`, ...; "" for a loop of its own."""
        for module, name in _TRAINERS:
            if module in sys.modules:
                return name
        return ""

    @property
    def name(self) -> str:
        """The model's class, without the wrappers around it."""
        model = self.model
        inner = _wrapped(model)
        while inner is not None:
            model = inner
            inner = _wrapped(model)
        name = type(model).__name__
        if fsdp2_units(model):  # fully_shard changes the class of what it shards
            return name.removeprefix("FSDP")
        return name


def subject_of(optimizers: Sequence[Any], model: nn.Module | None = None) -> Subject:
    """Find what these optimizers train; `model` is looked for among all living modules where it is not given."""
    if model is None:
        model = _root_of(optimizers)
    if model is None:
        why = "no module holds the parameters that the optimizer steps, so memory has no categories of the model"
        return Subject(nn.Module(), PLAIN, "no_shard", {}, (why,))
    for of_engine in (_of_deepspeed, _of_lab, _of_fsdp2, _of_fsdp1, _of_ddp):
        subject = of_engine(model, optimizers)
        if subject is not None:
            return subject
    return Subject(model, PLAIN, "no_shard", {"precision": _precision(model.parameters())})


def _root_of(optimizers: Sequence[Any]) -> nn.Module | None:
    """Find the root module that holds most of the optimizers' parameters, in elements."""
    for optimizer in optimizers:
        if isinstance(optimizer, nn.Module):  # DeepSpeed's engine steps itself
            return optimizer
    stepped = {id(parameter): parameter.numel() for parameter in parameters_of(optimizers)}
    candidates: list[tuple[int, nn.Module]] = []
    children: set[int] = set()
    for thing in gc.get_objects():
        # not isinstance: lazy proxies would load
        if not issubclass(type(thing), nn.Module) or "_modules" not in vars(thing):
            continue
        elements = sum(stepped.get(id(parameter), 0) for parameter in thing.parameters())
        if elements:
            candidates.append((elements, thing))
            children.update(id(child) for child in thing.children())
    most, root = 0, None
    for elements, module in candidates:
        # of nested modules the outermost, which is nobody's child
        if elements > most and id(module) not in children:
            most, root = elements, module
    return root


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "OptimizedModule")


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper holds: DDP and FSDP1 and DeepSpeed as `module`, torch.compile as `_orig_mod`."""
    if type(module).__name__ not in _WRAPPERS:
        return None
    inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
    return inner if isinstance(inner, nn.Module) else None


def _precision(parameters: Iterable[torch.Tensor]) -> str:
    """Return `fp32` or `bf16`, ...: that of most parameters."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return _dtype_word(max(sizes, key=sizes.__getitem__, default=torch.float32))


def _sent_in(mixed: torch.dtype | None, module: nn.Module) -> str:
    """Return the type of mixed precision, else that of most parameters."""
    if mixed is None:
        return _precision(module.parameters())
    return _dtype_word(mixed)


_DTYPE_WORDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    None: "fp32",  # an engine that casts nothing
}


def _dtype_word(dtype: torch.dtype | None) -> str:
    return _DTYPE_WORDS.get(dtype, str(dtype).removeprefix("torch."))


# ---- the engines: a subject each, None of another engine's model


def _of_deepspeed(module: Any, optimizers: Sequence[Any]) -> Subject | None:
    if type(module).__name__ not in ("DeepSpeedEngine", "PipelineEngine"):
        return None
    stage = module.zero_optimization_stage()
    # stage -> strategy, from the table of strategies
    strategy_of = {row.deepspeed_stage: row.name for row in STRATEGY_ROWS.values() if row.deepspeed_stage}
    precision = "fp32"
    if module.bfloat16_enabled():
        precision = "bf16"
    elif module.fp16_enabled():
        precision = "fp16"
    # stage 0 all-reduces gradients, as DDP does
    engine = f"deepspeed-{stage}" if stage else "torch-ddp"
    return Subject(module, engine, strategy_of.get(stage, "no_shard"), {"precision": precision})


def _of_lab(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    units = lab_units(module)
    if not units:
        return None
    config = units[-1].memory.config  # not the root's, which may keep its parameters where the others drop theirs
    count = len({id(unit) for unit in units})  # modules that were sharded together are one
    settings: dict[str, Any] = {"precision": _sent_in(config.policy.param_dtype, module), "unit_count": count}
    strategy = config.strategy.name
    if config.shard is not None and config.replicate is not None:
        strategy = "hybrid_shard"
        settings["shard_size"] = config.ranks
    return Subject(module, LAB, strategy, settings)


def _of_fsdp2(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    """Look at PyTorch's fully_shard: reshard_after_forward and the mesh tell the strategy."""
    units = fsdp2_units(module)
    if not units:
        return None
    groups = fsdp2_groups(module)
    if not groups:
        return Subject(module, "torch-fsdp2", "full_shard", {})
    mixed = getattr(groups[0], "mp_policy", None)
    precision = _sent_in(getattr(mixed, "param_dtype", None), module)
    settings: dict[str, Any] = {"precision": precision, "unit_count": len(groups)}
    mesh = groups[0].mesh_info.mesh
    if mesh.ndim > 1:
        strategy = "hybrid_shard"
        # a mesh of replicas x ranks of a shard group
        settings["shard_size"] = mesh.size(mesh.ndim - 1)
    # where parameters go after the forward: back to shards, or nowhere
    elif any(group.post_forward_mesh_info is not None for group in groups):
        strategy = "full_shard"
    else:
        strategy = "shard_grad_op"
    return Subject(module, "torch-fsdp2", strategy, settings)


def lab_units(module: nn.Module) -> list[Any]:
    """Return the units of the lab's engine, the root's first."""
    engine = sys.modules.get("fsdplab.engine.module")
    if engine is None:  # a job that has not imported the engine does not train with it
        return []
    # in the order of `modules`
    return [part._unit_hooks.unit for part in module.modules() if isinstance(part, engine.FSDPModule)]


def fsdp2_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters of PyTorch's fully_shard, the root's first.

    A unit whose parameters all belong to inner ones has none, and one has several where shard_placement_fn gives
    parameters a mesh of their own.
    """
    groups = []
    for unit in fsdp2_units(module):
        state = unit._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            groups += state._fsdp_param_groups
        # torch before 2.12
        elif getattr(state, "_fsdp_param_group", None):
            groups.append(state._fsdp_param_group)
    # the lab's units pass for PyTorch's, and have no such mesh
    return [group for group in groups if hasattr(group, "mesh_info")]


def fsdp2_units(module: nn.Module) -> list[Any]:
    """Return the modules that PyTorch's fully_shard was called on."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _of_fsdp1(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
    if not sharded:
        return None
    strategy_of = {row.torch_fsdp1: row.name for row in STRATEGY_ROWS.values() if row.torch_fsdp1}
    strategy = strategy_of.get(sharded[0].sharding_strategy.name, "hybrid_shard")
    mixed = sharded[0].mixed_precision
    dtype = mixed.param_dtype if mixed else None
    # one whose parameters all belong to inner ones has no handle
    count = sum(getattr(part, "_handle", None) is not None for part in sharded)
    return Subject(module, "torch-fsdp1", strategy, {"precision": _sent_in(dtype, module), "unit_count": count})


def _of_ddp(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return None
    shards_state = any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in optimizers)
    strategy = "zero1" if shards_state else "no_shard"
    return Subject(module, "torch-ddp", strategy, {"precision": _precision(module.parameters())})


# ---- the optimizers


def together(optimizers: Sequence[Any]) -> Any:
    """Return the optimizer that holds the state (of DeepSpeed's engine the one inside it); several as one."""
    inner = all_holding_state(optimizers)
    if len(inner) == 1:
        return inner[0]
    return _Together(inner)


def parameters_of(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """Return all parameters that these optimizers step; of DeepSpeed's engine, which steps itself, its own."""
    parameters: list[torch.Tensor] = []
    for optimizer in optimizers:
        if isinstance(optimizer, torch.nn.Module):
            parameters += optimizer.parameters()
        for group in getattr(optimizer, "param_groups", ()):
            parameters += group["params"]
    return parameters


def has_no_learning_rate(optimizers: Sequence[Any]) -> bool:
    """Return whether all groups of these optimizers have a learning rate, and it is 0 in each of them."""
    has_groups = False
    for optimizer in all_holding_state(optimizers):
        for group in getattr(optimizer, "param_groups", ()):
            rate = group.get("lr")
            # a number on a GPU is not read, as that would wait for it
            is_on_host = isinstance(rate, (int, float)) or (torch.is_tensor(rate) and rate.device.type == "cpu")
            if not is_on_host or bool(rate):
                return False
            has_groups = True
    return has_groups


def all_holding_state(optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that have the state of these optimizers."""
    inner: list[Any] = []
    for optimizer in optimizers:
        inner += holding_state(optimizer)
    return inner


def holding_state(optimizer: Any) -> list[Any]:
    """Return the optimizers that have the state, such as those in DeepSpeed's engine, ZeroRedundancyOptimizer,
    accelerate's wrapper, or torchtitan's list of several.
    """
    if isinstance(optimizer, torch.nn.Module):
        return [optimizer.optimizer]
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, list) and several and all(isinstance(part, Optimizer) for part in several):
        return all_holding_state(several)
    # torch's name for the optimizer inside; other wrappers say `optimizer`
    attribute = "optim" if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else "optimizer"
    inner = getattr(optimizer, attribute, None)
    if isinstance(inner, Optimizer):
        return holding_state(inner)
    return [optimizer]


class _Together(Optimizer):
    """Joins several optimizers, to be looked at; it steps nothing."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all = optimizers  # Optimizer.__init__ would make groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        groups: list[dict[str, Any]] = []
        for optimizer in self._all:
            groups += optimizer.param_groups
        return groups

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all."""
        states: dict[Any, Any] = {}
        for optimizer in self._all:
            states.update(optimizer.state)
        return states

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` before each of them steps."""
        return _Handles([optimizer.register_step_pre_hook(hook) for optimizer in self._all])

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` after each of them has stepped."""
        return _Handles([optimizer.register_step_post_hook(hook) for optimizer in self._all])


class _Handles:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
