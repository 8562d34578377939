"""Sends through gloo, with a reduce-scatter of its own, and has what every transport between CPUs needs.

Gloo's own reduce-scatter is a whole all-reduce, twice the bytes. An all-to-all and a local sum in float32, in rank
order, moves the textbook's bytes and gives the same bits in every run. Whatever algorithm runs below, a trace and
`CommDebugMode` see the collective it stands for (`announce`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average
from fsdplab.engine.transport.staged import Reduction, StagedTransport


class GlooTransport(StagedTransport):
    """Gloo, with a reduce-scatter that moves P(n-1)/n bytes."""

    _overflows_in_float16 = False  # it sums in float32

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._backend = group._get_backend(device)
        self._announced = compat.silent_group(self.rank, self.ranks)

    def _reduction(
        self,
        send: torch.Tensor,  # [ranks * shard elements]
        output: torch.Tensor,  # [shard elements], this rank's part of the average
        average: Average,
    ) -> Reduction:
        """Return how to sum `send` into `output`: an all-to-all, then a sum on this rank."""
        # [ranks * shard elements]: every rank's gradients of this rank's shard, rank after rank.
        received = torch.empty_like(send)
        events.tag("communication_buffers", received, "")

        def issue(asynchronous: bool) -> Any:
            announce("reduce_scatter", self._announced, lambda: (torch.empty_like(output), send))
            return self._backend.alltoall_base(received, send, [], [])

        # Unbound to [shard elements] of each rank, which are summed once somebody waits.
        return issue, lambda: average.sum_up(received.view(self.ranks, -1).unbind(), output), received


def announce(
    kind: str,
    group: dist.ProcessGroup,
    buffers: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None,  # output and source, flat
) -> None:
    """Show a collective, without moving anything, to whatever watches `torch.distributed` and the profiler.

    Whoever has replaced the function is shown `buffers` (output, source) of the true size and dtype, on the CPU; nobody
    else pays for them. The output is written to.
    """
    nothing = torch.empty(0, device="cpu")  # the group is the CPU's, whatever the default device is
    output, source = buffers() if buffers is not None and compat.collectives_are_replaced() else (nothing, nothing)
    if kind == "all_gather":
        compat.all_gather_single(output, source, group=group)
    elif kind == "reduce_scatter":
        compat.reduce_scatter_single(output, source, group=group)
    else:
        dist.all_reduce(output, group=group)
