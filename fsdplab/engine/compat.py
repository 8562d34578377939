"""Hides what differs between versions of torch (2.11 to 2.15), and nothing else.

Collectives are looked up on `torch.distributed` at call time, so that a patched collective and `CommDebugMode` see
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import Variable
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

from fsdplab.engine import events

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # before torch 2.13

    @dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]  # the stand-in for an import that failed bears its name
        """Which named dimensions of a full mesh are data parallel: those that shard and those that replicate."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError("DataParallelMeshDims needs at least one of shard and replicate")

        @property
        def shard_names(self) -> tuple[str, ...]:
            """Names of the dimensions that shard."""
            return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """Names of the dimensions that replicate."""
            return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


def all_gather_single(
    output: torch.Tensor,  # [ranks * elements], written in place
    source: torch.Tensor,  # [elements]
    **options: Any,
) -> Any:
    """Call `all_gather_into_tensor`, under the name that this torch prefers (renamed in 2.13)."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, source, **options)


def reduce_scatter_single(
    output: torch.Tensor,  # [elements], written in place
    source: torch.Tensor,  # [ranks * elements], a part for each rank
    **options: Any,
) -> Any:
    """Call `reduce_scatter_tensor`, under the name that this torch prefers (renamed in 2.13)."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(output, source, **options)


def collectives_are_replaced() -> bool:
    """Whether somebody has replaced a collective of `torch.distributed` by a function that may look at its buffers."""
    for name in _COLLECTIVES:
        # Who patches `dist.all_reduce` leaves `distributed_c10d.all_reduce`, the original, as it is.
        function = getattr(dist, name, None)
        if function is not getattr(dist.distributed_c10d, name, None) and function not in events.counters:
            return True
    return False


_COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
)


def inside_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1  # -1: no graph task runs here


def call_after_backward(function: Callable[[], None]) -> None:
    """Have autograd call `function` once the backward that runs now is complete; a `RuntimeError` in a compiled one,
    which would never call it.
    """
    if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
        raise RuntimeError(
            "compiled autograd does not run the callback that ends a sharded backward, so gradients would be lost;"
            " compile the forward only: call backward outside of compiled_autograd"
        )
    Variable._execution_engine.queue_callback(function)


def groups_alive() -> Container[dist.ProcessGroup]:
    """Return the groups that are not destroyed, now and later; where ranks are threads, those of this thread's rank."""
    return dist.distributed_c10d._world.pg_map


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that serves `device` in `group`; the group's own where Python implements it."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:  # "No backend type associated with device type cpu"
        return group.name()


def device_for(group: dist.ProcessGroup, wanted: torch.device) -> torch.device:
    """Return `wanted` where `group` has a backend for it, else a device that it has one for: NCCL serves no host."""
    kinds = [device.type for device in group._device_types]
    if not kinds or wanted.type in kinds:
        return wanted
    return torch.device(kinds[0])


def seconds_before_giving_up(group: dist.ProcessGroup) -> float:
    """Return the time-out that `group` was made with."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `function` make real tensors also within a `FakeTensorMode`: a mesh holds the numbers of its ranks."""

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


@with_real_tensors
def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh whose dimensions are those of `meshes`, which must be cut from one parent."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))


def shard_beside(dim: int, others: int) -> Shard:
    """Return the cut along `dim` of what `others` ranks have cut along it already."""
    return _StridedShard(dim, split_factor=others) if others > 1 else Shard(dim)


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `torch.compile` run `function` as it is, with all that it calls, instead of tracing it."""
    return torch._disable_dynamo(function)


def frame_not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `torch.compile` run `function` as it is; what it calls is compiled, as from `nn.Module.__call__`. It must
    not carry the attributes of a compiled function (`wraps(..., updated=())`): they name what to compile instead of it.
    """
    return torch._dynamo.decorators.skip(function)


def mark_for_compiler(module: nn.Module) -> None:
    """Have `torch.compile` take the parameters of `module` as inputs of a graph whose memory may move, as FSDP2 has."""
    module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def is_transformed() -> bool:
    """Whether `torch.func` transforms what runs now."""
    return torch._C._are_functorch_transforms_active()


def outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `function` see and make plain tensors also where `torch.func` transforms (jvp, vmap) what calls it, or in
    inference mode: what it makes is kept, and nobody may write to an inference tensor later, or train with it.
    """

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # the first alone would record gradients
                return outside(*args, **kwargs)
        if not is_transformed():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return outside


def dtensor_of(
    local: torch.Tensor,  # any shape: what this rank holds
    spec: DTensorSpec,  # of the whole: its mesh, placements and shape
) -> DTensor:
    """Return a DTensor around `local` itself: no copy, no autograd, neither `from_local`'s checks nor an empty
    `__init__`.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=local.requires_grad)


def local_of(
    tensor: torch.Tensor,  # any shape
) -> torch.Tensor:
    """Return `tensor` itself, or the local tensor of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_fake(
    tensor: torch.Tensor,  # any shape
) -> bool:
    """Whether `tensor` has a shape and a dtype but no values (`FakeTensorMode`)."""
    return isinstance(tensor, FakeTensor)


def keep_gradient_dtype(
    source: torch.Tensor,  # any shape
    target: torch.Tensor,  # any shape
) -> torch.Tensor:
    """Give the gradients of `target` the dtype that was set for those of `source` (`Tensor.grad_dtype`), if any was;
    return `target`.
    """
    if _has_gradient_dtype(source) and not _has_gradient_dtype(target):
        target.grad_dtype = source.grad_dtype
    return target


def gradient_dtype(
    parameter: torch.Tensor,  # any shape
) -> torch.dtype | None:
    """Return the dtype of the gradients of `parameter`: its own unless another was set; None where any will do."""
    if not hasattr(torch.Tensor, "grad_dtype") or not getattr(parameter, "_has_grad_dtype_override", True):
        return parameter.dtype
    return parameter.grad_dtype


def _has_gradient_dtype(
    parameter: torch.Tensor,  # any shape
) -> bool:
    """Whether a dtype was set for the gradients; before torch 2.15 nothing tells that the parameter's own was set."""
    if not hasattr(parameter, "grad_dtype"):
        return False
    return getattr(parameter, "_has_grad_dtype_override", parameter.grad_dtype is not parameter.dtype)


def move_data(
    parameter: torch.Tensor,  # any shape, changed in place
    device: torch.device,
) -> None:
    """Move what `parameter` holds to `device`, keeping the object."""
    parameter.data = parameter.data.to(device)
    if is_fake(parameter):  # it says itself where it is
        parameter.fake_device = device


def device_of(kind: str) -> torch.device:
    """Return the current device of a kind; where the machine has none, the one that fake tensors of the kind are on."""
    if kind != "cuda":
        return torch.device(kind)
    return torch.device(kind, torch.cuda.current_device() if torch.cuda.is_available() else 0)


def has_streams(device: torch.device) -> bool:
    """Whether work on `device` goes to streams: not on the host, nor on the GPU of fake tensors."""
    return device.type != "cpu" and torch.cuda.is_available()


def address_of(
    tensor: torch.Tensor,  # any shape
) -> int:
    """Return where the elements of `tensor` begin, 0 where it has no memory; fake tensors differ by their storages."""
    if is_fake(tensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize
    return tensor.data_ptr()


def forget_casts() -> None:
    """Drop the casts that autocast keeps while it is entered: around a whole loop they are of an earlier step's
    weights.
    """
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def storage_id(
    tensor: torch.Tensor,  # any shape
) -> int:
    """Return what tells the storage of `tensor` (of a DTensor: its own empty one) from others that are alive."""
    return tensor.untyped_storage()._cdata


def is_held_once(
    parameter: torch.Tensor,  # any shape, plain or a DTensor
) -> bool:
    """Whether the memory of `parameter` is held by it alone: by no other tensor, array or state dict. What is held by a
    DTensor is its local tensor, of which no variable may know either.
    """
    if isinstance(parameter, DTensor) and sys.getrefcount(parameter._local_tensor) > 2:  # its own, and this call
        return False
    base, storage = local_of(parameter)._base, local_of(parameter).untyped_storage()
    known = 2  # the tensor, and `storage`
    if base is not None:  # a view holds what it is a view of
        if sys.getrefcount(base) > _references_to_a_base():
            return False
        known = 3
    return torch._C._storage_Use_Count(storage._cdata) <= known


@cache
def _references_to_a_base() -> int:
    """Return what Python counts for the base of a view that one variable holds: versions of torch differ."""
    view = torch.zeros(1).view(1)
    base = view._base
    return sys.getrefcount(base)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differ(
    one: torch.Tensor,  # any shape
    other: torch.Tensor,  # of the shape, dtype and device of `one`
) -> bool | torch.Tensor:
    """Whether two tensors of one shape and dtype differ in a bit (NaNs may be equal); a tensor on other devices than
    the CPU, which the host then need not wait for.
    """
    # As whole numbers, bit by bit: as floats a NaN differs from itself, and 0.0 equals -0.0.
    word = _WORDS.get(one.itemsize)
    if word is not None:
        one, other = one.view(word), other.view(word)
    if one.is_cpu:
        return not torch.equal(one, other)
    return torch.ne(one, other).any()


def all_reduce_unseen(
    flags: torch.Tensor,  # any shape, reduced in place
    group: dist.ProcessGroup,
) -> None:
    """Leave the largest values of all ranks in `flags`, by the backend itself: a trace of `group` shows collectives of
    parameters and gradients only.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    try:
        backend = group._get_backend(flags.device)
    except RuntimeError:  # a group that Python implements
        backend = group
    backend.allreduce([flags], options).wait()


def own_storage(
    view: torch.Tensor,  # any shape
) -> torch.Tensor:
    """Return the memory of `view` as the whole of a storage; it keeps that of `view` alive.

    What copies, saves or pickles a DTensor asks its local tensor for its storage, and takes an offset in it for a
    pointer.
    """
    if type(view) is not torch.Tensor:  # a fake one has no memory, a subclass has its own
        return view
    if view.numel() == 0 or view.is_meta:
        return view.new_empty(view.shape)
    # A tensor that comes through DLPack has a storage of its own, which begins at its first element.
    flat = view.contiguous().view(-1).view(torch.uint8)
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(flat)).view(view.dtype).view(view.shape)


def silent_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """Make a process group that moves nothing: it lets an algorithm show the collective that it implements."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(dist.HashStore(), rank, ranks)
    group._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, ranks))
    group._set_default_backend(kind)
    return group


def register_state(module: nn.Module, state: Any) -> None:
    """Have torch's own `fully_shard.state(module)` answer `state`: pipelining asks that one, whoever sharded.

    `replicate` and other composable functions look into the registry, and leave what is sharded alone.
    """
    module.__dict__.setdefault(STATE_KEY, {})[torch_fully_shard.__wrapped__] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def registered_state(module: nn.Module) -> Any:
    """Return what `register_state` was given for `module`; None for a module that is no unit."""
    return module.__dict__.get(STATE_KEY, {}).get(torch_fully_shard.__wrapped__)
