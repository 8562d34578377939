"""What users of sharding engines struggle with, one test each: a clear error, a warning, or it works.

The numbers are the public issues in which people lost days to it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdplab.engine as engine
from fsdplab import checkpoint
from fsdplab.engine import events, fully_shard, shard_model
from tests.surface import Collectives, Net, close, data, gradients, loss_of, mesh_of, sharded, twin_gradients, wholes

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def said_by(action: Callable[[], Any]) -> str:
    """All warnings and the error, if any, of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
            error = ""
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
    return "\n".join([*(str(each.message) for each in caught), error])


# ---- torchtitan#735, pytorch#135513: reserved far above allocated, spikes


def the_same_memory_every_step() -> None:
    """Steps after the first allocate the same sizes for the same units in the same order."""
    for transport in ("gloo", "shm"):
        model, steps = shard_model(Net(), "full_shard", mp_policy=LOW, transport=transport, mesh=mesh_of()), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(5):
            tags: list[tuple[str, int, str]] = []
            note = lambda e: tags.append((e.category, e.nbytes, e.unit))  # noqa: E731
            stop = events.subscribe(lambda e: note(e) if isinstance(e, events.Tag) else None)
            loss_of(model, step).backward()
            optimizer.step(), optimizer.zero_grad()
            stop()
            steps.append(tags)
        assert steps[2] and steps[2] == steps[3] == steps[4], transport


def test_memory_is_the_same_every_step(ranks) -> None:
    ranks(2, the_same_memory_every_step)


# ---- pytorch#176076: tied weights in two units


def tied(units: list[str]) -> str:
    model = Net(hidden=(8, 8, 8))
    model.last.weight = model.blocks[0].down.weight
    return said_by(lambda: [fully_shard(model.get_submodule(name), mesh=mesh_of()) for name in units])


def tied_in_both_orders() -> None:
    for units in (["blocks.0", ""], ["last", "blocks.0"], ["last", ""]):
        text = tied(units)
        assert "tied" in text and "one unit" in text, (units, text)
    assert tied([""]) == "", "inside one unit it works"


def test_tied_weights_in_two_units_are_refused_with_the_remedy(ranks) -> None:
    ranks(2, tied_in_both_orders)


# ---- pytorch#91167: frozen and LoRA parameters of another dtype


def frozen_in_another_dtype(strategy: str) -> None:
    models = [Net(), Net()]
    for model in models:
        for block in model.blocks:
            block.up.bfloat16().requires_grad_(False)
            block.forward = lambda x, b=block: x + b.down(torch.tanh(b.up(x.bfloat16())).float())
    model, twin = shard_model(models[0], strategy, mesh=mesh_of()), models[1]
    loss_of(model).backward()
    close(gradients(model), twin_gradients(twin))
    assert model.blocks[0].up.weight.dtype == torch.bfloat16 and model.blocks[0].up.weight.grad is None


def test_frozen_parameters_of_another_dtype(ranks) -> None:
    for strategy in ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard"):
        ranks(2, frozen_in_another_dtype, strategy)


# ---- accelerate#3979: float32 masters that are silently bfloat16


def masters() -> None:
    model = shard_model(Net(), "full_shard", mp_policy=LOW, mesh=mesh_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    optimizer.step()
    held = [
        *model.parameters(),
        *(p.grad for p in model.parameters()),
        *(s["exp_avg"] for s in optimizer.state.values()),
    ]
    assert {each.dtype for each in held} == {torch.float32}
    text = said_by(lambda: loss_of(shard_model(Net().bfloat16(), "full_shard", mp_policy=LOW, mesh=mesh_of())))
    assert "bfloat16" in text and "float32" in text, (
        f"bfloat16 masters under a mixed-precision policy go unmentioned: {text!r}"
    )


def test_masters_are_float32_or_it_is_said(ranks) -> None:
    ranks(2, masters)


# ---- weights that a forward writes to: what it writes is lost with the gathered copy


def embedding(max_norm: float | None) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(11, 8, max_norm=max_norm)


def square(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(11)).square().mean()


def rewritten() -> None:
    """The warning, and its remedy, which trains as the unsharded embedding does."""
    text = said_by(lambda: square(fully_shard(embedding(1.0), mesh=mesh_of())))
    assert "(max_norm=1.0) shortens rows of its weight" in text and "weight.to_local().renorm_(2.0, 0, 1.0)" in text, (
        text
    )
    model, twin = fully_shard(embedding(None), mesh=mesh_of()), embedding(1.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=10.0) for each in (model, twin)]
    assert "max_norm" not in said_by(lambda: square(model).backward())
    weight = model.weight
    for _ in range(3):
        with torch.no_grad():
            weight.to_local().renorm_(2.0, 0, 1.0)
        model.zero_grad(), twin.zero_grad()
        square(model).backward(), square(twin).backward()
        close(gradients(model), gradients(twin))
        for optimizer in optimizers:
            optimizer.step()


def test_weights_that_a_forward_writes_to(ranks) -> None:
    ranks(2, rewritten)


# ---- accelerate#3394: an optimizer built before sharding


def optimizer_first(strategy: str) -> None:
    model, twin = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def use() -> None:
        shard_model(model, strategy, mesh=mesh_of())
        loss_of(model).backward()
        optimizer.step()

    text = said_by(use)
    if "optimizer" not in text:
        twin_gradients(twin), torch.optim.SGD(twin.parameters(), lr=0.1).step()
        for mine, other in zip(wholes(list(model.parameters())), twin.parameters()):
            torch.testing.assert_close(mine, other, msg="the optimizer steps parameters of before, and nobody says so")


def test_an_optimizer_built_before_sharding(ranks) -> None:
    for strategy in ("full_shard", "zero1", "no_shard"):
        ranks(2, optimizer_first, strategy)


def after_a_backward() -> None:
    """A gradient of before sharding trains nothing either."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data()).sum().backward()
    shard_model(model, "full_shard", mesh=mesh_of())
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="built before the model was sharded"):
        optimizer.step()


def test_an_optimizer_with_gradients_of_before_sharding(ranks) -> None:
    ranks(2, after_a_backward)


def another_model_s_too() -> None:
    """A parameter that another module shows still, and trains, is a parameter."""
    model, beside = Net(), nn.Linear(8, 8)
    beside.weight = model.last.weight
    optimizer = torch.optim.SGD(beside.parameters(), lr=0.1)
    shard_model(model, "full_shard", mesh=mesh_of())
    before = beside.weight.detach().clone()
    beside(data()).sum().backward()
    optimizer.step()
    assert not torch.equal(before, beside.weight)


def test_an_optimizer_of_what_another_model_has_too(ranks) -> None:
    ranks(2, another_model_s_too)


# ---- pytorch#170862: a total norm that is a partial DTensor


def norm() -> float:
    model = shard_model(Net(), "full_shard", mesh=mesh_of())
    loss_of(model).backward()
    total = engine.clip_grad_norm_(model.parameters(), 1.0)
    assert not isinstance(total, DTensor) and f"{total:.3f}"
    return total.item()


def test_the_total_norm_is_a_number_equal_everywhere(ranks) -> None:
    first, second = ranks(2, norm)
    assert first == second


# ---- pytorch#158719: unused parameters that hang


class Choosing(Net):
    """Uses one of two layers of the root, as its rank decides."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.other(x) if dist.get_rank() % 2 else x


def different_parameters(strategy: str) -> None:
    model, twin = shard_model(Choosing(), strategy, mesh=mesh_of()), Choosing()
    loss_of(model).backward()
    loss_of(twin).backward()
    for name, parameter in twin.named_parameters():
        value = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(value)
        parameter.grad = value / dist.get_world_size()
    close(gradients(model), {name: p.grad for name, p in twin.named_parameters()})


def test_ranks_that_use_different_parameters_of_a_unit(ranks) -> None:
    for strategy in ("full_shard", "zero1", "no_shard"):
        ranks(2, different_parameters, strategy)


# ---- pytorch#153354: model.forward(x) past the hooks


class Direct(Net):
    """Calls the `forward` of its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block.forward(x)
        return self.last(x)


def forward_called_directly() -> None:
    for cls in (Net, Direct):
        model, twin = sharded(engine, cls()), cls()
        for step in range(2):
            model.forward(data(step)).square().mean().backward()
            close(gradients(model), twin_gradients(twin, loss=lambda m: m.forward(data(step)).square().mean()))
            model.zero_grad(), twin.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model.forward(data()), model(data()))
        assert all(isinstance(p, DTensor) for p in model.parameters())


def test_forward_called_directly(ranks) -> None:
    ranks(2, forward_called_directly)


# ---- accelerate#3971: optimizer state at another number of ranks


def saved(folder: str) -> list[torch.Tensor]:
    model = shard_model(Net(), "full_shard", mesh=mesh_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model).backward(), optimizer.step()
    checkpoint.save(model, optimizer, folder)
    return wholes([*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())])


def loaded(folder: str) -> list[torch.Tensor]:
    model = shard_model(Net(seed=1), "full_shard", mesh=mesh_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint.load(model, optimizer, folder)
    return wholes([*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())])


def test_optimizer_state_moves_to_another_number_of_ranks(ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks(2, saved, str(Path(folder) / "two"))[0]
        for values in ranks(3, loaded, str(Path(folder) / "two")):
            torch.testing.assert_close(values, expected, rtol=0, atol=0)


# ---- pytorch#149640: the first rank blows up on a full state dict


def full_state() -> int:
    model = shard_model(Net(), "full_shard", mesh=mesh_of())
    with Collectives() as seen:
        state = checkpoint.full_state_dict(model)
    assert (len(state) == len(list(model.parameters()))) if dist.get_rank() == 0 else state == {}
    return max([each.elements for each in seen.seen], default=0)


def test_a_full_state_dict_gathers_one_parameter_at_a_time(ranks) -> None:
    largest = max(p.numel() for p in Net().parameters())
    assert max(ranks(2, full_state)) <= largest


# ---- overlap that is lost silently


class Turning(Net):
    """Runs its blocks backwards from some step on."""

    turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in reversed(self.blocks) if self.turned else self.blocks:
            x = block(x)
        return self.last(x)


def order_of_transitions(model: nn.Module) -> list[tuple[str, str, str]]:
    order: list[tuple[str, str, str]] = []
    stop = events.subscribe(
        lambda e: order.append((e.phase, e.unit, e.after)) if isinstance(e, events.Transition) else None
    )
    loss_of(model).backward()
    stop()
    return order


def overlap_comes_back() -> None:
    model = sharded(engine, Turning())
    for turned, chain in ((False, ["0", "1", "2"]), (True, ["2", "1", "0"])):
        model.turned = turned
        for _ in range(2):
            order = order_of_transitions(model)  # the second time the new order is known
        for phase, units in (("forward", chain), ("backward", chain[::-1])):
            for here, following in zip(units, units[1:]):
                gathers, ends = (phase, f"blocks.{following}", "unsharding"), (phase, f"blocks.{here}", "sharded")
                assert order.index(gathers) < order.index(ends), f"{phase}: blocks.{following} not behind {here}"


def test_prefetch_learns_a_new_order_of_units(ranks) -> None:
    ranks(2, overlap_comes_back)


# LlamaFactory#10820, garbage in non-persistent buffers after `to_empty`: see test_surface_models.py.


# ---- a program that only imports the engine


_IMPORTS = """
import importlib, os, pkgutil, warnings
import torch, torch.distributed as dist, torch.distributed.fsdp
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

def state():
    places = [*vars(modules).items(), *vars(optimizers).items()]
    hooks = [len(each) for name, each in places if name.endswith("_hooks")]
    functions = {name: value for name, value in vars(dist).items() if callable(value)}
    settings = list(warnings.filters), dict(os.environ), torch.get_num_threads(), list(dist.Backend.backend_list)
    return hooks, functions, settings

import fsdplab.engine
before = state()
for found in pkgutil.walk_packages(fsdplab.engine.__path__, "fsdplab.engine."):
    importlib.import_module(found.name)
assert state() == before, (before, state())

parameter = torch.nn.Parameter(torch.ones(3))
parameter._replaced_by_shard = True  # as of a model that was sharded by somebody else
torch.optim.SGD([parameter], lr=0.1).step()
"""


def test_importing_the_engine_changes_nothing() -> None:
    """No optimizer, module, backend, collective or filter of the process is touched before a model is sharded."""
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True, timeout=120)
