"""Holds a unit's parameters: the shards at rest, the unsharded parameters, and the copies between them.

Two buffers hold the parameters:

    shards     this rank's rows of every parameter, end to end
    whole      all rows of every parameter; it takes memory only while the unit is unsharded

Where a strategy never frees the whole, the shards at rest are views of it (`plan.aliased`), unless they have another
dtype. Under `no_shard` a shard is everything: nothing is gathered, and gradients are all-reduced.

A shard that was put in from outside, and that others hold too, lies apart, in its own memory, until they let it go:
until then all shards of the unit are copied for each gather. Gradients are in reduction.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fsdplab.engine import compat, events
from fsdplab.engine.core.buffers import UnshardedBuffer, chunks, cut_out, fingerprint
from fsdplab.engine.core.fewer_ranks import ShardsOverFewerRanks
from fsdplab.engine.core.layout import Slot
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.parted import in_its_form
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.plan import UnitConfig, UnitPlan, layout_of
from fsdplab.engine.core.reduction import GradientMemory
from fsdplab.engine.core.transport import CollectiveLabel, SendShard, Transport


class UnitMemory(GradientMemory):
    """The tensors of one unit."""

    def __init__(self, name: str, params: list[ShardedParam], config: UnitConfig) -> None:
        super().__init__(name, params, config)
        self.module_names: Sequence[str] = ()  # what the root calls the modules; empty until there is a root
        self.fewer_ranks: ShardsOverFewerRanks | None = None  # where it goes after its forward instead of to its shards
        self.keep_storage = False  # whether the unsharded parameters keep their memory when they are freed
        self._sent: torch.Tensor | None = None  # the fingerprint of the shards that were gathered, if it was taken
        self._lay_out()

    def _lay_out(self, apart: bool = False) -> None:
        """Plan for the dtypes that the parameters have now; no buffer takes memory yet."""
        self.plan = UnitPlan.of(self.params, self.config, apart)
        self._settled = False  # whether the shards have values, and lie in their buffer or apart
        self._apart = False  # whether one of them lies apart
        self._drop_shards()
        holds = "sharded_parameters" if self.plan.keeps_whole else "unsharded_parameters"
        self.whole = UnshardedBuffer(self.plan.layout, self.config.device, self.name, holds)
        self._in_whole = False  # whether the unsharded forms of the parameters lie in it

    def _drop_shards(self) -> None:
        """Begin a new buffer of shards; the last one belongs to whoever holds what lies in it."""
        self.shards: torch.Tensor | None = None  # [shard_bytes], bytes, end to end
        self._chunks: list[torch.Tensor] | None = None  # its parts, one per parameter
        for param in self.params:
            param.forget_place()

    @property
    def keeps_whole(self) -> bool:
        return self.plan.keeps_whole

    def transports(self) -> list[Transport]:
        """Return what the unit gathers and reduces with, in an order that all ranks share."""
        near = None
        if self.fewer_ranks is not None:
            near = self.fewer_ranks.transport
        in_order = (self.config.shard, self.config.replicate, near)  # None where the unit has none of the kind
        return [transport for transport in in_order if transport is not None]

    def moved(self, before: str, after: str, phase: str) -> None:
        """Report the unit's new state to whoever listens."""
        if events.listening():
            events.emit(events.Transition(self.name, before, after, phase, time.time_ns()))

    # ---- at rest

    def shard(self) -> None:
        """Keep this rank's rows of every parameter and let the rest go."""
        dtypes = [param.dtype for param in self.params]
        layout = layout_of(self.params, dtypes, self.config.ranks)
        for param, slot in zip(self.params, layout.slots):
            start, stop = slot.span(self.config.rank)
            param.cut(start, stop)
        # Nothing is settled yet, so this moves the shards into their buffer (`_settle`).
        self.take_over_replaced()

    def changed(self) -> bool | torch.Tensor:
        """Compare the shards with what was gathered from them, so that it makes no difference what wrote to them.

        Where the shards are views of what was gathered, their fingerprint is compared with the one that was taken then.
        Where neither is possible, they count as changed.
        """
        # What a tensor subclass sent is not kept, so there is nothing to compare with.
        if self.plan.parted:
            return True
        if not all(param.is_shown and param.keeps_shard() for param in self.params):
            return True
        if not self.params or compat.is_fake(self.whole.tensor):
            return False
        # Without a group to gather over, what the optimizer writes to is what the forward reads.
        if self.plan.aliased:
            return self.config.shard is not None and self._differs_from_sent()

        # Compared one by one, when the next result is asked for.
        rows = self.plan.layout.spans(self.config.rank)
        results = (param.differs(start, stop) for param, (start, stop) in zip(self.plan.plain, rows))
        device = self.config.device
        if device.type == "cpu":
            return any(results)  # after an optimizer's step the first parameter differs, and the others are not read
        flags = [torch.as_tensor(differs, device=device) for differs in results]
        return torch.stack(flags).any()  # on the device: the host reads it for all units at once

    def _differs_from_sent(self) -> bool | torch.Tensor:
        """Compare the fingerprint of the shards with that of the last gather; without one they count as changed."""
        if self._sent is None:
            return True
        return self._sent != self._fingerprint()

    def _fingerprint(self) -> torch.Tensor:
        """Return a number, 0-d (int64), that tells whether one of the shards has changed."""
        return fingerprint([param.local for param in self.plan.plain])

    @compat.outside_modes
    def take_over_replaced(self) -> bool:
        """Take over parameters that somebody has put in place of the shards; return whether there were any.

        This runs for every unit at every root forward, and usually ends at the first test.
        """
        if self._settled and all(param.is_untouched() for param in self.params):
            return False
        for param in self.params:
            param.find()
        # The list itself stays: `fewer_ranks` holds it too.
        self.params[:] = [in_its_form(param) for param in self.params]
        if self.plan.is_outdated(self.params):
            self._lay_out()
        # Other parameter objects over the same memory: nothing has to move.
        if self._settled and all(param.settled() for param in self.plan.plain):
            return False

        self.replacements += 1
        # Shards on meta have no values until `to_empty` or a state dict brings them.
        self._settled = not any(param.local.is_meta for param in self.params)
        if self._settled and self.params:
            self._settle()
        return True

    def _settle(self) -> None:
        """Move the shards at rest into their buffer, and leave those apart that have no place there.

        A shard has a place if nobody else holds it, and nobody holds the one that lay there before it.
        """
        lies_apart = self.plan.aliased != self.plan.aliasable  # it was planned for one that could not move
        if lies_apart or not all(param.has_place() for param in self.plan.plain):
            self._choose_buffers()
        self._apart = False
        for param, slot in zip(self.plan.plain, self.plan.rest_layout.slots):
            if param.has_place():
                # The buffer takes memory here, and not where no shard may move into it.
                buffer = self.whole.tensor if self.plan.aliased else self._make_shards()
                param.settle(self._rows_in(buffer, param, slot))
            else:
                param.stay(self.config.storage.device)
                self._apart = True
        if self.shards is not None:
            self.config.storage.done_reading(self.shards)
        self._settled = True

    def _choose_buffers(self) -> None:
        """Take new buffers where all shards may move there.

        Where one may not, the shards may not be views of the whole either: the unit is planned anew without that.
        """
        if all(param.may_move() for param in self.plan.plain):
            if self.plan.aliasable:
                self._lay_out()
            else:
                self._drop_shards()
        elif self.plan.aliased:
            self._lay_out(apart=True)

    def _rows_in(
        self,
        buffer: torch.Tensor,  # [bytes] (uint8), the whole or the shards
        param: ShardedParam,
        slot: Slot,
    ) -> torch.Tensor:
        """Return where this rank's rows of `param` belong in `buffer`: [rows, *others], rows first."""
        start, stop = slot.span(self.config.rank)
        offset = slot.offset
        if self.plan.aliased:  # the rows of the ranks before this one come first
            offset = slot.whole_offset + start * slot.row_bytes
        rows = buffer.narrow(0, offset, (stop - start) * slot.row_bytes)
        return rows.view(param.dtype).view(stop - start, *param.shape[1:])

    def _make_shards(self) -> torch.Tensor:
        """Return the buffer of shards, allocated."""
        if self.shards is None:
            self.shards = self.config.storage.make(self.plan.rest_layout.shard_bytes, self.name)
            events.tag("sharded_parameters", self.shards, self.name)
        return self.shards

    @property
    def _kept(self) -> ShardsOverFewerRanks | None:
        """The shards over fewer ranks, between a forward and a backward."""
        if self.fewer_ranks is not None and self.fewer_ranks.kept:
            return self.fewer_ranks
        return None

    # ---- unshard

    def prepare(self) -> None:
        """Lay out the next gather; raise where a parameter has no values yet."""
        if not self._settled:
            self._refuse_meta()
        self.plan = self.plan.with_parts(self.config)
        self.whole.lay_out(self.plan.layout)
        self.whole.announce(self.name)

    def _refuse_meta(self) -> None:
        """Raise for parameters that have no values yet."""
        prefix = ""
        if len(self.module_names) == 1 and self.module_names[0]:
            prefix = f"{self.module_names[0]}."
        names = [prefix + param.name for param in self.params if param.local.is_meta]
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the following were still"
            f" on meta device: {names}, so unit {self.name!r} cannot gather; call model.to_empty(device=...) and"
            " initialise the weights before the first forward"
        )

    def gather(self, phase: str) -> Pending | None:
        """Begin to fill the whole from the shards of all ranks; return None where the whole is never anything else."""
        label = CollectiveLabel(self.name, phase)
        if self._apart and phase == "forward":
            self._settle()  # those who held what lies apart may have let it go
        if self.shards is not None:
            self.config.storage.will_read(self.shards)
        self._sent = None
        needs_fingerprint = self.remembers and self.plan.aliased and self.config.shard is not None
        if needs_fingerprint and not compat.is_fake(self.whole.tensor):
            self._sent = self._fingerprint()

        # Between a forward and its backward the unit may lie over a few ranks, which are nearer.
        if self._kept is not None:
            return self._kept.gather(self.whole, label)
        if self.config.shard is not None:
            return self.config.shard.all_gather(self._send_shard(), self.whole, label)
        if self.plan.aliased:
            return None
        # One rank: what would be sent is the whole.
        written = self._write(self.whole.tensor)
        return Pending(written.wait, self.whole.tensor, on_drop=written.wait)

    def _send_shard(self) -> SendShard:
        """Return this rank's shards in the dtype that is sent: those at rest themselves, or made from them."""
        resident = None
        # Sent from where it rests, without a cast. Else `_fill` writes it where the transport wants it.
        if self.plan.travels_as_it_rests and self.config.storage.device == self.config.device:
            resident = self.shards
            if self._apart:
                resident = self._in_one_piece()
        return SendShard(self.plan.layout.shard_bytes, self.plan.wire_dtype, self._write, resident)

    def _in_one_piece(self) -> torch.Tensor:
        """Copy shards that lie apart into one piece, [shard_bytes] (uint8), where peers may read it.

        Either all ranks send what rests there, or none does: so a rank whose shards lie apart makes such memory too.
        """
        assert self.config.shard is not None, "nobody to send it to"
        storage = self.config.shard.storage(self.config.device)
        piece = storage.make(self.plan.layout.shard_bytes, self.name)
        self._fill(piece)
        return piece

    def _write(
        self,
        target: torch.Tensor,  # [shard_bytes] (uint8), on the device that computes
    ) -> Pending:
        """Begin to write this rank's shards, in the dtypes that are sent, into `target`."""
        return self.config.storage.send(self._fill, target)

    def _fill(
        self,
        target: torch.Tensor,  # [shard_bytes] (uint8), on the device that computes
    ) -> None:
        """Write this rank's shards into `target` from wherever they lie."""
        plan = self.plan
        if plan.aliased:
            # This rank's rows of two parameters lie apart in the whole: between them are those of other ranks.
            cut_out(self.config.rank, self.whole, target)
        elif self._apart:
            self._copy_apart(target)
        elif plan.plain:
            shards = self._make_shards()
            if plan.rest_dtypes != plan.compute_dtypes:
                # A copy from the host to a GPU that casts too would cast on the host.
                shards = shards.to(self.config.device, non_blocking=True)
            self._cast(shards, target)
        for parted in plan.parted:
            parted.write_parts(plan.layout, target)

    def _copy_apart(
        self,
        target: torch.Tensor,  # [shard_bytes] (uint8), on the device that computes
    ) -> None:
        """Copy every shard from where it lies to its place in `target`."""
        plan = self.plan
        places = chunks(target, plan.layout, plan.compute_dtypes)  # of those parameters that have elements
        filled = [param for param, slot in zip(plan.plain, plan.layout.slots) if slot.chunk_bytes]
        shards = []
        rows = []
        for param, place in zip(filled, places):
            shard = param.local.to(self.config.device, non_blocking=True)
            shards.append(shard)
            # A place has the rows of the rank that holds most; this rank may hold fewer.
            rows.append(place[: shard.numel()].view(shard.shape))
        torch._foreach_copy_(rows, shards, non_blocking=True)

    def _cast(
        self,
        shards: torch.Tensor,  # [shard_bytes at rest] (uint8)
        target: torch.Tensor,  # [shard_bytes as sent] (uint8)
    ) -> None:
        """Copy `shards` into `target`, casting each parameter."""
        plan = self.plan
        if plan.casts_at_once:
            source = shards.view(plan.rest_dtypes[0])
            target.view(plan.compute_dtypes[0]).copy_(source, non_blocking=True)
            return
        # The parts of the buffer that stays are cut once; those of a copy on the device are cut each time.
        at_rest = self._chunks
        if at_rest is None or shards is not self.shards:
            at_rest = chunks(shards, plan.rest_layout, plan.rest_dtypes)
        if shards is self.shards:
            self._chunks = at_rest
        sent = chunks(target, plan.layout, plan.compute_dtypes)
        torch._foreach_copy_(sent, at_rest, non_blocking=True)

    def arrived(self) -> None:
        """Put the unsharded parameters into their own order, once all shards are in the whole."""
        self._lay_in_whole()
        if self._kept is None:  # a gather from fewer ranks has written them in their own order
            for param in self.plan.plain:
                param.join()

    def abandoned(self) -> None:
        """Note that a gather was given up, so that nothing reads the shards."""
        if self.shards is not None:
            self.config.storage.done_reading(self.shards)

    def show_unsharded(self) -> None:
        """Make the modules show the unsharded parameters."""
        if self.shards is not None:
            self.config.storage.done_reading(self.shards)
        for parted in self.plan.parted:
            parted.assemble(self.plan.layout, self.whole.tensor)
        self._lay_in_whole()
        if self.plan.plain:
            # A gather fills this storage, whatever the parameters point to.
            memory = compat.storage_id(self.whole.tensor)
            for param in self.plan.plain:
                param.check_memory(memory)
        for param in self.params:
            param.show_gathered()

    def _lay_in_whole(self) -> None:
        """Put the unsharded forms of the parameters over the whole buffer, once it exists."""
        if self._in_whole:
            return
        # Once is enough: the storage is freed and allocated again under the same parameters.
        plan = self.plan
        for param, slot, dtype in zip(plan.plain, plan.layout.slots, plan.compute_dtypes):
            param.back(self.whole.tensor, slot.whole_offset, dtype)
        self._in_whole = True

    # ---- reshard

    def show_shards(self, until_backward: bool) -> None:
        """Make the modules show the shards: those over fewer ranks `until_backward`, if the unit has any."""
        for param in self.params:
            param.show(param.at_rest)
        if self.fewer_ranks is None:
            return
        # Copied out of the whole before `free` takes its memory.
        if until_backward:
            self.fewer_ranks.keep(self.whole)
        else:
            self.fewer_ranks.forget()

    def show_own_shards(self) -> None:
        """Make the modules show the shards at rest instead of those over fewer ranks."""
        if self._kept is not None:
            self.show_shards(until_backward=False)

    def free(self) -> None:
        """Give the memory of the unsharded parameters back, unless the strategy keeps it."""
        for parted in self.plan.parted:
            parted.release()
        if not self.plan.keeps_whole and not self.keep_storage:
            self.whole.free()

    def await_peers(self) -> None:
        """Return once other ranks have read the shards: a forward or a backward has ended."""
        for transport in self.transports():
            transport.await_peers()


def unchanged(memories: Sequence[UnitMemory], asks_always: bool) -> set[UnitMemory]:
    """Return the memories of which no rank has other shards than those that were gathered.

    The ranks exchange one byte for each: always, or only if this rank has other shards in one of them. All units over
    the same ranks share one exchange and one read of the device.
    """
    over: dict[Transport | None, list[UnitMemory]] = {}  # None: one rank
    for memory in memories:
        over.setdefault(memory.config.shard, []).append(memory)
    same: set[UnitMemory] = set()
    for transport, sharing in over.items():
        device = sharing[0].config.device
        changed = [torch.as_tensor(memory.changed(), device=device) for memory in sharing]
        flags = torch.stack(changed).to(torch.uint8)  # [units], of this rank
        if transport is not None and (asks_always or flags.any()):
            flags = transport.largest(flags)  # 1 where any rank has other shards
        for memory, is_changed in zip(sharing, flags.tolist()):
            if not is_changed:
                same.add(memory)
    return same
