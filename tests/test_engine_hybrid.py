"""Hybrid sharding: slices inside a group, replicas across groups, on a 2-D mesh."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard

from fsdplab.engine import MixedPrecisionPolicy, events, fully_shard, shard_model
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.streams import Job
from fsdplab.planning import UnitShapes, step_traffic
from fsdplab.workloads import build_model, loss_of
from fsdplab.workloads.twin import replay_gradients


def tokens_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def beside_twin_and_torch(shape: tuple[int, int], transport: str) -> None:
    """Five AdamW steps: the twin's losses and parameters, and torch's own HSDP on the same mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = shard_model(build_model("gpt-tiny", seed=1), "hybrid_shard", mesh=mesh, transport=transport)
    theirs = build_model("gpt-tiny", seed=1)
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(theirs, mesh=mesh)
    twin = build_model("gpt-tiny", seed=1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, theirs, twin)]
    for step in range(5):
        for each in (model, theirs):
            loss_of(each, *tokens_of(step, dist.get_rank())).backward()
        replay_gradients(twin, [[tokens_of(step, rank)] for rank in range(dist.get_world_size())], loss_of)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), other, whole in zip(
        model.named_parameters(), theirs.parameters(), twin.parameters(), strict=True
    ):
        assert ours.placements == other.placements == (Replicate(), Shard(0)), name
        assert ours.to_local().shape == other.to_local().shape, name
        torch.testing.assert_close(ours.full_tensor(), whole, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(ours.to_local(), other.to_local(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2)])
def test_hybrid_equals_the_twin_and_torch(ranks, shape: tuple[int, int], transport: str) -> None:
    ranks(shape[0] * shape[1], beside_twin_and_torch, shape, transport)


def ledger() -> tuple[dict, dict]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_model(build_model("gpt-tiny"), "hybrid_shard", mesh=mesh)
    seen: list[events.Collective] = []
    loss_of(model, *tokens_of(0, 0)).backward()
    stop = events.subscribe(lambda e: seen.append(e) if isinstance(e, events.Collective) else None)
    loss_of(model, *tokens_of(1, 0)).backward()
    stop()
    shapes = [
        UnitShapes(u.name, tuple((s.name, s.shape) for s in u.memory.plan.rest_layout.slots)) for u in units_of(model)
    ]
    expected = {(t.unit, t.kind, t.wire_bytes): t.count for t in step_traffic(shapes, "hybrid_shard", 4, replicas=2)}
    return dict(Counter((e.unit, e.kind, e.wire_bytes) for e in seen)), expected


def test_ledger_equals_the_formula(ranks) -> None:
    for counted, expected in ranks(4, ledger):
        assert counted == expected


def accumulated() -> None:
    """Without synchronisation nothing travels; afterwards the sum of both micro-batches is averaged."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, twin = fully_shard(build_model("gpt-tiny"), mesh=mesh), build_model("gpt-tiny")
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        (loss_of(model, *tokens_of(micro, dist.get_rank())) / 2).backward()
    replay_gradients(twin, [[tokens_of(micro, rank) for micro in range(2)] for rank in range(2)], loss_of)
    for ours, whole in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-7)


def test_accumulation_on_a_hybrid_mesh(ranks) -> None:
    ranks(2, accumulated)


def other_rows(strategy: str) -> None:
    """A row that is not `full_shard` within the shard group: three micro-batched AdamW steps beside the twin."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, twin = shard_model(build_model("gpt-tiny", seed=1), strategy, mesh=mesh), build_model("gpt-tiny", seed=1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, twin)]
    for step in range(3):
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            model.set_requires_gradient_sync(micro == 1 or strategy not in ("zero1",))
            (loss_of(model, *tokens_of(2 * step + micro, dist.get_rank())) / 2).backward()
        replay_gradients(
            twin, [[tokens_of(2 * step + micro, rank) for micro in range(2)] for rank in range(4)], loss_of
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), whole in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.placements == (Replicate(), Shard(0)), name
        torch.testing.assert_close(ours.full_tensor(), whole, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "shard_grad_op"])
def test_other_strategies_inside_the_shard_group(ranks, strategy: str) -> None:
    ranks(4, other_rows, strategy)


# ---- streams, and low precision


class OrderedStream:
    """Like a CUDA stream, it gives out events that another stream can wait for; here everything is done at once."""

    def __init__(self, role: str, issued: list[tuple[str, bool]]) -> None:
        self.role, self.issued = role, issued

    def run(self, job: Job) -> Pending:
        self.issued.append((self.role, job.after is not None))
        job.issue(True).wait()
        job.complete()
        return Pending(lambda: None, *job.buffers, event=torch.Event("cpu"))


def on_ordered_streams() -> list[tuple[str, bool]]:
    """What a step issues on the streams of reductions; and its gradients are those of a step on the host."""
    issued: list[tuple[str, bool]] = []
    found = []
    for ordered in (False, True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shard_model(build_model("gpt-tiny", seed=1), "hybrid_shard", mesh=mesh, transport="gloo")
        for unit in units_of(model) if ordered else ():
            shard, replicate = copy.copy(unit.memory.config.shard), copy.copy(unit.memory.config.replicate)
            shard._reduce_stream = OrderedStream("reduce", issued)
            replicate._all_reduce_stream = OrderedStream("all_reduce", issued)
            unit.memory.config = replace(unit.memory.config, shard=shard, replicate=replicate)
        loss_of(model, *tokens_of(0, dist.get_rank())).backward()
        found.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    return issued


def test_where_streams_order_them_both_reductions_are_issued_together(ranks) -> None:
    assert ranks(4, on_ordered_streams) == [[("reduce", False), ("all_reduce", True)] * 3] * 4


def large_float16_gradients(strategy: str, shape: tuple[int, ...]) -> list[float]:
    """The gradients of a model whose gradients are 20,000 on every rank, in float16: a sum of four overflows."""
    names = ("replicate", "shard")[: len(shape)]
    low = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = shard_model(
        torch.nn.Linear(4, 4, bias=False), strategy, units="root", mesh=mesh, mp_policy=low, transport="gloo"
    )
    (20_000 * model(torch.ones(1, 4))).sum().backward()
    (parameter,) = model.parameters()
    return (
        parameter.grad.to_local().flatten().tolist()
        if hasattr(parameter, "to_local")
        else parameter.grad.flatten().tolist()
    )


@pytest.mark.parametrize(("strategy", "shape"), [("hybrid_shard", (2, 2)), ("full_shard", (4,)), ("no_shard", (4,))])
def test_float16_gradients_are_divided_before_they_overflow(ranks, strategy: str, shape: tuple[int, ...]) -> None:
    for found in ranks(4, large_float16_gradients, strategy, shape):
        assert set(found) == {20_000.0}
