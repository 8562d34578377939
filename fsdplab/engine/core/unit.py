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
from collections.abc import Sequence
from typing import Protocol

import torch

from fsdplab.engine import events
from fsdplab.engine.core.gathered import Gathered
from fsdplab.engine.core.layout import Slot
from fsdplab.engine.core.packing import chunks, cut_out
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

    def keep(self, gathered: Gathered) -> None:
        """Copy this rank's rows out of the gathered parameters and show them."""

    def gather(self, whole: Gathered, stamp: Stamp) -> Pending:
        """Fill `whole`, laid out for all ranks, from what `keep` kept."""

    def forget(self) -> None:
        """Let the slices go."""


class Unit:
    """The parameters that are gathered, dropped and reduced together."""

    def __init__(
        self, name: str, params: list[ShardedParam], config: UnitConfig, reshard_after_forward: int | None
    ) -> None:
        self.name, self.params, self.config = name, params, config
        self.places: Sequence[str] = ()  # what the root calls the modules; empty until there is a root
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
        self._arriving = Pending(lambda: None)  # gradients on their way to host memory
        self._partial_output: torch.Tensor | None = None  # gradients summed over the shards, not yet over the replicas
        self._lay_out()

    def _lay_out(self) -> None:
        """Plan for the dtypes that the parameters have; no buffer exists yet."""
        self.plan = UnitPlan.of(self.params, self.config)
        self._settled = False  # whether the slices at rest lie in their buffer
        self._flat: torch.Tensor | None = None  # the slices at rest, end to end (bytes)
        self._chunks: list[torch.Tensor] | None = None  # its parts, one a parameter
        holds = "parameter_slices" if self.plan.keeps_whole else "gathered_parameters"
        self._whole = Gathered(self.plan.layout, self.config.device, self.name, holds)
        self._shown_whole = False  # whether the parameters' gathered forms lie in it

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
        buffer = self._whole.tensor if self.plan.aliased else self._make_flat()
        for param, slot in zip(self.plan.plain, self.plan.rest_layout.slots):
            param.settle(self._rows_in(buffer, param, slot))
        if not self.plan.aliased:
            self.config.storage.done_reading(buffer)

    def _rows_in(self, buffer: torch.Tensor, param: ShardedParam, slot: Slot) -> torch.Tensor:
        """Where the rows of `param` that this rank keeps belong."""
        start, stop = slot.span(self.config.rank)
        in_whole = slot.whole_offset + start * slot.row_bytes
        offset = in_whole if self.plan.aliased else slot.offset
        rows = buffer[offset : offset + (stop - start) * slot.row_bytes]
        return rows.view(param.dtype).view(stop - start, *param.shape[1:])

    def _make_flat(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = self.config.storage.make(self.plan.rest_layout.slice_bytes, self.name)
            events.tag("parameter_slices", self._flat, self.name)
        return self._flat

    def _lay_gathered_in_whole(self) -> None:
        """Put the gathered forms of the parameters over the whole buffer, once it exists."""
        if not self._shown_whole:
            storage, layout = self._whole.tensor.untyped_storage(), self.plan.layout
            for param, slot, dtype in zip(self.plan.plain, layout.slots, self.plan.compute_dtypes):
                param.back(storage, slot.whole_offset, dtype)
            self._shown_whole = True

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
        if not (accumulating and unchanged):
            self._gathered_versions = None

    def unshard_by_hand(self, afresh: bool) -> None:
        """Begin to gather outside a forward; the next forward uses what was gathered. `afresh`: a step that raised may
        have left the unit gathered, or a gather under way, from before somebody wrote to the slices.
        """
        if afresh and not self._unsharded_by_user or self._gathering is not None and self._gathering.lost:
            self.abandon_unshard()
            self.reshard("forward")
        self.settle()
        if self.state is SHARDED:
            self._gathered_versions = None
            self._unsharded_by_user = True
            self.start_unshard("forward")

    def start_unshard(self, phase: str) -> None:
        """Begin to gather the whole parameters; returns at once, and does nothing if that is under way or done."""
        if self.state is not SHARDED or not self.params:
            return
        if not self._settled:
            names = [self.full_name(param) for param in self.params if param.local.is_meta]
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still"
                f" on meta device: {names}, so unit {self.name!r} cannot gather; call model.to_empty(device=...) and"
                " initialise the weights before the first forward"
            )
        self._move(UNSHARDING, phase)
        self.plan = self.plan.with_parts(self.config)
        self._whole.lay_out(self.plan.layout)
        self._whole.announce(self.name)
        if self._gathered_versions is None or not self.plan.keeps_whole:
            if self._flat is not None:
                self.config.storage.will_read(self._flat)
            try:
                self._gathering = self._gather(Stamp(self.name, phase))
            except BaseException:  # what could not begin is not under way
                self._drop_whole(phase)
                raise

    def _gather(self, stamp: Stamp) -> Pending | None:
        if self.partial_reshard is not None and self.partial_reshard.kept:
            return self.partial_reshard.gather(self._whole, stamp)
        if self.config.shard is not None:
            return self.config.shard.all_gather(self._outgoing(), self._whole, stamp)
        written = None if self.plan.aliased else self._write(self._whole.tensor)
        return written and Pending(written.wait, self._whole.tensor, on_drop=written.wait)

    def _outgoing(self) -> Outgoing:
        """This rank's slice in the dtype that travels: the slices at rest themselves, or made from them."""
        ready = self.plan.travels_as_it_rests and self.config.storage.device == self.config.device
        return Outgoing(self.plan.layout.slice_bytes, self.plan.wire_dtype, self._write, self._flat if ready else None)

    def _write(self, target: torch.Tensor) -> Pending | None:
        """Begin to write this rank's slice, in the dtypes that travel, into `target` (bytes)."""
        return self.config.storage.send(self._fill, target)

    def _fill(self, target: torch.Tensor) -> None:
        plan = self.plan
        if plan.aliased:
            cut_out(self.config.rank, self._whole, target)
        elif plan.plain:
            self._cast(self._near(self._make_flat()), target)
        for parted in plan.parted:
            parted.write_parts(plan.layout, target)

    def _near(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat`, on the device that computes where it is cast: a copy from the host that casts would do it there."""
        if flat.device == self.config.device or self.plan.rest_dtypes == self.plan.compute_dtypes:
            return flat
        copy = flat.to(self.config.device, non_blocking=True)
        events.tag("communication_buffers", copy, self.name)
        return copy

    def _cast(self, at_rest: torch.Tensor, target: torch.Tensor) -> None:
        plan = self.plan
        if plan.casts_at_once:
            source = at_rest.view(plan.rest_dtypes[0])
            target.view(plan.compute_dtypes[0]).copy_(source, non_blocking=True)
            return
        if self._chunks is None or at_rest is not self._flat:
            self._chunks = chunks(at_rest, plan.rest_layout, plan.rest_dtypes)
        torch._foreach_copy_(chunks(target, plan.layout, plan.compute_dtypes), self._chunks, non_blocking=True)
        if at_rest is not self._flat:
            self._chunks = None

    def finish_unshard(self, phase: str) -> None:
        """Wait for the gather and show the whole parameters to the modules."""
        if self.state is not UNSHARDING:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._lay_gathered_in_whole()
            if self.partial_reshard is None or not self.partial_reshard.kept:
                for param in self.plan.plain:
                    param.join()
        if self._flat is not None:
            self.config.storage.done_reading(self._flat)
        for parted in self.plan.parted:
            parted.assemble(self.plan.layout, self._whole.tensor)
        self._lay_gathered_in_whole()
        for param in self.params:
            gathered = param.gathered
            assert gathered is not None, f"{param.name} was not gathered"
            if gathered.requires_grad != param.at_rest.requires_grad:  # `torch.func` lets nobody set it
                gathered.requires_grad_(param.at_rest.requires_grad)
            param.show(gathered)
        self._gathered_versions = self._versions()
        self._move(UNSHARDED, phase)

    def full_name(self, param: ShardedParam) -> str:
        """What the root calls `param`; its name within the unit where several modules or no root make that unknown."""
        return f"{self.places[0]}.{param.name}" if len(self.places) == 1 and self.places[0] else param.name

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
                self.partial_reshard.keep(self._whole)
            self._drop_whole("forward")

    def _drop_whole(self, phase: str) -> None:
        self._unsharded_by_user = False
        for parted in self.plan.parted:
            parted.release()
        if not self.plan.keeps_whole:
            self._whole.free()
        self._move(SHARDED, phase)

    def reshard_by_hand(self) -> None:
        """Reshard, and wait until peers have read: whoever asked for the slices may write to them."""
        self.reshard("forward")
        if self.config.shard is not None:
            self.config.shard.settle()
        self.config.storage.settle()

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

    # ---- collect_gradients, start_reduce, finish_reduce

    def collect_gradients(self) -> None:
        """Take the whole gradients that autograd left behind, adding them to those of earlier micro-batches.

        What is reduced at once is cast as it is packed; what is added to or kept is cast here.
        """
        at_once = self.sync and (self.config.strategy.shard_gradients or self.config.shard is None)
        accumulate_in = None if at_once else self.config.policy.reduce_dtype
        for param in self.params:
            param.take_gradient(accumulate_in)
            if param.whole_gradient is not None:
                events.tag("whole_gradients", param.whole_gradient, self.name)

    def check_unannounced(self) -> None:
        """Raise where a backward that came through no output has computed gradients while a gather was under way."""
        if self.state is UNSHARDING and any(getattr(each.gathered, "grad", None) is not None for each in self.params):
            raise RuntimeError(
                f"a backward reached the parameters of unit {self.name!r} through none of the outputs of its forward,"
                " so they were not gathered; let the forward return the tensors that the loss is computed from"
            )

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
            self._partial_output, self._arriving = self._reducing.partial_output, self._reducing.arriving
            self._reducing = None
        return self._reducing is None

    def await_gradients(self) -> None:
        """Wait until the gradients that were handed out may be read."""
        self._arriving.wait()

    def abandon_gradients(self) -> None:
        """Forget what a backward that raised has left behind."""
        self.await_gradients()
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
