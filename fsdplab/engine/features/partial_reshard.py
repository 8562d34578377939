"""A unit that after its forward is resharded to fewer ranks, and gathered from those in the backward.

`reshard_after_forward=m` trades memory for traffic: every rank keeps 1/m of the unit instead of 1/n, so the backward's
gather stays within m ranks (the GPUs of one machine, say). The slices at rest are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplab.engine import compat, events
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.placement import Axes, spec_at_rest
from fsdplab.engine.core.transport import Outgoing, Stamp, Transport


def ranks_after_forward(wanted: int, ranks: int) -> int:
    """`wanted` if it divides `ranks`; a `ValueError` otherwise. 1 means: stay gathered; `ranks`: reshard as usual."""
    if wanted < 1 or ranks % wanted:
        raise ValueError(
            f"reshard_after_forward={wanted} ranks: expected True, False, or a divisor of the {ranks} ranks that shard"
        )
    return wanted


def smaller_mesh(mesh: DeviceMesh, ranks: int) -> DeviceMesh:
    """`mesh` as replicas x `ranks` neighbours; making it is collective over the mesh."""
    return DeviceMesh(mesh.device_type, mesh.mesh.view(-1, ranks))


class SlicesOverFewerRanks:
    """The slices that a unit keeps from its forward to its backward, cut over the ranks of `transport`."""

    def __init__(self, params: Sequence[ShardedParam], mesh: DeviceMesh, transport: Transport) -> None:
        if any(param.whole_spec is not None for param in params):
            raise NotImplementedError("reshard_after_forward as a number of ranks does not go with DTensor parameters")
        self.kept = False
        self._params, self._mesh, self.transport = params, mesh, transport
        self._layout = Layout.of([], transport.ranks)
        self._slice: torch.Tensor | None = None

    def keep(self, layout: Layout, whole: torch.Tensor) -> None:
        """Copy this rank's rows out of the gathered parameters and show them as DTensors of the smaller mesh."""
        entries = [(slot.name, slot.shape, slot.itemsize) for slot in layout.slots]
        self._layout = Layout.of(entries, self.transport.ranks)
        self._slice = torch.zeros(self._layout.slice_bytes, dtype=torch.uint8, device=whole.device)
        events.tag("gathered_parameters", self._slice, "")
        for param, full, part in zip(self._params, layout.slots, self._layout.slots):
            start, stop = part.span(self.transport.rank)
            nbytes = (stop - start) * part.row_bytes
            first = layout.whole_offset(full) + start * part.row_bytes
            rows = self._slice[part.offset : part.offset + nbytes].copy_(whole[first : first + nbytes])
            self._show(param, rows.view(_gathered(param).dtype).view(stop - start, *param.shape[1:]))
        self.kept = True

    def _show(self, param: ShardedParam, rows: torch.Tensor) -> None:
        spec = spec_at_rest(param.name, _gathered(param), Axes(self._mesh), param.dim)
        shown = nn.Parameter(compat.dtensor_of(param.natural(rows), spec), requires_grad=param.at_rest.requires_grad)
        param.show(shown)

    def gather(self, layout: Layout, whole: torch.Tensor, stamp: Stamp) -> Pending:
        """Fill `whole`, laid out for all ranks, from the slices of the few."""
        kept = self._slice
        assert kept is not None, "no forward has kept anything"
        near = torch.empty(self._layout.total_bytes, dtype=torch.uint8, device=whole.device)
        events.tag("communication_buffers", near, stamp.unit)
        dtypes = {_gathered(param).dtype for param in self._params}
        sent = kept.view(*dtypes) if len(dtypes) == 1 else kept
        pending = self.transport.all_gather(self._layout, Outgoing.of(sent), near, stamp)

        def finish() -> None:
            pending.wait()
            for full, part in zip(layout.slots, self._layout.slots):
                here, there = layout.whole_offset(full), self._layout.whole_offset(part)
                whole[here : here + full.nbytes].copy_(near[there : there + full.nbytes])

        return Pending(finish, near, whole, on_drop=pending.abandon)

    def forget(self) -> None:
        """Let the slices go: a new forward begins, or the backward is over."""
        self._slice, self.kept = None, False


def _gathered(param: ShardedParam) -> nn.Parameter:
    assert param.gathered is not None, f"{param.name} was not gathered"
    return param.gathered
