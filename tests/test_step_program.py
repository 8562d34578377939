"""The planned program of a step is what the engine does: every issue, wait and move of real runs, in their order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdplab.engine import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, events, fully_shard, shard_model
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import CollectiveLabel
from fsdplab.engine.shard import units_of
from fsdplab.planning.program import Change, Holds, Issue, Move, Operation, Sharing, Wait, record_step
from tests.test_engine_stream_order import Case, device, sharded

WIDTH, BLOCKS = 16, 5
EACH_BLOCK = tuple(f"blocks.{number}" for number in range(BLOCKS))
OVER_ALL = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard")
Program = list[tuple[str, ...]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.head.weight.T @ self.head.weight  # the inputs of the first block need a gradient
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def happened(strategy: str, shards: int, choice: dict[str, Any], transport: str) -> list[Program]:
    """What happens in each micro-batch of the third step, in its order."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // shards, shards)) if strategy == "hybrid_shard" else None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if choice["casts"] else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=False) if choice["offloads"] else OffloadPolicy()
    model = shard_model(
        Net(), strategy, mesh=mesh, prefetch=choice["prefetch"], transport=transport, mp_policy=policy,
        offload_policy=offload, checkpoint=choice["checkpoint"],
    )  # fmt: skip
    model.set_reduce_scatter_max_input_buffers(choice["in_flight"])
    return third_step(model, choice["micro_batches"], syncs_once=strategy in ("no_shard", "zero1"))


def third_step(model: nn.Module, batches: int, syncs_once: bool = False) -> list[Program]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        for number in range(batches):
            last = number == batches - 1
            model.set_is_last_backward(last)
            if syncs_once:
                model.set_requires_gradient_sync(last)
            seen: list[tuple[int, tuple[str, ...]]] = []
            stop = events.subscribe(lambda event: seen.extend(noted(event)))
            model(torch.ones(2, WIDTH)).float().sum().backward()
            stop()
            found.append([what for _, what in sorted(seen, key=lambda pair: pair[0])])
        optimizer.step()
        optimizer.zero_grad()
    return found[-batches:]


def noted(event: events.Event) -> Program:
    """A collective was issued, and was waited for just now."""
    if isinstance(event, events.Collective):
        label = (event.unit, event.phase, event.kind)
        return [(event.issue_ns, ("issue", *label)), (time.time_ns(), ("wait", *label))]
    if isinstance(event, events.Transition):
        return [(event.time_ns, ("move", event.unit, event.before, event.after, event.phase))]
    return []


def planned(
    strategy: str, shards: int, ranks: int, choice: dict[str, Any], blocks: Sequence[str] = EACH_BLOCK
) -> list[Program]:
    """The same of the program."""
    cut = shards if strategy != "no_shard" else 1
    sharing = Sharing.of(strategy, cut, ranks // cut, casts=choice["casts"], offloads=choice["offloads"])
    counts = {key: choice[key] for key in ("prefetch", "micro_batches", "in_flight")}
    segments = record_step(tuple((name, Holds()) for name in ("root", *blocks)), sharing, **counts)
    return [in_words(operations) for operations in segments]


def in_words(operations: list[Operation]) -> Program:
    labels = {each.number: (each.unit, each.phase, each.kind) for each in operations if isinstance(each, Issue)}
    found: Program = []
    for each in operations:
        if isinstance(each, Issue):
            found.append(("issue", *labels[each.number]))
        elif isinstance(each, Wait):
            found.append(("wait", *labels[each.number]))
        elif isinstance(each, Move):
            found.append(("move", *each))
    return found


def choices_of(strategy: str, transport: str) -> list[dict[str, Any]]:
    """Prefetch x micro-batches x reductions in flight; for some, what else a run may choose.

    Shared memory has three buffers for all-reduces, so it waits for the first of four that would be under way.
    """
    most = 1 if (strategy, transport) == ("no_shard", "shm") else 2
    plain = {"casts": False, "offloads": False, "checkpoint": "none"}
    found = [
        {"prefetch": prefetch, "micro_batches": batches, "in_flight": in_flight, **plain}
        for prefetch, batches, in_flight in product((0, 1, 2), (1, 3), range(1, most + 1))
    ]
    others = [{"casts": True}, {"checkpoint": "full"}]
    others += [{"offloads": True}] if strategy in ("shard_grad_op", "full_shard", "hybrid_shard") else []
    return found + [{"prefetch": 1, "micro_batches": 2, "in_flight": 1, **plain, **other} for other in others]


def all_of(strategy: str, shards: int, transport: str) -> list[list[Program]]:
    return [happened(strategy, shards, choice, transport) for choice in choices_of(strategy, transport)]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(
    "strategy,shards,world_size",
    [*((strategy, 2, 2) for strategy in OVER_ALL), ("hybrid_shard", 2, 4), ("full_shard", 4, 4), ("no_shard", 4, 4)],
)
def test_a_run_does_what_the_program_says(ranks, strategy: str, shards: int, world_size: int, transport: str) -> None:
    for runs in ranks(world_size, all_of, strategy, shards, transport):
        for choice, real in zip(choices_of(strategy, transport), runs, strict=True):
            assert real == planned(strategy, shards, world_size, choice), choice


def in_other_units(transport: str) -> list[list[Program]]:
    """Two blocks together in a unit, and units that are resharded to half of the ranks after their forward."""
    together, partly = Net(), Net()
    fully_shard([together.blocks[0], together.blocks[1]], transport=transport)
    for block in together.blocks[2:]:
        fully_shard(block, transport=transport)
    for block in partly.blocks:
        fully_shard(block, transport=transport, reshard_after_forward=dist.get_world_size() // 2)
    return [third_step(fully_shard(model, transport=transport), batches=2) for model in (together, partly)]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_other_units_do_what_the_program_says(ranks, transport: str) -> None:
    choice = {"prefetch": 1, "micro_batches": 2, "in_flight": 1, "casts": False, "offloads": False}
    partly = planned("full_shard", 4, 4, choice)
    blocks = ("blocks.0+blocks.1", *(f"blocks.{number}" for number in range(2, BLOCKS)))
    together = planned("full_shard", 4, 4, choice, blocks)
    for runs in ranks(4, in_other_units, transport):
        assert runs == [together, partly]


# ---- on streams


def on_fake_streams(strategy: str, prefetch: int, batches: int, checkpoint: str, in_flight: int) -> list[Program]:
    """What happens in each micro-batch of the second step where collectives run on CUDA's streams, which are fakes."""
    case, log, found = Case(strategy, prefetch, batches, checkpoint, low=True), [], []
    with device() as made:
        model = sharded(made, case)
        model.set_reduce_scatter_max_input_buffers(in_flight)
        for transport in {each for unit in units_of(model) for each in unit.memory.transports()}:
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                setattr(transport, kind, noting(kind, getattr(transport, kind), log))
        stop = events.subscribe(lambda event: log.extend(what for _, what in noted(event)))
        for number in (0, *range(batches)):
            last = number == batches - 1
            model.set_is_last_backward(last)
            if strategy == "no_shard":
                model.set_requires_gradient_sync(last)
            log.clear()
            model(torch.ones(4, 32, requires_grad=True)).square().mean().backward()
            found.append(list(log))
        stop()
        events._deferred.clear()  # times of fakes
    return found[-batches:]


def noting(kind: str, collective: Any, log: Program) -> Any:
    """A transport's method that notes when a collective is issued and when it is waited for."""

    def noted_one(*args: Any, **kwargs: Any) -> Pending:
        label = next(each for each in args if isinstance(each, CollectiveLabel))
        row = (label.unit, label.phase, kind)
        log.append(("issue", *row))
        pending = collective(*args, **kwargs)
        wait = lambda: [pending.wait(), log.append(("wait", *row))]
        return Pending(wait, pending, on_drop=pending.abandon, event=pending.event)

    return noted_one


STREAMED = list(product((0, 1, 2), (1, 3), ("none", "full"), (1, 2)))


def all_on_fake_streams(strategy: str) -> list[list[Program]]:
    return [on_fake_streams(strategy, *choice) for choice in STREAMED]


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"])
def test_streams_do_what_the_program_says(ranks, strategy: str) -> None:
    units = dict.fromkeys(("root", "blocks.0", "blocks.1", "blocks.2"), Holds())
    units["root"] = Holds(False, False)
    sharing = Sharing.of(strategy, 1 if strategy == "no_shard" else 2, 2, casts=True, streams=True)
    if strategy not in ("no_shard", "hybrid_shard"):
        sharing = replace(sharing, replicates=False)
    (runs,) = ranks(1, all_on_fake_streams, strategy)
    for (prefetch, batches, checkpoint, in_flight), real in zip(STREAMED, runs, strict=True):
        segments = record_step(tuple(units.items()), sharing, prefetch, batches, in_flight)
        assert real == [in_words(operations) for operations in segments], (prefetch, batches, checkpoint, in_flight)


@pytest.mark.quick
@pytest.mark.parametrize("strategy", [*OVER_ALL, "hybrid_shard"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_backward_leaves_nothing_under_way(strategy: str, streams: bool) -> None:
    """Every collective is waited for once, and what a step takes it gives back, but for what the optimizer reads."""
    replicates = strategy in ("no_shard", "hybrid_shard")
    sharing = Sharing.of(strategy, 1 if strategy == "no_shard" else 2, 1 + replicates, streams=streams)
    segments = record_step(tuple((name, Holds()) for name in ("root", "a", "b")), sharing, micro_batches=3)
    for operations in segments:
        issued = sorted(each.number for each in operations if isinstance(each, Issue))
        assert issued == sorted(each.number for each in operations if isinstance(each, Wait))
    held = Counter[str]()
    for each in (each for segment in segments for each in segment):
        if isinstance(each, Change):
            held[each.buffer] += each.sign
    given = "kept_gradients" if strategy == "zero1" else "sharded_gradients"
    assert set(held.values()) == {0, 3} and +held == {given: 3}
