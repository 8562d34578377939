"""What only a GPU can show: streams, no host synchronisation inside a step, the same bits and bytes in every run.

With one GPU a group of one rank is made to gather and reduce all the same (NCCL copies), so that the side streams,
their events and the lifetimes of buffers are those of many ranks.
"""

from __future__ import annotations

import gzip
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import MixedPrecisionPolicy, compat, events, shard_model
from fsdplab.engine.emulation.link import Link, behind
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.staged import StagedTransport
from fsdplab.profiling.profiler import memory_snapshot
from fsdplab.workloads import build_model, loss_of, preset
from tests.hiding import LEAST_SHARE, SIZES, host_syncs, link_for, made_to_gather, measure

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 4


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


class Net(nn.Module):
    """Blocks wide enough that a gather takes as long as a few kernels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def gathering(group: dist.ProcessGroup, strategy: str = "full_shard") -> nn.Module:
    """A model on one GPU whose units gather and reduce over a group of one rank."""
    model = shard_model(Net().cuda(), strategy, mp_policy=BF16)
    transport = StagedTransport(group, torch.device("cuda", 0))
    for unit in units_of(model):
        unit.memory.config = replace(unit.memory.config, shard=transport)
    return model


def train(model: nn.Module, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(steps):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().clone() for parameter in model.parameters()]


def test_a_step_never_waits_on_the_host(group) -> None:
    model = gathering(group)
    train(model, steps=2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        x = torch.randn(64, 512, device="cuda")
        model(x).float().square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gathers_and_reductions_have_streams_of_their_own(group, monkeypatch) -> None:
    seen: dict[str, set[int]] = {"gather": set(), "reduce": set(), "compute": {torch.cuda.current_stream().cuda_stream}}

    def watched(role: str, call):
        def run(*args, **kwargs):
            seen[role].add(torch.cuda.current_stream().cuda_stream)
            return call(*args, **kwargs)

        return run

    monkeypatch.setattr(compat, "all_gather_single", watched("gather", compat.all_gather_single))
    monkeypatch.setattr(compat, "reduce_scatter_single", watched("reduce", compat.reduce_scatter_single))
    train(gathering(group), steps=1)
    assert all(len(streams) == 1 for streams in seen.values())
    assert len(set.union(*seen.values())) == 3


def test_reductions_on_a_communicator_of_their_own_give_the_same_bits(group) -> None:
    expected = train(gathering(group))
    model = gathering(group)
    model.set_separate_reduce_scatter_group()
    (transport,) = {unit.memory.config.shard for unit in units_of(model)}
    assert transport._reduce_group is not transport.group
    for one, two in zip(train(model), expected, strict=True):
        assert torch.equal(one, two)


def delayed(call, dice: random.Random):
    def run(*args, **kwargs):
        torch.cuda._sleep(dice.randrange(0, 2_000_000))
        return call(*args, **kwargs)

    return run


def test_twenty_runs_with_random_delays_on_every_stream_give_the_same_bits(group, monkeypatch) -> None:
    expected = train(gathering(group))
    dice = random.Random(0)
    monkeypatch.setattr(compat, "all_gather_single", delayed(compat.all_gather_single, dice))
    monkeypatch.setattr(compat, "reduce_scatter_single", delayed(compat.reduce_scatter_single, dice))
    monkeypatch.setattr(nn.Linear, "forward", delayed(nn.Linear.forward, dice))
    for run in range(20):
        for number, (one, two) in enumerate(zip(train(gathering(group)), expected, strict=True)):
            assert torch.equal(one, two), f"run {run}, parameter {number}"


def test_memory_is_the_same_in_every_run(group) -> None:
    peaks = set()
    for _ in range(20):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(gathering(group))
        torch.cuda.synchronize()
        peaks.add(torch.cuda.max_memory_allocated())
    assert len(peaks) == 1


def test_a_link_delays_a_collective_by_the_formula_and_no_multiprocessor_waits(group) -> None:
    link, device = Link(1e9, 1e-4), torch.device("cuda", 0)
    model = shard_model(Net().cuda(), "full_shard", mp_policy=BF16)
    transport = behind(StagedTransport(group, device), link, ranks=4)
    for unit in units_of(model):
        unit.memory.config = replace(unit.memory.config, shard=transport)
    rows: list[events.Collective] = []
    unsubscribe = events.subscribe(lambda event: rows.append(event) if isinstance(event, events.Collective) else None)
    train(model, steps=2)
    torch.cuda.synchronize()
    events.flush()
    unsubscribe()
    assert rows and all(row.emulated for row in rows)
    for row in rows:
        _, transfer_ns = link.collective(row.kind, row.logical_bytes, 4)
        assert row.end_ns - row.start_ns >= transfer_ns - 20_000, row  # events have a resolution of some microseconds


def test_a_link_changes_no_bit_and_never_makes_the_host_wait(group) -> None:
    expected = train(gathering(group))
    model = gathering(group)
    for unit in units_of(model):
        unit.memory.config = replace(unit.memory.config, shard=behind(unit.memory.config.shard, Link(5e9), ranks=4))
    x = torch.randn(64, 512, device="cuda")
    for one, two in zip(train(model), expected, strict=True):
        assert torch.equal(one, two)
    assert host_syncs(lambda: model(x).float().square().mean().backward(), torch.device("cuda", 0)) == []


def test_the_counter_of_host_syncs_sees_one() -> None:
    value = torch.ones(1, device="cuda")
    assert host_syncs(lambda: value.item(), torch.device("cuda", 0))


def test_full_shard_hides_what_a_slow_link_lets_it_hide(group) -> None:
    """The judgement is on CUDA events: gather of i+1 under forward of i, reduction of i under backward of i-1, at least
    90 % hidden.
    """
    device, size = torch.device("cuda", 0), SIZES["cuda"]
    free = measure(device, size, None)
    linked = measure(device, size, link_for(size, free.median_ns("compute", "forward"), 0.5))
    assert linked.median_ns("all_gather", "forward") >= 0.4 * free.median_ns("compute", "forward"), (
        "the link is slow enough to hide something"
    )
    for step in linked.judged():
        assert step.share >= LEAST_SHARE, [vars(slot) for slot in step.slots]
        assert step.elsewhere == ()


def test_the_memory_viewers_snapshot_holds_the_allocations_of_a_step(group, tmp_path) -> None:
    model = gathering(group)
    with memory_snapshot(tmp_path / "rank0.snapshot.pickle.gz", torch.device("cuda", 0)):
        train(model, steps=1)
    with gzip.open(tmp_path / "rank0.snapshot.pickle.gz") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"] and any(
        entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace
    )


def test_a_model_deleted_with_a_gather_in_flight_frees_its_memory_safely(group) -> None:
    before = torch.cuda.memory_allocated()
    model = gathering(group)
    handle = model.blocks[0].unshard(async_op=True)
    del model, handle
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_states_take_the_bytes_of_the_arithmetic(group) -> None:
    """Of P parameters in bf16 over fp32 masters: 4 P for slices, 8 P for two moments, 4 P for gradients."""
    device, parameters = torch.device("cuda", 0), preset("llama-20m").parameters
    before = torch.cuda.memory_allocated()
    model = made_to_gather(shard_model(build_model("llama-20m", device=device), "full_shard", mp_policy=BF16), device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, tokens, tokens).backward()
        optimizer.step()
    with_gradients = torch.cuda.memory_allocated() - before
    optimizer.zero_grad()
    at_rest = torch.cuda.memory_allocated() - before
    assert at_rest == pytest.approx(12 * parameters, rel=0.03)
    assert with_gradients - at_rest == pytest.approx(4 * parameters, rel=0.03)
