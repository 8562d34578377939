"""Around the step: gradient scaling, clipping, EMA, accumulation, DDP as a strategy,
and a change of strategy halfway.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdplab.engine as lab_engine
from fsdplab.engine import STRATEGIES, MixedPrecisionPolicy, events, fully_shard, shard_model
from tests.surface import (
    Collectives,
    Net,
    close,
    data,
    gradients,
    loss_of,
    mesh_of,
    no_warnings,
    on_both,
    sharded,
    twin_gradients,
    wholes,
)  # fmt: skip

ROWS = [name for name in STRATEGIES if name != "hybrid_shard"]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters())
    return dict(zip(names, wholes(parameters)))


# ---- GradScaler


def scaled(fsdp: Any, dtype: torch.dtype) -> Any:
    """An infinite gradient on one rank only: every rank skips that step and halves the scale."""
    model, answers = sharded(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(dtype, torch.float32)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(4):
        before = values(model)
        bad = step == 1 and dist.get_rank() == 0
        loss = loss_of(model, step) * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer), scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(before[name], now) for name, now in values(model).items())
        answers.append((moved, scaler.get_scale()))
    return answers, values(model)


def half(fsdp: Any) -> Any:
    return scaled(fsdp, torch.float16)


def brain(fsdp: Any) -> Any:
    return scaled(fsdp, torch.bfloat16)


def test_gradient_scaler(ranks) -> None:
    on_both(ranks, 2, half, brain)


# ---- clipping


def clipped_by_torch(fsdp: Any) -> Any:
    """torch's own function gives a DTensor norm, on both engines."""
    answers = []
    for kind in (2.0, 1.0, float("inf")):
        model, twin = sharded(fsdp), Net()
        loss_of(model).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind)
        twin_gradients(twin)
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05, norm_type=kind)
        torch.testing.assert_close(norm.full_tensor(), expected)
        close(gradients(model), gradients(twin), rtol=1e-5, atol=1e-6)
        answers.append((type(norm).__name__, norm.full_tensor()))
    return answers


def test_clipping_with_torchs_function(ranks) -> None:
    on_both(ranks, 2, clipped_by_torch)


def clipped(strategy: str) -> list[float]:
    """A plain number equal to the twin's; the gradients become the twin's too."""
    norms = []
    for kind in (2.0, 1.0, float("inf")):
        model, twin = Net(), Net()
        for each in (model, twin):
            each.blocks[0].requires_grad_(False)
        shard_model(model, strategy, mesh=mesh_of(2, 2, names=("r", "s")) if strategy == "hybrid_shard" else mesh_of())
        loss_of(model).backward()
        norm = lab_engine.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind)
        twin_gradients(twin)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05, norm_type=kind))
        assert type(norm) is torch.Tensor and norm.ndim == 0 and not norm.requires_grad
        close(gradients(model), gradients(twin), rtol=1e-5, atol=1e-6)
        norms.append(norm.item())
    return norms


def clipped_odd_cases() -> None:
    """Nothing to clip, a generator, plain parameters beside slices, a norm that is not finite."""
    assert lab_engine.clip_grad_norm_([], 1.0) == 0.0
    model = Net()
    fully_shard(model, mesh=mesh_of(), ignored_params={model.first.weight})
    loss_of(model).backward()
    expected = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients(model).values()]))
    torch.testing.assert_close(lab_engine.clip_grad_norm_((p for p in model.parameters()), 1e9), expected)
    model.last.bias.grad._local_tensor.fill_(float("inf") if dist.get_rank() == 0 else 0.0)
    with pytest.raises(RuntimeError, match="total norm"):
        lab_engine.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_clipping_gives_one_plain_number(ranks) -> None:
    for strategy in ROWS:
        norms = ranks(2, clipped, strategy)
        assert norms[0] == norms[1], strategy
    norms = ranks(4, clipped, "hybrid_shard")
    assert all(each == norms[0] for each in norms)


def test_clipping_odd_cases(ranks) -> None:
    ranks(2, clipped_odd_cases)


# ---- EMA


def averaged(fsdp: Any) -> Any:
    """An average of the slices beside them; swapped in for evaluation, swapped out for training."""
    model, twin, answers = sharded(fsdp), Net(), []
    averages = [[p.detach().clone() for p in m.parameters()] for m in (model, twin)]
    assert not isinstance(averages[0][0], nn.Parameter) and isinstance(averages[0][0], DTensor)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(3):
        loss_of(model, step).backward(), twin_gradients(twin, step)
        for m, average, optimizer in zip((model, twin), averages, optimizers):
            optimizer.step(), optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average, m.parameters()):
                    mean.lerp_(parameter.detach(), 0.5)
                live = [p.detach().clone() for p in m.parameters()]
                [p.copy_(mean) for p, mean in zip(m.parameters(), average)]
                answers.append(m(data(9)))
                m.reshard() if m is model else None  # torch's engine leaves the root gathered after an evaluation
                [p.copy_(value) for p, value in zip(m.parameters(), live)]
        torch.testing.assert_close(answers[-2], answers[-1], rtol=1e-4, atol=1e-5)
    return answers


def test_moving_averages_of_slices(ranks) -> None:
    on_both(ranks, 2, averaged)


# ---- no_shard is DDP


def beside_ddp() -> None:
    """Equal losses, and the ledger's bytes are those of one all-reduce of every gradient."""
    model, other, curves = shard_model(Net(), "no_shard"), DistributedDataParallel(Net()), []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other)]
    moved: list[int] = []
    for step in range(4):
        moved.clear()
        stop = events.subscribe(
            lambda e: moved.append(e.logical_bytes - e.padding_bytes) if isinstance(e, events.Collective) else None
        )
        losses = [loss_of(m, step) for m in (model, other)]
        for loss, optimizer in zip(losses, optimizers):
            loss.backward(), optimizer.step(), optimizer.zero_grad()
        stop()
        curves.append((*(loss.item() for loss in losses), sum(moved) - sum(p.nbytes for p in other.parameters())))
    for mine, theirs, more in curves:
        assert more == 0 and (mine == theirs if dist.get_world_size() == 2 else abs(mine - theirs) < 1e-5), curves


def test_no_shard_is_ddp(ranks) -> None:
    ranks(2, beside_ddp)
    ranks(4, beside_ddp)


# ---- accumulation, strategy by strategy


def accumulated(strategy: str) -> list[int]:
    """Three micro-batches equal the twin's; returns the collectives of each."""
    model, twin, row, counts = shard_model(Net(), strategy), Net(), STRATEGIES[strategy], []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    for _ in range(2):
        counts.clear()
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2 or row.shard_gradients)
            model.set_is_last_backward(micro == 2)
            with Collectives() as seen:
                loss_of(model, micro).backward()
            counts.append(len(seen.seen))
        close(gradients(model), twin_gradients(twin, 0, 1, 2), rtol=2e-6, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    close(values(model), values(twin), rtol=1e-4, atol=1e-5)
    return counts


def test_accumulation_in_each_strategys_own_way(ranks) -> None:
    expected = {"no_shard": [0, 0, 4], "zero1": [4, 0, 4], "zero2": [8, 4, 4]}
    expected |= {"shard_grad_op": [8, 8, 8], "full_shard": [11, 11, 11]}
    for strategy, counts in expected.items():
        got = ranks(2, accumulated, strategy)
        assert got == [counts, counts], strategy


# ---- another strategy from here on


def handed_on(route: list[str], policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
    """The losses of one step under each strategy in turn; state moves through full state dicts."""
    losses, held, whole_states = [], None, StateDictOptions(full_state_dict=True)
    for step, strategy in enumerate(route):
        mesh = mesh_of(2, dist.get_world_size() // 2, names=("r", "s")) if strategy == "hybrid_shard" else mesh_of()
        model = shard_model(Net(seed=step), strategy, mesh=mesh, mp_policy=policy)  # other weights, to be replaced
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if held is not None:
            with no_warnings():
                set_state_dict(
                    model, optimizer, model_state_dict=held[0], optim_state_dict=held[1], options=whole_states
                )
        loss = loss_of(model, step)
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        losses.append(loss.detach())
        held = copy.deepcopy(get_state_dict(model, optimizer, options=whole_states))
    return losses


def one_curve(route: list[str], policy: MixedPrecisionPolicy) -> None:
    straight = handed_on(["full_shard"] * len(route), policy)
    torch.testing.assert_close(handed_on(route, policy), straight)


def test_a_change_of_strategy_does_not_change_the_curve(ranks) -> None:
    ranks(2, one_curve, ["full_shard", "zero1", "no_shard", "shard_grad_op", "zero2"], MixedPrecisionPolicy())
    ranks(2, one_curve, ["zero1", "full_shard", "no_shard"], MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    ranks(4, one_curve, ["hybrid_shard", "full_shard", "hybrid_shard"], MixedPrecisionPolicy())
