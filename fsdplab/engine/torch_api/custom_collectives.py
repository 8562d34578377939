"""Runs collectives and staging memory that the user supplies: PyTorch's `AllGather` and `ReduceScatter` objects, and
allocators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average
from fsdplab.engine.core.transport import Transport
from fsdplab.engine.core.unit import Unit
from fsdplab.engine.transport.staged import Reduction, StagedTransport


class CustomTransport(StagedTransport):
    """Staged collectives in which the all-gather, the reduce-scatter, or the memory for them is somebody else's."""

    def __init__(self, below: Transport, device: torch.device, gather: Any = None, scatter: Any = None) -> None:
        super().__init__(below.group, device)
        if isinstance(below, StagedTransport):
            self._reduce_group = below._reduce_group
        self.below, self.gather, self.scatter = below, gather, scatter
        self._gathers_in_place = gather is not None  # as PyTorch's: memory that is registered holds both
        self._overflows_in_float16 = scatter is None

    def separate_reductions(self, enable: bool) -> None:
        """As below, and for good: what is made over the same transport later reduces in the same group."""
        self.below.separate_reductions(enable)
        super().separate_reductions(enable)

    def _staging(self, numel: int, dtype: torch.dtype, role: str) -> torch.Tensor:
        comm = self.gather if role == "gather" else self.scatter
        if comm is None:
            return super()._staging(numel, dtype, role)
        return comm.allocate((numel,), dtype=dtype, device=self.device)

    def _gather(self, staging: torch.Tensor, send: torch.Tensor, asynchronous: bool) -> Any:
        if self.gather is None:
            return super()._gather(staging, send, asynchronous)
        return self.gather(staging, send, self.group, async_op=asynchronous)

    def _reduction(self, send: torch.Tensor, output: torch.Tensor, average: Average) -> Reduction:
        if self.scatter is None:
            return super()._reduction(send, output, average)
        received = self._staging(output.numel(), output.dtype, "scatter")

        def issue(asynchronous: bool) -> Any:
            return self.scatter(received, send, self._reduce_group, dist.ReduceOp.SUM, async_op=asynchronous)

        return issue, lambda: average.finish(output.copy_(received), output), received


class GroupMemory:
    """Staging memory of the process group's own allocator (NCCL's registered buffers)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._backend = group._get_backend(device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of the group."""
        return self._backend.allocate_tensor(*size, dtype=dtype, device=device)

    def register(self, group: dist.ProcessGroup, *tensors: torch.Tensor) -> None:
        """Make `tensors` known to all ranks of `group`, before its collective uses them."""


class SymmetricMemory(GroupMemory):
    """Staging memory that all ranks map, which NCCL moves with copy engines or symmetric kernels."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, backend: str = "NCCL") -> None:
        from torch.distributed import _symmetric_memory

        self._memory = _symmetric_memory
        self._memory.set_backend(backend)
        dist.barrier(group=group)  # the rendezvous needs a communicator that exists

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of the pool that all ranks map."""
        with torch.cuda.use_mem_pool(self._memory.get_mem_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)

    def register(self, group: dist.ProcessGroup, *tensors: torch.Tensor) -> None:
        """Meet the other ranks over `tensors`."""
        for tensor in tensors:
            self._memory.rendezvous(tensor, group=group.group_name)


class CollectiveIn:
    """An all-gather or a reduce-scatter, which sums, between buffers in memory of a given kind."""

    def __init__(self, memory: GroupMemory, collective: Callable[..., Any]) -> None:
        self.memory, self.allocate, self._collective = memory, memory.allocate, collective

    def __call__(
        self, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, op: Any = None, *, async_op: bool
    ) -> Any:
        buffers = (output,) if source.numel() < output.numel() else (source, output)  # a gather is in place
        self.memory.register(group, *buffers)
        return self._collective(output, source, group=group, async_op=async_op)


def use(unit: Unit, gather: Any = None, scatter: Any = None) -> None:
    """Have `unit` gather with `gather` and reduce with `scatter`; None leaves what it has."""
    now = unit.memory.config.shard
    if now is None:
        return
    if not isinstance(now, CustomTransport):
        now = CustomTransport(now, unit.memory.config.device)
    made = CustomTransport(now.below, unit.memory.config.device, gather or now.gather, scatter or now.scatter)
    unit.memory.config = replace(unit.memory.config, shard=made)


def allocate_from_group(unit: Unit, enable: bool) -> None:
    """Stage this unit's collectives in memory of its process group, or no longer; nothing changes where it allocates
    none.
    """
    now, device = unit.memory.config.shard, unit.memory.config.device
    if now is None:
        return
    _check_not_custom(now, "set_allocate_memory_from_process_group_for_comm")
    if enable and now.group._get_backend(device).supports_tensor_alloc(device):
        _stage_in(unit, GroupMemory(now.group, device))
    elif not enable and isinstance(now, CustomTransport):
        unit.memory.config = replace(unit.memory.config, shard=now.below)


def allocate_symmetric(unit: Unit, backend: str) -> None:
    """Stage this unit's collectives in symmetric memory."""
    now, device = unit.memory.config.shard, unit.memory.config.device
    if device.type != "cuda":
        raise RuntimeError(f"symmetric memory needs CUDA devices and NCCL, got {device}")
    if now is not None:
        _check_not_custom(now, "set_symm_mem_for_comm")
        _stage_in(unit, SymmetricMemory(now.group, device, backend))


def _stage_in(unit: Unit, memory: GroupMemory) -> None:
    gather, scatter = (CollectiveIn(memory, each) for each in (compat.all_gather_single, compat.reduce_scatter_single))
    use(unit, gather, scatter)


def _check_not_custom(now: Transport, method: str) -> None:
    """An `AssertionError`, as PyTorch's, where the user's own collectives choose their memory themselves."""
    for comm in (now.gather, now.scatter) if isinstance(now, CustomTransport) else ():
        if comm is not None and not isinstance(comm, CollectiveIn):
            raise AssertionError(f"{method} cannot be used with a collective of your own ({type(comm).__name__})")


def on_stream(hook: Callable[[torch.Tensor], None], stream: torch.cuda.Stream) -> Callable[[torch.Tensor], None]:
    """`hook`, run on `stream` between what came before and what comes after."""

    def hooked(reduced: torch.Tensor) -> None:
        device = torch.get_device_module(reduced.device)
        stream.wait_stream(device.current_stream())
        with device.stream(stream), events.span("all_reduce_hook"):
            hook(reduced)
        device.current_stream().wait_stream(stream)

    return hooked
