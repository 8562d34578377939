"""One unit's gradients on their way: packed, reduce-scattered over the shards, all-reduced over the replicas, handed
out.

Which of the two collectives happen is read from the unit's configuration: `no_shard` has replicas only, `full_shard`
shards only, `hybrid_shard` both, and then each hides behind the backward of one further unit; so do the two halves of
an all-reduce between CPU ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch._prims_common import make_contiguous_strides_for as contiguous_strides

from fsdplab.engine import events
from fsdplab.engine.core.layout import Slot
from fsdplab.engine.core.packing import half, is_missing, pack
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import Stamp, Transport
from fsdplab.engine.core.unit_config import ReduceOptions, UnitConfig
from fsdplab.engine.core.unit_plan import layout_of

Stage = Callable[["Pending | None"], Pending]  # a collective, `after` the one on another stream that it goes on from


class Reduction:
    """The reduction of one unit's whole gradients; `advance` completes a stage and says whether it was the last.

    `earlier` is what a reduction without its all-reduce left behind, and `partial_output` is what this one leaves.
    `arriving` is over once the gradients may be read.
    """

    def __init__(
        self,
        unit: str,
        params: Sequence[ShardedParam],
        config: UnitConfig,
        options: ReduceOptions,
        earlier: torch.Tensor | None = None,
    ) -> None:
        self._params, self._config, self._options, self._earlier = params, config, options, earlier
        self.partial_output: torch.Tensor | None = None
        self.arriving = Pending(lambda: None)
        gradients = [param.whole_gradient for param in params]
        dtype = config.policy.reduce_dtype or reduce(torch.promote_types, {param.gradient_dtype for param in params})
        self._missing = [gradient is None for gradient in gradients]
        self._layout = layout_of(params, [dtype] * len(params), config.ranks)
        self._output = torch.empty(self._layout.slice_bytes // dtype.itemsize, dtype=dtype, device=config.device)
        events.tag("gradient_slices" if config.shard else "whole_gradients", self._output, unit)
        stages = self._stages(Stamp(unit, "backward"), gradients)
        self._pending, self._ahead = stages[0](None), stages[1:]
        if self._ahead and self._earlier is None and self._pending.event is not None:
            following = self._ahead[0](self._pending)  # one stream waits for the other: it may be issued at once
            self._ahead = [lambda _: following]

    def _stages(self, stamp: Stamp, gradients: Sequence[torch.Tensor | None]) -> list[Stage]:
        shard, replicate = self._config.shard, self._config.replicate
        divide, output = self._options.divide, self._output
        over_replicas: list[Stage] = []
        if replicate and self._options.all_reduce:
            over_replicas = [lambda after: self._over_replicas(replicate, stamp, after)]
        if shard is None and replicate and over_replicas and self._earlier is None:
            return _in_two_parts(replicate.all_reduce_packed(self._layout, gradients, output, stamp, divide))
        if shard is None:
            pack(self._layout, gradients, output)
            return over_replicas or [
                lambda _: Pending(lambda: None if replicate or divide == 1.0 else output.div_(divide))
            ]
        first = self._before_replicas() if replicate else divide
        return [lambda _: shard.reduce_scatter(self._layout, gradients, output, stamp, first), *over_replicas]

    def _before_replicas(self) -> float:
        """By how much to divide before the replicas sum: by one, but what could overflow is halfway small by then."""
        return half(self._options.divide) if self._output.dtype is torch.float16 else 1.0

    def _over_replicas(self, replicate: Transport, stamp: Stamp, after: Pending | None) -> Pending:
        if self._earlier is not None:
            self._output.add_(self._earlier)
        slots = self._layout.slots if self._config.shard else ()
        spans = [(slot, *slot.span(self._config.rank)) for slot in slots]
        real = sum((stop - start) * slot.row_bytes for slot, start, stop in spans)
        padding = self._layout.slice_bytes - real if slots else self._layout.padding_bytes
        divide = self._options.divide / (self._before_replicas() if self._config.shard else 1.0)
        return replicate.all_reduce(self._output, stamp, divide, padding, after)

    def advance(self) -> bool:
        """Wait for the stage in flight and start the next; True once the parameters have their gradients."""
        self._pending.wait()
        if self._ahead:
            self._pending, self._ahead = self._ahead[0](None), self._ahead[1:]
            return False
        if self._config.replicate and not self._options.all_reduce:
            self.partial_output = self._output if self._earlier is None else self._output.add_(self._earlier)
            return True
        given = self._given()
        if self._options.hook is not None:
            self._options.hook(self._output)
        self._hand_out(given)
        return True

    def abandon(self) -> None:
        """Let what is in flight go and hand out nothing."""
        self._pending.abandon()

    def _given(self) -> list[bool]:
        """Which parameters have a gradient; one that this rank has none of may have one on another.

        FSDP2 takes this rank's word for all of them.
        """
        if self._options.unused:
            return [True] * len(self._params)
        if not any(self._missing):
            return [True] * len(self._params)
        size, slots = self._output.element_size(), self._layout.slots
        parts = [self._output[slot.offset // size :][: slot.chunk_bytes // size] for slot in slots]
        return [not missing or not is_missing(part) for missing, part in zip(self._missing, parts)]

    def _hand_out(self, given: Sequence[bool]) -> None:
        """Give every parameter its rows. Those that go to host memory may still be on their way (`arriving`), unless
        somebody reads them at once, so whatever computes with them comes before they leave.
        """
        dtypes = {param.dtype for param in self._params}
        output = self._output.to(*dtypes) if len(dtypes) == 1 else self._output
        taking = [param for param, has_gradient in zip(self._params, given) if has_gradient]
        slots = [slot for slot, has_gradient in zip(self._layout.slots, given) if has_gradient]
        ready = (param.gradient_at_rest(self._rows(output, param, slot)) for param, slot in zip(taking, slots))
        locals_, self.arriving = self._config.storage.take(ready)
        if any(param.reads_gradient_at_once for param in taking):
            self.arriving.wait()
        for param, local in zip(taking, locals_):
            param.give_gradient(local)

    def _rows(self, output: torch.Tensor, param: ShardedParam, slot: Slot) -> torch.Tensor:
        """The rows of `param` in `output`; where its gradient is kept whole they take their place in it."""
        start, stop = slot.span(self._config.rank)
        shape = (stop - start, *param.shape[1:])
        rows = output.as_strided(shape, contiguous_strides(shape), slot.offset // slot.itemsize)
        whole, param.whole_gradient = param.whole_gradient, None
        return rows if whole is None else whole[start:stop].copy_(rows)


def _in_two_parts(work: Pending) -> list[Stage]:
    """Peers wait for this rank's sum: it is made when they can have sent their parts, and what is left is done one unit
    later, when they have made their own sums.
    """
    return [lambda _: Pending(work.advance, work, on_drop=work.abandon), lambda _: work]
