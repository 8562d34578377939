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
        """Do as the transport below, and for good: what is made over it later reduces in the same group."""
        self.below.separate_reductions(enable)
        super().separate_reductions(enable)

    def _staging(self, numel: int, dtype: torch.dtype, role: str) -> torch.Tensor:
        """Return memory, [numel], of the collective of that role where it is the user's, else of torch."""
        comm = self.gather if role == "gather" else self.scatter
        if comm is None:
            return super()._staging(numel, dtype, role)
        return comm.allocate((numel,), dtype=dtype, device=self.device)

    def _gather(
        self,
        staging: torch.Tensor,  # [ranks * shard elements]
        send: torch.Tensor,  # [shard elements], this rank's
        asynchronous: bool,
    ) -> Any:
        """Issue the user's all-gather, if there is one."""
        if self.gather is None:
            return super()._gather(staging, send, asynchronous)
        return self.gather(staging, send, self.group, async_op=asynchronous)

    def _reduction(
        self,
        send: torch.Tensor,  # [ranks * shard elements]
        output: torch.Tensor,  # [shard elements], this rank's part of the average
        average: Average,
    ) -> Reduction:
        """Return how to sum by the user's reduce-scatter, if there is one."""
        if self.scatter is None:
            return super()._reduction(send, output, average)
        # [shard elements] in the user's memory; the sum is copied to `output` and divided there.
        received = self._staging(output.numel(), output.dtype, "scatter")

        def issue(asynchronous: bool) -> Any:
            return self.scatter(received, send, self._reduce_group, dist.ReduceOp.SUM, async_op=asynchronous)

        return issue, lambda: average.finish(output.copy_(received), output), received


class GroupMemory:
    """Staging memory of the process group's own allocator (NCCL's registered buffers)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._backend = group._get_backend(device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory of the group."""
        return self._backend.allocate_tensor(*size, dtype=dtype, device=device)

    def register(
        self,
        group: dist.ProcessGroup,
        *tensors: torch.Tensor,  # any shapes
    ) -> None:
        """Make `tensors` known to all ranks of `group`, before its collective uses them."""


class SymmetricMemory(GroupMemory):
    """Staging memory that all ranks map, which NCCL moves with copy engines or symmetric kernels."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, backend: str = "NCCL") -> None:
        from torch.distributed import _symmetric_memory

        self._memory = _symmetric_memory
        self._memory.set_backend(backend)
        dist.barrier(group=group)  # the rendezvous needs a communicator that exists

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory of the pool that all ranks map."""
        with torch.cuda.use_mem_pool(self._memory.get_mem_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)

    def register(
        self,
        group: dist.ProcessGroup,
        *tensors: torch.Tensor,  # any shapes
    ) -> None:
        """Meet the other ranks over `tensors`."""
        for tensor in tensors:
            self._memory.rendezvous(tensor, group=group.group_name)


class CollectiveIn:
    """An all-gather or a reduce-scatter, which sums, between buffers in memory of a given kind."""

    def __init__(self, memory: GroupMemory, collective: Callable[..., Any]) -> None:
        self.memory, self.allocate, self._collective = memory, memory.allocate, collective

    def __call__(
        self,
        output: torch.Tensor,  # [ranks * elements] of a gather, [elements] of a reduction
        source: torch.Tensor,  # [elements] of a gather, [ranks * elements] of a reduction
        group: dist.ProcessGroup,
        op: Any = None,
        *,
        async_op: bool,
    ) -> Any:
        """Make the buffers known to all ranks, then issue the collective."""
        if source.numel() < output.numel():  # a gather, whose source is a part of its output
            self.memory.register(group, output)
        else:
            self.memory.register(group, source, output)
        return self._collective(output, source, group=group, async_op=async_op)


def use(unit: Unit, gather: Any = None, scatter: Any = None) -> None:
    """Have `unit` gather with `gather` and reduce with `scatter`; None leaves what it has."""
    config = unit.memory.config
    transport = config.shard
    if transport is None:
        return
    if not isinstance(transport, CustomTransport):
        transport = CustomTransport(transport, config.device)
    gather, scatter = gather or transport.gather, scatter or transport.scatter
    # Over the transport that was there first: a second call does not stack one on the other.
    transport = CustomTransport(transport.below, config.device, gather, scatter)
    unit.memory.config = replace(config, shard=transport)


def allocate_from_group(unit: Unit, enable: bool) -> None:
    """Stage this unit's collectives in memory of its process group, or no longer.

    Nothing changes where the group allocates none.
    """
    transport, device = unit.memory.config.shard, unit.memory.config.device
    if transport is None:
        return
    _check_not_custom(transport, "set_allocate_memory_from_process_group_for_comm")
    if not enable:
        if isinstance(transport, CustomTransport):
            unit.memory.config = replace(unit.memory.config, shard=transport.below)
    elif transport.group._get_backend(device).supports_tensor_alloc(device):
        _stage_in(unit, GroupMemory(transport.group, device))


def allocate_symmetric(unit: Unit, backend: str) -> None:
    """Stage this unit's collectives in symmetric memory."""
    transport, device = unit.memory.config.shard, unit.memory.config.device
    if device.type != "cuda":
        raise RuntimeError(f"symmetric memory needs CUDA devices and NCCL, got {device}")
    if transport is not None:
        _check_not_custom(transport, "set_symm_mem_for_comm")
        _stage_in(unit, SymmetricMemory(transport.group, device, backend))


def _stage_in(unit: Unit, memory: GroupMemory) -> None:
    """Have `unit` gather and reduce between buffers in `memory`."""
    gather = CollectiveIn(memory, compat.all_gather_single)
    scatter = CollectiveIn(memory, compat.reduce_scatter_single)
    use(unit, gather, scatter)


def _check_not_custom(transport: Transport, method: str) -> None:
    """Raise, as PyTorch does, where the user's own collectives choose their memory themselves."""
    if not isinstance(transport, CustomTransport):
        return
    for comm in (transport.gather, transport.scatter):
        if comm is not None and not isinstance(comm, CollectiveIn):
            raise AssertionError(f"{method} cannot be used with a collective of your own ({type(comm).__name__})")


def on_stream(
    hook: Callable[[torch.Tensor], None],  # is given [shard elements]
    stream: torch.cuda.Stream,
) -> Callable[[torch.Tensor], None]:
    """Return a function that runs `hook` on `stream`, between what came before and what comes after."""

    def hooked(
        reduced: torch.Tensor,  # [shard elements]
    ) -> None:
        device = torch.get_device_module(reduced.device)
        stream.wait_stream(device.current_stream())
        with device.stream(stream), events.span("all_reduce_hook"):
            hook(reduced)
        device.current_stream().wait_stream(stream)

    return hooked
