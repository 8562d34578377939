"""Offers shared memory as a c10d process group, so that torch's own DDP, FSDP, DTensor and `CommDebugMode` run on the
memory that our engine's ranks share.

A comparison of engines is fair when they move bytes in the same way. `SharedMemoryGroup` stands over a gloo group and
carries all-reduce, all-gather, reduce-scatter, broadcast and barrier through shared memory; what it does not define
(scatter, all-to-all, send, recv) goes to gloo. Every operation is complete when its call returns; behind an emulated
link, when the link has delivered.

`register_backend()` makes `dist.init_process_group("fsdplab_shm")`, `new_group` and device meshes use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import compat
from fsdplab.engine.core.average import Average
from fsdplab.engine.transport.shared_memory.arena import SharingRefused
from fsdplab.engine.transport.shared_memory.slots import Buffers, Slots

NAME = "fsdplab_shm"
_CPU, _GLOO = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
_create_work_from_future = torch._C._distributed_c10d._create_work_from_future
Tensors = Sequence[torch.Tensor]
# From outputs and inputs, flat: the arguments of each call of the algorithm (a method of `Moves`).
Calls = Callable[[Tensors, Tensors], Iterable[tuple[Any, ...]]]
# An operation of a kind, with these outputs, sets out on a link. What is returned takes the result once its bytes are
# there, and makes a future that holds it from the time on at which the link delivers.
Depart = Callable[[str, Tensors], Callable[[list[torch.Tensor]], torch.futures.Future]]
_ROUNDS = ("all_gather", "reduce_scatter", "all_reduce")  # what an emulated link carries: a barrier is no traffic
_PIECE = 4 << 20  # bytes of a slot: larger payloads travel in pieces
_SMALL = 32 << 10  # bytes up to which every rank sums everything: one round of waiting instead of two
_SLOTS = 3  # operations that may be under way: a rank that is late by one or two keeps nobody waiting
_LIKE_MAX = {"MAX": torch.maximum, "MIN": torch.minimum}
_OPERATIONS = ("SUM", "AVG", *_LIKE_MAX)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def register_backend() -> str:
    """Make torch know the backend; returns its name, for `init_process_group` and `new_group`."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    return NAME


def _create(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> SharedMemoryGroup:
    """Make the group over a gloo group of its own; torch calls this."""
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, ranks, timeout)
    gloo = dist.ProcessGroup(store, rank, ranks)
    gloo._register_backend(_CPU, _GLOO, backend)
    gloo._set_default_backend(_GLOO)
    return SharedMemoryGroup(gloo)


class SharedMemoryGroup(dist.ProcessGroup):
    """Collectives among ranks of one machine through shared memory. `gloo`, the group below, does the rest."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        super().__init__(gloo.rank(), gloo.size())
        try:
            self._moves = Moves(gloo)
        except SharingRefused as error:
            raise ValueError(
                f"shared memory needs all ranks on one x86-64 Linux machine; {error}: use a gloo group"
            ) from error
        self.gloo, self._rank, self._ranks = gloo, gloo.rank(), gloo.size()
        self._register_backend(_CPU, _GLOO, gloo._get_backend(_CPU))
        self._set_default_backend(_GLOO)
        self._depart: Depart | None = None  # on an emulated link
        # shows what runs here to CommDebugMode and the profiler
        self._silent = compat.silent_group(gloo.rank(), gloo.size())

    def getBackendName(self) -> str:
        """Return what DDP's log and `name()` show."""
        return NAME

    def allreduce(
        self,
        tensors: Tensors,  # one, of any shape
        opts: Any = None,
    ) -> dist.Work:
        """Reduce one tensor in place."""
        return self._all_reduce("allreduce", [_only("all_reduce", tensors)], opts)

    def allreduce_coalesced(
        self,
        tensors: Tensors,  # any shapes
        opts: Any = None,
    ) -> dist.Work:
        """Reduce several tensors in place."""
        return self._all_reduce("allreduce_coalesced", tensors, opts)

    def _all_reduce(
        self,
        call: str,
        tensors: Tensors,  # any shapes, reduced in place
        opts: Any,
    ) -> dist.Work:
        """Reduce `tensors` in place for the method `call` of torch's."""
        # All are checked before the first is sent: an error in between would leave the ranks out of step.
        operations = [operation_of(opts, tensor) for tensor in tensors]

        def calls(
            flats: Tensors,  # [elements] each
            _: Tensors,  # none: what is reduced is input and output
        ) -> Iterable[tuple[Any, ...]]:
            return zip(flats, operations)

        return self._moved("all_reduce", call, [tensors], tensors, [], calls)

    def allgather(
        self,
        outputs: Sequence[Tensors],  # one list, with a tensor of any shape for each rank
        inputs: Tensors,  # one, of any shape
        opts: Any = None,
    ) -> dist.Work:
        """Fill a list with every rank's tensor; they may differ in size."""
        # torch gives a list for each device of a rank; here a rank has one.
        output = _only("all_gather", outputs)
        source = _only("all_gather", inputs)
        if len(output) != self._ranks or _shown(output[self._rank]) != _shown(source):
            raise ValueError(
                f"all_gather: outputs {_shown(*output)} for this rank's input {_shown(source)}; expected {self._ranks},"
                " its own like its input"
            )

        def calls(
            flats: Tensors,  # [elements] each, one a rank
            sources: Tensors,  # one, [elements]
        ) -> Iterable[tuple[Any, ...]]:
            return [(flats, *sources)]

        return self._moved("all_gather", "allgather", [outputs, inputs], output, inputs, calls)

    def _allgather_base(
        self,
        output: torch.Tensor,  # [ranks * elements] in any shape
        source: torch.Tensor,  # [elements] in any shape
        opts: Any = None,
    ) -> dist.Work:
        """Gather every rank's `source` into one output: torch calls this for `all_gather_into_tensor`."""
        return self._gather_whole("_allgather_base", [output, source], [output], [source])

    def allgather_into_tensor_coalesced(
        self,
        outputs: Tensors,  # [ranks * elements] each, in any shapes
        inputs: Tensors,  # [elements] each, in any shapes
        opts: Any = None,
    ) -> dist.Work:
        """Gather several tensors, each into one output."""
        return self._gather_whole("allgather_into_tensor_coalesced", [outputs, inputs], outputs, inputs)

    def _gather_whole(
        self,
        call: str,  # the name of torch's method
        arguments: Sequence[Any],  # those of `call`, to be announced
        outputs: Tensors,  # [ranks * elements] each, in any shapes
        inputs: Tensors,  # [elements] each, in any shapes
    ) -> dist.Work:
        """Gather each of `inputs` into one output that has room for the tensors of all ranks."""
        self._check_whole("all_gather", outputs, inputs)

        def calls(
            flats: Tensors,  # [ranks * elements] each
            sources: Tensors,  # [elements] each
        ) -> Iterable[tuple[Any, ...]]:
            # On 2 ranks an output of 6 elements becomes the list of 3 and 3 that `Moves.all_gather` fills.
            return zip(self._split(flats), sources)

        return self._moved("all_gather", call, arguments, outputs, inputs, calls)

    def reduce_scatter(
        self,
        outputs: Tensors,  # one, of any shape
        inputs: Sequence[Tensors],  # one list, with a tensor of any shape for each rank
        opts: Any = None,
    ) -> dist.Work:
        """Reduce a list with one tensor a rank and keep this rank's; they may differ in size."""
        output = _only("reduce_scatter", outputs)
        sources = _only("reduce_scatter", inputs)
        have_one_dtype = len({source.dtype for source in sources}) == 1
        if len(sources) != self._ranks or _shown(sources[self._rank]) != _shown(output) or not have_one_dtype:
            raise ValueError(
                f"reduce_scatter: inputs {_shown(*sources)} for the output {_shown(output)}; expected {self._ranks},"
                " its own like the output"
            )
        operation = operation_of(opts, output)

        def calls(
            flats: Tensors,  # one, [elements]
            parts: Tensors,  # [elements] each, one a rank
        ) -> Iterable[tuple[Any, ...]]:
            return [(*flats, parts, operation)]

        return self._moved("reduce_scatter", "reduce_scatter", [outputs, inputs], outputs, sources, calls)

    def _reduce_scatter_base(
        self,
        output: torch.Tensor,  # [elements] in any shape
        source: torch.Tensor,  # [ranks * elements] in any shape
        opts: Any = None,
    ) -> dist.Work:
        """Reduce `source` and keep this rank's part: torch calls this for `reduce_scatter_tensor`."""
        return self._scatter_whole("_reduce_scatter_base", [output, source], [output], [source], opts)

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Tensors,  # [elements] each, in any shapes
        inputs: Tensors,  # [ranks * elements] each, in any shapes
        opts: Any = None,
    ) -> dist.Work:
        """Reduce and scatter several tensors."""
        return self._scatter_whole("reduce_scatter_tensor_coalesced", [outputs, inputs], outputs, inputs, opts)

    def _scatter_whole(
        self,
        call: str,  # the name of torch's method
        arguments: Sequence[Any],  # those of `call`, to be announced
        outputs: Tensors,  # [elements] each, in any shapes
        inputs: Tensors,  # [ranks * elements] each, in any shapes
        opts: Any,
    ) -> dist.Work:
        """Reduce each of `inputs`, which has a part for every rank, into the output for this rank's part."""
        self._check_whole("reduce_scatter", inputs, outputs)
        operations = [operation_of(opts, output) for output in outputs]

        def calls(
            flats: Tensors,  # [elements] each
            sources: Tensors,  # [ranks * elements] each
        ) -> Iterable[tuple[Any, ...]]:
            return zip(flats, self._split(sources), operations)

        return self._moved("reduce_scatter", call, arguments, outputs, inputs, calls)

    # their names since torch 2.13
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    def broadcast(
        self,
        tensors: Tensors,  # one, of any shape
        opts: Any = None,
    ) -> dist.Work:
        """Give the root's tensor to all."""
        _only("broadcast", tensors)
        root = 0
        if opts is not None:
            root = opts.rootRank

        def calls(
            flats: Tensors,  # one, [elements]
            _: Tensors,  # none: what is sent on the root is written on the others
        ) -> Iterable[tuple[Any, ...]]:
            return [(*flats, root)]

        return self._moved("broadcast", "broadcast", [tensors], tensors, [], calls)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have come."""
        return self._moved("barrier", "barrier", [], [torch.empty(0)], [], lambda *_: [()])

    def put_behind(self, depart: Depart | None) -> None:
        """Have the operations of all tensors pass an emulated link; None takes it away."""
        self._depart = depart

    def _moved(
        self,
        kind: str,  # the name of a method of `Moves`
        call: str,  # the name of torch's method
        arguments: Sequence[Any],  # those of `call`, to be announced
        outputs: Tensors,  # any shapes, written in place
        inputs: Tensors,  # any shapes
        calls: Calls,  # makes the arguments of the method of `Moves`
    ) -> dist.Work:
        """Show a call of torch's to whoever watches, then have the algorithm of that kind write `outputs`.

        No rank can go on after it was interrupted in one. A profiler range names the transport, as gloo's own do.
        """
        # The silent group has torch's method of the same name, which moves nothing and is seen all the same.
        show = getattr(self._silent, call)
        show(*_traces(arguments))
        sources = _flat(kind, inputs)
        flats = _flat(kind, outputs)
        arrive: Callable[[list[torch.Tensor]], torch.futures.Future] = _arrived
        if self._depart is not None and kind in _ROUNDS:
            arrive = self._depart(kind, flats)  # the time on the link counts from now, not from the end of the copies
        algorithm = getattr(self._moves, kind)
        with torch.profiler.record_function(f"shm:{kind}"):
            with self._moves.slots.unrepeatable(kind):
                for algorithm_arguments in calls(flats, sources):
                    algorithm(*algorithm_arguments)
            for flat, output in zip(flats, outputs):
                if not output.is_contiguous():  # then `flat` is a copy
                    output.data.copy_(flat.view(output.shape))
        return _create_work_from_future(arrive(list(outputs)))

    def _split(
        self,
        wholes: Tensors,  # [ranks * elements] each
    ) -> Iterable[Tensors]:
        """Cut each of `wholes` into the parts of all ranks, [elements] each."""
        return (whole.tensor_split(self._ranks) for whole in wholes)

    def _check_whole(
        self,
        kind: str,
        wholes: Tensors,  # any shapes
        parts: Tensors,  # any shapes
    ) -> None:
        """Raise where a whole has not the elements and the dtype of as many parts as there are ranks."""
        for whole, part in zip(wholes, parts, strict=True):
            if whole.numel() != self._ranks * part.numel() or whole.dtype != part.dtype:
                raise ValueError(f"{kind}: {_shown(whole)} is not {self._ranks} times {_shown(part)}")


def _only(kind: str, given: Sequence[Any]) -> Any:
    """Return the one element of a list that torch makes for several devices."""
    if len(given) != 1:
        raise ValueError(f"{kind}: expected one tensor a rank, got {len(given)}; call it for each")
    return given[0]


def _shown(
    *tensors: torch.Tensor,  # any shapes
) -> str:
    """Describe tensors in an error: `"6 x float32, 4 x float32"`."""
    return ", ".join(f"{tensor.numel()} x {_name(tensor)}" for tensor in tensors)


def _flat(
    kind: str,
    tensors: Tensors,  # any shapes
) -> list[torch.Tensor]:
    """Return the tensors in one dimension, without autograd and its version counter, as backends write to them."""
    for tensor in tensors:
        if tensor.device != _CPU or tensor.layout != torch.strided:
            raise ValueError(
                f"{kind}: shared memory moves dense tensors on the CPU, not {tensor.layout} on {tensor.device}: use a"
                " gloo group"
            )
    # Of a tensor that is not contiguous this is a copy, which `_moved` copies back where it is an output.
    return [tensor.data.contiguous().view(-1) for tensor in tensors]


def _arrived(
    result: list[torch.Tensor],  # any shapes
) -> torch.futures.Future:
    """Return a future that holds `result` now."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return future


def _traces(given: Any) -> Any:
    """Return nested lists of tensors without any elements, but over the same storages.

    The profiler sees which buffers move, and to announce them moves nothing.
    """
    if isinstance(given, torch.Tensor):
        return given.data.as_strided((0,), (1,))
    return [_traces(part) for part in given]


# ---- algorithms: which rank writes and reads what, in which slot, in which order


class Moves:
    """Collectives on flat tensors over the slots of `group`, which is used for set-up only.

    Long ones are sent in pieces: peers read a piece while it is still in the cache, and no buffer grows beyond a piece.
    Sums are taken in rank order, in float32 for 16-bit floats, so results carry the same bits in every run.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self.slots = Slots(group, _SLOTS)
        self._buffers = Buffers(self.slots, _SLOTS)

    def all_reduce(
        self,
        flat: torch.Tensor,  # [elements], reduced in place
        operation: str,
    ) -> None:
        """Reduce in place."""
        label = f"all_reduce {operation} {_name(flat)}"
        for part in _cut(flat, _PIECE // flat.element_size()):  # 10 MiB are pieces of 4, 4 and 2 MiB
            number = self._publish([part], part.nbytes, label)
            if part.nbytes <= _SMALL:
                # Every rank sums all of it, which is sooner done than waiting for the others' shares.
                self._reduce(number, part.nbytes, 0, part, operation)
            else:
                self._reduce_and_share(number, part.tensor_split(self._ranks), operation)
            self.slots.done(number)

    def _reduce_and_share(
        self,
        number: int,
        shares: Sequence[torch.Tensor],  # [elements] each, one a rank: parts of one tensor, end to end
        operation: str,
    ) -> None:
        """Reduce this rank's share, put it back into its slot, and copy the shares of the others from theirs.

        Nobody else reads a share before its owner says that it is summed.
        """
        own_share = shares[self._rank]
        firsts = []  # the element at which each share begins: 5 elements on 2 ranks are shares of 3 and 2, from 0 and 3
        elements = 0
        for share in shares:
            firsts.append(elements)
            elements += len(share)
        nbytes = elements * own_share.element_size()
        self._reduce(number, nbytes, firsts[self._rank], own_share, operation)
        for peer in self.slots.nearest_first:
            buffer = self.slots.read(peer, number, nbytes).view(own_share.dtype)
            first = firsts[peer]
            place = buffer[first : first + len(shares[peer])]
            if peer == self._rank:
                # Peers read their own shares of this buffer only, so this place is free for the sum.
                place.copy_(own_share)
                self.slots.summed(number)
            else:
                self.slots.await_summed(peer, number)
                shares[peer].copy_(place)

    def all_gather(
        self,
        wholes: Sequence[torch.Tensor],  # [elements] each, one a rank; written in place
        source: torch.Tensor,  # [elements], this rank's
    ) -> None:
        """Fill `wholes[r]` from rank r's `source`; ranks may differ in size."""
        wholes = [whole.view(torch.uint8) for whole in wholes]
        source = source.view(torch.uint8)
        longest = max(len(whole) for whole in wholes)
        for start in range(0, longest, _PIECE):
            size = min(_PIECE, longest - start)
            piece = source[start : start + size]
            number = self._publish([piece], size, "all_gather")
            for peer in self.slots.nearest_first:
                place = wholes[peer][start : start + size]
                if peer == self._rank:
                    place.copy_(piece)
                else:
                    place.copy_(self.slots.read(peer, number, size)[: len(place)])
            self.slots.done(number)

    def reduce_scatter(
        self,
        output: torch.Tensor,  # [elements], written in place
        inputs: Sequence[torch.Tensor],  # [elements] each, one a rank
        operation: str,
    ) -> None:
        """Reduce `inputs[r]` into rank r's output; ranks may differ in size."""
        label = f"reduce_scatter {operation} {_name(output)}"
        longest = max(len(source) for source in inputs)
        word = output.element_size()
        # A piece has a part for each rank: in float32 on 2 ranks, 524,288 elements for each in 4 MiB.
        width = _PIECE // word // self._ranks
        for start in range(0, longest, width):
            length = min(width, longest - start)
            nbytes = length * word * self._ranks
            pieces = [source[start : start + length] for source in inputs]
            number = self._publish(pieces, nbytes, label)
            part = output[start : start + length]  # shorter than `length`, or empty, where this rank has less
            self._reduce(number, nbytes, self._rank * length, part, operation)
            self.slots.done(number)

    def broadcast(
        self,
        flat: torch.Tensor,  # [elements], written in place on all ranks but `root`
        root: int,
    ) -> None:
        """Give the root's tensor to all."""
        is_root = self._rank == root
        for piece in _cut(flat.view(torch.uint8), _PIECE):
            sent = [piece] if is_root else []  # others publish nothing, but take part in the operation
            number = self._publish(sent, piece.nbytes, f"broadcast from {root}")
            if not is_root:
                piece.copy_(self.slots.read(root, number, piece.nbytes))
            self.slots.done(number)

    def barrier(self) -> None:
        """Return when all ranks are here."""
        number = self._publish([], 1, "barrier")
        for peer in self.slots.nearest_first:
            self.slots.read(peer, number, 1)
        self.slots.done(number)

    def _publish(
        self,
        parts: Sequence[torch.Tensor],  # [elements] each
        nbytes: int,
        label: str,
    ) -> int:
        """Write `parts` at equal distances into this rank's buffer; return the operation's number.

        All ranks give equal `nbytes` and `label`.
        """
        number = self.slots.claim(nbytes, label)
        buffer = self._buffers.get(number % _SLOTS, nbytes, label)
        places = buffer.chunk(len(parts) or 1)  # a part may be shorter than its place, where ranks differ in size
        for part, place in zip(parts, places):
            place[: part.nbytes].copy_(part.view(torch.uint8))
        self.slots.publish(number, buffer)
        return number

    def _reduce(
        self,
        number: int,
        nbytes: int,
        first: int,  # element of the buffers at which this rank's part begins
        output: torch.Tensor,  # [elements], written in place
        operation: str,
    ) -> None:
        """Reduce what starts at element `first` of every rank's buffer into `output`, rank 0 first."""
        parts = []  # [elements of `output`] each, in the buffers of all ranks
        for peer in range(self._ranks):
            buffer = self.slots.read(peer, number, nbytes).view(output.dtype)
            parts.append(buffer[first : first + len(output)])
        if operation in _LIKE_MAX:
            output.copy_(parts[0])
            for part in parts[1:]:
                _LIKE_MAX[operation](output, part, out=output)
            return
        divide = self._ranks if operation == "AVG" else 1.0
        Average(divide).sum_up(parts, output)


def operation_of(
    opts: Any,
    tensor: torch.Tensor,  # any shape
) -> str:
    """Return the name of the reduction; raise where it is not offered for such a tensor."""
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    names = [name for name in _OPERATIONS if wanted == getattr(dist.ReduceOp, name)]
    if not names:
        raise ValueError(f"shared memory reduces with {', '.join(_OPERATIONS)}, not {wanted.op.name}: use a gloo group")
    name = names[0]
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    if name != "AVG":  # an average of integers is no integer
        dtypes += _INTEGERS
    if tensor.dtype not in dtypes:
        raise ValueError(f"shared memory does not reduce {tensor.dtype} with {name}: use a gloo group")
    return name


def _cut(
    flat: torch.Tensor,  # [elements]
    length: int,
) -> Sequence[torch.Tensor]:
    """Cut `flat` into pieces of at most `length`; an empty tensor has none."""
    return flat.split(length) if len(flat) else ()


def _name(
    tensor: torch.Tensor,  # any shape
) -> str:
    """Return the name of a tensor's dtype without its module: `"float32"`."""
    return str(tensor.dtype).removeprefix("torch.")
