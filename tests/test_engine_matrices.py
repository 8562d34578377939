"""Optimizers of whole matrices on sharded parameters: the unsharded optimizer's bits, two collectives a bucket."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdplab.engine import MatrixOptimizer, clip_grad_norm_, events, fully_shard, shard_model, whole_matrices
from fsdplab.engine.core.owners import Matrix, buckets_of, elements_sent, newton_schulz_flops
from fsdplab.workloads import build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

STRATEGIES = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard")


def tokens_of(step: int, rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank + 10_000 * micro)
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and all other parameters."""
    inner = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    return inner, [p for p in model.parameters() if all(p is not other for other in inner)]


def unsharded(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3, fused=True)]


def sharded(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    matrices, others = split(model)
    rest = torch.optim.AdamW(others, lr=1e-3, fused=True)
    return whole_matrices(torch.optim.Muon(matrices, lr=0.02), rest=rest, **options)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def beside_the_twin(strategy: str, bucket_bytes: int, micro_batches: int = 2, torchs: bool = False) -> None:
    """Three steps with accumulation and clipping: the unsharded twin's parameters, bit for bit."""
    mesh = None
    if strategy == "hybrid_shard":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model, twin = build_model("gpt-tiny", seed=1), build_model("gpt-tiny", seed=1)
    if torchs:
        for block in model.blocks:
            torch_fully_shard(block)
        torch_fully_shard(model)
    else:
        shard_model(model, strategy, mesh=mesh)
    replicas = dist.group.WORLD if strategy == "no_shard" else None
    mine, theirs = sharded(model, bucket_bytes=bucket_bytes, replicas=replicas), unsharded(twin)
    ranks = dist.get_world_size()
    for step in range(3):
        for micro in range(micro_batches):
            if not torchs:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            (loss_of(model, *tokens_of(step, dist.get_rank(), micro)) / micro_batches).backward()
        batches = [[tokens_of(step, rank, micro) for micro in range(micro_batches)] for rank in range(ranks)]
        replay_gradients(twin, batches, loss_of)
        for ours, other in zip(model.parameters(), twin.parameters()):
            # what is compared is the optimizer: sums of gradients may round otherwise
            torch.testing.assert_close(whole(ours.grad), other.grad, rtol=1e-4, atol=1e-6)
            other.grad.copy_(whole(ours.grad))
        for optimizer in (mine, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        exact = {id(p) for p in split(twin)[0]}
        for (name, ours), other in zip(model.named_parameters(), twin.parameters()):
            where = f"rank {dist.get_rank()}, step {step}: {name}"
            if id(other) in exact:
                assert torch.equal(whole(ours), other), where
            else:  # the fused AdamW of a shard rounds its last elements otherwise than in the middle of a whole
                torch.testing.assert_close(whole(ours), other, rtol=1e-5, atol=1e-6, msg=where)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bucket_bytes", [40_000, 1, 1 << 30])
def test_every_strategy_has_the_bits_of_one_process(ranks, strategy: str, bucket_bytes: int) -> None:
    ranks(3, beside_the_twin, strategy, bucket_bytes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_numbers_of_ranks(ranks, world_size: int) -> None:
    ranks(world_size, beside_the_twin, "full_shard", 1 << 20)


def test_hybrid_exchanges_within_the_shard_group(ranks) -> None:
    ranks(4, beside_the_twin, "hybrid_shard", 1 << 20)


def test_modules_of_pytorchs_engine(ranks) -> None:
    ranks(2, beside_the_twin, "full_shard", 1 << 20, 1, True)


class Pieces(nn.Module):
    """Matrices that are cut unevenly or not at all on three ranks, one frozen, one tied, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"even": (6, 5), "uneven": (7, 4), "few": (2, 9), "one": (1, 8), "frozen": (5, 5)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))
        self.frozen.requires_grad_(False)
        self.tied = self.even
        self.stack = nn.Parameter(torch.randn(4, 3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.even, self.uneven, self.few, self.one, self.frozen, self.tied]
        return sum((p * x).sin().sum() for p in found) + (self.stack * x).cos().sum()


def alone(model: Pieces) -> list[torch.optim.Optimizer]:
    """torch's Muon on each matrix of the whole model; an expert is a parameter that shares the stack's memory."""
    experts = []
    for number in range(model.stack.size(0)):
        expert = nn.Parameter(model.stack.data[number])
        expert.grad = model.stack.grad[number]
        experts.append(expert)
    return [torch.optim.Muon([*(p for p in model.parameters() if p.ndim == 2 and p.requires_grad), *experts], lr=0.1)]


def uneven(dim: int, dtype: torch.dtype) -> None:
    model, twin = Pieces().to(dtype), Pieces().to(dtype)
    fully_shard(model, shard_placement_fn=lambda p: Shard(dim % p.ndim))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = whole_matrices(torch.optim.Muon, trained, lr=0.1, bucket_bytes=100)
    model(torch.tensor(0.5)).backward()
    twin(torch.tensor(0.5)).backward()
    for ours, other in zip(model.parameters(), twin.parameters()):
        if other.grad is not None:
            other.grad.copy_(whole(ours.grad))
    optimizer.step()
    for each in alone(twin):
        each.step()
    for (name, ours), other in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(whole(ours), other), f"rank {dist.get_rank()}: {name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_uneven_empty_tied_frozen_and_stacked(ranks, dim: int, dtype: torch.dtype) -> None:
    ranks(3, uneven, dim, dtype)


def counted(strategy: str, bucket_bytes: int) -> tuple[Counter, Counter, int]:
    """Collectives of the optimizer's step and the bytes that this rank sends, in the ledger and by the formula."""
    model = shard_model(build_model("gpt-tiny", seed=1), strategy)
    rank, n = dist.get_rank(), dist.get_world_size()
    replicas = dist.group.WORLD if strategy == "no_shard" else None
    optimizer = sharded(model, bucket_bytes=bucket_bytes, replicas=replicas)
    loss_of(model, *tokens_of(0, rank)).backward()
    seen: list[events.Collective] = []
    stop = events.subscribe(lambda e: seen.append(e) if isinstance(e, events.Collective) else None)
    optimizer.step()
    stop()
    shapes = [tuple(p.shape) for p in split(model)[0]]
    matrices = [Matrix.replicated(s, n) if strategy == "no_shard" else Matrix.sharded(s, 0, n) for s in shapes]
    buckets = buckets_of(matrices, [newton_schulz_flops(s) for s in shapes], n, bucket_bytes // 2)
    formula: Counter = Counter()
    for bucket in buckets:
        there, back = elements_sent(matrices, bucket, rank)
        if strategy == "no_shard":
            owned = [sum(matrices[m].numel for m, o in zip(bucket.numbers, bucket.owners) if o == r) for r in range(n)]
            formula["all_gather", 2 * max(owned) * (n - 1)] += 1
        else:
            formula["all_to_all", 2 * there] += 1
            formula["all_to_all", 2 * back] += 1
    return Counter((e.kind, e.wire_bytes) for e in seen), formula, sum(m.numel for m in matrices)


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("bucket_bytes", [1 << 13, 1 << 30])
def test_the_ledger_equals_the_formula(ranks, strategy: str, bucket_bytes: int) -> None:
    answers = ranks(4, counted, strategy, bucket_bytes)
    for seen, formula, _ in answers:
        assert seen == formula
        if bucket_bytes == 1 << 30:
            assert sum(seen.values()) == (1 if strategy == "no_shard" else 2)
    sent = sum(count * nbytes for seen, _, _ in answers for (_, nbytes), count in seen.items())
    if strategy == "full_shard":  # 2 P (n-1) / n^2 elements of 2 bytes on average
        assert sent / 4 == 2 * 2 * answers[0][2] * 3 / 16


def checkpointed(folder: str) -> None:
    """What torch's functions save of three ranks is torch's own state, and two ranks go on from it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        loss_of(model, *tokens_of(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = build_model("gpt-tiny", seed=1)
    model = shard_model(build_model("gpt-tiny", seed=1), "full_shard", mesh=init_device_mesh("cpu", (3,)))
    matrices, _ = split(model)
    torchs = torch.optim.Muon(split(plain)[0], lr=0.02)
    optimizer = whole_matrices(torch.optim.Muon(matrices, lr=0.02))
    trained(model, optimizer, 0)
    trained(plain, torchs, 0)
    ours, theirs = optimizer.state_dict(), torchs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert state.keys() == ours["state"][number].keys()
        torch.testing.assert_close(whole(ours["state"][number]["momentum_buffer"]), state["momentum_buffer"])
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    again = shard_model(build_model("gpt-tiny", seed=1), "full_shard", mesh=init_device_mesh("cpu", (3,)))
    other = whole_matrices(torch.optim.Muon(split(again)[0], lr=0.5))
    wanted = {"optimizer": get_optimizer_state_dict(again, other)}
    dcp.load(wanted, checkpoint_id=folder)
    set_optimizer_state_dict(again, other, wanted["optimizer"])
    assert other.param_groups[0]["lr"] == 0.02
    for left, right in zip(matrices, split(again)[0]):
        assert torch.equal(
            whole(optimizer.state[left]["momentum_buffer"]), whole(other.state[right]["momentum_buffer"])
        )


def loaded(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = shard_model(build_model("gpt-tiny", seed=1), "full_shard")
    optimizer = whole_matrices(torch.optim.Muon(split(model)[0], lr=0.5))
    wanted = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(wanted, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, wanted["optimizer"])
    plain = build_model("gpt-tiny", seed=1)
    torchs = torch.optim.Muon(split(plain)[0], lr=0.02)
    loss_of(plain, *tokens_of(0, 0)).backward()
    torchs.step()
    for ours, other in zip(split(model)[0], split(plain)[0]):
        torch.testing.assert_close(
            whole(optimizer.state[ours]["momentum_buffer"]), torchs.state[other]["momentum_buffer"]
        )


def test_state_is_torchs_and_loads_on_other_ranks(ranks, tmp_path) -> None:
    ranks(3, checkpointed, str(tmp_path))
    ranks(2, loaded, str(tmp_path))


def of_the_page() -> type[MatrixOptimizer]:
    """The optimizer that docs/engine.md shows as an update of another kind."""
    page = (Path(__file__).parents[1] / "docs" / "engine.md").read_text(encoding="utf-8")
    lines = re.search(r"```python\n(import torch\n[^`]*?class Whitened.*?)```", page, re.DOTALL)
    assert lines, "docs/engine.md shows no class Whitened"
    names: dict[str, Any] = {}
    exec(lines[1], names)  # noqa: S102  what a reader would paste
    return names["Whitened"]


Whitened = of_the_page()


def of_another_kind() -> None:
    model, twin = build_model("gpt-tiny", seed=1), build_model("gpt-tiny", seed=1)
    shard_model(model, "full_shard")
    mine, theirs = Whitened(split(model)[0]), Whitened(split(twin)[0])
    scheduler = torch.optim.lr_scheduler.LambdaLR(mine, lambda step: 1.0)
    for step in range(2):
        loss_of(model, *tokens_of(step, 0)).backward()
        loss_of(twin, *tokens_of(step, 0)).backward()
        for ours, other in zip(model.parameters(), twin.parameters()):
            other.grad.copy_(whole(ours.grad))
        clip_grad_norm_(model.parameters(), 1e9)
        mine.step()
        theirs.step()
        scheduler.step()
        mine.zero_grad()
        theirs.zero_grad()
    for ours, other in zip(split(model)[0], split(twin)[0], strict=True):
        assert torch.equal(whole(ours), other)


def test_an_update_of_another_kind(ranks) -> None:
    ranks(2, of_another_kind)


def refused() -> list[str]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    from fsdplab.engine import CPUOffloadPolicy, offload_optimizer

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    both = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, (Shard(0), Shard(1))))
    fine = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, (Replicate(), Shard(1))))
    vector = nn.Parameter(torch.randn(4))

    class Short(Whitened):
        def whole(self, matrix, group):
            return matrix[:1]

    def short_step() -> None:  # each rank owns one of two matrices, so both raise
        pair = [fine, nn.Parameter(fine.detach().clone())]
        for parameter in pair:
            parameter.grad = parameter.detach().clone()
        Short(pair).step()

    calls = [
        lambda: whole_matrices(torch.optim.AdamW([vector])),
        lambda: whole_matrices(torch.optim.Muon, [both]),
        lambda: whole_matrices(torch.optim.Muon, [vector]),
        lambda: whole_matrices(torch.optim.Muon, [fine], lr=-1.0),
        lambda: whole_matrices(torch.optim.Muon([fine]), lr=0.1),
        lambda: whole_matrices(torch.optim.Muon([fine]), bucket_bytes=0),
        lambda: whole_matrices(torch.optim.Muon([fine]), rest=torch.optim.AdamW([fine])),
        lambda: offload_optimizer(whole_matrices(torch.optim.Muon([fine])), CPUOffloadPolicy()),
        short_step,
    ]
    said = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_cannot_be_is_one_sentence(ranks) -> None:
    expected = [
        "takes torch.optim.Muon", "along one dimension of a mesh", "no matrix", "Learning rate", "has its own already",
        "bucket_bytes must be 1 or more", "in both optimizers", "not part by part", "return the same shape",
    ]  # fmt: skip
    for said in ranks(2, refused):
        assert len(said) == len(expected)
        for text, part in zip(said, expected):
            assert part in text


def test_owners_are_balanced_and_buckets_bounded() -> None:
    shapes = [(64 * (1 + number % 5), 256) for number in range(40)]
    matrices = [Matrix.sharded(shape, 0, 8) for shape in shapes]
    costs = [newton_schulz_flops(shape) for shape in shapes]
    buckets = buckets_of(matrices, costs, 8, 200_000)
    assert sorted(number for bucket in buckets for number in bucket.numbers) == list(range(40))
    load = [0.0] * 8
    for bucket in buckets:
        assert len(bucket.numbers) == 8 or sum(matrices[number].numel for number in bucket.numbers[:-1]) < 200_000
        for number, owner in zip(bucket.numbers, bucket.owners):
            load[owner] += costs[number]
    assert max(load) <= 4 / 3 * sum(costs) / 8
    total = [elements_sent(matrices, bucket, rank) for bucket in buckets for rank in range(8)]
    elements = sum(matrix.numel for matrix in matrices)
    assert sum(map(sum, total)) == 2 * elements * 7 // 8  # of all ranks: 2 P (n-1) / n
