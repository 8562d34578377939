"""A unit: the parameters that travel together, and their life in time order.

    shard -> start_unshard -> finish_unshard -> (forward) -> reshard -> start_unshard -> finish_unshard -> (backward)
          -> collect_gradients -> reshard -> start_reduce -> finish_reduce -> the optimizer sees slices only

One life serves every strategy. What differs is read from the row: whether the whole buffer is dropped by `reshard`
(`keeps_whole`), whether the slices at rest are views of it (`aliased`), and over how many ranks slices are cut. Under
`no_shard` a slice is everything: nothing is gathered, and gradients are all-reduced over the replicas.
"""

from __future__ import annotations

import time
import weakref

import torch

from fsdplab.engine import events
from fsdplab.engine.core.layout import Slot
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.partial_reshard import Halfway
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.reduction import Reduction, Terms, Wish, layout_of
from fsdplab.engine.core.tensor_subclasses import ALIGNMENT, ExtendedParam, with_parts
from fsdplab.engine.core.transport import Outgoing, Stamp

SHARDED, UNSHARDING, UNSHARDED = "sharded", "unsharding", "unsharded"
_NEXT = {SHARDED: (UNSHARDING,), UNSHARDING: (UNSHARDED,), UNSHARDED: (SHARDED,)}


class Unit:
    """The parameters that are gathered, dropped and reduced together."""

    def __init__(self, name: str, params: list[ShardedParam], terms: Terms, reshard_after_forward: int | None) -> None:
        self.name, self.params, self.terms = name, params, terms
        self.reshard_after_forward, self.reshard_after_backward, self.unshard_in_backward = (
            reshard_after_forward,
            True,
            True,
        )
        self.halfway: Halfway | None = None  # where a unit goes after its forward that is resharded to fewer ranks
        self.stays = False  # whether it stays gathered after a forward that no backward follows
        self.ahead: dict[str, list[weakref.ref[Unit]]] = {}  # phase -> what the user wants gathered behind this unit
        self.sync = True  # whether a backward ends in a reduction, or only adds to the whole gradients
        self.wish = Wish(terms.divide)
        self.in_flight = 1  # reductions that may be under way when the next begins
        self.state = SHARDED
        self.stale = True  # whether the whole buffer must be gathered again before it is read
        self._by_hand = False  # whether the user gathered it outside a forward
        self._versions: list[int] = []
        self._gathering: Pending | None = None
        self._reducing: Reduction | None = None
        self._left: torch.Tensor | None = None  # gradients summed over the shards that still wait for the replicas
        self._plan()

    def _plan(self) -> None:
        """Lay everything out for the dtypes that the parameters have; no buffer exists yet."""
        ranks, row = self.terms.ranks, self.terms.strategy
        self._extended = [param for param in self.params if isinstance(param, ExtendedParam)]
        params = self._plain = [param for param in self.params if param not in self._extended]
        self._dtypes, low = [param.dtype for param in params], self.terms.policy.param_dtype
        self._compute = [low if low and dtype.is_floating_point else dtype for dtype in self._dtypes]
        self.rest_layout = layout_of(params, self._dtypes, ranks)
        self.layout = layout_of(params, self._compute, ranks, ALIGNMENT if self._extended else 0)
        self._wire = self._compute[0] if len(set(self._compute)) == 1 and not self._extended else torch.uint8
        casts, alone = self._compute != self._dtypes, ranks == 1
        self.aliased = (
            not casts and not self._extended and (alone and not self.terms.home.away or not row.shard_parameters)
        )
        self.keeps_whole = self.aliased or not (alone or row.shard_parameters)
        self._settled = False
        self._flat: torch.Tensor | None = None  # the slices at rest, end to end (bytes)
        self._low: torch.Tensor | None = None  # their low-precision copy, from the root forward to the end of backward
        self._whole: torch.Tensor | None = None  # the gathered parameters (bytes); its storage comes and goes

    # ---- shard

    def shard(self) -> None:
        """Keep this rank's rows of every parameter and let the rest go."""
        rows = layout_of(self.params, [param.dtype for param in self.params], self.terms.ranks)
        for param, slot in zip(self.params, rows.slots):
            param.cut(*slot.span(self.terms.rank))
        self.settle()

    def settle(self) -> None:
        """Bring slices that were replaced from outside (`to_empty`, `to`, an assigned state dict) into the buffer."""
        if self.state is not SHARDED or not self.params:
            return
        for param in self.params:
            param.find()
        if [param.dtype for param in self._plain] != self._dtypes:
            self._plan()
        if self._settled and all(param.settled() for param in self._plain):
            return
        self._settled = self.stale = not any(param.local.is_meta for param in self.params)
        if not self._settled:
            return
        buffer = self._make_whole() if self.aliased else self._make_flat()
        for param, slot in zip(self._plain, self.rest_layout.slots):
            param.settle(self._home(buffer, param, slot))
        if not self.aliased:
            self.terms.home.done_reading(buffer)

    def _home(self, buffer: torch.Tensor, param: ShardedParam, slot: Slot) -> torch.Tensor:
        """Where the rows of `param` that this rank keeps belong."""
        start, stop = slot.span(self.terms.rank)
        offset = self.rest_layout.whole_offset(slot) + start * slot.row_bytes if self.aliased else slot.offset
        rows = buffer[offset : offset + (stop - start) * slot.row_bytes]
        return rows.view(param.dtype).view(stop - start, *param.shape[1:])

    def _make_flat(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = self.terms.home.make(self.rest_layout.slice_bytes, self.name)
            events.tag("parameter_slices", self._flat, self.name)
        return self._flat

    def _make_whole(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = torch.zeros(self.layout.total_bytes, dtype=torch.uint8, device=self.terms.device)
            for param, slot, dtype in zip(self._plain, self.layout.slots, self._compute):
                param.back(self._whole.untyped_storage(), self.layout.whole_offset(slot), dtype)
        elif self._whole.untyped_storage().nbytes() == 0:
            self._whole.untyped_storage().resize_(self.layout.total_bytes)
        events.tag("parameter_slices" if self.keeps_whole else "gathered_parameters", self._whole, self.name)
        return self._whole

    # ---- start_unshard, finish_unshard

    def begin_forward(self, accumulating: bool) -> None:
        """A root forward begins: what was gathered before is out of date, unless the user gathered it by hand.

        What is gathered still (several forwards before a backward; `reshard_after_backward=False`), or kept whole
        between micro-batches, need not be gathered again if nobody wrote to the parameters.
        """
        if self._by_hand:
            self._by_hand = False
            return
        unchanged = self._versions == [param.version for param in self.params]
        if self.state is UNSHARDED and unchanged:
            return
        self.reshard("forward")
        self.settle()
        self.forget_low_precision()
        self.stale |= not (accumulating and unchanged)

    def unshard_by_hand(self) -> None:
        """Begin to gather outside a forward; the next forward uses what was gathered."""
        self.settle()
        if self.state is SHARDED:
            self.forget_low_precision()
            self.stale = self._by_hand = True
            self.start_unshard("forward")

    def start_unshard(self, phase: str) -> None:
        """Begin to gather the whole parameters; returns at once, and does nothing if that is under way or done."""
        if self.state is not SHARDED or not self.params:
            return
        if not self._settled:
            raise RuntimeError(
                f"unit {self.name!r} cannot gather: its parameters are still on the meta device; "
                "call model.to_empty(device=...) and initialise the weights before the first forward"
            )
        self._move(UNSHARDING, phase)
        if self._extended:
            self.layout = with_parts(self.layout, self._extended, self.terms)
        whole = self._make_whole()
        if self.stale or not self.keeps_whole:
            if self._flat is not None and self._low is None:
                self.terms.home.will_read(self._flat)
            self._gathering = self._gather(whole, phase)
            self.stale = False

    def _gather(self, whole: torch.Tensor, phase: str) -> Pending | None:
        if self.halfway is not None and self.halfway.kept:
            return self.halfway.gather(self.layout, whole, Stamp(self.name, phase))
        if self.terms.shard is not None:
            return self.terms.shard.all_gather(self.layout, self._outgoing(), whole, Stamp(self.name, phase))
        if not self.aliased:
            self._fill(whole)
        return None

    def _outgoing(self) -> Outgoing:
        """This rank's slice in the dtype that travels: the slices at rest themselves, or made from them."""
        nbytes, dtype = self.layout.slice_bytes, self._wire
        if not self.aliased and not self._extended and self._compute == self._dtypes:
            home, device = self.terms.home, self.terms.device
            at_rest = self._flat if home.device == device else None
            return Outgoing(nbytes, dtype, self._fill, lambda: home.bring(self._flat, device).view(dtype), at_rest)
        return Outgoing(nbytes, dtype, self._fill, lambda: self._made().view(dtype))

    def _made(self) -> torch.Tensor:
        """The slice that travels, as a tensor: one low-precision copy from the root forward to the end of the
        backward.
        """
        if self._low is not None and not self._extended:
            return self._low
        made = torch.empty(self.layout.slice_bytes, dtype=torch.uint8, device=self.terms.device)
        events.tag("communication_buffers" if self.aliased else "parameter_slices", made, self.name)
        self._fill(made)
        if not self.aliased:
            self._low = made
        return made

    def _fill(self, target: torch.Tensor) -> None:
        """Write this rank's slice, in the dtypes that travel, into `target` (bytes)."""
        for param, slot, dtype in zip(self._plain, self.layout.slots, self._compute):
            own = param.local.reshape(-1)
            place = target[slot.offset : slot.offset + slot.chunk_bytes].view(dtype)
            place[: own.numel()].copy_(own, non_blocking=True)
        for param in self._extended:
            param.write_parts(self.layout, target)

    def finish_unshard(self, phase: str) -> None:
        """Wait for the gather and show the whole parameters to the modules."""
        if self.state is not UNSHARDING:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self._flat is not None:
            self.terms.home.done_reading(self._flat)
        for extended in self._extended:
            extended.assemble(self.layout, self._whole)
        for param in self.params:
            gathered = param.gathered
            assert gathered is not None, f"{param.name} was not gathered"
            gathered.requires_grad_(param.at_rest.requires_grad)
            param.show(gathered)
        self._versions = [param.version for param in self.params]
        self._move(UNSHARDED, phase)

    # ---- reshard

    def reshard(self, phase: str, halfway: bool = False) -> None:
        """Show the slices again and drop the whole parameters, where the strategy drops them.

        `halfway`: a forward ended; a unit that goes to fewer ranks then does so.
        """
        self.finish_unshard(phase)
        self._by_hand = False
        if self.halfway is not None and self.halfway.kept and not halfway:
            self.halfway.forget()
            self._show_slices()
        if self.state is not UNSHARDED:
            return
        self._show_slices()
        if halfway and self.halfway is not None:
            self.halfway.keep(self.layout, self._whole)
        for param in self._extended:
            param.release()
        if not self.keeps_whole and self._whole is not None:
            self._whole.untyped_storage().resize_(0)
        self._move(SHARDED, phase)

    def reshard_by_hand(self) -> None:
        """Reshard, and wait until peers have read: whoever asked for the slices may write to them."""
        self.reshard("forward")
        if self.terms.shard is not None:
            self.terms.shard.settle()

    def _show_slices(self) -> None:
        for param in self.params:
            param.show(param.at_rest)

    def forget_low_precision(self) -> None:
        """Free the low-precision slice: the optimizer is about to change the masters."""
        self._low = None

    # ---- collect_gradients, start_reduce, finish_reduce

    def collect_gradients(self) -> None:
        """Take the whole gradients that autograd left behind, adding them to those of earlier micro-batches."""
        for param in self.params:
            param.take_gradient(self.terms.policy.reduce_dtype)
            if param.whole_gradient is not None:
                events.tag("whole_gradients", param.whole_gradient, self.name)

    def start_reduce(self) -> None:
        """Begin to average the collected gradients over the ranks; parameters without one count as zeros."""
        trainable = [param for param in self.params if param.at_rest.requires_grad]
        if all(param.whole_gradient is None for param in trainable):
            return
        self._reducing, self._left = Reduction(self.name, trainable, self.terms, self.wish, self._left), None
        if self.terms.strategy.shard_gradients or self.terms.shard is None:
            self.forget_whole_gradients()

    def finish_reduce(self) -> bool:
        """Wait for the stage in flight; True once every parameter at rest has its rows of the averaged gradient."""
        if self._reducing is not None and self._reducing.advance():
            self._left, self._reducing = self._reducing.left, None
        return self._reducing is None

    def abandon_gradients(self) -> None:
        """Forget what a backward that raised has left behind."""
        if self._reducing is not None:
            self._reducing.abandon()
        self._reducing = self._left = None
        self.forget_whole_gradients()
        for param in self.params:
            if param.gathered is not None:
                param.gathered.grad = None

    def forget_whole_gradients(self) -> None:
        """Free the whole gradients; a reduction in flight keeps what it still reads."""
        for param in self.params:
            param.whole_gradient = None

    def _move(self, state: str, phase: str) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"unit {self.name!r} cannot go from {self.state} to {state} in {phase}")
        if events.listening():
            events.emit(events.Transition(self.name, self.state, state, phase, time.time_ns()))
        self.state = state
