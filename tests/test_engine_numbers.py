"""The engine's numbers: every strategy equals the unsharded twin, torch's DDP and torch's FSDP2."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdplab.engine import STRATEGIES, fully_shard, shard_model
from fsdplab.workloads import ByteText, block_types, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

pytestmark = pytest.mark.default  # every strategy beside the twin, DDP and FSDP2: the grids stay whole
ROWS = [name for name in STRATEGIES if name != "hybrid_shard"]  # that one needs a 2-D mesh
STEPS, BATCH, LENGTH = 10, 2, 32
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MOMENTS = ("exp_avg", "exp_avg_sq")
Build = Callable[[nn.Module], nn.Module]
State = dict[str, dict[str, torch.Tensor]]  # of each parameter: itself and Adam's moments


def batch_of(
    text: ByteText, step: int, rank: int, world_size: int, micro_batch: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return text.batch(step, rank, world_size, BATCH, LENGTH, micro_batch=micro_batch)


def rows_here(ours: torch.Tensor, theirs: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a parameter that this rank holds, and the same rows of the twin's."""
    if not isinstance(ours, DTensor):
        return ours, theirs
    chunks = torch.chunk(theirs, ours.device_mesh.size(), dim=0)
    return ours.to_local(), chunks[rank] if rank < len(chunks) else theirs[:0]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Parameters and Adam's moments, by name."""
    moments = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {
        name: {"parameter": p.detach(), **{key: moments[name][key] for key in MOMENTS}}
        for name, p in model.named_parameters()
    }


def compare_to_twin(ours: State, twins: State, rank: int, step: int, tolerance: float) -> None:
    """Parameters and Adam's moments against the twin's; the failure names parameter, rank and step."""
    assert ours.keys() == twins.keys()
    for name, what in [(each, what) for each in ours for what in ours[each]]:
        here, there = rows_here(ours[name][what], twins[name][what], rank)
        assert here.shape == there.shape, f"{what} of {name}: rank {rank} holds {here.shape}, expected {there.shape}"
        difference = (here - there).abs().max().item() if here.numel() else 0.0
        assert difference <= tolerance, f"{what} of {name}: rank {rank}, step {step}, differs by {difference:.3g}"


def replay(file: Path, preset: str, micro_batches: int, world_size: int) -> None:
    """The unsharded twin on the batches of all ranks; writes its state after each of ten AdamW steps."""
    text, twin = ByteText.from_standard_library(), build_model(preset, seed=1)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=3e-3)
    states = []
    for step in range(STEPS):
        batches = [
            [batch_of(text, step, rank, world_size, micro) for micro in range(micro_batches)]
            for rank in range(world_size)
        ]
        replay_gradients(twin, batches, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        states.append(copy.deepcopy(state_of(twin, optimizer)))
    torch.save(states, file)


@pytest.fixture(scope="module")
def twin(ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], Path]:
    """`twin(preset, micro_batches, world_size)` is the file of that twin's states, replayed once and not by each rank
    of each strategy.
    """

    @functools.cache
    def replayed(*twins: str | int) -> Path:
        file = tmp_path_factory.mktemp("twin") / "states"
        ranks(1, replay, file, *twins)
        return file

    return replayed


def train_beside_twin(
    strategy: str, tolerance: float, twins: Path, preset: str = "gpt-tiny", micro_batches: int = 1
) -> None:
    """Ten AdamW steps, compared with the twin's after each one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text, row = ByteText.from_standard_library(), STRATEGIES[strategy]
    model = build_model(preset, seed=1)
    shard_model(model, strategy, units=block_types(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    states = torch.load(twins, mmap=True)
    for step in range(STEPS):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            model.set_requires_gradient_sync(last or row.shard_gradients)
            model.set_is_last_backward(last)
            loss = loss_of(model, *batch_of(text, step, rank, world_size, micro)) / micro_batches
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        compare_to_twin(state_of(model, optimizer), states[step], rank, step, tolerance)


def each_beside_twin(tolerances: dict[str, float], *rest: Any) -> None:
    """One strategy after the other, each with its tolerance."""
    for strategy, tolerance in tolerances.items():
        try:
            train_beside_twin(strategy, tolerance, *rest)
        except AssertionError as error:
            raise AssertionError(f"{strategy}: {error}") from error


@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.quick("the engine trains as the twin does")), 3, 4]
)
def test_ten_steps_equal_the_twin_bit_for_bit(ranks, twin, world_size: int) -> None:
    """gloo's own all-reduce adds in another order above two ranks, so no_shard is equal to rounding there."""
    tolerances = {name: 2e-5 if name == "no_shard" and world_size > 2 else 0.0 for name in ROWS}
    ranks(world_size, each_beside_twin, tolerances, twin("gpt-tiny", 1, world_size))


def test_llama_equals_the_twin(ranks, twin) -> None:
    tolerances = {"full_shard": 0.0, "zero1": 0.0}
    ranks(2, each_beside_twin, tolerances, twin("llama-tiny", 1, 2), "llama-tiny")


def test_accumulation_over_three_micro_batches_equals_the_twin(ranks, twin) -> None:
    """Where gradients are reduced per micro-batch the sum runs in another order: equal to rounding."""
    tolerances = {name: 2e-5 if STRATEGIES[name].shard_gradients else 0.0 for name in ROWS}
    ranks(2, each_beside_twin, tolerances, twin("gpt-tiny", 3, 2), "gpt-tiny", 3)


def losses_of(build: Build, world_size: int, bf16_autocast: bool = False) -> list[float]:
    text = ByteText.from_standard_library()
    model = build(build_model("gpt-tiny", seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *batch_of(text, step, dist.get_rank(), world_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        losses.append((total / world_size).item())
    return losses


def by_torch_fsdp2(policy: MixedPrecisionPolicy) -> Build:
    def build(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            torch_fully_shard(block, mp_policy=policy)
        return torch_fully_shard(model, mp_policy=policy)

    return build


def by_our_fully_shard(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def against_torch() -> dict[str, list[float]]:
    world_size = dist.get_world_size()
    runs = {name: losses_of(lambda m, n=name: shard_model(m, n), world_size) for name in ROWS}
    runs["fully_shard"] = losses_of(by_our_fully_shard, world_size)
    runs["torch DDP"] = losses_of(lambda m: DistributedDataParallel(m), world_size)
    runs["torch FSDP2"] = losses_of(by_torch_fsdp2(MixedPrecisionPolicy()), world_size)
    return runs


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_equal_torch_ddp_and_fsdp2(ranks, world_size: int) -> None:
    runs = ranks(world_size, against_torch)[0]
    for name, losses in runs.items():
        assert losses == pytest.approx(runs["torch DDP"], rel=2e-6), f"{name}: {losses} against {runs['torch DDP']}"


def bf16_distances(world_size: int) -> dict[str, float]:
    """How far ten bf16 steps end from the float32 ones, for our strategies and for torch's FSDP2."""
    reference = losses_of(lambda m: shard_model(m, "full_shard"), world_size)
    builds = {n: lambda m, n=n: shard_model(m, n, mp_policy=BF16) for n in ROWS}
    builds["torch FSDP2"] = by_torch_fsdp2(BF16)
    return {
        name: max(abs(a - b) for a, b in zip(losses_of(build, world_size), reference)) for name, build in builds.items()
    }


def test_bf16_with_float32_masters_is_as_close_as_torch_fsdp2(ranks) -> None:
    distances = ranks(2, bf16_distances, 2)[0]
    limit = max(2 * distances["torch FSDP2"], 1e-3)
    assert 0 < distances["torch FSDP2"] < 0.1
    for name, distance in distances.items():
        assert distance <= limit, (
            f"{name} in bf16 is {distance:.3g} from float32, torch FSDP2 {distances['torch FSDP2']:.3g}"
        )


def masters_stay_float32() -> None:
    model = shard_model(build_model("gpt-tiny"), "full_shard", mp_policy=BF16)
    text = ByteText.from_standard_library()
    loss_of(model, *batch_of(text, 0, dist.get_rank(), dist.get_world_size())).backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, f"{name} is kept in {parameter.dtype}"
        assert parameter.grad.dtype == torch.float32, f"the gradient of {name} is {parameter.grad.dtype}"


def test_bf16_keeps_float32_masters_and_gradients(ranks) -> None:
    ranks(2, masters_stay_float32)
