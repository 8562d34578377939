"""One unit's gradients on their way: packed, reduce-scattered over the shards, all-reduced over the replicas, handed out.

Which of the two collectives happen is read from the unit's terms: `no_shard` has replicas only, `full_shard` shards
only, `hybrid_shard` both, and then each hides behind the backward of one further unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from . import events
from .layout import Layout
from .param import ShardedParam
from .pending import Pending
from .policy import MixedPrecisionPolicy, Strategy
from .transport import Stamp, Transport, pack


@dataclass(frozen=True)
class Terms:
    """What a unit was told once: its row, its dtypes, and the groups it shards over and replicates over."""

    strategy: Strategy
    policy: MixedPrecisionPolicy
    device: torch.device
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


def layout_of(params: Sequence[ShardedParam], dtypes: Sequence[torch.dtype], ranks: int) -> Layout:
    """The layout of `params` in `dtypes`, cut over `ranks` ranks."""
    return Layout.of([(p.name, p.shape, dtype.itemsize) for p, dtype in zip(params, dtypes)], ranks)


class Reduction:
    """The reduction of one unit's whole gradients; `advance` completes a stage and says whether it was the last."""

    def __init__(self, unit: str, params: Sequence[ShardedParam], terms: Terms, divide: float) -> None:
        self._params, self._terms = params, terms
        gradients = [param.whole_gradient for param in params]
        dtypes = {terms.policy.reduce_dtype or gradient.dtype for gradient in gradients if gradient is not None}
        dtype = reduce(torch.promote_types, dtypes)
        self._layout = layout_of(params, [dtype] * len(params), terms.ranks)
        self._output = torch.empty(self._layout.slice_bytes // dtype.itemsize, dtype=dtype, device=terms.device)
        events.tag("gradient_slices" if terms.shard else "whole_gradients", self._output, unit)
        stages = self._stages(Stamp(unit, "backward"), gradients, divide)
        self._pending, self._left = stages[0](), stages[1:]

    def _stages(
        self, stamp: Stamp, gradients: Sequence[torch.Tensor | None], divide: float
    ) -> list[Callable[[], Pending]]:
        shard, replicate, output = self._terms.shard, self._terms.replicate, self._output
        if shard is None:
            pack(self._layout, gradients, output)
            whole = [lambda: replicate.all_reduce(output, stamp, divide, self._layout.padding_bytes)]
            return whole if replicate else [lambda: Pending(lambda: None)]
        scatter = lambda: shard.reduce_scatter(self._layout, gradients, output, stamp, 1.0 if replicate else divide)  # noqa: E731
        padding = self._layout.slice_bytes - sum(self._rows_bytes())
        return [scatter, *([lambda: replicate.all_reduce(output, stamp, divide, padding)] if replicate else [])]

    def _rows_bytes(self) -> list[int]:
        spans = [(slot, *slot.span(self._terms.rank)) for slot in self._layout.slots]
        return [(stop - start) * slot.row_bytes for slot, start, stop in spans]

    def advance(self) -> bool:
        """Wait for the stage in flight and start the next; True once the parameters have their gradients."""
        self._pending.wait()
        if self._left:
            self._pending, self._left = self._left[0](), self._left[1:]
            return False
        self._hand_out()
        return True

    def abandon(self) -> None:
        """Wait for what is in flight and hand out nothing."""
        self._pending.wait()

    def _hand_out(self) -> None:
        size = self._output.element_size()
        for param, slot in zip(self._params, self._layout.slots):
            (start, stop), row = slot.span(self._terms.rank), slot.row_bytes // size
            first = slot.offset // size
            rows = self._output[first : first + (stop - start) * row].view(stop - start, *param.shape[1:])
            if param.whole_gradient is not None:  # kept whole: the averaged rows take their place in it
                rows = param.whole_gradient[start:stop].copy_(rows)
            param.whole_gradient = None
            param.give_gradient(rows)
