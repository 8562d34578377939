"""The engine's streams without a GPU: every access in a step is ordered, and every wait is needed.

The engine takes its way for CUDA on tensors of the CPU: collectives on three side streams, waits by events. Streams and
events are fakes that only say what they order (`stream_order.Order` judges it), and operators run at once, so the
numbers are right whatever the order. A group of one rank gathers and reduces all the same. Real streams, the real
allocator, several ranks, offload: tests/fake_cuda.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.engine import STRATEGIES, MixedPrecisionPolicy, shard_model
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.staged import StagedTransport
from fsdplab.engine.transport.streams import CudaStream, DeviceClock
from tests.stream_order import Order, tensors_of, touched

CPU = torch.device("cpu")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Device:
    """One device of fake streams: `order` hears what they do. The waits of a run are counted; one may be left out."""

    def __init__(self, left_out: int | None = None) -> None:
        self.order, self.left_out = Order(), left_out
        self.waits: list[str] = []
        self.numbers = itertools.count(1)
        self.current = Stream(self, name="main")

    def may_wait(self, stream: Stream, what: str) -> bool:
        self.waits.append(f"{stream.name} waits for {what}")
        return len(self.waits) - 1 != self.left_out


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name, self.number = device, name, next(device.numbers)
        self.device = CPU

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if self._device.may_wait(self, event.of):
            self._device.order.syncs.stream_wait_for_event(self.number, event.number)

    def record_event(self) -> Event:
        event = Event(self._device)
        event.record(self)
        return event


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.number, self.of = device, next(device.numbers), ""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current
        self.of = stream.name
        self._device.order.syncs.record_state(self.number, stream.number)


class Watch(TorchDispatchMode):
    """Tells the order what every operator touches, and when its memory comes and goes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = operator(*args, **(kwargs or {}))
        for tensor in tensors_of((output, args, kwargs)):
            self.note(tensor.untyped_storage())
        reads, writes = touched(operator, args, kwargs or {}, output)
        self.device.order.access(self.device.current.number, reads, writes, str(operator))
        return output

    def note(self, storage: torch.UntypedStorage) -> None:
        """Follow the memory of `storage`, if it is new and no part of memory that is known."""
        start, order = storage.data_ptr(), self.device.order
        if storage.nbytes() and not order.holds(start):
            order.allocated(start, self.device.current.number, start + storage.nbytes())
            weakref.finalize(storage, order.freed, start)


@contextmanager
def device(left_out: int | None = None) -> Iterator[Device]:
    """Fake streams in the place of CUDA's, and a watch over what runs."""
    made = Device(left_out)
    watch = Watch(made)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        made.order.freed(storage.data_ptr())
        resize(storage, size)
        watch.note(storage)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, made.current = made.current, stream
        yield
        made.current = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda _=None: made.current)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "Event", lambda **_: Event(made))
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        with watch:
            yield made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@dataclass(frozen=True)
class Case:
    """What is trained for two steps."""

    strategy: str
    prefetch: int = 1
    batches: int = 1
    checkpoint: str = "none"
    low: bool = False
    hook: bool = False


def sharded(made: Device, case: Case) -> nn.Module:
    """A model whose gathers and reductions run on fake side streams."""
    clock, transport = DeviceClock(CPU), StagedTransport(dist.group.WORLD, CPU)
    for role in ("gather", "reduce", "all_reduce"):
        setattr(transport, f"_{role}_stream", CudaStream(Stream(made, role), clock))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s")) if case.strategy == "hybrid_shard" else None
    policy = BF16 if case.low else MixedPrecisionPolicy()
    model = shard_model(
        Net(), case.strategy, mesh=mesh, prefetch=case.prefetch, checkpoint=case.checkpoint, mp_policy=policy
    )
    over = {"no_shard": ("replicate",), "hybrid_shard": ("shard", "replicate")}.get(case.strategy, ("shard",))
    for unit in units_of(model):
        unit.memory.config = replace(unit.memory.config, **dict.fromkeys(over, transport))
    for module in model.blocks if case.hook else ():
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(2.0))
    return model


def trained(case: Case, left_out: int | None = None) -> Device:
    """Two steps; in the second one every unit is prefetched. `left_out` is the number of a wait that is not done."""
    with device(left_out) as made:
        model = sharded(made, case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(2):
            for batch in range(case.batches):
                last = batch == case.batches - 1
                model.set_is_last_backward(last)
                if case.strategy in ("no_shard", "zero1"):
                    model.set_requires_gradient_sync(last)
                model(torch.full((4, 32), 0.1 * (step + batch))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return made


CASES = [
    Case(strategy, *rest)
    for strategy in STRATEGIES
    for rest in ((0, 2, "none"), (1, 1, "selective", True), (2, 1, "full", False, True))
]


def unordered() -> list[str]:
    return [f"{case}: {conflict}" for case in CASES for conflict in trained(case).order.conflicts]


def test_every_access_of_a_step_is_ordered(ranks) -> None:
    """Strategies x prefetch x accumulation x recomputation x dtypes x a hook that reads what was reduced."""
    assert ranks(1, unordered) == [[]]


def unnoticed(case: Case) -> tuple[list[str], list[int]]:
    """The waits of a run; and which of those of its second step may be left out without a conflict."""
    waits = trained(case).waits
    half = range(len(waits) // 2, len(waits))
    return waits, [number for number in half if not trained(case, number).order.conflicts]


@pytest.mark.parametrize(
    "case",
    [Case("full_shard", low=True), Case("hybrid_shard", hook=True), Case("no_shard", hook=True)],
    ids=lambda case: case.strategy,
)
def test_every_wait_is_needed(ranks, case: Case) -> None:
    ((waits, left_out),) = ranks(1, unnoticed, case)
    assert len(waits) >= 12 and [waits[number] for number in left_out] == []


def test_a_reduction_in_place_that_nobody_reads_needs_the_last_wait_alone(ranks) -> None:
    """Over replicas what was reduced in place is the gradient: no memory is given back after the wait, and the
    optimizer is the first to read it. By then the main stream has waited for a later reduction of the same stream.
    """
    ((waits, left_out),) = ranks(1, unnoticed, Case("no_shard"))
    half = range(len(waits) // 2, len(waits))
    for_reductions = [number for number in half if waits[number] == "main waits for all_reduce"]
    assert left_out == for_reductions[:-1] and for_reductions


def left_behind() -> list[str]:
    """A gather in flight when the model is deleted; a backward that raises, and another step."""
    with device() as made:
        model = sharded(made, Case("full_shard"))
        handle = model.blocks[0].unshard(async_op=True)
        del model, handle
        model = sharded(made, Case("full_shard", prefetch=2))
        for fails in (False, True, False):
            x = torch.ones(4, 32, requires_grad=True)
            if fails:
                model.blocks[0][1].register_full_backward_hook(lambda *_: 1 / 0)
            try:
                model(x).sum().backward()
            except ZeroDivisionError:
                model.blocks[0][1]._backward_hooks.clear()
                model.reset_iter_state()
    return made.order.conflicts


def test_what_is_left_behind_is_ordered(ranks) -> None:
    assert ranks(1, left_behind) == [[]]


def blind_to_ends() -> list[str]:
    """What is found without the ends of memory: the group's own reduction makes and frees a buffer on the reduce
    stream, and whoever gets its address next seems to race with it.
    """
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Order, "freed", lambda *_: None)
        for size in range(12):
            kept = torch.empty(997 * size)
            found += trained(Case("full_shard")).order.conflicts
            del kept
    return found


def test_a_check_that_misses_the_end_of_memory_reports_what_is_not_there(ranks) -> None:
    (found,) = ranks(1, blind_to_ends)
    assert any("aten." in each and "c10d" not in each for each in found)
