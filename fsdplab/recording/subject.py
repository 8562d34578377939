"""What a job trains, found from the optimizers that stepped: the model, the engine by its class, the strategy; and the
optimizers, all as the one that the memory's recorder looks at.
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
        """What a record's spec says of it."""
        known = {"model": self.name, "engine": self.engine, "strategy": self.strategy, "trainer": self.trainer}
        return {**known, **self.settings}

    @property
    def trainer(self) -> str:
        """What runs the loop, by what the job has imported: `Trainer`, `Lightning`, ...; "" for a loop of its own."""
        return next((name for module, name in _TRAINERS if module in sys.modules), "")

    @property
    def name(self) -> str:
        """The model's class, without the wrappers around it."""
        inner = self.model
        while (wrapped := _wrapped(inner)) is not None:
            inner = wrapped
        return type(inner).__name__.removeprefix("FSDP") if fsdp2_units(inner) else type(inner).__name__


def subject_of(optimizers: Sequence[Any], model: nn.Module | None = None) -> Subject:
    """What these optimizers train; `model` is looked for among all living modules where it is not given."""
    found = model if model is not None else _root_of(optimizers)
    if found is None:
        why = "no module holds the parameters that the optimizer steps, so memory has no categories of the model"
        return Subject(nn.Module(), PLAIN, "no_shard", {}, (why,))
    for of_engine in (_of_deepspeed, _of_lab, _of_fsdp2, _of_fsdp1, _of_ddp):
        if (subject := of_engine(found, optimizers)) is not None:
            return subject
    return Subject(found, PLAIN, "no_shard", {"precision": _precision(found.parameters())})


def _root_of(optimizers: Sequence[Any]) -> nn.Module | None:
    """The root module that holds most of the optimizers' parameters, in elements."""
    for optimizer in optimizers:
        if isinstance(optimizer, nn.Module):  # DeepSpeed's engine steps itself
            return optimizer
    stepped = {id(each): each.numel() for each in parameters_of(optimizers)}
    held: list[tuple[int, nn.Module]] = []
    inner: set[int] = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and "_modules" in vars(thing):  # not isinstance: lazy proxies would load
            elements = sum(stepped.get(id(each), 0) for each in thing.parameters())
            if elements:
                held.append((elements, thing))
                inner.update(id(child) for child in thing.children())
    roots = [(elements, module) for elements, module in held if id(module) not in inner]
    return max(roots, key=lambda root: root[0], default=(0, None))[1]


def _wrapped(module: nn.Module) -> nn.Module | None:
    """What a wrapper holds: DDP and FSDP1 and DeepSpeed as `module`, torch.compile as `_orig_mod`."""
    wraps = type(module).__name__ in (
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "DeepSpeedEngine",
        "OptimizedModule",
    )
    inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None) if wraps else None
    return inner if isinstance(inner, nn.Module) else None


def _precision(parameters: Iterable[torch.Tensor]) -> str:
    """`fp32` or `bf16`, ...: of most parameters."""
    sizes: dict[torch.dtype, int] = {}
    for each in parameters:
        sizes[each.dtype] = sizes.get(each.dtype, 0) + each.numel()
    return _dtype_word(max(sizes, key=sizes.__getitem__, default=torch.float32))


def _dtype_word(dtype: torch.dtype | None) -> str:
    words = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", None: "fp32"}
    return words.get(dtype, str(dtype).removeprefix("torch."))


# ---- the engines: a subject each, None of another engine's model


def _of_deepspeed(module: Any, optimizers: Sequence[Any]) -> Subject | None:
    if type(module).__name__ not in ("DeepSpeedEngine", "PipelineEngine"):
        return None
    stage = module.zero_optimization_stage()
    named = {row.deepspeed_stage: row.name for row in STRATEGY_ROWS.values() if row.deepspeed_stage}
    low = "bf16" if module.bfloat16_enabled() else "fp16" if module.fp16_enabled() else "fp32"
    engine = f"deepspeed-{stage}" if stage else "torch-ddp"
    return Subject(module, engine, named.get(stage, "no_shard"), {"precision": low})


def _of_lab(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    engine = sys.modules.get("fsdplab.engine.module")  # a job that has not imported the engine does not train with it
    units = [each._unit_hooks.unit for each in module.modules() if engine and isinstance(each, engine.FSDPModule)]
    if not units:
        return None
    config = units[-1].memory.config  # not the root's, which may keep its parameters where the others drop theirs
    count = len({id(unit) for unit in units})  # modules that were sharded together are one
    settings: dict[str, Any] = {"precision": _dtype_word(config.policy.param_dtype), "unit_count": count}
    if in_groups := config.shard is not None and config.replicate is not None:
        settings["shard_size"] = config.ranks
    return Subject(module, LAB, "hybrid_shard" if in_groups else config.strategy.name, settings)


def _of_fsdp2(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    """PyTorch's fully_shard: reshard_after_forward and the mesh tell the strategy."""
    units = fsdp2_units(module)
    if not units:
        return None
    groups = [group for unit in units if (group := getattr(unit._get_fsdp_state(), "_fsdp_param_group", None))]
    if not groups:
        return Subject(module, "torch-fsdp2", "full_shard", {})
    reshards = any(group.post_forward_mesh_info is not None for group in groups)
    mesh, mixed = groups[0].mesh_info.mesh, getattr(groups[0], "mp_policy", None)
    in_groups = mesh.ndim > 1
    settings: dict[str, Any] = {
        "precision": _dtype_word(getattr(mixed, "param_dtype", None)),
        "unit_count": len(groups),
    }
    if in_groups:
        settings["shard_size"] = mesh.size(mesh.ndim - 1)
    return Subject(
        module, "torch-fsdp2", "hybrid_shard" if in_groups else "full_shard" if reshards else "shard_grad_op", settings
    )


def fsdp2_units(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _of_fsdp1(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    first = next((each for each in module.modules() if isinstance(each, FullyShardedDataParallel)), None)
    if first is None:
        return None
    named = {row.torch_fsdp1: row.name for row in STRATEGY_ROWS.values() if row.torch_fsdp1}
    strategy = named.get(first.sharding_strategy.name, "hybrid_shard")
    mixed = first.mixed_precision.param_dtype if first.mixed_precision else None
    return Subject(module, "torch-fsdp1", strategy, {"precision": _dtype_word(mixed)})


def _of_ddp(module: nn.Module, optimizers: Sequence[Any]) -> Subject | None:
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return None
    shards_state = any(type(each).__name__ == "ZeroRedundancyOptimizer" for each in optimizers)
    strategy = "zero1" if shards_state else "no_shard"
    return Subject(module, "torch-ddp", strategy, {"precision": _precision(module.parameters())})


# ---- the optimizers


def together(optimizers: Sequence[Any]) -> Any:
    """The optimizer that holds the state (of DeepSpeed's engine the one inside it); several as one."""
    inner = [held for each in optimizers for held in holding_state(each)]
    return inner[0] if len(inner) == 1 else _Together(inner)


def parameters_of(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """All parameters that these optimizers step; of DeepSpeed's engine, which steps itself, its own."""
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        if isinstance(optimizer, torch.nn.Module):
            found += optimizer.parameters()
        found += [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
    return found


def holding_state(optimizer: Any) -> list[Any]:
    """The optimizers that have the state, such as those in DeepSpeed's engine, ZeroRedundancyOptimizer, accelerate's
    wrapper, or torchtitan's list of several.
    """
    if isinstance(optimizer, torch.nn.Module):
        return [optimizer.optimizer]
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, list) and several and all(isinstance(each, Optimizer) for each in several):
        return [held for each in several for held in holding_state(each)]
    inner = getattr(optimizer, "optim" if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else "optimizer", None)
    return holding_state(inner) if isinstance(inner, Optimizer) else [optimizer]


class _Together(Optimizer):
    """Several optimizers, to be looked at; it steps nothing."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all = optimizers  # Optimizer.__init__ would make groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for each in self._all for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all."""
        return {parameter: state for each in self._all for parameter, state in each.state.items()}

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` before each of them steps."""
        return _Handles([each.register_step_pre_hook(hook) for each in self._all])

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` after each of them has stepped."""
        return _Handles([each.register_step_post_hook(hook) for each in self._all])


class _Handles:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all hooks."""
        for each in self._handles:
            each.remove()
