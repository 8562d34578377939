"""A unit: the parameters that travel together, and their life in time order.

    shard -> start_unshard -> finish_unshard -> (forward) -> reshard -> start_unshard -> finish_unshard -> (backward)
          -> collect_gradients -> reshard -> start_reduce -> finish_reduce -> the optimizer sees slices only

One life serves every strategy. What differs is read from the unit's plan: whether the whole buffer is dropped by
`reshard` (`keeps_whole`), whether the slices at rest are views of it (`aliased`), and over how many ranks slices are
cut. Under `no_shard` a slice is everything: nothing is gathered, and gradients are all-reduced over the replicas.
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol

import torch

from fsdplab.engine import events
from fsdplab.engine.core.layout import Layout, Slot
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.reduction import Reduction
from fsdplab.engine.core.transport import Outgoing, Stamp, Transport
from fsdplab.engine.core.unit_config import ReduceOptions, UnitConfig
from fsdplab.engine.core.unit_plan import UnitPlan, layout_of

SHARDED, UNSHARDING, UNSHARDED = "sharded", "unsharding", "unsharded"
_NEXT = {SHARDED: (UNSHARDING,), UNSHARDING: (UNSHARDED, SHARDED), UNSHARDED: (SHARDED,)}


class PartialReshard(Protocol):
    """Slices over fewer ranks, which a unit may keep from its forward to its backward."""

    kept: bool
    transport: Transport

    def keep(self, layout: Layout, whole: torch.Tensor) -> None:
        """Copy this rank's rows out of the gathered parameters and show them."""

    def gather(self, layout: Layout, whole: torch.Tensor, stamp: Stamp) -> Pending:
        """Fill `whole`, laid out for all ranks, from what `keep` kept."""

    def forget(self) -> None:
        """Let the slices go."""


class Unit:
    """The parameters that are gathered, dropped and reduced together."""

    def __init__(
        self, name: str, params: list[ShardedParam], config: UnitConfig, reshard_after_forward: int | None
    ) -> None:
        self.name, self.params, self.config = name, params, config
        # what a user may change from step to step
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.partial_reshard: PartialReshard | None = None  # where it goes after its forward instead of to its slices
        self.keep_unsharded = False  # whether it stays gathered after a forward that no backward follows
        self.ahead: dict[str, list[weakref.ref[Unit]]] = {}  # phase -> what the user wants gathered behind this unit
        self.sync = True  # whether a backward ends in a reduction, or only adds to the whole gradients
        self.reduce_options = ReduceOptions(config.divide)
        self.in_flight = 1  # reductions that may be under way when the next begins
        # where it stands
        self.state = SHARDED
        self._unsharded_by_user = False  # outside a forward: the next one uses what was gathered
        self._gathered_versions: list[int] | None = None  # of the parameters; None: the whole buffer is out of date
        self._gathering: Pending | None = None
        self._reducing: Reduction | None = None
        self._partial_output: torch.Tensor | None = None  # gradients summed over the shards, not yet over the replicas
        self._lay_out()

    def _lay_out(self) -> None:
        """Plan for the dtypes that the parameters have; no buffer exists yet."""
        self.plan = UnitPlan.of(self.params, self.config)
        self._settled = False  # whether the slices at rest lie in their buffer
        self._flat: torch.Tensor | None = None  # the slices at rest, end to end (bytes)
        self._low: torch.Tensor | None = None  # their low-precision copy, from the root forward to the end of backward
        self._whole: torch.Tensor | None = None  # the gathered parameters (bytes); its storage comes and goes

    # ---- shard

    def shard(self) -> None:
        """Keep this rank's rows of every parameter and let the rest go."""
        rows = layout_of(self.params, [param.dtype for param in self.params], self.config.ranks)
        for param, slot in zip(self.params, rows.slots):
            param.cut(*slot.span(self.config.rank))
        self.settle()

    def settle(self) -> None:
        """Bring slices that were replaced from outside (`to_empty`, `to`, an assigned state dict) into the buffer."""
        if self.state is not SHARDED or not self.params:
            return
        for param in self.params:
            param.find()
        self.params[:] = map(self.config.own_form, self.params)
        if self.plan.is_outdated(self.params):
            self._lay_out()
        if self._settled and all(param.settled() for param in self.plan.plain):
            return
        self._gathered_versions = None
        self._settled = not any(param.local.is_meta for param in self.params)
        if not self._settled:
            return
        buffer = self._make_whole() if self.plan.aliased else self._make_flat()
        for param, slot in zip(self.plan.plain, self.plan.rest_layout.slots):
            param.settle(self._rows_in(buffer, param, slot))
        if not self.plan.aliased:
            self.config.storage.done_reading(buffer)

    def _rows_in(self, buffer: torch.Tensor, param: ShardedParam, slot: Slot) -> torch.Tensor:
        """Where the rows of `param` that this rank keeps belong."""
        start, stop = slot.span(self.config.rank)
        in_whole = self.plan.rest_layout.whole_offset(slot) + start * slot.row_bytes
        offset = in_whole if self.plan.aliased else slot.offset
        rows = buffer[offset : offset + (stop - start) * slot.row_bytes]
        return rows.view(param.dtype).view(stop - start, *param.shape[1:])

    def _make_flat(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = self.config.storage.make(self.plan.rest_layout.slice_bytes, self.name)
            events.tag("parameter_slices", self._flat, self.name)
        return self._flat

    def _make_whole(self) -> torch.Tensor:
        layout = self.plan.layout
        if self._whole is None:
            whole = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=self.config.device)
            for param, slot, dtype in zip(self.plan.plain, layout.slots, self.plan.compute_dtypes):
                param.back(whole.untyped_storage(), layout.whole_offset(slot), dtype)
            self._whole = whole  # once every parameter lies in it
        elif self._whole.untyped_storage().nbytes() == 0:
            self._whole.untyped_storage().resize_(layout.total_bytes)
        events.tag("parameter_slices" if self.plan.keeps_whole else "gathered_parameters", self._whole, self.name)
        return self._whole

    # ---- start_unshard, finish_unshard

    def begin_forward(self, accumulating: bool) -> None:
        """A root forward begins: what was gathered before is out of date, unless the user gathered it by hand.

        What is gathered still (several forwards before a backward; `reshard_after_backward=False`), or kept whole
        between micro-batches, need not be gathered again if nobody wrote to the parameters.
        """
        if self._unsharded_by_user:
            self._unsharded_by_user = False
            return
        unchanged = self._gathered_versions == self._versions()
        if self.state is UNSHARDED and unchanged:
            return
        self.abandon_unshard()
        self.reshard("forward")
        self.settle()
        self.forget_low_precision()
        if not (accumulating and unchanged):
            self._gathered_versions = None

    def unshard_by_hand(self) -> None:
        """Begin to gather outside a forward; the next forward uses what was gathered."""
        self.settle()
        if self._gathering is not None and self._gathering.lost:
            self.abandon_unshard()
        if self.state is SHARDED:
            self.forget_low_precision()
            self._gathered_versions = None
            self._unsharded_by_user = True
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
        self.plan = self.plan.with_parts(self.config)
        whole = self._make_whole()
        if self._gathered_versions is None or not self.plan.keeps_whole:
            if self._flat is not None and self._low is None:
                self.config.storage.will_read(self._flat)
            self._gathering = self._gather(whole, Stamp(self.name, phase))
        self._move(UNSHARDING, phase)  # last: a gather that could not begin is not under way

    def _gather(self, whole: torch.Tensor, stamp: Stamp) -> Pending | None:
        if self.partial_reshard is not None and self.partial_reshard.kept:
            return self.partial_reshard.gather(self.plan.layout, whole, stamp)
        if self.config.shard is not None:
            return self.config.shard.all_gather(self.plan.layout, self._outgoing(), whole, stamp)
        if not self.plan.aliased:
            self._fill(whole)
        return None

    def _outgoing(self) -> Outgoing:
        """This rank's slice in the dtype that travels: the slices at rest themselves, or made from them."""
        nbytes, dtype = self.plan.layout.slice_bytes, self.plan.wire_dtype
        if not self.plan.travels_as_it_rests:
            return Outgoing(nbytes, dtype, self._fill, lambda: self._made().view(dtype))
        storage, device = self.config.storage, self.config.device
        at_rest = self._flat if storage.device == device else None
        return Outgoing(nbytes, dtype, self._fill, lambda: storage.bring(self._flat, device).view(dtype), at_rest)

    def _made(self) -> torch.Tensor:
        """The slice that travels, as a tensor: one low-precision copy from the root forward to the end of the
        backward.
        """
        if self._low is not None and not self.plan.parted:
            return self._low
        made = torch.empty(self.plan.layout.slice_bytes, dtype=torch.uint8, device=self.config.device)
        events.tag("communication_buffers" if self.plan.aliased else "parameter_slices", made, self.name)
        self._fill(made)
        if not self.plan.aliased:
            self._low = made
        return made

    def _fill(self, target: torch.Tensor) -> None:
        """Write this rank's slice, in the dtypes that travel, into `target` (bytes)."""
        for param, slot, dtype in zip(self.plan.plain, self.plan.layout.slots, self.plan.compute_dtypes):
            own = param.local.reshape(-1)
            place = target[slot.offset : slot.offset + slot.chunk_bytes].view(dtype)
            place[: own.numel()].copy_(own, non_blocking=True)
        for parted in self.plan.parted:
            parted.write_parts(self.plan.layout, target)

    def finish_unshard(self, phase: str) -> None:
        """Wait for the gather and show the whole parameters to the modules."""
        if self.state is not UNSHARDING:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self._flat is not None:
            self.config.storage.done_reading(self._flat)
        for parted in self.plan.parted:
            parted.assemble(self.plan.layout, self._whole)
        for param in self.params:
            gathered = param.gathered
            assert gathered is not None, f"{param.name} was not gathered"
            gathered.requires_grad_(param.at_rest.requires_grad)
            param.show(gathered)
        self._gathered_versions = self._versions()
        self._move(UNSHARDED, phase)

    def _versions(self) -> list[int]:
        return [param.version for param in self.params]

    # ---- reshard

    def reshard(self, phase: str) -> None:
        """Show the slices again and drop the whole parameters, where the strategy drops them."""
        self.finish_unshard(phase)
        if self.partial_reshard is not None and self.partial_reshard.kept:
            self.partial_reshard.forget()
            self._show_slices()
        if self.state is UNSHARDED:
            self._show_slices()
            self._drop_whole(phase)

    def reshard_until_backward(self) -> None:
        """As `reshard`, after a forward; a unit that then keeps slices over fewer ranks shows those."""
        self.finish_unshard("forward")
        if self.state is UNSHARDED:
            self._show_slices()
            if self.partial_reshard is not None:
                self.partial_reshard.keep(self.plan.layout, self._whole)
            self._drop_whole("forward")

    def _drop_whole(self, phase: str) -> None:
        self._unsharded_by_user = False
        for parted in self.plan.parted:
            parted.release()
        if not self.plan.keeps_whole and self._whole is not None:
            self._whole.untyped_storage().resize_(0)
        self._move(SHARDED, phase)

    def reshard_by_hand(self) -> None:
        """Reshard, and wait until peers have read: whoever asked for the slices may write to them."""
        self.reshard("forward")
        if self.config.shard is not None:
            self.config.shard.settle()

    def transports(self) -> list[Transport]:
        """What it gathers and reduces with, in an order that all ranks share."""
        near = None if self.partial_reshard is None else self.partial_reshard.transport
        return [each for each in (self.config.shard, self.config.replicate, near) if each is not None]

    def abandon_unshard(self) -> None:
        """Give up a gather that is under way: a step that raised has left it behind."""
        if self.state is not UNSHARDING:
            return
        if self._gathering is not None:
            self._gathering.abandon()
            self._gathering = None
        if self._flat is not None:
            self.config.storage.done_reading(self._flat)
        self._gathered_versions = None
        self._drop_whole("forward")

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
            param.take_gradient(self.config.policy.reduce_dtype)
            if param.whole_gradient is not None:
                events.tag("whole_gradients", param.whole_gradient, self.name)

    def start_reduce(self) -> None:
        """Begin to average the collected gradients over the ranks; nothing begins where there is none."""
        trainable = [param for param in self.params if param.at_rest.requires_grad]
        counted = self.reduce_options.unused and self._gathered_versions is not None
        if not trainable or not counted and all(param.whole_gradient is None for param in trainable):
            return
        earlier, self._partial_output = self._partial_output, None
        self._reducing = Reduction(self.name, trainable, self.config, self.reduce_options, earlier)
        if self.config.strategy.shard_gradients or self.config.shard is None:
            self.forget_whole_gradients()

    def finish_reduce(self) -> bool:
        """Wait for the stage in flight; True once every parameter at rest has its rows of the averaged gradient."""
        if self._reducing is not None and self._reducing.advance():
            self._partial_output, self._reducing = self._reducing.partial_output, None
        return self._reducing is None

    def abandon_gradients(self) -> None:
        """Forget what a backward that raised has left behind."""
        if self._reducing is not None:
            self._reducing.abandon()
        self._reducing = self._partial_output = None
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
