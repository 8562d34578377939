"""PyTorch's own FSDP2 on the fabric of `shared_gpu`, so that engines are compared on the same way of moving bytes.

FSDP2 takes collectives of the user's own: objects that allocate memory and are called on the stream where the
collective belongs. These do what `SharedGpuTransport` does, over arenas and timelines of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdplab.engine.transport.gloo import sum_in_rank_order
from fsdplab.engine.transport.shared_gpu.series import Series, moving, watched
from fsdplab.engine.transport.shared_gpu.transport import fabric_for

_SLOTS = 2


class _Memory:
    """Ordinary memory for a collective's buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class SharedGpuAllGather(_Memory):
    """FSDP2's `AllGather` over `series`."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with every rank's `input_tensor`, rank 0's first, in the order of the current stream."""
        line, send = self._series, input_tensor.view(torch.uint8)
        with moving("all_gather", output_tensor.nbytes):
            number, slot = line.claim(send.nbytes, "all_gather of FSDP2")
            slot.copy_(send)
            line.publish(number)
            parts = output_tensor.view(torch.uint8).chunk(line.ranks)
            for step in range(line.ranks):
                peer = (line.rank + step) % line.ranks
                parts[peer].copy_(line.read(peer, number, send.nbytes))
            line.done(number)


class SharedGpuReduceScatter(_Memory):
    """FSDP2's `ReduceScatter` over `series`: sums and averages, in rank order, in float32."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Sum (or average) this rank's part of every rank's `input_tensor` into `output_tensor`, in the order of the
        current stream.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"shared_gpu reduces with SUM or AVG, got {op}; leave FSDP2's gradient divide factor as it is"
            )
        line, nbytes = self._series, input_tensor.nbytes
        with moving("reduce_scatter", nbytes):
            number, slot = line.claim(nbytes, "reduce_scatter of FSDP2")
            slot.copy_(input_tensor.view(torch.uint8))
            line.publish(number)
            wholes = (line.read(peer, number, nbytes) for peer in range(line.ranks))
            parts = (whole.view(output_tensor.dtype).view(line.ranks, -1)[line.rank] for whole in wholes)
            sum_in_rank_order(parts, output_tensor.view(-1), float(line.ranks) if op == dist.ReduceOp.AVG else 1.0)
            line.done(number)


def put_on_shared_gpu(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Have every FSDP2 module of `model` gather and reduce over the fabric of `shared_gpu`; all ranks of `group` must
    call it.

    Raises `ValueError` where the ranks cannot share a GPU, or where nothing of the model is FSDP2's.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} holds no module of torch's FSDP2; call torch.distributed.fsdp.fully_shard first"
        )
    fabric = fabric_for(group, device)
    gathers, reductions = Series(group, fabric, _SLOTS), Series(group, fabric, _SLOTS)
    gathers.watchdog = reductions.watchdog = watched(group, fabric, [gathers, reductions])
    for module in modules:
        module.set_custom_all_gather(SharedGpuAllGather(gathers))
        module.set_custom_reduce_scatter(SharedGpuReduceScatter(reductions))
