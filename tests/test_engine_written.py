"""Whoever writes to the shards, by whatever way, and whatever state their unit is in: the next forward of the root
computes with what was written, exactly as the unsharded twin does. docs/engine.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdplab.engine import shard_model
from fsdplab.engine.core.buffers import fingerprint
from tests.ranks import transports
from tests.surface import Collectives, mesh_of
from tests.test_engine_handed_out import STRATEGIES, Tower, X, equal

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
KEEP = 0.875  # what a write leaves of every value
Parameters = list[nn.Parameter]


# ---- ways to write: each scales the parameters by `KEEP`


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module, Parameters], None]:
    def write(model: nn.Module, parameters: Parameters) -> None:
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        kind(parameters, lr=1 - KEEP, **options).step()
        for parameter in parameters:
            parameter.grad = None

    return write


def copy_(model: nn.Module, parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.copy_(parameter * KEEP)


def data(model: nn.Module, parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.data.mul_(KEEP)


def local_data(model: nn.Module, parameters: Parameters) -> None:
    for parameter in parameters:
        local(parameter).data.mul_(KEEP)


def numpy(model: nn.Module, parameters: Parameters) -> None:
    for parameter in parameters:
        array = local(parameter).detach().numpy()
        array *= KEEP


def foreach(model: nn.Module, parameters: Parameters) -> None:
    torch._foreach_mul_([parameter.detach() for parameter in parameters], KEEP)


def load_state_dict(model: nn.Module, parameters: Parameters) -> None:
    model.load_state_dict({name: value * KEEP for name, value in model.state_dict().items()})


def assign(model: nn.Module, parameters: Parameters) -> None:
    model.load_state_dict({name: value * KEEP for name, value in model.state_dict().items()}, assign=True)
    parameters[:] = model.parameters()


def set_(model: nn.Module, parameters: Parameters) -> None:
    for parameter in parameters:
        held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        held.set_(held * KEEP)


def swap(model: nn.Module, parameters: Parameters) -> None:
    for parameter in parameters:
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter * KEEP, parameter.requires_grad))


WAYS: dict[str, Callable[[nn.Module, Parameters], None]] = {
    "single-tensor optimizer": optimizer(torch.optim.SGD, foreach=False),
    "foreach optimizer": optimizer(torch.optim.SGD, foreach=True),
    "fused optimizer": optimizer(torch.optim.Adam, fused=True),
    "copy_": copy_,
    ".data": data,
    "to_local().data": local_data,
    "numpy": numpy,
    "torch._foreach_mul_": foreach,
    "load_state_dict": load_state_dict,
    "load_state_dict(assign=True)": assign,
    "set_ of the local tensor": set_,
    "swap_tensors": swap,
}


# ---- states of a unit, which a model is put into before its first forward


def as_it_is(model: nn.Module) -> None: ...


def kept_after_forward(model: nn.Module) -> None:
    model.set_reshard_after_forward(False)


def kept_after_backward(model: nn.Module) -> None:
    model.set_reshard_after_backward(False)


def never_synchronised(model: nn.Module) -> None:
    model.set_requires_gradient_sync(False)


def one_frozen_unit_not_synchronised(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[0].set_requires_gradient_sync(False)


def never_the_last_backward(model: nn.Module) -> None:
    model.set_is_last_backward(False)


def kept_and_never_last(model: nn.Module) -> None:
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)


def all_at_once(model: nn.Module) -> None:
    for change in (kept_after_forward, kept_after_backward, never_synchronised, never_the_last_backward):
        change(model)


STATES = (
    as_it_is, kept_after_forward, kept_after_backward, never_synchronised, one_frozen_unit_not_synchronised,
    never_the_last_backward, kept_and_never_last, all_at_once,
)  # fmt: skip


# ---- what a program does between two writes


def train(model: nn.Module) -> torch.Tensor:
    loss = model(X).float().square().mean()
    loss.backward()
    return loss.detach()


def train_on_two_batches(model: nn.Module) -> torch.Tensor:
    """Two forwards before one backward: the root stays unsharded between them."""
    loss = model(X).float().square().mean() + model(X + 1).float().square().mean()
    loss.backward()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module) -> torch.Tensor:
    return model(X).float()


@torch.inference_mode()
def infer(model: nn.Module) -> torch.Tensor:
    return model(X).float().clone()


def forward_alone(model: nn.Module) -> torch.Tensor:
    """A forward with gradients that no backward follows: units that are not resharded stay unsharded."""
    return model(X).float().detach()


# what a program does in which states: elsewhere its units are resharded when it is over
USES: dict[Callable[[nn.Module], torch.Tensor], tuple[Callable[[nn.Module], None], ...]] = {
    train: STATES,
    train_on_two_batches: (as_it_is, kept_after_backward),
    evaluate: (kept_after_forward,),
    infer: (kept_after_forward,),
    forward_alone: (as_it_is, kept_after_forward),
}


def sharded(strategy: str, transport: str, state: Callable[[nn.Module], None], **options: Any) -> nn.Module:
    model = shard_model(Tower(blocks=1), strategy, transport=transport, mesh=one_mesh(), **options)
    state(model)
    return model


@cache
def one_mesh() -> DeviceMesh:
    """The same for all models of a rank."""
    return mesh_of()


def seen_of(use: Callable[[nn.Module], torch.Tensor], name: str, model: nn.Module, uses: int = 2) -> list[torch.Tensor]:
    """What some uses give, with a write after each; the parameters are those that an optimizer would have."""
    seen, parameters = [], list(model.parameters())
    for _ in range(uses):
        seen.append(use(model).clone())
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad():
            WAYS[name](model, parameters)
    return seen


def table(strategy: str, transport: str) -> None:
    for name in WAYS:
        for use, states in USES.items():
            uses = 4 if name == "numpy" else 2
            expected = seen_of(use, name, Tower(blocks=1), uses)
            assert len({value.flatten()[0].item() for value in expected}) == uses, "the writes make no difference"
            for state in states:
                got = seen_of(use, name, sharded(strategy, transport, state), uses)
                equal(got, expected, f"{strategy}, {transport}, {name}, {state.__name__}, {use.__name__}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_to_write_in_every_state(ranks, strategy: str) -> None:
    for transport in transports():
        ranks(2, table, strategy, transport)


def in_low_precision(transport: str) -> None:
    """Shards that are cast before they are gathered; a unit that is resharded always is gathered anew."""
    for name in ("foreach optimizer", "numpy"):
        for strategy in STRATEGIES:
            for use, states in USES.items():
                expected = seen_of(use, name, sharded("full_shard", transport, as_it_is, mp_policy=BF16))
                for state in states:
                    got = seen_of(use, name, sharded(strategy, transport, state, mp_policy=BF16))
                    equal(got, expected, f"{strategy}, {name}, {state.__name__}, {use.__name__}")


def test_in_low_precision(ranks) -> None:
    for transport in transports():
        ranks(2, in_low_precision, transport)


def on_one_rank_alone(transport: str) -> None:
    """Only rank 0 writes, to what it holds: all ranks gather again."""
    for strategy in STRATEGIES[1:]:
        for state in STATES:
            model, twin = sharded(strategy, transport, state), Tower(blocks=1)
            parameters = list(model.parameters())
            equal(train(model), train(twin), strategy)
            if dist.get_rank() == 0:
                for parameter in parameters:
                    local(parameter).detach().numpy()[:] *= KEEP
            for parameter in twin.parameters():
                parameter.data[: -(-len(parameter) // 2)] *= KEEP
            equal(train(model), train(twin), f"{strategy}, {state.__name__}")


def test_what_one_rank_has_written(ranks) -> None:
    for transport in transports():
        ranks(2, on_one_rank_alone, transport)


# ---- what was not written to is not gathered again


def gathers(use: Callable[[nn.Module], torch.Tensor], model: nn.Module) -> list[int]:
    counts = []
    for _ in range(3):
        with Collectives() as seen:
            use(model)
        counts.append(seen.kinds.count("gather"))
    return counts


def gathered_once(transport: str) -> None:
    for strategy, state, use, counts in (
        ("full_shard", kept_after_forward, evaluate, [2, 0, 0]),
        ("shard_grad_op", kept_and_never_last, train, [2, 0, 0]),
        ("zero1", never_synchronised, train, [2, 0, 0]),
        ("zero2", never_the_last_backward, train, [2, 0, 0]),
        ("zero2", as_it_is, train, [2, 2, 2]),
        ("full_shard", as_it_is, train_on_two_batches, [5, 5, 5]),
    ):
        got = gathers(use, sharded(strategy, transport, state))
        assert got == counts, (strategy, state.__name__, got)


def test_what_nobody_has_written_to_is_gathered_once(ranks) -> None:
    for transport in transports():
        ranks(2, gathered_once, transport)


def test_the_fingerprint_sees_every_change() -> None:
    """Of one element, of signs, of the order, of rows that change places; in the last bytes and in the first."""
    torch.manual_seed(0)
    for dtype, count in ((torch.float32, 100_003), (torch.bfloat16, 70_001), (torch.float64, 33)):
        value = torch.randn(count).to(dtype)
        changes = [value.neg(), value.flip(0), value.roll(1), value.abs(), value * 0]
        for place in (0, 1, count // 2, count - 1):
            other = value.clone()
            other[place] = -other[place]
            changes.append(other)
        whole = fingerprint([value])
        assert fingerprint([value.clone()]) == whole
        assert all(fingerprint([change]) != whole for change in changes)
    rows = [torch.randn(4, 4), torch.randn(3)]
    assert fingerprint(rows) != fingerprint([rows[0].flip(0), rows[1]]) != fingerprint(rows[::-1])
