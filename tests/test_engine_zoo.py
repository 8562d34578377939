"""Whatever a model throws at the engine: repeated units, checkpointing, odd outputs, exceptions; against the unsharded
twin.

Each case trains a few steps beside an unsharded copy on the same data on every rank, so that averaging changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdplab.engine import STRATEGIES, MixedPrecisionPolicy, events, fully_shard, shard_model
from tests.surface import wholes

ROWS = [name for name in STRATEGIES if name != "hybrid_shard"]


@dataclass
class Answer:
    """An output that is no pytree."""

    value: torch.Tensor


class Block(nn.Module):
    """Two layers; with `wrap` the output is a dataclass, with `fail` the forward or the backward raises."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return x if skip else self.b(x)


class Net(nn.Module):
    """Blocks between two layers of the root; `call` says how the blocks are run."""

    def __init__(self, call: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.call(self.blocks, self.first(x)))


def in_turn(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def each_twice(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(block(x))
    return x


def twice_on_raw_input(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return in_turn(blocks, x) + blocks[0](blocks[0](x.detach()))


def partly_used(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return blocks[0](blocks[0](x), skip=True)


def checkpointed(reentrant: bool) -> Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]:
    def call(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return call


def one_region(reentrant: bool) -> Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]:
    return lambda blocks, x: checkpoint(in_turn, blocks, x, use_reentrant=reentrant)


CALLS = {
    "in_turn": in_turn,
    "each_twice": each_twice,
    "twice_on_raw_input": twice_on_raw_input,
    "partly_used": partly_used,
    "checkpoint": checkpointed(False),
    "checkpoint_reentrant": checkpointed(True),
    "region": one_region(False),
    "region_reentrant": one_region(True),
}


def data(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def compare_gradients(model: nn.Module, twin: nn.Module, step: int, case: str = "") -> None:
    """Equal gradients, and none where the twin has none."""
    found = wholes([parameter.grad for parameter in model.parameters()])
    for (name, _), ours, theirs in zip(model.named_parameters(), found, twin.parameters(), strict=True):
        where = f"{case} {name}, rank {dist.get_rank()}, step {step}"
        assert (ours is None) == (theirs.grad is None), f"{where}: {ours} beside {theirs.grad}"
        if ours is not None:
            torch.testing.assert_close(ours, theirs.grad, msg=lambda text, w=where: f"{w}: {text}")


def steps_beside_twin(
    model: nn.Module,
    twin: nn.Module,
    losses: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    first: int = 0,
    case: str = "",
) -> None:
    for step in range(first, first + 3):
        for each in (model, twin):
            losses(each, data(step)).backward()
        compare_gradients(model, twin, step, case)
        for each in (model, twin):
            torch.optim.SGD([p for p in each.parameters() if p.grad is not None], lr=0.1).step()
            each.zero_grad()


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def run_call(call: str) -> None:
    for strategy in ROWS:
        model, twin = shard_model(Net(CALLS[call]), strategy), Net(CALLS[call])
        steps_beside_twin(model, twin, mean, case=strategy)


@pytest.mark.parametrize("call", CALLS)
def test_ways_to_run_units(ranks, call: str) -> None:
    ranks(2, run_call, call)


def many_forwards(strategy: str) -> None:
    two = lambda m, x: m(x).square().mean() + m(2 * x).square().mean()  # noqa: E731
    raw_then_wanted = lambda m, x: m(x).square().mean() + m(x.clone().requires_grad_()).square().mean()  # noqa: E731
    for losses in (two, raw_then_wanted):
        steps_beside_twin(shard_model(Net(in_turn), strategy), Net(in_turn), losses)


@pytest.mark.parametrize("strategy", ROWS)
def test_several_forwards_before_a_backward(ranks, strategy: str) -> None:
    ranks(2, many_forwards, strategy)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a backward of the user's own failed")


def backward_raises(strategy: str) -> None:
    model, twin = shard_model(Net(in_turn), strategy), Net(in_turn)
    steps_beside_twin(model, twin, mean)
    model.call = lambda blocks, x: blocks[2](Failing.apply(blocks[1](blocks[0](x))))
    with pytest.raises(RuntimeError, match="user's own failed"):
        mean(model, data(9)).backward()
    model.call = in_turn
    model.zero_grad()
    steps_beside_twin(model, twin, mean, first=3)


@pytest.mark.parametrize("strategy", ROWS)
def test_training_goes_on_after_an_exception_in_a_backward(ranks, strategy: str) -> None:
    ranks(2, backward_raises, strategy)


class Wrapping(Net):
    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(super().forward(x))


def odd_outputs(strategy: str) -> None:
    losses = lambda m, x: m(x).value.square().mean()  # noqa: E731
    steps_beside_twin(shard_model(Wrapping(in_turn), strategy), Wrapping(in_turn), losses)


@pytest.mark.parametrize("strategy", ROWS)
def test_dataclass_outputs(ranks, strategy: str) -> None:
    ranks(2, odd_outputs, strategy)


def other_dtypes(dtype: torch.dtype) -> None:
    model, twin = shard_model(Net(in_turn).to(dtype), "full_shard"), Net(in_turn).to(dtype)
    late, late_twin = shard_model(Net(in_turn), "zero1"), Net(in_turn)
    mean(late, data(0)).backward()
    late.zero_grad()
    for ours, theirs in ((model, twin), (late.to(dtype), late_twin.to(dtype))):
        for each in (ours, theirs):
            mean(each, data(1).to(dtype)).backward()
        compare_gradients(ours, theirs, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_also_when_cast_after_sharding(ranks, dtype: torch.dtype) -> None:
    ranks(2, other_dtypes, dtype)


def surface() -> None:
    """Behaviours of PyTorch's `fully_shard` that programs rely on."""
    sequential = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    assert type(sequential[:2]) is nn.Sequential and len(sequential[:2]) == 2
    with pytest.raises(AssertionError, match="cannot be deep-copied; copy it first"):
        copy.deepcopy(sequential)
    model = shard_model(Net(in_turn), "full_shard")
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: calls.append(n))
    mean(model, data(0)).backward()
    assert sorted(calls) == sorted(name for name, _ in model.named_parameters())
    broken = Net(in_turn)
    broken.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="0-dimensional"):
        fully_shard(broken)
    del broken.scale
    fully_shard(broken)


def test_surface_that_programs_rely_on(ranks) -> None:
    ranks(2, surface)


def reduced_dtypes(policy: MixedPrecisionPolicy) -> set[tuple[str, str]]:
    model = shard_model(Net(in_turn), "full_shard", mp_policy=policy)
    seen = set()
    stop = events.subscribe(lambda e: seen.add((e.kind, e.dtype)) if isinstance(e, events.Collective) else None)
    mean(model, data(0)).backward()
    stop()
    return seen


def test_without_a_reduce_dtype_gradients_travel_as_they_are(ranks) -> None:
    seen = ranks(2, reduced_dtypes, MixedPrecisionPolicy(param_dtype=torch.bfloat16))[0]
    assert seen == {("all_gather", "bfloat16"), ("reduce_scatter", "bfloat16")}


def weights_change(strategy: str) -> None:
    """Whoever writes to the parameters at rest, whenever: the next forward and the next `unshard` see it."""
    model = shard_model(Net(in_turn), strategy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for prepare in (
        lambda: mean(model, data(0)).backward(),
        lambda: (
            model.set_requires_gradient_sync(False),
            mean(model, data(0)).backward(),
            model.set_requires_gradient_sync(True),
        ),
        lambda: model(data(0)),
    ):
        prepare()
        model.state_dict()  # shows slices, also after a forward without a backward
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.blocks[0].unshard()
        assert model.blocks[0].a.weight.abs().max() == 0
        model.blocks[0].reshard()
        with torch.no_grad():
            assert model(data(0)).abs().max() == 0
            for parameter in model.parameters():
                parameter.fill_(0.5)
            assert model(data(0)).abs().max() > 0


@pytest.mark.parametrize("strategy", ROWS)
def test_nothing_stale_is_read(ranks, strategy: str) -> None:
    ranks(2, weights_change, strategy)


def skipped_on_one_rank() -> str:
    model = shard_model(Net(lambda blocks, x: blocks[0](x) if dist.get_rank() else blocks[1](x)), "full_shard")
    try:
        model(data(0))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_unit_skipped_on_some_ranks_is_an_error_that_names_unit_and_ranks(ranks) -> None:
    said = ranks(2, skipped_on_one_rank)
    assert "rank 0 runs all_gather of blocks.1" in said[0] and "rank 1 runs all_gather of blocks.0" in said[0], said[0]
    assert "skipped on some ranks" in said[1]


def kept_by_one_rank() -> None:
    """Building models must not depend on what each rank has already let go of."""
    kept = shard_model(Net(in_turn), "full_shard")
    if dist.get_rank() == 0:
        del kept
    mean(shard_model(Net(in_turn), "full_shard"), data(0)).backward()


def test_ranks_may_let_go_of_models_at_different_times(ranks) -> None:
    ranks(2, kept_by_one_rank)


# ---- an output that is a view, written to in place


class Viewed(nn.Module):
    """Blocks whose outputs are views that the caller adds to in place: PyTorch's FSDP2 loses its hook there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (2, 4)), nn.Flatten(-2)) for _ in range(3)
        )
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            out = block(x)
            out += x
            x = out
        return self.last(x)


def in_place_on_views() -> list[bool]:
    whole, sharded = Viewed(), Viewed()
    shard_model(sharded, "full_shard")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    for model in (whole, sharded):
        model(x).square().sum().backward()
    pairs = zip(whole.parameters(), sharded.parameters(), strict=True)
    return [torch.equal(one.grad, two.grad.full_tensor()) for one, two in pairs]


def test_an_output_that_is_a_view_may_be_written_to_in_place(ranks) -> None:
    assert all(all(each) for each in ranks(2, in_place_on_views))
