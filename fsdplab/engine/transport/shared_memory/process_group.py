"""Shared memory as a c10d process group, so that torch's own DDP, FSDP, DTensor and `CommDebugMode` run on the fabric
of our engine.

A comparison of engines is fair when they move bytes in the same way. `SharedMemoryGroup` stands over a gloo group and
carries all-reduce, all-gather, reduce-scatter, broadcast and barrier through shared memory (`shm_moves`); what it does
not define (scatter, all-to-all, send, recv) goes to gloo. Every operation is complete when its call returns.

`register_backend()` makes `dist.init_process_group("fsdplab_shm")`, `new_group` and device meshes use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import compat
from fsdplab.engine.transport.shared_memory.deliveries import Deliveries
from fsdplab.engine.transport.shared_memory.moves import Moves, operation_of
from fsdplab.engine.transport.shared_memory.slots import machine_of_this_rank

NAME = "fsdplab_shm"
_CPU, _GLOO = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
_create_work_from_future = torch._C._distributed_c10d._create_work_from_future
Tensors = Sequence[torch.Tensor]
# An operation of a kind, with these outputs, sets out on a link; what is returned is called when its bytes are there,
# and returns when the link delivers (ns).
Depart = Callable[[str, Tensors], Callable[[], int]]
_ROUNDS = ("all_gather", "reduce_scatter", "all_reduce")  # what an emulated link carries: a barrier is no traffic


def register_backend() -> str:
    """Make torch know the backend; returns its name, for `init_process_group` and `new_group`."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    return NAME


def _create(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> SharedMemoryGroup:
    gloo = dist.ProcessGroup(store, rank, ranks)
    gloo._register_backend(_CPU, _GLOO, dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, ranks, timeout))
    gloo._set_default_backend(_GLOO)
    return SharedMemoryGroup(gloo)


def machines_of(group: dist.ProcessGroup) -> set[tuple[str, ...] | None]:
    """The machines on which the ranks of `group` run; None among them where a rank cannot share memory. All ranks must
    call it.
    """
    told: list[tuple[str, ...] | None] = [None] * group.size()
    dist.all_gather_object(told, machine_of_this_rank(), group=group)
    return set(told)


class SharedMemoryGroup(dist.ProcessGroup):
    """Collectives among ranks of one machine through shared memory;
    `gloo`, the group below, does set-up and all else.
    """

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        super().__init__(gloo.rank(), gloo.size())
        machines = machines_of(gloo)
        if None in machines or len(machines) != 1:
            found = "a machine without it" if None in machines else f"{len(machines)} machines"
            raise ValueError(
                f"shared memory needs all ranks on one x86-64 Linux machine; got {found}: use a gloo group"
            )
        self.gloo, self._own, self._ranks = gloo, gloo.rank(), gloo.size()
        self._register_backend(_CPU, _GLOO, gloo._get_backend(_CPU))
        self._set_default_backend(_GLOO)
        self._moves, self._deliveries = Moves(gloo), Deliveries()
        self._depart: Depart | None = None  # an emulated link
        self._due: Callable[[], int] | None = None  # of the operation that has just entered it
        # shows what runs here to CommDebugMode and the profiler
        self._silent = compat.silent_group(gloo.rank(), gloo.size())

    def getBackendName(self) -> str:
        """What DDP's log and `name()` show."""
        return NAME

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce one tensor in place."""
        return self._all_reduce(self._silent.allreduce, [_only("all_reduce", tensors)], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors in place."""
        return self._all_reduce(self._silent.allreduce_coalesced, tensors, opts)

    def _all_reduce(self, announce: Any, tensors: Tensors, opts: Any) -> dist.Work:
        operations = [operation_of(opts, tensor) for tensor in tensors]
        announce(_traces(tensors))
        with self._moving("all_reduce", tensors) as flats:
            for flat, operation in zip(flats, operations):
                self._moves.all_reduce(flat, operation)
        return self._finished(tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Fill a list with every rank's tensor; they may differ in size."""
        output, source = _only("all_gather", outputs), _only("all_gather", inputs)
        if len(output) != self._ranks or _shown(output[self._own]) != _shown(source):
            raise ValueError(
                f"all_gather: outputs {_shown(*output)} for this rank's input {_shown(source)}; expected {self._ranks},"
                " its own like its input"
            )
        self._silent.allgather([_traces(output)], _traces(inputs))
        with self._moving("all_gather", output) as flats:
            self._moves.all_gather(
                [flat.view(torch.uint8) for flat in flats], _flat("all_gather", source).view(torch.uint8)
            )
        return self._finished(output)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._gather_whole(self._silent._allgather_base, [output], [source], *_traces([output, source]))

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors, each into one output."""
        return self._gather_whole(
            self._silent.allgather_into_tensor_coalesced, outputs, inputs, _traces(outputs), _traces(inputs)
        )

    def _gather_whole(self, announce: Any, outputs: Tensors, inputs: Tensors, *traces: Any) -> dist.Work:
        self._check_whole("all_gather", outputs, inputs)
        announce(*traces)
        with self._moving("all_gather", outputs) as flats:
            for flat, source in zip(flats, inputs, strict=True):
                mine = _flat("all_gather", source).view(torch.uint8)
                self._moves.all_gather(flat.view(torch.uint8).tensor_split(self._ranks), mine)
        return self._finished(outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Reduce a list with one tensor a rank and keep this rank's; they may differ in size."""
        output, sources = _only("reduce_scatter", outputs), _only("reduce_scatter", inputs)
        if (
            len(sources) != self._ranks
            or _shown(sources[self._own]) != _shown(output)
            or len({each.dtype for each in sources}) > 1
        ):
            raise ValueError(
                f"reduce_scatter: inputs {_shown(*sources)} for the output {_shown(output)}; expected {self._ranks},"
                " its own like the output"
            )
        operation = operation_of(opts, output)
        self._silent.reduce_scatter(_traces(outputs), [_traces(sources)])
        with self._moving("reduce_scatter", outputs) as (flat,):
            self._moves.reduce_scatter(flat, [_flat("reduce_scatter", each) for each in sources], operation)
        return self._finished(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._scatter_whole(
            self._silent._reduce_scatter_base, [output], [source], opts, *_traces([output, source])
        )

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce and scatter several tensors."""
        return self._scatter_whole(
            self._silent.reduce_scatter_tensor_coalesced, outputs, inputs, opts, _traces(outputs), _traces(inputs)
        )

    def _scatter_whole(self, announce: Any, outputs: Tensors, inputs: Tensors, opts: Any, *traces: Any) -> dist.Work:
        self._check_whole("reduce_scatter", inputs, outputs)
        operations = [operation_of(opts, output) for output in outputs]
        announce(*traces)
        with self._moving("reduce_scatter", outputs) as flats:
            for flat, source, operation in zip(flats, inputs, operations):
                self._moves.reduce_scatter(flat, _flat("reduce_scatter", source).tensor_split(self._ranks), operation)
        return self._finished(outputs)

    # their names since torch 2.13
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Give the root's tensor to all."""
        tensor, root = _only("broadcast", tensors), 0 if opts is None else opts.rootRank
        self._silent.broadcast(_traces([tensor]))
        with self._moving("broadcast", [tensor]) as (flat,):
            self._moves.broadcast(flat.view(torch.uint8), root)
        return self._finished([tensor])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have come."""
        self._silent.barrier()
        with self._moving("barrier", []):
            self._moves.meet()
        return self._finished([torch.empty(0)])

    def put_behind(self, depart: Depart | None) -> None:
        """Have the operations of all tensors pass an emulated link; None takes it away."""
        self._depart = depart

    @contextmanager
    def _moving(self, kind: str, outputs: Tensors) -> Iterator[list[torch.Tensor]]:
        """Outputs in one dimension, to be written inside;
        a profiler range that names the transport, as gloo's own do.
        """
        flats = [_flat(kind, output) for output in outputs]
        if self._depart is not None and kind in _ROUNDS:
            self._due = self._depart(kind, flats)
        with torch.profiler.record_function(f"shm:{kind}"):
            yield flats
            for flat, output in zip(flats, outputs):
                if not output.is_contiguous():
                    output.data.copy_(flat.view(output.shape))

    def _finished(self, result: Tensors) -> dist.Work:
        due, self._due = self._due, None
        return _create_work_from_future(self._deliveries.at(due() if due else 0, list(result)))

    def _check_whole(self, kind: str, wholes: Tensors, parts: Tensors) -> None:
        for whole, part in zip(wholes, parts, strict=True):
            if whole.numel() != self._ranks * part.numel() or whole.dtype != part.dtype:
                raise ValueError(f"{kind}: {_shown(whole)} is not {self._ranks} times {_shown(part)}")


def _only(kind: str, given: Sequence[Any]) -> Any:
    if len(given) != 1:
        raise ValueError(f"{kind}: expected one tensor a rank, got {len(given)}; call it for each")
    return given[0]


def _shown(*tensors: torch.Tensor) -> str:
    return ", ".join(f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _flat(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one dimension, without autograd and its version counter: backends write behind autograd's back."""
    if tensor.device != _CPU or tensor.layout != torch.strided:
        raise ValueError(
            f"{kind}: shared memory moves dense tensors on the CPU, not {tensor.layout} on {tensor.device}: use a gloo"
            " group"
        )
    return tensor.data.contiguous().view(-1)


def _traces(tensors: Tensors) -> list[torch.Tensor]:
    """Nothing of the tensors but their storage: the profiler sees which buffers move, and announcing them moves
    nothing.
    """
    return [tensor.data.as_strided((0,), (1,)) for tensor in tensors]
