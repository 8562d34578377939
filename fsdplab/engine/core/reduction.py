"""Averages a unit's gradients: from those that autograd leaves to those that the optimizer reads.

    collect    take the gradients from the unsharded parameters, adding them to those of earlier micro-batches
    reduce     average them over the ranks: reduce-scatter over the shards, all-reduce over the replicas
    hand out   give each parameter at rest its rows of the average

A parameter may have a gradient on some ranks and none on others (an expert that got no tokens). The sum says which
parameters have none on any rank (average.py). The host reads this from the device once a backward, for all units; until
then the averages of parameters that this rank has no gradient of are undecided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

import torch
from torch._prims_common import make_contiguous_strides_for

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average, Marks, half
from fsdplab.engine.core.buffers import pack
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.plan import UnitConfig, layout_of
from fsdplab.engine.core.transport import CollectiveLabel, Gradients
from fsdplab.engine.core.unit import Memory, ReduceOptions

_contiguous_strides = cache(make_contiguous_strides_for)  # takes longer than the view that it is for


class GradientLayout:
    """How the gradients of `params` are reduced in `dtype`: where they lie in what is sent, and where their marks are.

    Complex gradients are sent as pairs of real numbers, since sums and quotients of complex zeros lose their signs.
    """

    def __init__(self, params: Sequence[ShardedParam], dtype: torch.dtype, config: UnitConfig) -> None:
        self.params = params
        self.dtype = dtype
        self.layout = layout_of(params, [dtype] * len(params), config.ranks)
        self.sent = self.layout  # of the same bytes as real numbers
        if dtype.is_complex:  # (5, 4) of complex64, 8 bytes each, is (5, 4, 2) of 4 bytes each
            halves = [(slot.name, (*slot.shape, 2), slot.itemsize // 2) for slot in self.layout.slots]
            self.sent = Layout.of(halves, config.ranks)
        self.marks = Marks.of(self.sent, config.device)
        # Which parameter each mark is of: one without elements has none.
        self.marked = [number for number, slot in enumerate(self.layout.slots) if slot.chunk_bytes]

    def is_of(self, params: Sequence[ShardedParam], dtype: torch.dtype) -> bool:
        """Whether it is the layout of these parameters in this dtype."""
        return self.dtype is dtype and self.params == params

    def as_sent(
        self,
        gradient: torch.Tensor | None,  # [rows, *others], whole; None: missing
    ) -> torch.Tensor | None:
        """Return `gradient` as real numbers; None stays None."""
        if gradient is None or not self.dtype.is_complex:
            return gradient
        return torch.view_as_real(gradient.to(self.dtype).resolve_conj())


@dataclass(frozen=True)
class Reduction:
    """One reduction under way: what is summed, how it is divided and where the result goes."""

    layout: GradientLayout
    missing: Sequence[bool]  # for each parameter, whether this rank has no gradient of it
    output: torch.Tensor  # [elements of a shard]: this rank's part of the average
    sent: torch.Tensor  # the same memory as real numbers
    average: Average
    asks_ranks: bool  # whether the sum must say which parameters have a gradient on other ranks only


@dataclass(frozen=True)
class Undecided:
    """Averages of one reduction that are handed out once the host has read which parameters have a gradient at all."""

    missing_everywhere: torch.Tensor  # [parameters that have a mark], bool, on the device
    averages: Sequence[tuple[ShardedParam, torch.Tensor | None]]  # in that order; None: handed out already


class GradientMemory(Memory):
    """The half of a unit's memory that holds gradients; memory.py adds the half that holds parameters."""

    def __init__(self, name: str, params: list[ShardedParam], config: UnitConfig) -> None:
        self.name = name
        self.config = config
        self.params: list[ShardedParam] = params
        self._partial_sum: torch.Tensor | None = None  # gradients summed over the shards, not yet over the replicas
        self._moving = Pending(lambda: None)  # reduced gradients on their way to where their parameters rest
        self._undecided: list[Undecided] = []  # until the end of the backward
        self._gradient_layout: GradientLayout | None = None  # of the last reduction

    @property
    def keeps_gradients(self) -> bool:
        return not self.config.strategy.shard_gradients and self.config.shard is not None

    @property
    def hides_all_reduce(self) -> bool:
        return bool(self.config.shard and self.config.replicate) and self.config.device.type == "cpu"

    def await_copies(self) -> None:
        """Return once the host may write to shards, and read the gradients that were handed out."""
        self.config.storage.await_copies()
        self._moving.wait()

    # ---- collect

    def has_new_gradients(self) -> bool:
        """Whether autograd has left gradients on unsharded parameters that were not collected."""
        return any(param.gathered is not None and param.gathered.grad is not None for param in self.params)

    def collect_gradients(self, keep: bool) -> None:
        """Take what autograd has left, and add it to the gradients of earlier micro-batches.

        Gradients that are kept or added to are cast here, the others where they are packed.
        """
        accumulate_in = None
        if keep:
            accumulate_in = self.config.policy.reduce_dtype
        for param in self.params:
            # Once trained, it stays to be reduced, also if it is frozen before the last micro-batch.
            param.to_reduce = param.to_reduce or param.is_trained
            param.take_gradient(accumulate_in)
            if param.unsharded_gradient is not None:
                events.tag("unsharded_gradients", param.unsharded_gradient, self.name)

    def forget_gradients(self) -> None:
        """Free the collected gradients; a reduction under way keeps what it still reads."""
        for param in self.params:
            param.unsharded_gradient, param.to_reduce = None, False

    def abandon_gradients(self) -> None:
        """Drop all gradients that were not handed out."""
        self._partial_sum, self._undecided = None, []
        self.forget_gradients()
        for param in self.params:
            if param.gathered is not None:
                param.gathered.grad = None

    # ---- reduce

    def has_gradients(self, or_zeros: bool) -> bool:
        """Whether there is anything to reduce; `or_zeros`: a missing gradient counts as zeros."""
        params = self._to_reduce()
        if or_zeros:
            return bool(params)
        return any(param.unsharded_gradient is not None for param in params)

    def reduce(self, options: ReduceOptions) -> Iterator[Pending]:
        """Average the gradients over the ranks and hand them out; each collective is issued when it is taken."""
        reduction = self._begin_reduction(options)
        # The list is passed on without a name, so that each gradient is freed as soon as it is packed.
        yield from self._sum(reduction, self._gradients_as_sent(reduction.layout), options.all_reduce)
        if self.config.replicate and not options.all_reduce:
            self._partial_sum = reduction.sent  # added by the next reduction over the replicas
            return
        missing_everywhere = None
        if reduction.asks_ranks:  # on the device: nothing waits for it here
            missing_everywhere = reduction.layout.marks.missing(reduction.sent)
        self._hand_out(reduction, options, missing_everywhere)

    def _to_reduce(self) -> list[ShardedParam]:
        """Return the parameters that were trained when gradients were collected: the same on all ranks."""
        return [param for param in self.params if param.to_reduce]

    def _begin_reduction(self, options: ReduceOptions) -> Reduction:
        """Choose dtype and layout, and allocate this rank's part of the average."""
        params = self._to_reduce()
        layout = self._layout_for(params, self._dtype_for(params))
        # Shapes (5, 4) and (3,) in float32 on 2 ranks: 56 bytes a shard, 14 elements.
        elements = layout.layout.shard_bytes // layout.dtype.itemsize
        output = torch.empty(elements, dtype=layout.dtype, device=self.config.device)
        category = "sharded_gradients" if self.config.shard else "unsharded_gradients"
        events.tag(category, output, self.name)
        sent = output
        if layout.dtype.is_complex:
            sent = torch.view_as_real(output).view(-1)

        missing = [param.unsharded_gradient is None for param in params]
        asks_ranks = any(missing) and self.config.divide > 1.0  # a rank that has all gradients knows already
        if options.unused or compat.is_fake(output):  # missing ones are zeros then; fake tensors have no marks to read
            asks_ranks = False
        missing_by_mark = [missing[number] for number in layout.marked]
        marks = layout.marks.to_add(missing_by_mark, sent)
        average = Average(options.divide, layout.marks, marks, keeps=asks_ranks)
        return Reduction(layout, missing, output, sent, average, asks_ranks)

    def _gradients_as_sent(self, layout: GradientLayout) -> Gradients:
        """Return the whole gradients of this rank as real numbers, None where one is missing."""
        return [layout.as_sent(param.unsharded_gradient) for param in layout.params]

    def _dtype_for(self, params: Sequence[ShardedParam]) -> torch.dtype:
        """Return the dtype to reduce in: the policy's, or one that holds all gradients."""
        dtypes = {param.gradient_dtype for param in params}
        wanted = self.config.policy.reduce_dtype
        if wanted is None:
            return reduce(torch.promote_types, dtypes)
        if any(dtype.is_complex for dtype in dtypes):  # a real dtype would drop their imaginary parts
            return reduce(torch.promote_types, dtypes, wanted)
        return wanted

    def _layout_for(self, params: Sequence[ShardedParam], dtype: torch.dtype) -> GradientLayout:
        """Return how gradients of `params` are reduced in `dtype`: most steps need the last layout again."""
        layout = self._gradient_layout
        if layout is None or not layout.is_of(params, dtype):
            self._gradient_layout = layout = GradientLayout(params, dtype, self.config)
        return layout

    def _sum(
        self,
        reduction: Reduction,
        gradients: Gradients,  # [rows, *others] each, whole; None: this rank has none
        all_reduce: bool,
    ) -> Iterator[Pending]:
        """Average `gradients` into `reduction.sent`: over the shards, with `all_reduce` over the replicas too.

        Each collective is issued when it is taken, so that it hides behind the backward of one further unit. So do the
        two halves of an all-reduce between CPU ranks.
        """
        layout, sent, average = reduction.layout.sent, reduction.sent, reduction.average
        shard = self.config.shard
        replicate = None
        if all_reduce:
            replicate = self.config.replicate
        label = CollectiveLabel(self.name, "backward")
        padding = self._padding(layout) if replicate else 0
        over_shards, over_replicas = self._divisions(average, sent.dtype)
        earlier = self._partial_sum  # of micro-batches that were not summed over the replicas
        self._partial_sum = None

        last: Pending | None = None  # the all-reduce, where it is issued together with what comes before it
        # The first collective.
        if shard is not None:
            first = shard.reduce_scatter(layout, gradients, sent, label, over_shards)
            if replicate and earlier is None and first.event is not None:  # one stream waits for the other
                last = replicate.all_reduce(sent, label, over_replicas, padding, first)
        elif replicate and earlier is None:
            both = replicate.all_reduce_packed(layout, gradients, sent, label, over_replicas)
            first, last = both.parts()
        else:  # nothing to wait for: one rank, no all-reduce this time, or earlier sums to be added before it
            pack(layout, gradients, sent)
            average.mark(sent)
            first = Pending(lambda: None)
        del gradients  # what is packed is freed
        yield first

        # The second one, over the replicas.
        if earlier is not None:
            sent.add_(earlier)
        if replicate:
            yield last or replicate.all_reduce(sent, label, over_replicas, padding)
        elif shard is None and self.config.replicate is None and average.factor != 1.0:
            sent.div_(average.factor)

    def _divisions(self, average: Average, dtype: torch.dtype) -> tuple[Average, Average]:
        """Return how to divide the sums over shards and over replicas.

        With replicas, gradients are summed over all ranks before they are divided. In fp16 that sum could overflow, so
        the sum over the shards is divided by about the square root of the factor before it is summed over replicas.
        """
        if self.config.replicate is None:
            return average, average
        first = 1.0  # a factor of 64 is 1 and then 64; in fp16 it is 8 and then 8
        if dtype is torch.float16 and self.config.shard:
            first = half(average.factor)
        return replace(average, factor=first).keeping(), average.after(first)

    def _padding(self, layout: Layout) -> int:
        """Return how many bytes of what is all-reduced hold no gradient."""
        if self.config.shard is None:
            return layout.padding_bytes
        # The last ranks may hold fewer rows than a shard reserves.
        filled = 0
        for slot, (start, stop) in zip(layout.slots, layout.spans(self.config.rank)):
            rows = stop - start
            filled += rows * slot.row_bytes
        return layout.shard_bytes - filled

    # ---- hand out

    def _hand_out(
        self,
        reduction: Reduction,
        options: ReduceOptions,
        missing_everywhere: torch.Tensor | None,  # [parameters that have a mark], bool, on the device
    ) -> None:
        """Give every parameter its rows; one that no rank has a gradient of gets none, unless `options.unused`.

        Where `missing_everywhere` is given, parameters that this rank has no gradient of wait until it is read
        (`hand_out_undecided`). PyTorch's FSDP2 takes this rank's word for all ranks.
        """
        if options.hook is not None:
            options.hook(reduction.output)
        params = reduction.layout.params
        lacking: set[ShardedParam] = set()  # parameters that this rank has no gradient of
        if not options.unused:
            lacking.update(param for param, missing in zip(params, reduction.missing) if missing)
        taken = params
        if missing_everywhere is None:  # the other ranks are not asked: what this rank lacks is handed out to nobody
            taken = [param for param in params if param not in lacking]

        at_rest, self._moving = self.config.storage.take(self._rows(reduction, taken))
        # Rows may still be on their way to host memory (`await_copies`), unless somebody reads them at once.
        if self.config.storage.away and any(param.reads_gradient_at_once for param in taken if param not in lacking):
            self._moving.wait()
        undecided: dict[ShardedParam, torch.Tensor] = {}
        for param, gradient in zip(taken, at_rest):
            if param in lacking:
                undecided[param] = gradient
            else:
                param.give_gradient(gradient)
        if missing_everywhere is not None:
            marked = [params[number] for number in reduction.layout.marked]
            averages = [(param, undecided.get(param)) for param in marked]
            self._undecided.append(Undecided(missing_everywhere, averages))

    def _rows(self, reduction: Reduction, taken: Sequence[ShardedParam]) -> Iterator[torch.Tensor]:
        """Return this rank's rows of the averages of `taken`, in the dtypes that their parameters want.

        They are made one by one, but a cast of the whole output comes first: it runs before any row leaves the device.
        """
        params = reduction.layout.params
        layout = reduction.layout.layout
        output = reduction.output
        dtypes = [compat.gradient_dtype(param.at_rest) or output.dtype for param in params]
        if len(set(dtypes)) == 1:
            output = output.to(dtypes[0])  # one kernel instead of one a parameter
        spans = layout.spans(self.config.rank)
        places = dict(zip(params, zip(layout.slots, spans, dtypes)))

        def rows_of(param: ShardedParam) -> torch.Tensor:
            slot, (start, stop), dtype = places[param]
            first = slot.offset // slot.itemsize
            return _gradient_of(param, output, first, start, stop, dtype)

        return map(rows_of, taken)

    def take_undecided(self) -> list[Undecided]:
        """Return what `hand_out_undecided` has to decide, once it has arrived where its parameters rest."""
        taken, self._undecided = self._undecided, []
        if taken:
            self._moving.wait()
        return taken


def _gradient_of(
    param: ShardedParam,
    output: torch.Tensor,  # [shard elements], this rank's averages of all parameters
    first: int,  # the element of `output` at which the rows begin
    start: int,
    stop: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return rows [start, stop) of the average of `param` as it has them at rest, in `dtype`.

    Where the whole gradient is kept, they are written into it and returned as a view of it.
    """
    shape = (stop - start, *param.shape[1:])
    # A view, [rows of this rank, *others]; the padding behind them is left out.
    rows = output.as_strided(shape, _contiguous_strides(shape), first)
    if rows.dtype is not dtype and rows.is_complex() and not dtype.is_complex:
        rows = rows.real.contiguous()  # of a real parameter that travels with complex ones
    whole = param.unsharded_gradient
    param.unsharded_gradient = None
    if whole is not None:
        rows = whole[start:stop].copy_(rows)
    # Dtypes differ within the unit, or the whole gradient was kept in another one than the parameter's.
    if rows.dtype is not dtype:
        rows = rows.to(dtype)
    if param.dim == 0:
        return rows
    return param.natural(rows).contiguous()


def hand_out_undecided(memories: Iterable[GradientMemory]) -> None:
    """Give parameters the averages that this rank had no gradient of and others had, after one read of the device."""
    undecided = [reduction for memory in memories for reduction in memory.take_undecided()]
    if not undecided:
        return
    device = undecided[0].missing_everywhere.device
    # Reductions of 3 and of 2 parameters are one tensor of 5 flags, which is read at once.
    flags = torch.cat([reduction.missing_everywhere.to(device) for reduction in undecided])
    is_missing = iter(flags.tolist())  # here the host waits for the device
    for reduction in undecided:
        for param, average in reduction.averages:
            is_missing_everywhere = next(is_missing)
            if not is_missing_everywhere and average is not None:
                param.give_gradient(average)
