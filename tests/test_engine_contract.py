"""What the engine promises to a program: PyTorch's contract, the ledger, bounded gathered memory, clear errors."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdplab.engine import STRATEGIES, FSDPModule, events, fully_shard, shard_model
from fsdplab.engine.shard import units_of
from fsdplab.planning import UnitShapes, step_traffic
from fsdplab.workloads import PRESETS, build_model, initialise, loss_of
from fsdplab.workloads.shapes import gpt
from fsdplab.workloads.twin import replay_gradients

ROWS = [name for name in STRATEGIES if name != "hybrid_shard"]  # that one needs a 2-D mesh
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Odd(nn.Module):
    """Rows that divide by nothing, fewer rows than ranks, and a parameter that the forward may skip."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3))
        self.spare = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.ones(1))
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x if self.skip else self.spare(x)) * self.scale


def step_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


# ---- PyTorch's contract


def surface() -> None:
    model, names = Odd(), [name for name, _ in Odd().named_parameters()]
    theirs = Odd()
    for block in theirs.blocks:
        torch_fully_shard(block)
    torch_fully_shard(theirs)
    for block in model.blocks:
        assert fully_shard(block) is block
    fully_shard(model)
    assert type(model).__name__ == "FSDPOdd" and isinstance(model, Odd | FSDPModule)
    assert isinstance(model, FSDPModule) and isinstance(model, TorchFSDPModule)
    assert isinstance(model.blocks[0], nn.Sequential) and len(model.blocks[0]) == 3
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    for (name, ours), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(ours, DTensor) and ours.placements == (Shard(0),), name
        assert ours.shape == other.shape and ours.stride() == other.stride()
        assert torch.equal(ours.to_local(), other.to_local()), f"{name} on rank {dist.get_rank()}"
    step_of(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == (Shard(0),), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_fully_shard_leaves_what_pytorchs_leaves(ranks, world_size: int) -> None:
    ranks(world_size, surface)


def explicit_unshard() -> None:
    model, whole = fully_shard(Odd()), Odd()
    handle = model.unshard(async_op=True)
    handle.wait()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert not isinstance(ours, DTensor) and torch.equal(ours, theirs), name
    model.reshard()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.unshard()
    assert not isinstance(model.scale, DTensor)


def test_unshard_and_reshard_by_hand(ranks) -> None:
    ranks(2, explicit_unshard)


def at_rest(strategy: str) -> int:
    """Bytes of the buffers that the parameters at rest lie in."""
    held = 0
    for unit in units_of(shard_model(build_model("gpt-tiny"), strategy)):
        buffer = unit.memory.whole.tensor if unit.memory.plan.aliased else unit.memory.shards
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        assert all(begin <= param.local.data_ptr() < end for param in unit.memory.params if param.local.numel())
        held += buffer.nbytes
    return held


def test_parameters_at_rest_are_whole_or_one_nth(ranks) -> None:
    whole = sum(p.numel() for p in build_model("gpt-tiny").parameters()) * 4
    for strategy, row in [(name, STRATEGIES[name]) for name in ROWS]:
        for held in ranks(2, at_rest, strategy):
            assert held == (whole // 2 if row.shard_parameters else whole), strategy


# ---- the ledger


def ledger_of(strategy: str, policy: MixedPrecisionPolicy, micro_batches: int) -> tuple[list, list]:
    """The ledger of the third step, and the formula's answer, in the same form."""
    model, row = shard_model(Odd(), strategy, mp_policy=policy), STRATEGIES[strategy]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shapes = [
        UnitShapes(u.name, tuple((s.name, s.shape) for s in u.memory.plan.rest_layout.slots)) for u in units_of(model)
    ]
    for _ in range(3):
        seen: list[events.Collective] = []
        stop = events.subscribe(lambda e: seen.append(e) if isinstance(e, events.Collective) else None)
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            model.set_requires_gradient_sync(last or row.shard_gradients)
            model.set_is_last_backward(last)
            step_of(model)
        optimizer.step()
        optimizer.zero_grad()
        stop()
    assert all(0 < e.start_ns <= e.end_ns and not e.emulated for e in seen)
    counted = Counter((e.unit, e.kind, e.logical_bytes, e.wire_bytes, e.padding_bytes) for e in seen)
    param, reduce = (policy.param_dtype or torch.float32).itemsize, (policy.reduce_dtype or torch.float32).itemsize
    formula = step_traffic(
        shapes,
        strategy,
        dist.get_world_size(),
        param_itemsize=param,
        reduce_itemsize=reduce,
        micro_batches=micro_batches,
    )
    expected = {(t.unit, t.kind, t.logical_bytes, t.wire_bytes, t.padding_bytes): t.count for t in formula}
    dtypes = {e.dtype for e in seen if e.kind == "all_gather"}
    assert dtypes <= {str(policy.param_dtype or torch.float32).removeprefix("torch.")}
    return sorted(counted.items()), sorted(expected.items())


def ledgers() -> dict[str, tuple[list, list]]:
    cases = [(name, policy, micros) for name in ROWS for policy in (MixedPrecisionPolicy(), BF16) for micros in (1, 3)]
    return {
        f"{name}, {policy}, {micros} micro-batches": ledger_of(name, policy, micros) for name, policy, micros in cases
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_ledger_equals_the_formula_unit_by_unit(ranks, world_size: int) -> None:
    for found in ranks(world_size, ledgers):
        assert len(found) == 4 * len(ROWS)
        for case, (counted, expected) in found.items():
            assert counted == expected, case


def counted(strategy: str) -> dict[str, int]:
    """Collectives of one step as CommDebugMode sees them."""
    model = shard_model(Odd(), strategy)
    step_of(model)
    with CommDebugMode() as seen:
        step_of(model)
    return {str(op).removeprefix("c10d."): count for op, count in seen.get_comm_counts().items()}


def test_comm_debug_mode_sees_the_textbooks_collectives(ranks) -> None:
    """Four units (three blocks and the root, which is gathered once): nothing but what the table promises."""
    expected = {
        "no_shard": {"allreduce_": 4},
        "zero1": {"_allgather_base_": 4, "_reduce_scatter_base_": 4},
        "zero2": {"_allgather_base_": 4, "_reduce_scatter_base_": 4},
        "shard_grad_op": {"_allgather_base_": 4, "_reduce_scatter_base_": 4},
        "full_shard": {"_allgather_base_": 7, "_reduce_scatter_base_": 4},
    }
    for strategy, counts in expected.items():
        assert ranks(2, counted, strategy) == [counts, counts], strategy
        assert ranks(1, counted, strategy) == [{}], strategy


def test_one_rank_communicates_nothing(ranks) -> None:
    assert ranks(1, ledger_of, "full_shard", MixedPrecisionPolicy(), 1) == [([], [])]


# ---- prefetch and gathered memory


def most_gathered(strategy: str, prefetch: int) -> tuple[int, list[float]]:
    """The largest number of units besides the root that were gathered, or being gathered, at once."""
    config = gpt("small", layers=6, width=32, heads=2, ffn=64, vocabulary=64, context=32)
    model = shard_model(build_model(config), strategy, prefetch=prefetch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    held: set[str] = set()
    most, losses = 0, []

    def watch(event: events.Event) -> None:
        nonlocal most
        if isinstance(event, events.Transition) and event.unit != "root":
            held.discard(event.unit) if event.after == "sharded" else held.add(event.unit)
            most = max(most, len(held))

    stop = events.subscribe(watch)
    for step in range(4):
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(step))
        loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stop()
    assert not held, f"still gathered after the step: {held}"
    return most, losses


def test_gathered_units_never_exceed_prefetch_depth_plus_one(ranks) -> None:
    curves = {}
    for prefetch in (0, 1, 2):
        (most, curves[prefetch]), _ = ranks(2, most_gathered, "full_shard", prefetch)
        assert most == prefetch + 1
    assert curves[0] == curves[1] == curves[2]
    assert ranks(2, most_gathered, "shard_grad_op", 1)[0][0] == 6


def overlapped() -> bool:
    """Whether a gather was issued before the compute of the unit ahead of it ended (by the order of events)."""
    model = shard_model(build_model("gpt-tiny"), "full_shard")
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    order: list[tuple[str, str, str]] = []
    for _ in range(2):
        order.clear()
        stop = events.subscribe(
            lambda e: order.append((e.phase, e.unit, e.after)) if isinstance(e, events.Transition) else None
        )
        loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
        stop()
    forward = order.index(("forward", "blocks.1", "unsharding")) < order.index(("forward", "blocks.0", "sharded"))
    backward = order.index(("backward", "blocks.0", "unsharding")) < order.index(("backward", "blocks.1", "sharded"))
    return forward and backward


def test_the_next_unit_is_on_its_way_in_both_directions(ranks) -> None:
    assert ranks(2, overlapped) == [True, True]


# ---- what a model may do


def beside_twin(model: nn.Module, twin: nn.Module, tokens: torch.Tensor | None = None) -> None:
    """One SGD step of both; afterwards every parameter is equal."""
    world_size = dist.get_world_size()
    xs = [torch.randn(4, 7, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    model(xs[dist.get_rank()]).square().mean().backward()
    replay_gradients(twin, [[(x, x)] for x in xs], lambda m, a, _: m(a).square().mean())
    for each in (model, twin):
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        full = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert torch.equal(full, theirs[1]), f"{name} on rank {dist.get_rank()}"


def frozen_and_unused(strategy: str) -> None:
    for prepare in (lambda m: m.blocks[1].requires_grad_(False), lambda m: m.blocks[0][0].bias.requires_grad_(False)):
        model, twin = Odd(), Odd()
        prepare(model), prepare(twin)
        beside_twin(shard_model(model, strategy), twin)
    model = shard_model(Odd(skip=True), strategy)
    step_of(model)
    assert model.spare.weight.grad is None and model.blocks[0][0].weight.grad is not None


@pytest.mark.parametrize("strategy", ROWS)
def test_frozen_and_unused_parameters(ranks, strategy: str) -> None:
    ranks(2, frozen_and_unused, strategy)


def tied() -> None:
    config = dataclasses.replace(PRESETS["gpt-tiny"], tied=True)
    model, twin = build_model(config), build_model(config)
    shard_model(model, "full_shard")
    assert model.head.weight is model.token_embedding.weight
    tokens = torch.arange(18).view(2, 9)
    for each in (model, twin):
        loss_of(each, tokens[:, :-1], tokens[:, 1:]).backward()
    assert model.head.weight is model.token_embedding.weight
    assert torch.equal(model.head.weight.grad.full_tensor(), twin.head.weight.grad)


def test_tied_weights_inside_a_unit_stay_tied(ranks) -> None:
    ranks(2, tied)


def evaluation_and_failure() -> None:
    model, twin = shard_model(Odd(), "full_shard"), Odd()
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "left gathered after evaluation"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 3))
    beside_twin(model, twin)


def test_evaluation_leaves_slices_and_an_exception_leaves_a_usable_model(ranks) -> None:
    ranks(2, evaluation_and_failure)


def two_forwards() -> None:
    model, twin = shard_model(Odd(), "full_shard"), Odd()
    x = torch.randn(4, 7)
    for each in (model, twin):
        (each(x).square().mean() + each(2 * x).square().mean()).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_two_forwards_before_one_backward(ranks) -> None:
    ranks(1, two_forwards)


def from_meta(strategy: str) -> None:
    model = shard_model(build_model("llama-tiny", device="meta"), strategy)
    with pytest.raises(RuntimeError, match="meta device: .*call model.to_empty"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    model.to_empty(device="cpu")
    initialise(model, seed=3)
    whole = build_model("llama-tiny", seed=3)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens), whole(tokens))


@pytest.mark.parametrize("strategy", ROWS)
def test_initialisation_from_the_meta_device(ranks, strategy: str) -> None:
    ranks(2, from_meta, strategy)


def reloaded(strategy: str) -> None:
    """Parameters that were changed between steps, by whatever hand, are what the next forward reads."""
    model, other = shard_model(build_model("gpt-tiny", seed=1), strategy), build_model("gpt-tiny", seed=2)
    tokens = torch.arange(12).view(2, 6)
    loss_of(model, tokens, tokens).backward()
    source = shard_model(build_model("gpt-tiny", seed=2), strategy).state_dict()
    model.load_state_dict(source)
    assert torch.equal(model(tokens), other(tokens))
    model.load_state_dict({name: value.clone() * 0 for name, value in source.items()}, assign=True)
    assert model(tokens).abs().max() == 0


@pytest.mark.parametrize("strategy", ROWS)
def test_the_next_forward_sees_loaded_parameters(ranks, strategy: str) -> None:
    ranks(2, reloaded, strategy)


def deleted(strategy: str) -> bool:
    gc.disable()
    try:
        model = shard_model(Odd(), strategy)
        step_of(model)
        step_of(model)
        watched = [weakref.ref(unit) for unit in units_of(model)] + [weakref.ref(model)]
        del model
        return all(reference() is None for reference in watched)
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", ROWS)
def test_deleting_the_model_frees_everything_without_the_cyclic_collector(ranks, strategy: str) -> None:
    assert ranks(2, deleted, strategy) == [True, True]


# ---- errors


def refusals() -> None:
    model = Odd()
    fully_shard(model.blocks[0])
    with pytest.raises(AssertionError, match="already a unit"):
        fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="has no forward.*shard its children"):
        fully_shard(model.blocks)
    with pytest.raises(ValueError, match="no_shard cuts nothing, so it needs a 1-D mesh"):
        shard_model(Odd(), "no_shard", mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards")))
    with pytest.raises(ValueError, match="hybrid_shard needs a 2-D mesh: init_device_mesh"):
        shard_model(Odd(), "hybrid_shard")
    with pytest.raises(ValueError, match="matches no submodule of Odd"):
        shard_model(Odd(), "full_shard", units=[nn.Conv2d])
    with pytest.raises(ValueError, match="units is 'blocks'; expected auto, root, module classes"):
        shard_model(Odd(), "full_shard", units="blocks")
    with pytest.raises(ValueError, match="unknown strategy 'zero4'"):
        shard_model(Odd(), "zero4")
    with pytest.raises(ValueError, match="prefetch must be 0 or more units, got -1"):
        shard_model(Odd(), "full_shard", prefetch=-1)
    across = Odd()
    across.spare.weight = across.blocks[0][0].weight
    fully_shard(across.blocks[0])
    with pytest.raises(ValueError, match="'spare.weight' is shared with a parameter already managed by another"):
        fully_shard(across)
    inner = Odd()
    fully_shard(inner.blocks[0]), fully_shard(inner)
    inner.blocks[0](torch.randn(2, 7))
    with pytest.raises(RuntimeError, match="already ran under another root"):
        inner(torch.randn(2, 7))


def test_what_cannot_work_is_refused_with_the_remedy(ranks) -> None:
    ranks(2, refusals)


def under_torchrun() -> None:
    """As with PyTorch's engine, who has made no group gets the one that the launcher's variables describe."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    free = [free_port() if rank == 0 else None]
    dist.broadcast_object_list(free)
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free[0]}
    os.environ.update({name: str(value) for name, value in variables.items()})
    model = fully_shard(nn.Linear(4, 4))
    assert dist.get_world_size() == ranks == model.weight.device_mesh.size()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_launcher_s_group_is_made(ranks) -> None:
    ranks(2, under_torchrun)


def test_without_a_process_group_the_error_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="no process group: call torch.distributed.init_process_group"):
        fully_shard(Odd())
