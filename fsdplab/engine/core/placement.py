"""Describes the DTensor that a shard is: data-parallel axes of a mesh, alone or beside tensor and expert parallelism.

A plain parameter becomes `Shard(dim)` on the data-parallel mesh. One that is already a DTensor (tensor or expert
parallel) becomes a DTensor on both meshes; where both cut the same dimension, the data-parallel cut is strided, because
it cuts what tensor parallelism left. On a full mesh (`dp_mesh_dims`) the data-parallel dimensions turn from `Replicate`
to `Shard`. Same placements as PyTorch's FSDP2, so checkpoints are interchangeable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdplab.engine import compat


@dataclass(frozen=True)
class Axes:
    """The data-parallel mesh of a unit: 1-D, or 2-D as replicas x shards.

    `shards` is False where every dimension replicates. `full` is the mesh that `dp_mesh_dims` spoke of, and `named` are
    the positions of its data-parallel dimensions (`cut`: those that shard).
    """

    mesh: DeviceMesh
    shards: bool = True
    full: DeviceMesh | None = None
    named: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()

    @property
    def shard_ranks(self) -> int:
        """Over how many ranks shards are cut."""
        if not self.shards:
            return 1
        return self.mesh.size(self.mesh.ndim - 1)


def axes_of(mesh: DeviceMesh, dims: compat.DataParallelMeshDims | None) -> Axes:
    """Return the axes of a 1-D or 2-D data-parallel `mesh`, or those that `dims` names on a full mesh.

    Raises `ValueError` for other meshes, and for names that the mesh does not have.
    """
    if dims is None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; a 2-D one is replicas x shards"
            )
        return Axes(mesh)
    if mesh.mesh_dim_names is None:
        raise ValueError(f"mesh must have mesh_dim_names when dp_mesh_dims is provided; got {mesh}")
    names = mesh.mesh_dim_names
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}: dp_mesh_dims may name those only"
            )
    # Several dimensions that replicate count as one, and so do several that shard.
    parts = [_flat(mesh, group) for group in (dims.replicate_names, dims.shard_names) if group]
    joined = compat.concatenated(parts)  # of one part, that part itself
    replicated = [names.index(name) for name in dims.replicate_names]
    cut = [names.index(name) for name in dims.shard_names]
    return Axes(joined, bool(cut), mesh, named=(*replicated, *cut), cut=tuple(cut))


def axes_of_info(info: Any) -> Axes:
    """Return the axes that a `FSDPMeshInfo` of PyTorch's describes; raise where its mesh has further dimensions."""
    if info.dp_mesh_dims is not None:
        return axes_of(info.spmd_mesh or info.mesh, info.dp_mesh_dims)
    dims = [dim for dim in (info.replicate_mesh_dim, info.shard_mesh_dim) if dim is not None]
    mesh = info.mesh
    if dims != [*range(mesh.ndim)]:
        if mesh.mesh_dim_names is None:
            raise ValueError(f"expected a mesh of replicas x shards, or one with mesh_dim_names; got {info}")
        mesh = mesh[tuple(mesh.mesh_dim_names[dim] for dim in dims)]
    return Axes(mesh, shards=info.shard_mesh_dim is not None)


@compat.with_real_tensors
def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the named dimensions of `mesh` as one."""
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[names]._flatten("_".join(names))


def local_part(
    parameter: torch.Tensor,  # any shape, plain or a DTensor
) -> torch.Tensor:
    """Return what this rank holds of `parameter` before it is sharded: its local tensor where it is a DTensor."""
    return compat.local_of(parameter).detach()


def spec_at_rest(
    name: str,
    parameter: torch.Tensor,  # any shape, plain or a DTensor of tensor or expert parallelism
    axes: Axes,
    dim: int,  # the dimension to cut
) -> DTensorSpec:
    """Return the description of the shards of `parameter`, cut along `dim`; raise where it does not fit the mesh.

    On 2 replicas x 4 shards a plain parameter becomes `(Replicate(), Shard(0))`, and one that tensor parallelism has
    cut along the same dimension `(Replicate(), _StridedShard(0), Shard(0))`.
    """
    if axes.full is not None:
        return _on_full_mesh(name, parameter, axes, dim)
    replicas = [Replicate()] * (axes.mesh.ndim - 1)
    if not isinstance(parameter, DTensor):
        meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
        return DTensorSpec(axes.mesh, (*replicas, Shard(dim)), tensor_meta=meta)
    # Tensor parallelism has cut first: of 8 rows on 2 x 2 ranks each of its ranks has 4, of which a shard is 2.
    spec = parameter._spec
    cut = compat.shard_beside(dim, spec.num_shards_map[dim])
    joined = compat.concatenated([axes.mesh, spec.mesh])
    return DTensorSpec(joined, (*replicas, cut, *spec.placements), tensor_meta=spec.tensor_meta)


def _on_full_mesh(
    name: str,
    parameter: torch.Tensor,  # any shape, a DTensor on the full mesh
    axes: Axes,
    dim: int,  # the dimension to cut
) -> DTensorSpec:
    """Do as `spec_at_rest` for a parameter on the full mesh, which replicates it over the data-parallel dimensions."""
    if not isinstance(parameter, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via"
            f" distribute_module). Got plain tensor for parameter '{name}'"
        )
    if parameter._spec.mesh != axes.full:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects:"
            f" parameter {name!r} is on {parameter._spec.mesh}, the call names {axes.full}"
        )
    placements = list(parameter._spec.placements)
    for position in axes.named:
        if not isinstance(placements[position], Replicate):
            kind = "shard" if position in axes.cut else "replicate"
            raise ValueError(
                f"Expected Replicate() on DP {kind} dim '{axes.full.mesh_dim_names[position]}' (index {position}) but"
                f" got {placements[position]}, of parameter {name!r}"
            )
    meta = parameter._spec.tensor_meta
    if not axes.cut:
        return DTensorSpec(axes.full, tuple(placements), tensor_meta=meta)

    # The first dimension that shards cuts what the dimensions right of it have left of the same rows.
    first = axes.cut[0]
    ranks_right = 1
    for position in range(first + 1, axes.full.ndim):
        if getattr(placements[position], "dim", None) == dim:  # strided shards are no `is_shard`
            ranks_right *= axes.full.size(position)
    placements[first] = compat.shard_beside(dim, ranks_right)
    if len(axes.cut) == 1:
        return DTensorSpec(axes.full, tuple(placements), tensor_meta=meta)

    # Several dimensions that shard count as one, flattened.
    others = [position for position in range(axes.full.ndim) if position not in axes.named]
    meshes = [axes.full[axes.full.mesh_dim_names[position]] for position in others]
    joined = compat.concatenated([axes.mesh, *meshes])
    replicas = [Replicate()] * (axes.mesh.ndim - 1)
    placements_of_others = [placements[position] for position in others]
    placed = (*replicas, placements[first], *placements_of_others)
    return DTensorSpec(joined, placed, tensor_meta=meta)


def wrapped(
    value: torch.Tensor,  # any shape: the local part of the whole
    spec: DTensorSpec | None,  # of the parameter before sharding; None: it was plain
) -> torch.Tensor:
    """Return `value` as the DTensor that a forward should see: `spec` is that of the parameter before sharding."""
    if spec is None:
        return value
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != value.dtype:  # mixed precision computes in another dtype
        spec = replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, value.dtype))
    return compat.dtensor_of(value, spec)


def local_gradient(
    gradient: torch.Tensor,  # any shape: of the whole parameter
    spec: DTensorSpec | None,  # of the parameter before sharding; None: it was plain
    axes: Axes,
) -> torch.Tensor:
    """Return this rank's plain gradient of a parameter with `spec`; sums what tensor parallelism has left partial."""
    if spec is None or not isinstance(gradient, DTensor):
        return gradient
    wanted = list(spec.placements)
    if axes.full is not None:
        for position in axes.named:  # the engine itself sums over the data-parallel dimensions
            wanted[position] = gradient.placements[position]
    if list(gradient.placements) != wanted:
        gradient = gradient.redistribute(placements=wanted)
    local = gradient._local_tensor
    if hasattr(local, "wait"):  # a collective under way
        return local.wait()
    return local
