"""After an exception: `reset_iter_state` on the root, and the next step is as if nothing had happened,
on both engines.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdplab.engine as lab_engine
from tests.surface import (
    Collectives,
    Net,
    close,
    data,
    gradients,
    lab_over,
    loss_of,
    mesh_of,
    on_both,
    sharded,
    shown,
    twin_gradients,
)


class Broken(Exception):
    """What the user's own code raises."""


class BreaksBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Broken("in a backward")


class Fragile(Net):
    """Raises where it is told to: before a block's forward, or in the backward between two blocks."""

    where: str = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.where == f"forward {index}":
                raise Broken(self.where)
            x = BreaksBackward.apply(x) if self.where == f"backward {index}" else x
            x = block(x)
        return self.last(x)


def attempt(model: Fragile, where: str) -> None:
    """One step that raises; gradients that it left are dropped."""
    model.where = where
    try:
        loss_of(model).backward()
    except Broken:
        model.where = ""
        model.reset_iter_state()
        clear_what_torch_leaves(model)
        model.zero_grad()
        return
    raise AssertionError(f"nothing was raised at {where!r}")


def clear_what_torch_leaves(model: nn.Module) -> None:
    """Torch 2.13 promises to discard the failed step's gradients, but its whole parameters keep theirs for the next
    step.
    """
    if not isinstance(model, lab_engine.FSDPModule):
        for state in model._get_fsdp_state()._state_ctx.all_states:
            for param in (each for group in state._fsdp_param_groups for each in group.fsdp_params):
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


def carry_on(fsdp: Any, **options: Any) -> Any:
    """Each kind of failure in turn, in the very first step and in later ones, with a checked step after each."""
    answers = []
    for first in ("", "forward 1"):
        model, twin = sharded(fsdp, Fragile(), **options), Net()
        if first:
            attempt(model, first)
        for step, where in enumerate(("forward 0", "forward 2", "backward 2", "backward 1")):
            with Collectives() as seen:
                loss = loss_of(model, step)
                loss.backward()
            close(gradients(model), twin_gradients(twin, step), rtol=2e-6, atol=1e-6)
            answers.append((loss.detach(), sorted(seen.seen), shown(model)))
            model.zero_grad(), twin.zero_grad()
            attempt(model, where)
            answers.append(shown(model))
    return answers


def with_shards(fsdp: Any) -> Any:
    return carry_on(fsdp)


def keeping_parameters(fsdp: Any) -> Any:
    return carry_on(fsdp, reshard_after_forward=False)


def in_low_precision(fsdp: Any) -> Any:
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, twin = (sharded(fsdp, each, mp_policy=policy) for each in (Fragile(), Net()))
    attempt(model, "backward 1")
    for each in (model, twin):
        loss_of(each, 3).backward()
    close(gradients(model), gradients(twin))
    return gradients(model)


def micro_batches_are_lost(fsdp: Any) -> Any:
    """What was accumulated without communication is discarded too: the sequence starts again."""
    model, twin = sharded(fsdp, Fragile()), Net()
    model.set_requires_gradient_sync(False)
    loss_of(model, 5).backward()
    attempt(model, "forward 1")
    model.set_requires_gradient_sync(True)
    loss_of(model, 6).backward()
    close(gradients(model), twin_gradients(twin, 6))


def reduced(model: nn.Module) -> set[str]:
    """The names of slices that have a gradient."""
    return {name for name, each in model.named_parameters() if isinstance(each, DTensor) and each.grad is not None}


def half_of_the_gradients(transport: str) -> None:
    """Those that were reduced before a backward raised go with the rest of it; the next forward alone keeps them."""
    model = sharded(lab_over(transport), Fragile())
    for reset in (False, True):
        model.where = "backward 1"
        with pytest.raises(Broken):
            loss_of(model).backward()
        model.where = ""
        given = reduced(model)
        assert any("blocks.2" in name for name in given) and not any("blocks.0" in name for name in given)
        model.reset_iter_state() if reset else loss_of(model)
        assert reduced(model) == (set() if reset else given)
        model.reset_iter_state(), model.zero_grad()


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_half_of_the_gradients(ranks, transport: str) -> None:
    ranks(2, half_of_the_gradients, transport)


def replicas(fsdp: Any) -> Any:
    """HSDP with a partial reduction waiting: it is discarded."""
    model, twin = sharded(fsdp, Fragile(), mesh=mesh_of(2, 2, names=("replicate", "shard"))), Net()
    model.set_requires_all_reduce(False)
    loss_of(model, 5).backward()
    attempt(model, "backward 1")
    model.set_requires_all_reduce(True)
    loss_of(model, 6).backward()
    close(gradients(model), twin_gradients(twin, 6), rtol=2e-6, atol=1e-6)


def gathered_by_hand(fsdp: Any) -> Any:
    """A gather in flight when the step failed."""
    model = sharded(fsdp, Fragile())
    loss_of(model).backward()
    model.zero_grad()
    model.blocks[2].unshard(async_op=True)
    attempt(model, "forward 1")
    between = shown(model)
    loss_of(model, 1).backward()
    close(gradients(model), twin_gradients(Net(), 1))
    return between


def test_a_step_after_an_exception(ranks) -> None:
    on_both(ranks, 2, with_shards, keeping_parameters, in_low_precision, gathered_by_hand)


def test_accumulated_gradients_after_an_exception(ranks) -> None:
    on_both(ranks, 2, micro_batches_are_lost)


def test_partial_reductions_after_an_exception(ranks) -> None:
    on_both(ranks, 4, replicas)


def by_hand_after_an_exception(transport: str, where: str) -> None:
    """A step that raised with gathers done and under way, and nobody resets; slices are written, then gathered."""
    model = sharded(lab_over(transport), Fragile())
    loss_of(model).backward()  # learns the order of units: from now on the next one is gathered ahead
    at_rest, units = list(model.parameters()), [model, *model.blocks]
    model.where = where
    with pytest.raises(Broken):
        loss_of(model).backward()
    with torch.no_grad():
        for slice_ in at_rest:
            slice_.fill_(3.0)
    for unit in units:
        unit.unshard()
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())
    for unit in units:
        unit.reshard()


def inside_a_running_forward(transport: str) -> None:
    """What is on its way already is not gathered a second time."""
    model = sharded(lab_over(transport), Fragile())
    loss_of(model).backward()
    model.blocks[0].register_forward_pre_hook(lambda *_: model.blocks[1].unshard(async_op=True) and None)
    with Collectives() as seen:
        loss_of(model)
    assert len(seen.seen) == 4, "the root and three blocks"


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_gathering_by_hand_after_an_exception_reads_what_was_written(ranks, transport: str) -> None:
    for where in ("forward 1", "forward 2", "backward 1"):
        ranks(2, by_hand_after_an_exception, transport, where)
    ranks(2, inside_a_running_forward, transport)


class Twice(nn.Module):
    """Runs its blocks again without gradients, as evaluation in the middle of an accumulation does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.net(x).abs().mean()
        return self.net(x) * scale


def backward_never_comes(fsdp: Any) -> Any:
    """A forward with gradients whose loss is thrown away, then training; evaluation between forward and backward."""
    model, twin = sharded(fsdp), Net()
    loss_of(model, 7)
    loss = loss_of(model, 8)
    with torch.no_grad():
        evaluated = model(data(9))
    loss_of(model, 8).backward()
    close(gradients(model), twin_gradients(twin, 8))
    inner = Twice()
    sharded(fsdp, inner.net)
    fsdp.fully_shard(inner, mesh=mesh_of())
    inner(data()).square().mean().backward()
    expected = twin_gradients(reference := Twice(), loss=lambda m: m(data()).square().mean())
    close(gradients(inner), expected)
    del loss, reference
    return evaluated


def test_forwards_whose_backward_never_comes(ranks) -> None:
    on_both(ranks, 2, backward_never_comes)
