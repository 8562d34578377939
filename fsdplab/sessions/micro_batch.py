"""Records one micro-batch of any model for predictions: its storages, and when the engine's hooks would act.

The plain model runs one forward and one backward on fake tensors (shapes without values, `FakeTensorMode`), with no
process group. The engine's own hooks say where units begin and end; what they call is written down instead of done. A
dispatch mode sees every result of an operator, and a finalizer of its storage when the last tensor of it is gone. Real
tensors are recorded alike, for models whose control flow depends on values.

Kernels take scratch memory that no result shows: see `scratch.py`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from fsdplab.engine import compat
from fsdplab.engine.core.hooks import Runtime, UnitHooks
from fsdplab.engine.core.policy import MixedPrecisionPolicy
from fsdplab.engine.core.unit import Memory, Unit
from fsdplab.engine.features.recompute import recompute_of, recomputing
from fsdplab.engine.shard import owned_parameters, select_units
from fsdplab.planning.lab_memory.step import Allocate, Call, Event, Free, Gradient, MicroBatch, Stored
from fsdplab.sessions.scratch import Taken, one_thread, taken_by
from fsdplab.workloads.workload import At

RANDOM_STATE = 5056  # bytes: checkpointing keeps the generator's state for each region, past all dispatch modes
SCRATCH = -1  # instead of a storage's number: memory inside an operator
CPU = torch.device("cpu")
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@dataclass(frozen=True)
class RecordChoices:
    """What a recording depends on, besides the workload. `units`: the built model -> what `shard_model` takes.
    `on_card`: the scratch memory of the CPU's kernels is left out. `matrices`: the built model -> the parameters that
    Muon steps; by default there are none.
    """

    units: Callable[[nn.Module], Any]
    low_precision: bool = False  # whether parameters compute in bfloat16
    checkpoint: str = "none"
    world_size: int = 1
    seed: int = 0
    on_card: bool = False
    recomputes: type[nn.Module] = nn.Module  # of the units below the root, those that are computed again
    matrices: Callable[[nn.Module], Sequence[nn.Parameter]] = lambda _: ()


class Trainable(Protocol):
    """What is recorded: as a run's workload."""

    def build(self, device: torch.device | str, seed: int) -> nn.Module: ...
    def batch(self, at: At) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...


def record_micro_batch(workload: Trainable, choices: RecordChoices) -> MicroBatch:
    """Record the first micro-batch of `workload`, on fake tensors; on real ones where its control flow needs values."""
    # drawn with values, which the second way needs; fake tensors are made of it for the first
    batch = workload.batch(At(0, 0, choices.world_size, seed=choices.seed))
    try:
        with unlogged(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            model = without_values(workload.build("meta", choices.seed))
            batch_without = tree_map_only(Tensor, fake.from_tensor, batch)
            return _record(workload, model, batch_without, choices, real=False)
    except NEEDS_VALUES:
        with one_thread():
            return _record(workload, workload.build("cpu", choices.seed), batch, choices, real=True)


@contextmanager
def unlogged() -> Iterator[None]:
    """Silence torch's own log of an operator that fails on fake tensors: its error is raised, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def without_values(model: nn.Module) -> nn.Module:
    """Give `model` fake tensors of the CPU instead of its own; what is shared stays shared."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            fakes[id(tensor)] = new
        return fakes[id(tensor)]

    for module in model.modules():
        # `__dict__` holds tensors that are plain attributes, such as masks and tables of positions
        for attributes in (module._parameters, module._buffers, module.__dict__):
            for name, value in [*attributes.items()]:
                if isinstance(value, Tensor):
                    attributes[name] = fake(value)
    return model


def _record(workload: Trainable, model: nn.Module, batch: Any, choices: RecordChoices, real: bool) -> MicroBatch:
    matrices = tuple((matrix.shape[0], matrix.shape[1]) for matrix in choices.matrices(model) if matrix.requires_grad)
    log = StorageLog(with_scratch=not choices.on_card)
    runtime, stored = _hooked(model, choices, log)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    for tensor in (*model.buffers(), *tensors):
        # they are there before the micro-batch, and counted apart
        log.know(tensor)
    with log:
        loss = workload.loss(model, batch)
        with log.between_nodes(loss):
            loss.backward()
        # else its storage would outlive the recording
        del loss
    return MicroBatch(
        {name: stored[name] for name in runtime.units},
        log.events(),
        _bytes_of(tensors),
        _bytes_of(model.buffers()),
        log.flops,
        log.moved,
        real,
        matrices,
    )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of their storages, each counted once."""
    by_address = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        by_address[storage._cdata] = storage.nbytes()
    return sum(by_address.values())


# ---- when the engine would act


def _hooked(model: nn.Module, choices: RecordChoices, log: StorageLog) -> tuple[_Calls, dict[str, tuple[Stored, ...]]]:
    """Put the engine's hooks on the units of `model`; return what these call, and the units' parameters."""
    recompute = recompute_of(choices.checkpoint)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if choices.low_precision else None)
    names = {module: name or "root" for name, module in model.named_modules()}
    stored: dict[str, tuple[Stored, ...]] = {}
    hooks: dict[str, UnitHooks] = {}
    # inner units first, the root last: a parameter belongs to the innermost unit around it
    recomputed: set[str] = set()
    for module in [*reversed(select_units(model, choices.units(model))), model]:
        unit = names[module]
        if recompute is not None and module is not model and isinstance(module, choices.recomputes):
            module.__class__ = recomputing(module.__class__, recompute)
            recomputed.add(unit)
        owned = {parameter: name for parameter, (name, _) in owned_parameters([module], set()).items()}
        stored[unit] = tuple(_stored(parameter, name, unit, policy, log) for parameter, name in owned.items())
        hooks[unit] = UnitHooks([module], Unit(_NoMemory(unit, owned, policy), None))
    in_order = {name: hooks[name].unit for name in names.values() if name in hooks}
    runtime = _Calls(in_order, log, recomputed)
    for unit_hooks in hooks.values():
        unit_hooks.runtime = runtime
    return runtime, stored


def _stored(parameter: nn.Parameter, name: str, unit: str, policy: MixedPrecisionPolicy, log: StorageLog) -> Stored:
    """Return what the unit stores of it; from now on it has the dtype of computing, and its gradient is noted."""
    stored_dtype = parameter.dtype
    if policy.param_dtype and stored_dtype.is_floating_point:
        parameter.data = parameter.data.to(policy.param_dtype)
    log.know(parameter)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(partial(log.note_gradient, unit, name))
    shape = tuple(parameter.shape)
    return Stored(name, shape, stored_dtype.itemsize, parameter.dtype.itemsize, parameter.requires_grad)


class _NoMemory(Memory):
    """A unit that holds and sends nothing: its parameters are there as they are."""

    keeps_whole, keeps_gradients, hides_all_reduce = True, False, False

    def __init__(self, name: str, parameters: Iterable[nn.Parameter], policy: MixedPrecisionPolicy) -> None:
        self.name, self.config = name, SimpleNamespace(policy=policy, device=CPU)
        self.params = [SimpleNamespace(at_rest=parameter, sites=lambda: ()) for parameter in parameters]

    def changed(self) -> bool:
        return False

    def gather(self, phase: str) -> None:
        return None

    def free(self) -> None: ...
    def collect_gradients(self, keep: bool) -> None: ...
    def has_gradients(self, or_zeros: bool) -> bool:
        return False

    def reduce(self, options: Any) -> Iterator[Any]:
        return iter(())

    def forget_gradients(self) -> None: ...


class _Calls(Runtime):
    """Notes what hooks call. A unit's state is kept, as the hooks ask for it. Those that are computed again keep the
    generator's state from their forward to their backward.
    """

    def __init__(self, units: dict[str, Unit], log: StorageLog, recomputed: Collection[str]) -> None:
        super().__init__(units, prefetch=0)
        self.log, self._recomputed = log, recomputed
        self._computing = [self.root.name]  # units whose forward or backward runs, the innermost last
        self._ends = False

    def check_before_training(self, root: nn.Module) -> None:
        """Check nothing: no ranks train here, and the units hold no shards that a check could look at."""

    def _note(self, method: str, unit: Unit, *options: bool) -> None:
        self.log.note(Call(method, unit.name, *options))
        if method.startswith("before"):
            self._computing.append(unit.name)
        elif method.startswith("after") and unit.name in self._computing[1:]:
            self._computing.remove(unit.name)
        self.log.unit = self._computing[-1]

    def before_forward(self, unit: Unit) -> None:
        if not compat.inside_backward():
            self._note("before_forward", unit)
            if unit.name in self._recomputed:
                self.log.note(Allocate(self._kept_for(unit), RANDOM_STATE, "activations"))
        super().before_forward(unit)

    def after_forward(self, unit: Unit, will_backward: bool) -> None:
        if not compat.inside_backward():
            self._note("after_forward", unit, will_backward, unit.hidden)
        super().after_forward(unit, will_backward)

    def unshard_again(self, unit: Unit) -> None:
        self._note("unshard_again", unit)
        super().unshard_again(unit)

    def begin_backward(self) -> bool:
        if not self.in_backward:
            self.log.note(Call("begin_backward", ""))
        return super().begin_backward()

    def before_backward(self, unit: Unit) -> None:
        self._queue_end()
        self._note("before_backward", unit)
        super().before_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        if not self._ends:
            self._queue_end()
            if unit.name in self._recomputed:
                # autograd has let go of what the unit's first operator saved before it hands on a gradient
                self.log.note(Free(self._kept_for(unit)))
            self._note("after_backward", unit)
        super().after_backward(unit)

    def end_backward(self) -> None:
        self.log.note(Call("end_backward", ""))
        self._ends = True  # units that are left are the order's own business
        super().end_backward()
        self._ends = False

    def _kept_for(self, unit: Unit) -> int:
        """Return a number that no storage has."""
        return -2 - [*self.units].index(unit.name)

    def _hand_out_undecided(self) -> None: ...


# ---- storages


class StorageLog(TorchDispatchMode):
    """Notes the storages of all results of operators, from their beginning to their end, between the calls of hooks."""

    def __init__(self, with_scratch: bool = True) -> None:
        super().__init__()
        self.unit = "root"  # whose operators run now
        self.flops: dict[tuple[str, str], int] = {}
        self.moved: dict[tuple[str, str], int] = {}
        self._with_scratch = with_scratch
        self._events: list[Event] = []
        self._numbers: dict[int, int] = {}  # address of a storage -> its number; 0: it was there before
        self._gradients: set[int] = set()
        self._begun = 0
        self._between = False  # whether autograd sums gradients now, between two nodes
        self._summed: tuple[int, set[int]] = (0, set())  # the last sum, and what it might have been written into
        self._same: dict[int, int] = {}  # storage -> an earlier one that it would have been written into

    def know(self, tensor: Tensor) -> None:
        """Leave its storage out of the recording."""
        self._numbers[tensor.untyped_storage()._cdata] = 0

    def note(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def note_gradient(self, unit: str, name: str, parameter: nn.Parameter) -> None:
        """Note that autograd has left a gradient; from now on only the unit holds it."""
        assert parameter.grad is not None
        number = self._numbers[parameter.grad.untyped_storage()._cdata]
        parameter.grad = None  # which frees it, so the last events have its end
        number = self._same.get(number, number)
        at = len(self._events) - 1
        # back to where the gradient's storage was freed: from there on the unit holds it
        while self._events[at] != Free(number):
            at -= 1
        self._events.insert(at, Gradient(unit, name, number))
        self._gradients.add(number)

    def events(self) -> list[Event]:
        """Return all that was noted; storages that became gradients are so from their beginning."""
        events: list[Event] = []
        for event in self._events:
            if isinstance(event, Allocate) and event.storage in self._gradients:
                event = event._replace(category="unsharded_gradients")
            events.append(event)
        return events

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        self._summed = 0, set()
        result = func(*args, **given)
        taken = taken_by(func, args, result) if self._with_scratch else Taken()
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor, nbytes in zip(results, taken.results, strict=bool(taken.results)):
            _have(tensor, nbytes)
        numbers = [self._see(tensor) for tensor in results]
        new = [number for number in numbers if number]
        # A tensor with two uses has two gradients, which autograd adds here. It may write into the first, but not into
        # a view such as the gradient of a linear layer's weight: then both and their sum are there at once.
        if self._between and func is torch.ops.aten.add.Tensor and new and _may_be_written(args[0]):
            self._summed = new[0], {self._number(args[0])}
        if taken.scratch:
            # begins and ends inside the operator, at whose peak it counts
            self._events += [Allocate(SCRATCH, taken.scratch, "activations"), Free(SCRATCH)]
        self._count(func, args, given, result, bool(new))
        return result

    def _count(self, func: Any, args: tuple, given: dict[str, Any], result: Any, makes: bool) -> None:
        """Count the arithmetic of products, and of other operators the bytes that they read and write; views do
        neither.
        """
        phase = "backward" if compat.inside_backward() else "forward"
        key = (self.unit, phase)
        flops_of = flop_registry.get(func._overloadpacket)
        if flops_of is not None:
            # a product of [m, k] and [k, n]: 2 m k n
            self.flops[key] = self.flops.get(key, 0) + flops_of(*args, **given, out_val=result)
        # every argument is read and every result written once
        elif makes or func._schema.is_mutable:
            nbytes = 0
            for leaf in tree_leaves((args, given, result)):
                if isinstance(leaf, Tensor):
                    nbytes += leaf.numel() * leaf.element_size()
            self.moved[key] = self.moved.get(key, 0) + nbytes

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(tensor.untyped_storage()._cdata, 0)
        return self._same.get(number, number)

    def _see(self, tensor: Tensor) -> int:
        """Return the number of a new storage; 0 for one that is known."""
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return 0
        self._begun += 1
        self._numbers[storage._cdata] = self._begun
        self._events.append(Allocate(self._begun, storage.nbytes(), "activations"))
        # called when the last tensor of the storage is gone, views included
        weakref.finalize(storage, self._end, storage._cdata, self._begun)
        return self._begun

    def _end(self, address: int, number: int) -> None:
        self._numbers.pop(address, None)
        number = self._same.get(number, number)
        made, places = self._summed
        if number in places:
            # without a dispatch mode, autograd would have summed in place: one storage goes on as the other
            self._summed = 0, set()
            at = len(self._events) - 1
            while not self._begins(self._events[at], made):
                at -= 1
            del self._events[at]
            self._same[made] = number
            return
        self._events.append(Free(number))

    @staticmethod
    def _begins(event: Event, number: int) -> bool:
        return isinstance(event, Allocate) and event.storage == number

    @contextmanager
    def between_nodes(self, loss: Tensor) -> Iterator[None]:
        """Know during the backward of `loss` which sums are those of gradients that autograd makes between nodes."""

        def after(*_: Any) -> None:
            self._between = True

        def before(*_: Any) -> None:
            self._between, self._summed = False, (0, set())

        handles = []
        for node in _nodes(loss):
            handles += [node.register_prehook(before), node.register_hook(after)]
        yield
        for handle in handles:
            handle.remove()


def _have(tensor: Tensor, nbytes: int) -> None:
    """Give a fake result the bytes that the kernel's has."""
    if nbytes != tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(nbytes)
        tensor.set_(tensor.untyped_storage(), 0, (nbytes // tensor.element_size(),))


def _nodes(loss: Tensor) -> list[Any]:
    """Return the nodes of a graph that compute gradients."""
    nodes: dict[Any, None] = {}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes or node.name() == "torch::autograd::AccumulateGrad":
            continue
        nodes[node] = None
        # edges lead from a result to its inputs: from the loss to all that it depends on
        waiting += [next_node for next_node, _ in node.next_functions]
    return list(nodes)


def _may_be_written(tensor: Any) -> bool:
    """Return whether autograd may sum into a gradient that nobody else holds: no view, and in one piece."""
    return isinstance(tensor, Tensor) and not tensor._is_view() and is_dense(tensor)
