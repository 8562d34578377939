"""Shards a model: `fully_shard`, the drop-in for PyTorch's, and `shard_model`, for every row of the strategy table."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from fsdplab.engine import compat
from fsdplab.engine.compat import DataParallelMeshDims
from fsdplab.engine.core.fewer_ranks import ShardsOverFewerRanks, smaller_mesh
from fsdplab.engine.core.hooks import Runtime, UnitHooks, before_training, bind_root, hooks_of
from fsdplab.engine.core.memory import UnitMemory
from fsdplab.engine.core.param import ShardedParam, Sites
from fsdplab.engine.core.parted import PartedParam, in_its_form
from fsdplab.engine.core.placement import Axes, axes_of, axes_of_info, local_part
from fsdplab.engine.core.plan import UnitConfig
from fsdplab.engine.core.policy import MixedPrecisionPolicy, OffloadPolicy, Strategy, strategy_named, strategy_of
from fsdplab.engine.core.transport import Transport
from fsdplab.engine.core.unit import ReduceOptions, Unit
from fsdplab.engine.features.initial_weights import WholeWeights, warn_of_differing_weights
from fsdplab.engine.features.misuse_checks import (
    mark_ignored,
    warn_of_late_parameters,
    warn_of_low_masters,
    warn_of_rewritten_weights,
    watch_optimizers,
    watch_units,
)
from fsdplab.engine.features.offload import storage_of
from fsdplab.engine.features.recompute import recompute_of, recomputing
from fsdplab.engine.module import FSDPModule, below, bound, sharded_class
from fsdplab.engine.torch_api import torch_interop
from fsdplab.engine.transport.selection import transport_of

Units = Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool] | str
PlacementFn = Callable[[nn.Parameter], Any]  # a Shard, None, or PyTorch's ShardPlacementResult
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    transport: str = "auto",
) -> Any:
    """Make `module`, or a list of modules together, a unit that shards its parameters over `mesh`, in place; returns
    it.

    Same arguments and effect as `torch.distributed.fsdp.fully_shard` (default mesh: all ranks): apply it to the blocks
    first, then to the root; parameters become `Shard(0)` DTensors, the class becomes `FSDP<Name>`. On a 2-D mesh shards
    are cut over dimension 1 and replicated over dimension 0. `reshard_after_forward=None` reshards every unit but
    the root after its forward, an int keeps shards over that many ranks. Raises `ValueError` for containers without a
    forward, meshes of more dimensions, and parameters that another unit holds. Example: Linear(4, 5) on 2 ranks leaves
    3 and 2 weight rows.
    """
    axes = axes_of(mesh or _default_mesh(), dp_mesh_dims)
    if dp_mesh_dims is None and axes.mesh.ndim == 2 and axes.mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: expected names for replicas and shards,"
            f" got {axes.mesh}"
        )
    after = partial(_after_forward, reshard_after_forward)
    row = strategy_of(axes.shards, reshards=after(axes) is not False)
    config_of = partial(_config, row, policy=mp_policy, offload=offload_policy, wanted=transport)
    modules = [module] if isinstance(module, nn.Module) else list(module)
    units = _make_units(modules, config_of(axes), after, ignored_params or (), shard_placement_fn, config_of)
    for unit in units:
        ranks = unit.reshard_after_forward
        if ranks in (True, False, None):
            continue
        # Resharded to `ranks` neighbours: the last dimension of this mesh, over which the backward gathers.
        near = smaller_mesh(unit.memory.config.axes.mesh, ranks)
        over_few = transport_of(near.get_group(1), unit.memory.config.device, transport)
        unit.memory.fewer_ranks = ShardsOverFewerRanks(unit.memory.params, near, over_few)
    return module


fully_shard.__dict__["state"] = compat.registered_state  # `fully_shard.state(module)`, as torch's own has it


def shard_model(
    model: nn.Module,
    strategy: str | Strategy,
    *,
    units: Units = "auto",
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Collection[nn.Parameter] | None = None,
    checkpoint: str = "none",
    prefetch: int = 1,
    transport: str = "auto",
) -> FSDPModule:
    """Shard `model` in place by one row of the table: `no_shard, zero1, zero2, shard_grad_op, full_shard,
    hybrid_shard`.

    `units` says what travels together: module classes, a predicate (name, module) -> bool, "auto" for every child of
    a ModuleList, or "root" for none of its own; whatever is left forms the root unit. On a 2-D mesh (replicas x shards)
    shards are cut within a row of it (`hybrid_shard` needs one). `checkpoint` ("none", "full", "selective") says which
    activations of the units below the root are computed again in the backward. `prefetch` units are gathered ahead.
    `transport` is "auto", "gloo", "shm", or "nccl". Raises `ValueError` for an unknown strategy or
    checkpoint, units that match nothing, or a negative prefetch. Build the optimizer afterwards.
    """
    row = strategy_named(strategy)
    if prefetch < 0:
        raise ValueError(f"prefetch must be 0 or more units, got {prefetch}")
    recompute = recompute_of(checkpoint)
    ignored = tuple(ignored_params or ())
    axes = axes_of(mesh or _default_mesh(), None)
    config = _config(row, axes, mp_policy, offload_policy, transport)
    # Blocks before what holds them, as with `fully_shard`: a unit owns what no unit below it holds.
    for module in [*reversed(select_units(model, units)), model]:
        if recompute is not None and module is not model:
            module.__class__ = recomputing(module.__class__, recompute)
        _make_units([module], config, lambda _: row.reshard_after_forward, ignored)
    # The root is known here, so units get their names and `prefetch` before the first forward.
    bind_root(model, prefetch)
    return model


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a sharded model in the order of the module tree, the root first."""
    return list(bound(model).units.values())


def _after_forward(wanted: bool | int | None, axes: Axes) -> bool | int | None:
    """Return what a unit does after its forward, once `wanted` was checked: 1 rank keeps it, all ranks reshard it."""
    if wanted is None or isinstance(wanted, bool):
        return wanted
    if not isinstance(wanted, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not"
            f" {wanted!r}; None leaves only the root gathered"
        )
    if axes.full is not None:
        raise NotImplementedError("reshard_after_forward as a number of ranks does not go with dp_mesh_dims")
    ranks = axes.shard_ranks
    if wanted < 1 or ranks % wanted:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {ranks}, not {wanted}: it says over"
            f" how many of the {ranks} ranks a unit stays sharded after its forward"
        )
    # Of 8 ranks: 1 keeps the whole, 8 is an ordinary reshard, 2 and 4 cut it over as many neighbours.
    return {1: False, ranks: True}.get(wanted, wanted)


def select_units(model: nn.Module, units: Units) -> list[nn.Module]:
    """Return the modules that `units` names, without the root; raise `ValueError` where there is none."""
    if units == "root":
        return []
    if units == "auto":
        blocks: list[nn.Module] = []
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                blocks.extend(module)
        return blocks
    if isinstance(units, str):
        raise ValueError(f"units is {units!r}; expected auto, root, module classes or a predicate on (name, module)")
    classes = () if callable(units) else tuple(units)
    selected = []
    for name, module in model.named_modules():
        if module is model:
            continue
        is_selected = units(name, module) if callable(units) else isinstance(module, classes)
        if is_selected:
            selected.append(module)
    if not selected:
        raise ValueError(f"units={units!r} matches no submodule of {type(model).__name__}; name its block classes")
    return selected


def _make_units(
    modules: Sequence[nn.Module],
    config: UnitConfig,
    after: Callable[[Axes], bool | int | None],
    ignored: Collection[nn.Parameter],
    place: PlacementFn | None = None,
    config_of: Callable[[Axes], UnitConfig] | None = None,
) -> list[Unit]:
    """Make one unit of `modules`, and one more for each further mesh that `place` names, configured by `config_of`.

    `after` says what units do after their forward.
    """
    ignored = tuple(ignored)  # once, as it may be `module.parameters()`
    mark_ignored(ignored)
    _check(modules)
    watch_optimizers()
    before_training[_check_first] = None

    # Which parameters it has, and over which mesh each of them is cut.
    owned = owned_parameters(modules, {id(parameter) for parameter in ignored})
    warn_of_low_masters([(name, original) for original, (name, _) in owned.items()], config.policy)
    params_over: dict[Axes, list[ShardedParam]] = {config.axes: []}
    configs = {config.axes: config}
    for original, (name, sites) in owned.items():
        _check_shape(name, original)
        dim, axes = _placed(name, original, config, place)
        if axes not in configs and config_of is not None:
            configs[axes], params_over[axes] = config_of(axes), []
        params_over[axes].append(_sharded_param(name, sites, original, configs[axes], dim))
    if len(params_over) > 1 and not params_over[config.axes]:  # all of them are cut over other meshes
        del params_over[config.axes]

    # Cut them, and bind the units to the modules.
    _move_buffers(modules, config.device)
    title = "+".join(type(module).__name__ for module in modules)
    memories = [UnitMemory(title, params, configs[axes]) for axes, params in params_over.items()]
    for memory in memories:
        # Its checksums of the wholes come first: after the cut no rank has these.
        weights = WholeWeights(memory)
        memory.shard()
        weights.cut()
    units = [Unit(memory, after(memory.config.axes), ReduceOptions(memory.config.divide)) for memory in memories]
    watch_units(units)
    for original in owned:
        original._owned_by_unit = True  # so that another unit refuses it
    beside = [UnitHooks(modules, unit) for unit in units[1:]]
    torch_interop.State(modules, UnitHooks(modules, units[0], beside))
    for module in modules:
        for _, part in below(module):
            compat.mark_for_compiler(part)
        module.__class__ = sharded_class(type(module))
    return units


def _check_first(root: nn.Module, runtime: Runtime) -> None:
    """Warn of what is looked at once, before the first forward of a root that trains."""
    warn_of_late_parameters(root)
    warn_of_rewritten_weights(root)
    warn_of_differing_weights(unit.memory for unit in runtime.units.values())


def _check(modules: Sequence[nn.Module]) -> None:
    """Raise for modules of which one is a unit already, or of which none has a forward that would gather them."""
    for number, module in enumerate(modules):
        if hooks_of(module) is not None or module in modules[:number]:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has already"
                f" been applied: {type(module).__name__} is already a unit, or stands twice in one list"
            )
    if modules and not any(_has_forward(module) for module in modules):
        raise ValueError(
            "fully_shard does not support containers that do not implement forward: a"
            f" {type(modules[0]).__name__} has no forward, so nothing would gather its parameters; shard its children"
        )


def _has_forward(module: nn.Module) -> bool:
    """Whether somebody may call `module`: a list or a dict of modules only holds them."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward


def _check_shape(name: str, original: nn.Parameter) -> None:
    """Raise for a parameter of a lazy module that has no shape yet."""
    if is_lazy(original):
        raise RuntimeError(
            f"parameter {name!r} has no shape yet, as those of lazy modules have none before their first forward; run"
            " one forward, then shard"
        )


def _config(row: Strategy, axes: Axes, policy: MixedPrecisionPolicy, offload: OffloadPolicy, wanted: str) -> UnitConfig:
    """Return the configuration of units over `axes`.

    Shards are cut over the last dimension of the mesh. The dimension before it replicates, and so does the only one of
    a strategy that cuts nothing.
    """
    mesh = axes.mesh
    if mesh.ndim == 2 and not row.shard_optimizer:
        raise ValueError(f"{row.name} cuts nothing, so it needs a 1-D mesh; got {mesh}")
    if row.in_groups and mesh.ndim == 1:
        raise ValueError(f"{row.name} needs a 2-D mesh: init_device_mesh(device_type, (replicas, ranks that shard))")
    device = compat.device_of(mesh.device_type)
    transports: list[Transport | None] = []  # by the dimensions of the mesh; none among one rank
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        over_dim = None
        if group.size() > 1:
            over_dim = transport_of(group, device, wanted)
        transports.append(over_dim)
    # Of a 1-D mesh [shards], of a 2-D one [replicas, shards].
    *replicas, over_shards = transports
    storage = storage_of(offload, device, row)
    # Without offload shards rest in memory that the transport may read in place.
    if over_shards is not None and type(offload) is OffloadPolicy:
        storage = over_shards.storage(device)
    if not row.shard_optimizer:  # nothing is cut: the one dimension of the mesh replicates
        return UnitConfig(row, policy, axes, device, storage, 0, None, over_shards)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    over_replicas = replicas[0] if replicas else None
    return UnitConfig(row, policy, axes, device, storage, rank, over_shards, over_replicas)


def owned_parameters(modules: Sequence[nn.Module], ignored: set[int]) -> dict[nn.Parameter, tuple[str, Sites]]:
    """Return the parameters of `modules` that no unit below holds -> their first name and the places that show them."""
    owned: dict[nn.Parameter, tuple[str, Sites]] = {}
    for number, module in enumerate(modules):
        # Of one module "weight"; of two that form a unit together "0.weight" and "1.weight".
        number_prefix = f"{number}." if len(modules) > 1 else ""
        for prefix, part in below(module, number_prefix):
            for attribute, parameter in part._parameters.items():
                if parameter is None or id(parameter) in ignored:
                    continue
                _, sites = owned.setdefault(parameter, (prefix + attribute, []))
                sites.append((part, attribute))
    return owned


def _sharded_param(
    name: str, sites: Sites, original: nn.Parameter, config: UnitConfig, dim: int | None
) -> ShardedParam:
    """Return `original` as a parameter of a unit, on its device and not cut yet; raise where it may not be one."""
    if getattr(original, "_owned_by_unit", False):
        raise ValueError(
            f"Parameter '{name}' is shared with a parameter already managed by another FSDP group. For shared/tied"
            " parameters, use fully_shard([module_a, module_b]) to place them in one unit, or leave both to the root"
        )
    if isinstance(original, DTensor) and original.device_mesh.device_type != config.device.type:
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got"
            f" {original.device_mesh.device_type} for DTensor and {config.device.type} for FSDP: parameter {name!r}"
        )
    if not original.is_meta and original.device.type != config.device.type:
        # The object stays, since other modules may show it too.
        compat.move_data(original, config.device)
    param = in_its_form(ShardedParam(name, sites, original, config.axes, dim))
    if isinstance(param, PartedParam) and not config.strategy.shard_parameters:
        raise ValueError(
            f"parameter {name!r} ({type(local_part(original)).__name__}) travels in a form of its own, which needs a "
            f"strategy that shards parameters; got {config.strategy.name}"
        )
    return param


def _placed(
    name: str, original: nn.Parameter, config: UnitConfig, place: PlacementFn | None
) -> tuple[int | None, Axes]:
    """Return the dimension to cut `original` along and the mesh to cut it over: 0 and the unit's, or what
    `shard_placement_fn` says.
    """
    # A strategy that cuts nothing: None leaves the parameter whole at rest.
    if not config.strategy.shard_optimizer:
        if place is not None:
            raise ValueError(
                "Per-param mesh via shard_placement_fn is not supported with DDPMeshInfo; it requires FSDPMeshInfo (or"
                f" subclass): the mesh {config.axes.mesh} shards nothing"
            )
        return None, config.axes
    wanted: Any = None
    axes = config.axes
    if place is not None:
        wanted = place(original)
    if wanted is not None and hasattr(wanted, "mesh_info"):  # PyTorch's ShardPlacementResult
        wanted, axes = wanted.placement, axes_of_info(wanted.mesh_info)
    return _dimension(name, original, wanted), axes


def _dimension(name: str, original: nn.Parameter, wanted: Shard | None) -> int:
    """Return the dimension that `wanted` names, 0 for None and counted from the front; raise where there is none."""
    local = local_part(original)
    if local.ndim == 0:
        raise ValueError(
            f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
            " It is 0-dimensional and has no rows to shard"
        )
    if wanted is None:
        return 0
    if not isinstance(wanted, Shard):
        raise ValueError(
            f"Invalid shard_placement_fn result: {wanted!r} for parameter {name!r}; expected a Shard, None or a"
            " ShardPlacementResult"
        )
    if not -local.ndim <= wanted.dim < local.ndim:
        raise AssertionError(
            f"Shard dim {wanted.dim} is invalid for {local.ndim}D tensor: {local.shape}. shard_placement_fn gave it for"
            f" parameter {name!r}"
        )
    return wanted.dim % local.ndim  # -1 of a matrix is 1


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move the buffers of a unit's modules to the device that computes; those on meta have nothing to move."""
    for module in modules:
        for _, part in below(module):
            for name, buffer in part._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                    part._buffers[name] = buffer.to(device)


@compat.with_real_tensors
def _default_mesh() -> DeviceMesh:
    """Return a mesh of all ranks in one dimension; under torchrun the process group is made here."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group first (under torchrun it is made here; or"
                " give it world_size=1)"
            )
        dist.init_process_group()
    cpu_only = dist.get_backend() in ("gloo", "fsdplab_shm")
    kind = "cuda" if torch.cuda.is_available() and not cpu_only else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))
