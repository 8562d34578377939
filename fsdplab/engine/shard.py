"""`fully_shard`, the drop-in for PyTorch's, and `shard_model`, the one call for every row of the strategy table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

from . import compat
from .choose import transport_of
from .hooks import UnitHooks, bind_root, hooks_of
from .param import ShardedParam
from .policy import STRATEGIES, MixedPrecisionPolicy, Strategy, strategy_named
from .reduction import Terms
from .unit import Unit

Units = Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool] | str
_classes: dict[type, type] = {}


class FSDPModule(TorchFSDPModule):
    """What a module becomes when it is made a unit: itself, plus these methods (PyTorch's names and meaning)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """Slicing a container makes a new one of the original class, not of this one."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError("a sharded model cannot be deep-copied; copy it first, then shard each copy")

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; with `async_op`, returns a handle to wait on."""
        unit = hooks_of(self).unit
        unit.unshard_by_hand()
        return UnshardHandle(unit) if async_op else unit.finish_unshard("forward")

    def reshard(self) -> None:
        """Drop this unit's gathered parameters and show the slices."""
        hooks_of(self).unit.reshard("forward")

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backward reduces gradients or only accumulates them, whole, on each rank."""
        for hooks in _hooks_under(self, recurse):
            hooks.unit.sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False announces that another backward comes before the optimizer steps."""
        _bound(self).runtime.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether units drop their parameters between forward and backward."""
        for hooks in _hooks_under(self, recurse):
            hooks.unit.reshard_after_forward = reshard_after_forward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` instead of by the number of ranks."""
        hooks_of(self).unit.divide = factor

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        for hooks in _hooks_under(self, recurse=True):
            hooks.unit.reshard("forward")
        module = super(TorchFSDPModule, self)._apply(*args, **kwargs)
        for hooks in _hooks_under(self, recurse=True):
            hooks.unit.settle()
        return module


class UnshardHandle:
    """Work begun by `unshard(async_op=True)`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return once the parameters may be read."""
        self._unit.finish_unshard("forward")


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    transport: str = "auto",
) -> FSDPModule:
    """Make `module` a unit that shards its parameters over `mesh` (default: all ranks), in place.

    Same effect as `torch.distributed.fsdp.fully_shard`: apply it to the blocks first, then to the root; parameters
    become `Shard(0)` DTensors, the class becomes `FSDP<Name>`. On a 2-D mesh slices are cut over dimension 1 and replicated
    over dimension 0. `reshard_after_forward=None` drops every unit but the
    root after its forward. Raises `ValueError` for containers without a forward, meshes of more dimensions, and
    parameters that another unit holds. Example: Linear(4, 5) on 2 ranks leaves 3 and 2 weight rows.
    """
    row = STRATEGIES["shard_grad_op" if reshard_after_forward is False else "full_shard"]
    mesh = mesh or _default_mesh()
    return _make_unit(module, mesh, _terms(row, mesh, mp_policy, transport), reshard_after_forward)


def shard_model(
    model: nn.Module,
    strategy: str | Strategy,
    *,
    units: Units = "auto",
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    prefetch: int = 1,
    transport: str = "auto",
) -> FSDPModule:
    """Shard `model` in place by one row of the table: `no_shard, zero1, zero2, shard_grad_op, full_shard`, or,
    on a 2-D mesh, `hybrid_shard`.

    `units` says what travels together: module classes, a predicate (name, module) -> bool, or "auto" for every child of
    a ModuleList; whatever is left forms the root unit. `prefetch` units are gathered ahead. `transport` is
    "auto", "gloo", "shm" or "nccl". Raises `ValueError` for an
    unknown strategy, units that match nothing, or a negative prefetch. Build the optimizer afterwards.
    """
    row = strategy_named(strategy)
    if prefetch < 0:
        raise ValueError(f"prefetch must be 0 or more units, got {prefetch}")
    mesh = mesh or _default_mesh()
    terms = _terms(row, mesh, mp_policy, transport)
    for module in [*reversed(_select(model, units)), model]:
        _make_unit(module, mesh, terms, row.reshard_after_forward)
    hooks_of(model).prefetch = prefetch
    bind_root(model)
    return model


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a sharded model in the order of the module tree, the root first."""
    return list(_bound(model).runtime.units.values())


def _select(model: nn.Module, units: Units) -> list[nn.Module]:
    if units == "auto":
        return [child for each in model.modules() if isinstance(each, nn.ModuleList) for child in each]
    chosen = units if callable(units) else lambda _, module: isinstance(module, tuple(units))
    found = [module for name, module in model.named_modules() if module is not model and chosen(name, module)]
    if not found:
        raise ValueError(f"units={units!r} matches no submodule of {type(model).__name__}; name its block classes")
    return found


def _make_unit(module: nn.Module, mesh: DeviceMesh, terms: Terms, reshard: bool | None) -> FSDPModule:
    _check(module)
    owned = _owned(module)
    params = [_sharded_param(name, sites, original, terms, mesh) for original, (name, sites) in owned.items()]
    _move_buffers(module, terms.device)
    unit = Unit(type(module).__name__, params, terms, reshard)
    unit.shard()
    for original in owned:
        original._owned_by_unit = True
    module.__dict__["_unit_hooks"] = UnitHooks(module, unit)
    module.__class__ = _sharded_class(type(module))
    return module


def _check(module: nn.Module) -> None:
    if hooks_of(module) is not None:
        raise ValueError(f"{type(module).__name__} is already a unit; call fully_shard once per module")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward, so nothing would gather its parameters; shard its children"
        )


def _terms(row: Strategy, mesh: DeviceMesh, policy: MixedPrecisionPolicy, wanted: str) -> Terms:
    """Slices are cut over the last dimension of the mesh; over the one before it, and for rows that cut nothing, replicas."""
    if mesh.ndim not in (1, 2) or mesh.ndim == 2 and not row.shard_parameters:
        raise ValueError(f"{row.name} needs a 1-D mesh, or full_shard a 2-D one (replicas x shards); got {mesh}")
    if row.name == "hybrid_shard" and mesh.ndim == 1:
        raise ValueError("hybrid_shard needs a 2-D mesh: init_device_mesh(device_type, (replicas, ranks that shard))")
    cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
    *replicas, slices = [
        transport_of(group, device, wanted) if group.size() > 1 else None for group in map(mesh.get_group, range(mesh.ndim))
    ]
    if not row.shard_optimizer:
        return Terms(row, policy, device, 0, shard=None, replicate=slices)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return Terms(row, policy, device, rank, shard=slices, replicate=replicas[0] if replicas else None)


def _owned(module: nn.Module) -> dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]]:
    """Parameters of `module` that no unit below it holds -> their first name and every place that shows them."""
    found: dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for prefix, each in _below(module, ""):
        for attribute, parameter in each._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, (prefix + attribute, []))[1].append((each, attribute))
    return found


def _below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """`module` and what is below it, down to where another unit begins."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and hooks_of(child) is None:
            yield from _below(child, f"{prefix}{name}.")


def _sharded_param(
    name: str, sites: list[tuple[nn.Module, str]], original: nn.Parameter, terms: Terms, mesh: DeviceMesh
) -> ShardedParam:
    if isinstance(original, DTensor):
        raise ValueError(f"parameter {name!r} is a DTensor with {original.placements}; expected a plain parameter")
    if getattr(original, "_owned_by_unit", False):
        raise ValueError(
            f"parameter {name!r} is tied to one that another unit holds; put both modules into one unit, "
            "or leave both to the root"
        )
    if not original.is_meta and original.device.type != terms.device.type:
        original.data = original.data.to(terms.device)
    spec = compat.row_sharded_spec(mesh, original) if terms.strategy.shard_optimizer else None
    return ShardedParam(name, sites, original, spec)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for _, each in _below(module, ""):
        for name, buffer in each._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                each._buffers[name] = buffer.to(device)


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    made = _classes.get(cls) or type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    return _classes.setdefault(cls, made)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group first (under torchrun, or with world_size=1)"
        )
    cpu_only = dist.get_backend() in ("gloo", "fsdplab_shm")
    kind = "cuda" if torch.cuda.is_available() and not cpu_only else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))


def _bound(module: nn.Module) -> UnitHooks:
    hooks = hooks_of(module)
    if hooks.runtime is None:
        bind_root(module)
    return hooks


def _hooks_under(module: nn.Module, recurse: bool) -> list[UnitHooks]:
    modules = module.modules() if recurse else [module]
    return [hooks for each in modules if (hooks := hooks_of(each)) is not None]
