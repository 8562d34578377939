"""Collectives and staging memory that the user supplies: PyTorch's `AllGather` and `ReduceScatter` objects, and
allocators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.transport import Transport
from fsdplab.engine.core.unit import Unit
from fsdplab.engine.transport.staged import Reduction, StagedTransport


class CustomTransport(StagedTransport):
    """Staged collectives in which the all-gather, the reduce-scatter, or the memory for them is somebody else's."""

    def __init__(self, below: Transport, device: torch.device, gather: Any = None, scatter: Any = None) -> None:
        super().__init__(below.group, device)
        self.below, self.device, self.gather, self.scatter = below, device, gather, scatter

    def _staging(self, like: torch.Tensor, numel: int, role: str) -> torch.Tensor:
        comm = self.gather if role == "gather" else self.scatter
        if comm is None:
            return super()._staging(like, numel, role)
        return comm.allocate((numel,), dtype=like.dtype, device=self.device)

    def _gather(self, staging: torch.Tensor, send: torch.Tensor, asynchronous: bool) -> Any:
        if self.gather is None:
            return super()._gather(staging, send, asynchronous)
        return self.gather(staging, send, self.group, async_op=asynchronous)

    def _reduction(self, send: torch.Tensor, output: torch.Tensor, divide: float) -> Reduction:
        if self.scatter is None:
            return super()._reduction(send, output, divide)
        received = self._staging(output, output.numel(), "scatter")

        def issue(asynchronous: bool) -> Any:
            return self.scatter(received, send, self.group, dist.ReduceOp.SUM, async_op=asynchronous)

        return issue, lambda: output.copy_(received).div_(divide), received


class GroupMemory:
    """An all-gather over staging memory of the process group's own allocator (NCCL's registered buffers)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._backend = group._get_backend(device)

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of the group."""
        return self._backend.allocate_tensor(*size, dtype=dtype, device=device)

    def __call__(
        self, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return compat.all_gather_single(output, source, group=group, async_op=async_op)


class SymmetricMemory(GroupMemory):
    """An all-gather over symmetric memory, which NCCL then moves with copy engines or symmetric kernels."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        from torch.distributed import _symmetric_memory

        self._memory = _symmetric_memory
        self._memory.set_backend(backend)
        dist.barrier(group=group)  # the rendezvous needs a communicator that exists

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of the pool that all ranks map."""
        with torch.cuda.use_mem_pool(self._memory.get_mem_pool(device)):
            return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self._memory.rendezvous(output, group=group.group_name)
        return super().__call__(output, source, group, async_op)


def use(unit: Unit, gather: Any = None, scatter: Any = None) -> None:
    """Have `unit` gather with `gather` and reduce with `scatter`; None leaves what it has."""
    now = unit.config.shard
    if now is None:
        return
    if not isinstance(now, CustomTransport):
        now = CustomTransport(now, unit.config.device)
    made = CustomTransport(now.below, unit.config.device, gather or now.gather, scatter or now.scatter)
    unit.config = replace(unit.config, shard=made)


def allocate_from_group(unit: Unit, enable: bool) -> None:
    """Stage this unit's gathers in memory of its process group, or no longer;
    nothing changes where it allocates none.
    """
    now, device = unit.config.shard, unit.config.device
    if enable and now is not None and now.group._get_backend(device).supports_tensor_alloc(device):
        use(unit, gather=GroupMemory(now.group, device))
    elif isinstance(now, CustomTransport) and isinstance(now.gather, GroupMemory):
        unit.config = replace(unit.config, shard=now.below)


def allocate_symmetric(unit: Unit, backend: str) -> None:
    """Stage this unit's gathers in symmetric memory."""
    if unit.config.device.type != "cuda":
        raise RuntimeError(f"symmetric memory needs CUDA devices and NCCL, got {unit.config.device}")
    if unit.config.shard is not None:
        use(unit, gather=SymmetricMemory(unit.config.shard.group, backend))


def on_stream(hook: Callable[[torch.Tensor], None], stream: torch.cuda.Stream) -> Callable[[torch.Tensor], None]:
    """`hook`, run on `stream` between what came before and what comes after."""

    def hooked(reduced: torch.Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), events.span("all_reduce_hook"):
            hook(reduced)
        torch.cuda.current_stream().wait_stream(stream)

    return hooked
