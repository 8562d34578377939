"""Reshards a unit to fewer ranks after its forward, and gathers it from those in the backward.

`reshard_after_forward=m` trades memory for traffic: every rank keeps 1/m of the unit instead of 1/n, so the backward's
gather stays within m ranks (the GPUs of one machine, say). The shards at rest are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplab.engine import compat, events
from fsdplab.engine.core.buffers import UnshardedBuffer
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.placement import Axes, local_part, spec_at_rest
from fsdplab.engine.core.transport import CollectiveLabel, SendShard, Transport


@compat.with_real_tensors
def smaller_mesh(mesh: DeviceMesh, ranks: int) -> DeviceMesh:
    """`mesh` as replicas x `ranks` neighbours; making it is collective over the mesh."""
    return DeviceMesh(mesh.device_type, mesh.mesh.view(-1, ranks))


class ShardsOverFewerRanks:
    """The shards that a unit keeps from its forward to its backward, cut over the ranks of `transport`."""

    def __init__(self, params: Sequence[ShardedParam], mesh: DeviceMesh, transport: Transport) -> None:
        if any(param.whole_spec is not None for param in params):
            raise NotImplementedError("reshard_after_forward as a number of ranks does not go with DTensor parameters")
        self._params, self._mesh, self.transport = params, mesh, transport
        self._layout = Layout.of([], transport.ranks)
        self._shard: torch.Tensor | None = None

    @property
    def kept(self) -> bool:
        """Whether there are shards to gather from."""
        return self._shard is not None

    def keep(self, gathered: UnshardedBuffer) -> None:
        """Copy this rank's rows out of the unsharded parameters and show them as DTensors of the smaller mesh."""
        entries = [(slot.name, slot.shape, slot.itemsize) for slot in gathered.layout.slots]
        self._layout = Layout.of(entries, self.transport.ranks)
        device = gathered.tensor.device
        self._shard = torch.zeros(self._layout.shard_bytes, dtype=torch.uint8, device=device)
        events.tag("unsharded_parameters", self._shard, "")
        for param, slot in zip(self._params, self._layout.slots):
            start, stop = slot.span(self.transport.rank)
            value = param.rows_first(local_part(param.unsharded))  # [all rows, *others]
            place = self._shard[slot.offset : slot.offset + (stop - start) * slot.row_bytes]
            rows = place.view(value.dtype).view(stop - start, *param.shape[1:])
            self._show(param, rows.copy_(value[start:stop]))

    def _show(
        self,
        param: ShardedParam,
        rows: torch.Tensor,  # [rows of this rank, *others], the dimension that is cut first
    ) -> None:
        """Make the modules show `rows`, [rows of this rank, *others], as a DTensor."""
        spec = spec_at_rest(param.name, param.unsharded, Axes(self._mesh), param.dim)
        local = param.natural(rows).contiguous()
        shown = nn.Parameter(compat.dtensor_of(local, spec), requires_grad=param.at_rest.requires_grad)
        shown._shown_during_step = True
        param.show(shown)

    def gather(self, whole: UnshardedBuffer, label: CollectiveLabel) -> Pending:
        """Fill `whole`, laid out for all ranks, from the shards of the few, through a buffer laid out for those."""
        shard = self._shard
        assert shard is not None, "no forward has kept anything"
        near = UnshardedBuffer(self._layout, shard.device, label.unit, "communication_buffers")
        dtypes = {param.unsharded.dtype for param in self._params}
        if len(dtypes) == 1:
            shard = shard.view(*dtypes)
        pending = self.transport.all_gather(SendShard.of(shard), near, label)

        def finish() -> None:
            pending.wait()
            whole.tensor  # noqa: B018 - takes its memory, which the parameters are views of
            source = near.tensor  # [bytes]
            for param, slot in zip(self._params, near.layout.slots):
                rows = source[slot.whole_offset : slot.whole_offset + slot.nbytes].view(param.unsharded.dtype)
                param.write(param.natural(rows.view(param.shape)))

        return Pending(finish, near, on_drop=pending.abandon)

    def forget(self) -> None:
        """Let the shards go: a new forward begins, or the backward is over."""
        self._shard = None
