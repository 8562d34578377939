"""Everything that depends on the torch version (2.11 to 2.15), and nothing else.

Collectives are looked up on `torch.distributed` at call time, so that a patched collective and `CommDebugMode` see them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def all_gather_single(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    """`all_gather_into_tensor`, under the name that this torch prefers (renamed in 2.13)."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, source, **options)


def reduce_scatter_single(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    """`reduce_scatter_tensor`, under the name that this torch prefers (renamed in 2.13)."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(output, source, **options)


def inside_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_group_alive(group: dist.ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def seconds_before_giving_up(group: dist.ProcessGroup) -> float:
    """The time-out that `group` was made with."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def row_sharded_spec(mesh: DeviceMesh, like: torch.Tensor) -> DTensorSpec:
    """The description of a tensor like `like` cut into rows: `Shard(0)`, or `(Replicate(), Shard(0))` on a 2-D mesh."""
    return DTensorSpec(mesh, (*[Replicate()] * (mesh.ndim - 1), Shard(0)), tensor_meta=TensorMeta(like.size(), like.stride(), like.dtype))


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local` itself: no copy, no autograd, none of `from_local`'s checks."""
    return DTensor(local, spec, requires_grad=local.requires_grad)


def silent_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """A process group that moves nothing: it lets an algorithm show the collective that it implements."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(dist.HashStore(), rank, ranks)
    group._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, ranks))
    group._set_default_backend(kind)
    return group
