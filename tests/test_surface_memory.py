"""What is alive and for how long: gathered units, low-precision slices, two hundred steps,
and a model that is let go.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import fsdplab.engine as engine
from fsdplab.engine import events, fully_shard, shard_model
from fsdplab.engine.shard import units_of
from fsdplab.profiling.profiler import await_gloo_threads
from tests.surface import Net, loss_of, mesh_of, sharded

T = TypeVar("T")
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
EQUAL = (8, 8, 8, 8, 8, 8)  # blocks of one size


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def settled(count: Callable[[], T]) -> T:
    """What `count` gives twice in a row with no gloo thread at work: such a thread says that a collective is done, and
    lets go of its tensors a moment later. What is kept for good is counted each time.
    """
    before, now = None, count()
    while now != before:
        time.sleep(0.01)  # a thread that lets go of a tensor may wait for the interpreter's lock
        await_gloo_threads()
        before, now = now, count()
    return now


# ---- unsharded parameters


def bytes_gathered(model: nn.Module) -> int:
    """What the gathered forms of all units but the root hold right now."""
    gathered = [
        p.gathered
        for unit in units_of(model)
        if unit.name != "root"
        for p in unit.memory.params
        if p.gathered is not None
    ]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in gathered}.values())


def most_gathered(make: Callable[[], nn.Module]) -> tuple[int, float, float]:
    """In four steps: the most units but the root that were on their way or gathered at once, the most memory that
    gathered ones had at once, in blocks, and what was left after each step.
    """
    model = make()
    busy, most, left = 0, 0, 0

    def watch(event: events.Event) -> None:
        nonlocal busy, most
        busy = max(busy, sum(unit.state != "sharded" for unit in units_of(model) if unit.name != "root"))
        if isinstance(event, events.Transition | events.Tag):  # memory is tagged when it is taken
            most = max(most, bytes_gathered(model))

    train(model, 1)
    one_block = next(unit for unit in units_of(model) if unit.name == "blocks.0").memory.plan.layout.whole_bytes
    stop = events.subscribe(watch)
    for _ in range(4):
        train(model, 1)
        left = max(left, bytes_gathered(model))
    stop()
    return busy, most / one_block, left / one_block


def by_prefetch(prefetch: int, policy: MixedPrecisionPolicy, transport: str) -> Callable[[], nn.Module]:
    options = {"mp_policy": policy, "prefetch": prefetch, "transport": transport, "mesh": mesh_of()}
    return lambda: shard_model(Net(hidden=EQUAL), "full_shard", **options)


def prefetch_of_two_by_hand() -> nn.Module:
    model = sharded(engine, Net(hidden=EQUAL))
    for index, block in enumerate(model.blocks):
        block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 3]))
        block.set_modules_to_backward_prefetch(list(reversed(model.blocks[max(index - 2, 0) : index])))
    return model


def bounds() -> None:
    for transport in ("gloo", "shm"):
        for policy in (MixedPrecisionPolicy(), LOW):
            for prefetch in (0, 1, 2):
                found = most_gathered(by_prefetch(prefetch, policy, transport))
                at_once = 1 if transport == "gloo" else prefetch + 1  # gloo's are on their way in buffers of their own
                assert found == (prefetch + 1, at_once, 0), (transport, policy, prefetch, found)
    for _ in range(2):
        assert most_gathered(prefetch_of_two_by_hand) == (3, 3, 0)
    assert most_gathered(lambda: sharded(engine, Net(hidden=EQUAL))) == (2, 2, 0)


def test_never_more_than_the_prefetch_depth_and_one_unit_besides_the_root(ranks) -> None:
    ranks(2, bounds)


# ---- low-precision slices


def low_slices() -> None:
    """A slice that is cast for its gather is cast where the gather ends: no low-precision copy is kept beside it."""
    model = shard_model(Net(), "full_shard", mp_policy=LOW, transport="gloo", mesh=mesh_of())
    train(model, 1)
    made: Counter = Counter()

    def watch(event: events.Event) -> None:
        if isinstance(event, events.Tag):
            made[event.category] += 1

    stop = events.subscribe(watch)
    loss_of(model).backward()
    stop()
    assert made["unsharded_parameters"] and not made["sharded_parameters"], made


def test_no_low_precision_copy_is_kept(ranks) -> None:
    ranks(2, low_slices)


# ---- two hundred steps


def alive() -> tuple[int, int]:
    """Bytes under all tensors that Python can see, and their number."""
    gc.collect()
    storages, count = {}, 0
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            local = each._local_tensor if isinstance(each, DTensor) else each
            if not local.is_meta and type(local) in (torch.Tensor, nn.Parameter):
                count += 1
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values()), count


def no_growth(strategy: str, policy: MixedPrecisionPolicy, transport: str) -> list[tuple[int, int]]:
    model = shard_model(Net(), strategy, mp_policy=policy, transport=transport, mesh=mesh_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    counts = []
    for steps in (10, 95, 95):
        train(model, steps, optimizer)
        counts.append(settled(alive))
    return counts


@pytest.mark.full("two hundred steps")
@pytest.mark.parametrize(
    "strategy,policy,transport",
    [("full_shard", LOW, "shm"), ("full_shard", MixedPrecisionPolicy(), "gloo"), ("zero1", LOW, "shm")],
)
def test_nothing_grows_over_200_steps(ranks, strategy: str, policy: MixedPrecisionPolicy, transport: str) -> None:
    for _, second, third in ranks(2, no_growth, strategy, policy, transport):  # the first counts what other tests left
        assert second == third


# ---- a model that is let go


def remembered(model: nn.Module) -> list[Any]:
    """Weak references to the model, its units, its parameters and everything they stand on."""
    kept: list[Any] = [weakref.ref(model), *(weakref.ref(module) for module in model.modules())]
    for unit in units_of(model):
        kept += [weakref.ref(unit), *(weakref.ref(param) for param in unit.memory.params)]
        tensors = [t for p in unit.memory.params for t in (p.gathered, p.at_rest, p.at_rest.grad) if t is not None]
        kept += [StorageWeakRef(storage_of(tensor)) for tensor in tensors]
    return kept


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def still_there(kept: list[Any]) -> list[str]:
    gone = lambda each: each.expired() if isinstance(each, StorageWeakRef) else each() is None  # noqa: E731
    return [f"storage {e.cdata}" if isinstance(e, StorageWeakRef) else type(e()).__name__ for e in kept if not gone(e)]


def in_use(prepare: Callable[[nn.Module], None], **options: Any) -> list[str]:
    """What is left of a model that was used in some way and then deleted, with the cyclic collector off."""
    gc.collect()
    gc.disable()
    try:
        model = shard_model(Net(), options.pop("strategy", "full_shard"), mesh=mesh_of(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        train(model, 2, optimizer)
        prepare(model)
        kept = remembered(model)
        del model, optimizer
        return settled(lambda: still_there(kept))
    finally:
        gc.enable()


def raises(model: nn.Module) -> None:
    try:
        model(torch.ones(2, 3))
    except RuntimeError as error:
        error.__traceback__ = None
    model.reset_iter_state()


def listed(model: nn.Module) -> None:
    """Units that name each other."""
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    loss_of(model).backward()


def let_go() -> None:
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "trained": lambda m: None,
        "gradients": lambda m: loss_of(m).backward(),
        "evaluated": lambda m: torch.no_grad()(m)(torch.ones(2, 8)),
        "by hand": lambda m: (m.unshard(), m.blocks[0].unshard(async_op=True).wait()),
        "in flight": lambda m: m.blocks[0].unshard(async_op=True),
        "prefetch lists": listed,
        "accumulated": lambda m: (m.set_requires_gradient_sync(False), loss_of(m).backward()),
        "exception": raises,
        "state": lambda m: fully_shard.state(m)._state_ctx.all_states,
    }
    in_use(lambda m: None)  # what torch imports at the first step keeps frames alive
    for way, prepare in ways.items():
        for options in ({}, {"transport": "gloo", "mp_policy": LOW}, {"strategy": "zero1"}, {"checkpoint": "full"}):
            left = in_use(prepare, **dict(options))
            if way == "in flight":  # peers still read those buffers
                left = [each for each in left if not each.startswith("storage")]
            assert left == [], (way, options, left)


def test_a_deleted_model_leaves_nothing_without_the_cyclic_collector(ranks) -> None:
    ranks(2, let_go)


def loss_kept() -> None:
    """A forward without a backward, whose loss outlives the model for a while."""
    gc.collect()
    gc.disable()
    try:
        model = sharded(engine)
        loss = loss_of(model)
        kept = remembered(model)
        del model, loss
        assert settled(lambda: still_there(kept)) == []
    finally:
        gc.enable()
    dist.barrier()


def test_a_forward_without_a_backward_is_let_go_too(ranks) -> None:
    ranks(2, loss_kept)
