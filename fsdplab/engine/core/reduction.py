"""One unit's gradients on their way: packed, reduce-scattered over the shards, all-reduced over the replicas, handed
out.

Which of the two collectives happen is read from the unit's terms: `no_shard` has replicas only, `full_shard` shards
only, `hybrid_shard` both, and then each hides behind the backward of one further unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from fsdplab.engine import events
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.packing import pack
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.placement import Axes
from fsdplab.engine.core.policy import MixedPrecisionPolicy, Strategy
from fsdplab.engine.core.shard_storage import Home
from fsdplab.engine.core.transport import Stamp, Transport


@dataclass(frozen=True)
class Terms:
    """What a unit was told once: its row, its dtypes, where slices rest, and what it shards and replicates over."""

    strategy: Strategy
    policy: MixedPrecisionPolicy
    axes: Axes
    device: torch.device
    home: Home
    rank: int
    shard: Transport | None
    replicate: Transport | None

    @property
    def ranks(self) -> int:
        """Over how many ranks slices are cut."""
        return self.shard.ranks if self.shard else 1

    @property
    def divide(self) -> float:
        """Gradients are averaged over all data-parallel ranks."""
        return float(self.ranks * (self.replicate.ranks if self.replicate else 1))


def layout_of(params: Sequence[ShardedParam], dtypes: Sequence[torch.dtype], ranks: int, alignment: int = 0) -> Layout:
    """The layout of `params` in `dtypes`, cut over `ranks` ranks."""
    return Layout.of([(p.name, p.shape, dtype.itemsize) for p, dtype in zip(params, dtypes)], ranks, alignment)


@dataclass(frozen=True)
class Wish:
    """What the user may change from step to step about a unit's reductions.

    Without `all_reduce`, gradients are summed over the shards and kept; the next reduction that has it adds them.
    `hook` sees the reduced slice before the optimizer does.
    """

    divide: float
    all_reduce: bool = True
    hook: Callable[[torch.Tensor], None] | None = None


class Reduction:
    """The reduction of one unit's whole gradients; `advance` completes a stage and says whether it was the last.

    `earlier` is what a reduction without its all-reduce left behind, and `left` is what this one leaves.
    """

    def __init__(
        self, unit: str, params: Sequence[ShardedParam], terms: Terms, wish: Wish, earlier: torch.Tensor | None = None
    ) -> None:
        self._params, self._terms, self._wish, self._earlier = params, terms, wish, earlier
        self.left: torch.Tensor | None = None
        gradients = [param.whole_gradient for param in params]
        dtypes = {terms.policy.reduce_dtype or gradient.dtype for gradient in gradients if gradient is not None}
        dtype = reduce(torch.promote_types, dtypes)
        self._layout = layout_of(params, [dtype] * len(params), terms.ranks)
        self._output = torch.empty(self._layout.slice_bytes // dtype.itemsize, dtype=dtype, device=terms.device)
        events.tag("gradient_slices" if terms.shard else "whole_gradients", self._output, unit)
        stages = self._stages(Stamp(unit, "backward"), gradients)
        self._pending, self._ahead = stages[0](), stages[1:]

    def _stages(self, stamp: Stamp, gradients: Sequence[torch.Tensor | None]) -> list[Callable[[], Pending]]:
        shard, replicate, divide, output = self._terms.shard, self._terms.replicate, self._wish.divide, self._output
        over_replicas = [lambda: self._over_replicas(replicate, stamp)] if replicate and self._wish.all_reduce else []
        if shard is None and replicate and over_replicas and self._earlier is None:
            return [lambda: replicate.all_reduce_packed(self._layout, gradients, output, stamp, divide)]
        if shard is None:
            pack(self._layout, gradients, output)
            return over_replicas or [
                lambda: Pending(lambda: None if replicate or divide == 1.0 else output.div_(divide))
            ]
        first = 1.0 if replicate else divide
        return [lambda: shard.reduce_scatter(self._layout, gradients, output, stamp, first), *over_replicas]

    def _over_replicas(self, replicate: Transport, stamp: Stamp) -> Pending:
        if self._earlier is not None:
            self._output.add_(self._earlier)
        slots = self._layout.slots if self._terms.shard else ()
        spans = [(slot, *slot.span(self._terms.rank)) for slot in slots]
        real = sum((stop - start) * slot.row_bytes for slot, start, stop in spans)
        padding = self._layout.slice_bytes - real if slots else self._layout.padding_bytes
        return replicate.all_reduce(self._output, stamp, self._wish.divide, padding)

    def advance(self) -> bool:
        """Wait for the stage in flight and start the next; True once the parameters have their gradients."""
        self._pending.wait()
        if self._ahead:
            self._pending, self._ahead = self._ahead[0](), self._ahead[1:]
            return False
        if self._terms.replicate and not self._wish.all_reduce:
            self.left = self._output if self._earlier is None else self._output.add_(self._earlier)
            return True
        if self._wish.hook is not None:
            self._wish.hook(self._output)
        self._hand_out()
        return True

    def abandon(self) -> None:
        """Wait for what is in flight and hand out nothing."""
        self._pending.wait()

    def _hand_out(self) -> None:
        size, output = self._output.element_size(), self._terms.home.take(self._output)
        for param, slot in zip(self._params, self._layout.slots):
            (start, stop), row = slot.span(self._terms.rank), slot.row_bytes // size
            first = slot.offset // size
            rows = output[first : first + (stop - start) * row].view(stop - start, *param.shape[1:])
            if param.whole_gradient is not None:  # kept whole: the averaged rows take their place in it
                rows = param.whole_gradient[start:stop].copy_(rows)
            param.whole_gradient = None
            param.give_gradient(rows)
