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
    """Return `mesh` as replicas x `ranks` neighbours: 4 ranks become [[0, 1], [2, 3]]; collective over the mesh."""
    return DeviceMesh(mesh.device_type, mesh.mesh.view(-1, ranks))


class ShardsOverFewerRanks:
    """The shards that a unit keeps from its forward to its backward, cut over the ranks of `transport`."""

    def __init__(self, params: Sequence[ShardedParam], mesh: DeviceMesh, transport: Transport) -> None:
        if any(param.whole_spec is not None for param in params):  # DTensors before they were sharded
            raise NotImplementedError("reshard_after_forward as a number of ranks does not go with DTensor parameters")
        self._params = params
        self._mesh = mesh
        self.transport = transport
        self._layout = Layout.of([], transport.ranks)  # that of the unit's last forward
        self._shard: torch.Tensor | None = None  # [shard_bytes] (uint8), between a forward and its backward

    @property
    def kept(self) -> bool:
        """Whether there are shards to gather from."""
        return self._shard is not None

    def keep(self, gathered: UnshardedBuffer) -> None:
        """Copy this rank's rows out of the unsharded parameters and show them as DTensors of the smaller mesh."""
        # The same parameters in the same dtypes, cut over fewer ranks: 8 rows are 2 on each of 4 ranks, 4 on each of 2.
        entries = [(slot.name, slot.shape, slot.itemsize) for slot in gathered.layout.slots]
        self._layout = Layout.of(entries, self.transport.ranks)
        self._shard = torch.zeros(self._layout.shard_bytes, dtype=torch.uint8, device=gathered.tensor.device)
        events.tag("unsharded_parameters", self._shard, "")
        for param, slot in zip(self._params, self._layout.slots):
            start, stop = slot.span(self.transport.rank)
            value = param.rows_first(local_part(param.unsharded))  # [all rows, *others]
            nbytes = (stop - start) * slot.row_bytes
            place = self._shard[slot.offset : slot.offset + nbytes]
            rows = place.view(value.dtype).view(stop - start, *param.shape[1:])
            rows.copy_(value[start:stop])
            self._show(param, rows)

    def _show(
        self,
        param: ShardedParam,
        rows: torch.Tensor,  # [rows of this rank, *others], the dimension that is cut first
    ) -> None:
        """Make the modules show `rows`, [rows of this rank, *others], as a DTensor."""
        spec = spec_at_rest(param.name, param.unsharded, Axes(self._mesh), param.dim)
        local = param.natural(rows).contiguous()
        sharded = compat.dtensor_of(local, spec)
        shown = nn.Parameter(sharded, requires_grad=param.at_rest.requires_grad)
        shown._shown_during_step = True  # for optimizers that are given it by mistake
        param.show(shown)

    def gather(self, whole: UnshardedBuffer, label: CollectiveLabel) -> Pending:
        """Fill `whole`, laid out for all ranks, from the shards of the few, through a buffer laid out for those."""
        shard = self._shard
        assert shard is not None, "no forward has kept anything"
        # Cut over 2 ranks a parameter has other padding than over 8, so its rows lie elsewhere than in `whole`.
        near = UnshardedBuffer(self._layout, shard.device, label.unit, "communication_buffers")
        dtypes = {param.unsharded.dtype for param in self._params}
        if len(dtypes) == 1:  # so that the ledger names it; else bytes are sent
            shard = shard.view(*dtypes)
        pending = self.transport.all_gather(SendShard.of(shard), near, label)

        def finish() -> None:
            pending.wait()
            whole.tensor  # noqa: B018 - takes its memory, which the parameters are views of
            source = near.tensor  # [bytes]
            # Written one by one: a parameter that is cut along another dimension has another order in `whole`.
            for param, slot in zip(self._params, near.layout.slots):
                start = slot.whole_offset
                in_bytes = source[start : start + slot.nbytes]  # without the padding behind the last row
                rows = in_bytes.view(param.unsharded.dtype).view(param.shape)
                param.write(param.natural(rows))

        return Pending(finish, near, on_drop=pending.abandon)

    def forget(self) -> None:
        """Let the shards go: a new forward begins, or the backward is over."""
        self._shard = None
