"""A unit's tensors: shards at rest, unsharded parameters, gradients and their reductions.

Two buffers hold the parameters: the shards of this rank, end to end, and the whole, which takes memory only while the
unit is unsharded. Where a strategy never frees the whole, the shards at rest are views of it (`plan.aliased`), unless
they have another dtype. Under `no_shard` a shard is everything: nothing is gathered, and gradients are all-reduced.

A shard that was put in from outside, and that others hold too, lies apart, in its own memory, until they let it go:
until then all shards of the unit are copied for each gather.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

import torch
from torch._prims_common import make_contiguous_strides_for

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average, Marks, half
from fsdplab.engine.core.buffers import UnshardedBuffer, chunks, cut_out, fingerprint, pack
from fsdplab.engine.core.fewer_ranks import ShardsOverFewerRanks
from fsdplab.engine.core.layout import Layout, Slot
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.parted import in_its_form
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.plan import UnitConfig, UnitPlan, layout_of
from fsdplab.engine.core.transport import CollectiveLabel, SendShard, Transport
from fsdplab.engine.core.unit import Memory, ReduceOptions

_contiguous_strides = cache(make_contiguous_strides_for)  # takes longer than the view that it is for


@dataclass(frozen=True)
class Undecided:
    """Averages that nobody has read yet: for each parameter that has a mark, whether no rank had a gradient (bool, on
    the device), and its part of the average; None where this rank had one, so that it was handed out.
    """

    missing: torch.Tensor
    averages: Sequence[tuple[ShardedParam, torch.Tensor | None]]


class GradientLayout:
    """How the gradients of some parameters are reduced in `dtype`: the layout of what is sent, which as real numbers is
    `sent` (sums and quotients of complex zeros lose their signs), and its marks.
    """

    def __init__(self, params: Sequence[ShardedParam], dtype: torch.dtype, config: UnitConfig) -> None:
        self.params, self.dtype = params, dtype
        self.layout = self.sent = layout_of(params, [dtype] * len(params), config.ranks)
        if dtype.is_complex:
            halves = [(slot.name, (*slot.shape, 2), slot.itemsize // 2) for slot in self.layout.slots]
            self.sent = Layout.of(halves, config.ranks)
        self.marks = Marks.of(self.sent, config.device)

    def as_sent(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """`gradient` as real numbers."""
        if gradient is None or not self.dtype.is_complex:
            return gradient
        return torch.view_as_real(gradient.to(self.dtype).resolve_conj())


class UnitMemory(Memory):
    """The tensors of one unit."""

    def __init__(self, name: str, params: list[ShardedParam], config: UnitConfig) -> None:
        self.name, self.config = name, config
        self.params: list[ShardedParam] = params
        self.module_names: Sequence[str] = ()  # what the root calls the modules; empty until there is a root
        self.fewer_ranks: ShardsOverFewerRanks | None = None  # where it goes after its forward instead of to its shards
        self.keep_storage = False  # whether the unsharded parameters keep their memory when they are freed
        self._sent: torch.Tensor | None = None  # the fingerprint of the shards that were gathered, if it was taken
        self._partial_sum: torch.Tensor | None = None  # gradients summed over the shards, not yet over the replicas
        self._arriving = Pending(lambda: None)  # gradients on their way to host memory
        self._undecided: list[Undecided] = []  # until the end of the backward
        self._gradient_layout: GradientLayout | None = None  # of the last reduction
        self._lay_out()

    def _lay_out(self, apart: bool = False) -> None:
        """Plan for the dtypes that the parameters have; no buffer exists yet."""
        self.plan = UnitPlan.of(self.params, self.config, apart)
        self._settled = False  # whether the shards have values, and lie in their buffer or apart
        self._apart = False  # whether one of them lies apart
        self._drop_shards()
        holds = "sharded_parameters" if self.plan.keeps_whole else "unsharded_parameters"
        self.whole = UnshardedBuffer(self.plan.layout, self.config.device, self.name, holds)
        self._in_whole = False  # whether the unsharded forms of the parameters lie in it

    def _drop_shards(self) -> None:
        """Begin a new buffer of shards; the last belongs to whoever holds what lies in it."""
        self.shards: torch.Tensor | None = None  # end to end (bytes)
        self._chunks: list[torch.Tensor] | None = None  # its parts, one per parameter
        for param in self.params:
            param.forget_place()

    @property
    def keeps_whole(self) -> bool:
        return self.plan.keeps_whole

    @property
    def keeps_gradients(self) -> bool:
        return not self.config.strategy.shard_gradients and self.config.shard is not None

    @property
    def hides_all_reduce(self) -> bool:
        return bool(self.config.shard and self.config.replicate) and self.config.device.type == "cpu"

    def transports(self) -> list[Transport]:
        """What it gathers and reduces with, in an order that all ranks share."""
        near = None if self.fewer_ranks is None else self.fewer_ranks.transport
        return [each for each in (self.config.shard, self.config.replicate, near) if each is not None]

    def moved(self, before: str, after: str, phase: str) -> None:
        if events.listening():
            events.emit(events.Transition(self.name, before, after, phase, time.time_ns()))

    # ---- at rest

    def shard(self) -> None:
        """Keep this rank's rows of every parameter and let the rest go."""
        rows = layout_of(self.params, [param.dtype for param in self.params], self.config.ranks)
        for param, slot in zip(self.params, rows.slots):
            param.cut(*slot.span(self.config.rank))
        self.take_over_replaced()

    def changed(self) -> bool | torch.Tensor:
        """By comparing the shards with what was gathered from them, or, where they are views of that, with their
        fingerprint: what wrote to them, and how, makes no difference. Where neither is possible they count as changed.
        """
        if self.plan.parted or not all(param.is_shown and param.keeps_shard() for param in self.params):
            return True
        if not self.params or compat.is_fake(self.whole.tensor):
            return False
        if self.plan.aliased:
            return self.config.shard is not None and self._differs_from_sent()
        rows = self.plan.layout.spans(self.config.rank)
        differ = (param.differs(*span) for param, span in zip(self.plan.plain, rows))
        if self.config.device.type == "cpu":
            return any(differ)  # after a step the first parameter tells
        return torch.stack([torch.as_tensor(each, device=self.config.device) for each in differ]).any()

    def _differs_from_sent(self) -> bool | torch.Tensor:
        return True if self._sent is None else self._sent != self._fingerprint()

    def _fingerprint(self) -> torch.Tensor:
        return fingerprint([param.local for param in self.plan.plain])

    @compat.outside_modes
    def take_over_replaced(self) -> bool:
        if self._settled and all(param.is_untouched() for param in self.params):
            return False
        for param in self.params:
            param.find()
        self.params[:] = [in_its_form(param) for param in self.params]
        if self.plan.is_outdated(self.params):
            self._lay_out()
        if self._settled and all(param.settled() for param in self.plan.plain):
            return False
        self.replacements += 1
        self._settled = not any(param.local.is_meta for param in self.params)
        if self._settled and self.params:
            self._settle()
        return True

    def _settle(self) -> None:
        """Move the shards at rest into their buffer, except what others hold too and what has no place there, because
        somebody holds the shard that was replaced: those stay apart.
        """
        plain = self.plan.plain
        if self.plan.aliased != self.plan.aliasable or not all(param.has_place() for param in plain):
            self._choose_buffers()
        self._apart = False
        for param, slot in zip(self.plan.plain, self.plan.rest_layout.slots):
            if param.has_place():
                buffer = self.whole.tensor if self.plan.aliased else self._make_shards()
                param.settle(self._rows_in(buffer, param, slot))
            else:
                param.stay(self.config.storage.device)
                self._apart = True
        if self.shards is not None:
            self.config.storage.done_reading(self.shards)
        self._settled = True

    def _choose_buffers(self) -> None:
        """Take new buffers where all shards may move there; where not, have none that shards must lie in."""
        if all(param.may_move() for param in self.plan.plain):
            self._lay_out() if self.plan.aliasable else self._drop_shards()
        elif self.plan.aliased:
            self._lay_out(apart=True)

    def _rows_in(self, buffer: torch.Tensor, param: ShardedParam, slot: Slot) -> torch.Tensor:
        """Where the rows of `param` that this rank keeps belong."""
        start, stop = slot.span(self.config.rank)
        offset = slot.whole_offset + start * slot.row_bytes if self.plan.aliased else slot.offset
        rows = buffer.narrow(0, offset, (stop - start) * slot.row_bytes)
        return rows.view(param.dtype).view(stop - start, *param.shape[1:])

    def _make_shards(self) -> torch.Tensor:
        if self.shards is None:
            self.shards = self.config.storage.make(self.plan.rest_layout.shard_bytes, self.name)
            events.tag("sharded_parameters", self.shards, self.name)
        return self.shards

    @property
    def _kept(self) -> ShardsOverFewerRanks | None:
        """The shards over fewer ranks, between a forward and a backward."""
        return self.fewer_ranks if self.fewer_ranks is not None and self.fewer_ranks.kept else None

    # ---- unshard

    def prepare(self) -> None:
        if not self._settled:
            prefix = f"{self.module_names[0]}." if len(self.module_names) == 1 and self.module_names[0] else ""
            names = [prefix + param.name for param in self.params if param.local.is_meta]
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still"
                f" on meta device: {names}, so unit {self.name!r} cannot gather; call model.to_empty(device=...) and"
                " initialise the weights before the first forward"
            )
        self.plan = self.plan.with_parts(self.config)
        self.whole.lay_out(self.plan.layout)
        self.whole.announce(self.name)

    def gather(self, phase: str) -> Pending | None:
        label = CollectiveLabel(self.name, phase)
        if self._apart and phase == "forward":
            self._settle()  # those who held what lies apart may have let it go
        if self.shards is not None:
            self.config.storage.will_read(self.shards)
        needs_fingerprint = self.remembers and self.plan.aliased and self.config.shard is not None
        self._sent = self._fingerprint() if needs_fingerprint and not compat.is_fake(self.whole.tensor) else None
        if self._kept is not None:
            return self._kept.gather(self.whole, label)
        if self.config.shard is not None:
            return self.config.shard.all_gather(self._send_shard(), self.whole, label)
        if self.plan.aliased:
            return None
        written = self._write(self.whole.tensor)
        return Pending(written.wait, self.whole.tensor, on_drop=written.wait)

    def _send_shard(self) -> SendShard:
        """This rank's shards in the dtype that travels: those at rest themselves, or made from them."""
        resident = None
        if self.plan.travels_as_it_rests and self.config.storage.device == self.config.device:
            resident = self._in_one_piece() if self._apart else self.shards
        return SendShard(self.plan.layout.shard_bytes, self.plan.wire_dtype, self._write, resident)

    def _in_one_piece(self) -> torch.Tensor:
        """A copy of shards that lie apart, end to end, where peers may read it: a gather sends what lies there already
        on all ranks, or on none.
        """
        assert self.config.shard is not None, "nobody to send it to"
        piece = self.config.shard.storage(self.config.device).make(self.plan.layout.shard_bytes, self.name)
        self._fill(piece)
        return piece

    def _write(self, target: torch.Tensor) -> Pending:
        """Begin to write this rank's shards, in the dtypes that travel, into `target` (bytes)."""
        return self.config.storage.send(self._fill, target)

    def _fill(self, target: torch.Tensor) -> None:
        plan = self.plan
        if plan.aliased:
            cut_out(self.config.rank, self.whole, target)
        elif self._apart:
            self._copy_each(target)
        elif plan.plain:
            shards = self._make_shards()
            if plan.rest_dtypes != plan.compute_dtypes:  # a copy from the host that casts would do it there
                shards = shards.to(self.config.device, non_blocking=True)
            self._cast(shards, target)
        for parted in plan.parted:
            parted.write_parts(plan.layout, target)

    def _copy_each(self, target: torch.Tensor) -> None:
        """Copy every shard from where it lies to its place in `target` (bytes)."""
        plan = self.plan
        filled = [param for param, slot in zip(plan.plain, plan.layout.slots) if slot.chunk_bytes]
        shards = [param.local.to(self.config.device, non_blocking=True) for param in filled]
        places = chunks(target, plan.layout, plan.compute_dtypes)
        rows = [place[: shard.numel()].view(shard.shape) for place, shard in zip(places, shards)]
        torch._foreach_copy_(rows, shards, non_blocking=True)

    def _cast(self, shards: torch.Tensor, target: torch.Tensor) -> None:
        plan = self.plan
        if plan.casts_at_once:
            source = shards.view(plan.rest_dtypes[0])
            target.view(plan.compute_dtypes[0]).copy_(source, non_blocking=True)
            return
        if self._chunks is None or shards is not self.shards:
            self._chunks = chunks(shards, plan.rest_layout, plan.rest_dtypes)
        torch._foreach_copy_(chunks(target, plan.layout, plan.compute_dtypes), self._chunks, non_blocking=True)
        if shards is not self.shards:
            self._chunks = None

    def arrived(self) -> None:
        self._lay_in_whole()
        if self._kept is None:
            for param in self.plan.plain:
                param.join()

    def abandoned(self) -> None:
        if self.shards is not None:
            self.config.storage.done_reading(self.shards)

    def show_unsharded(self) -> None:
        if self.shards is not None:
            self.config.storage.done_reading(self.shards)
        for parted in self.plan.parted:
            parted.assemble(self.plan.layout, self.whole.tensor)
        self._lay_in_whole()
        if self.plan.plain:
            memory = compat.storage_id(self.whole.tensor)
            for param in self.plan.plain:
                param.check_memory(memory)
        for param in self.params:
            param.show_gathered()

    def _lay_in_whole(self) -> None:
        """Put the unsharded forms of the parameters over the whole buffer, once it exists."""
        if not self._in_whole:
            for param, slot, dtype in zip(self.plan.plain, self.plan.layout.slots, self.plan.compute_dtypes):
                param.back(self.whole.tensor, slot.whole_offset, dtype)
            self._in_whole = True

    # ---- reshard

    def show_shards(self, until_backward: bool) -> None:
        for param in self.params:
            param.show(param.at_rest)
        if self.fewer_ranks is not None:
            self.fewer_ranks.keep(self.whole) if until_backward else self.fewer_ranks.forget()

    def show_own_shards(self) -> None:
        if self._kept is not None:
            self.show_shards(until_backward=False)

    def free(self) -> None:
        for parted in self.plan.parted:
            parted.release()
        if not self.plan.keeps_whole and not self.keep_storage:
            self.whole.free()

    def await_peers(self) -> None:
        if self.config.shard is not None:
            self.config.shard.await_peers()

    def await_copies(self) -> None:
        self.config.storage.await_copies()
        self._arriving.wait()

    # ---- gradients

    def has_new_gradients(self) -> bool:
        return any(param.gathered is not None and param.gathered.grad is not None for param in self.params)

    def collect_gradients(self, keep: bool) -> None:
        """Gradients that are only packed are cast then, those that are kept or added to are cast here."""
        accumulate_in = self.config.policy.reduce_dtype if keep else None
        for param in self.params:
            param.to_reduce = param.to_reduce or param.at_rest.requires_grad
            param.take_gradient(accumulate_in)
            if param.unsharded_gradient is not None:
                events.tag("unsharded_gradients", param.unsharded_gradient, self.name)

    def _reduced_in(self, held: set[torch.dtype]) -> torch.dtype:
        """The policy's dtype, or what holds all gradients: a real one would drop imaginary parts of complex ones."""
        wanted = self.config.policy.reduce_dtype
        if wanted is None:
            return reduce(torch.promote_types, held)
        return reduce(torch.promote_types, held, wanted) if any(each.is_complex for each in held) else wanted

    def _to_reduce(self) -> list[ShardedParam]:
        return [param for param in self.params if param.to_reduce]

    def has_gradients(self, or_zeros: bool) -> bool:
        return any(or_zeros or param.unsharded_gradient is not None for param in self._to_reduce())

    def reduce(self, options: ReduceOptions) -> Iterator[Pending]:
        params = self._to_reduce()
        missing = [param.unsharded_gradient is None for param in params]
        dtype = self._reduced_in({each.gradient_dtype for each in params})
        lying = self._gradients_in(params, dtype)
        output = torch.empty(lying.layout.shard_bytes // dtype.itemsize, dtype=dtype, device=self.config.device)
        events.tag("sharded_gradients" if self.config.shard else "unsharded_gradients", output, self.name)
        sent = torch.view_as_real(output).view(-1) if dtype.is_complex else output
        # a rank that has a gradient knows; of fake ones nobody has what this rank has not
        asks = any(missing) and self.config.divide > 1.0 and not options.unused and not compat.is_fake(output)
        marked = [lacks for lacks, slot in zip(missing, lying.layout.slots) if slot.chunk_bytes]
        average = Average(options.divide, lying.marks, lying.marks.to_add(marked, sent), keeps=asks)
        yield from self._sum(
            lying.sent, [lying.as_sent(param.unsharded_gradient) for param in params], sent, average, options.all_reduce
        )
        if self.config.replicate and not options.all_reduce:
            self._partial_sum = sent
        else:
            nobodys = lying.marks.missing(sent) if asks else None
            self._hand_out(params, missing, lying.layout, output, options, nobodys)

    def _gradients_in(self, params: Sequence[ShardedParam], dtype: torch.dtype) -> GradientLayout:
        """How the gradients of `params` are reduced; kept for the next reduction."""
        kept = self._gradient_layout
        if kept is None or (kept.params, kept.dtype) != (params, dtype):
            self._gradient_layout = kept = GradientLayout(params, dtype, self.config)
        return kept

    def _sum(
        self,
        layout: Layout,
        gradients: Sequence[torch.Tensor | None],
        output: torch.Tensor,
        average: Average,
        all_reduce: bool,
    ) -> Iterator[Pending]:
        """Reduce-scatter over the shards, all-reduce over the replicas, or both: each then hides behind the backward
        of one further unit. So do the two halves of an all-reduce between CPU ranks.
        """
        shard, replicate = self.config.shard, self.config.replicate if all_reduce else None
        label = CollectiveLabel(self.name, "backward")
        padding = self._padding(layout) if replicate else 0
        first, second = self._divisions(average, output.dtype)
        earlier, self._partial_sum = self._partial_sum, None
        over_replicas = None
        if shard is None and replicate and earlier is None:
            summed, over_replicas = replicate.all_reduce_packed(layout, gradients, output, label, second).parts()
        elif shard is None:
            pack(layout, gradients, output)
            average.mark(output)
            summed = Pending(lambda: None)
        else:
            summed = shard.reduce_scatter(layout, gradients, output, label, first)
            if replicate and earlier is None and summed.event is not None:  # one stream waits for the other
                over_replicas = replicate.all_reduce(output, label, second, padding, summed)
        del gradients  # what is packed is freed
        yield summed
        if earlier is not None:
            output.add_(earlier)
        if replicate:
            yield over_replicas or replicate.all_reduce(output, label, second, padding)
        elif shard is None and self.config.replicate is None and average.factor != 1.0:
            output.div_(average.factor)

    def _divisions(self, average: Average, dtype: torch.dtype) -> tuple[Average, Average]:
        """How to divide the sums over shards and over replicas: replicas sum before anything is divided, but what could
        overflow is halfway small by then.
        """
        if self.config.replicate is None:
            return average, average
        first = half(average.factor) if dtype is torch.float16 and self.config.shard else 1.0
        return replace(average, factor=first).keeping(), average.after(first)

    def _padding(self, layout: Layout) -> int:
        """Bytes of what is all-reduced that hold no gradient."""
        if self.config.shard is None:
            return layout.padding_bytes
        spans = zip(layout.slots, layout.spans(self.config.rank))
        return layout.shard_bytes - sum((stop - start) * slot.row_bytes for slot, (start, stop) in spans)

    def _hand_out(
        self,
        params: Sequence[ShardedParam],
        missing: Sequence[bool],
        layout: Layout,
        output: torch.Tensor,
        options: ReduceOptions,
        nobodys: torch.Tensor | None,
    ) -> None:
        """Give every parameter its rows; one that no rank has used gets none, unless `options.unused`.

        A parameter that this rank has no gradient of may have one on another; FSDP2 takes this rank's word for all of
        them. `nobodys` says so on the device, where it is read once a backward (`hand_out_undecided`). Rows that go to
        host memory may still be on their way (`await_copies`), unless somebody reads them at once, so whatever computes
        with them comes before they leave.
        """
        if options.hook is not None:
            options.hook(output)
        dtypes = [compat.gradient_dtype(param.at_rest) or output.dtype for param in params]
        cast = output.to(dtypes[0]) if len(set(dtypes)) == 1 else output
        spans = layout.spans(self.config.rank)
        taken = [
            (param, not lacks or options.unused, (slot.offset // slot.itemsize, *span, dtype))
            for param, slot, span, dtype, lacks in zip(params, layout.slots, spans, dtypes, missing)
            if not lacks or options.unused or nobodys is not None
        ]
        ready = (_gradient_of(param, cast, *place) for param, _, place in taken)
        at_rest, self._arriving = self.config.storage.take(ready)
        if self.config.storage.away and any(at_once and param.reads_gradient_at_once for param, at_once, _ in taken):
            self._arriving.wait()
        waiting: dict[ShardedParam, torch.Tensor] = {}
        for (param, at_once, _), gradient in zip(taken, at_rest):
            if at_once:
                param.give_gradient(gradient)
            else:
                waiting[param] = gradient
        if nobodys is not None:
            marked = [param for param, slot in zip(params, layout.slots) if slot.chunk_bytes]
            self._undecided.append(Undecided(nobodys, [(param, waiting.get(param)) for param in marked]))

    def take_undecided(self) -> list[Undecided]:
        """What `hand_out_undecided` has to decide, once it has arrived where its parameters rest."""
        taken, self._undecided = self._undecided, []
        if taken:
            self._arriving.wait()
        return taken

    def forget_gradients(self) -> None:
        for param in self.params:
            param.unsharded_gradient, param.to_reduce = None, False

    def abandon_gradients(self) -> None:
        self._partial_sum, self._undecided = None, []
        self.forget_gradients()
        for param in self.params:
            if param.gathered is not None:
                param.gathered.grad = None


def _gradient_of(
    param: ShardedParam, output: torch.Tensor, first: int, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows [start, stop) of `param`, which begin at element `first` of `output`, as it has them at rest, in `dtype`; a
    gradient that is kept whole takes them in.
    """
    shape = (stop - start, *param.shape[1:])
    rows = output.as_strided(shape, _contiguous_strides(shape), first)
    whole, param.unsharded_gradient = param.unsharded_gradient, None
    if whole is not None:
        rows = whole[start:stop].copy_(rows)
    if rows.dtype is not dtype:
        rows = rows.to(dtype)
    return param.natural(rows).contiguous() if param.dim else rows


def unchanged(memories: Sequence[UnitMemory]) -> set[UnitMemory]:
    """Those of which no rank has other shards than those that were gathered: one exchange of a byte each, and one read
    of the device, for all units over the same ranks.
    """
    found: set[UnitMemory] = set()
    for transport in dict.fromkeys(memory.config.shard for memory in memories):
        alike = [memory for memory in memories if memory.config.shard is transport]
        device = alike[0].config.device
        flags = torch.stack([torch.as_tensor(each.changed(), device=device) for each in alike]).to(torch.uint8)
        if transport is not None:
            flags = transport.largest(flags)
        found.update(memory for memory, flag in zip(alike, flags.tolist()) if not flag)
    return found


def hand_out_undecided(memories: Iterable[UnitMemory]) -> None:
    """Give parameters the gradients that this rank had not and others had, after one read of the device for all."""
    undecided = [each for memory in memories for each in memory.take_undecided()]
    if not undecided:
        return
    device = undecided[0].missing.device
    missing = iter(torch.cat([each.missing.to(device) for each in undecided]).tolist())
    for param, average in (pair for each in undecided for pair in each.averages):
        if not next(missing) and average is not None:
            param.give_gradient(average)
