"""Compiled programs on both engines: the same graph breaks, graphs and operators, and the losses of the program that
is not compiled.

`Graphs()` is a backend that counts what `torch.compile` makes of a program and runs it as it is, so losses are equal to
the last bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fsdplab.engine as lab_engine
from fsdplab.engine.features.recompute import CHECKPOINTS
from tests.surface import (
    Block,
    Net,
    Program,
    close,
    data,
    gradients,
    loss_of,
    no_warnings,
    on_both,
    sharded,
    twin_gradients,
)  # fmt: skip

STEPS = 2


class Graphs:
    """A backend that counts the graphs and the operators that it is given, and compiles nothing."""

    def __init__(self) -> None:
        self.graphs, self.operators = 0, 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        self.operators += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return graph


# ---- what is compiled: nothing, each block as one graph, or the model


def nothing(model: nn.Module, **_: Any) -> nn.Module:
    return model


def blocks(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(fullgraph=True, **options)
    return model


def wrapped_blocks(model: nn.Module, **options: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, fullgraph=True, **options)
    return model


def whole(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def wrapped(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, **options)


# ---- what is trained


class Unrolled(Net):
    """Its forward has no loop, so that the compiler makes graphs of what is between two blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x)).tanh()
        x = self.blocks[1](x) * 2
        return self.last(self.blocks[2](x).cos())


class Equal(Net):
    """More blocks than the compiler makes graphs of one function for; they share one."""

    def __init__(self) -> None:
        super().__init__(hidden=(8,) * 10)


class Recomputing(Block):
    """Recomputes its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Inside(Net):
    """Its blocks recompute their own forward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = Recomputing


class Outside(Net):
    """Recomputes its blocks, with all that their hooks do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Wrapped(Net):
    """Its units are blocks inside PyTorch's wrapper for recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)


def root_alone(fsdp: Any, model: nn.Module, **options: Any) -> nn.Module:
    return fsdp.fully_shard(model, **options)


def in_one_list(fsdp: Any, model: nn.Module, **options: Any) -> nn.Module:
    fsdp.fully_shard(list(model.blocks), **options)
    return fsdp.fully_shard(model, **options)


def trained(
    fsdp: Any, way: Callable[..., nn.Module], first: bool = True, backend: Any = None, kind: Callable[..., Any] = Net,
    shard: Callable[..., Any] = sharded, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The losses of a model that is compiled as `way` says before (`first`) or after it is sharded, and the counts."""
    torch._dynamo.reset()
    counters.clear()
    backend = backend or Graphs()
    if first:
        model = shard(fsdp, way(kind(), backend=backend), **options)
    else:
        model = way(shard(fsdp, kind(), **options), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    counted = vars(backend) if isinstance(backend, Graphs) else {}
    return {"losses": losses, "breaks": sum(counters["graph_break"].values()), **counted}


TWO = ((blocks, False), (wrapped, False))
THREE = ((blocks, True), *TWO)


def answers_of(fsdp: Any, ways: Any = THREE, **options: Any) -> Any:
    """What is counted when a model is compiled in several ways, of which none may change a loss."""
    answers = {}
    with no_warnings():
        expected = trained(fsdp, nothing, **options)["losses"]
        for way, first in ways:
            answer = answers[way.__name__, first] = trained(fsdp, way, first, **options)
            assert answer["losses"] == expected, f"{way.__name__}: {answer} instead of {expected}"
            if way in (blocks, wrapped_blocks):
                assert answer["breaks"] == 0 and answer["operators"] > 0, f"{way.__name__}: {answer}"
    return answers


def both(*ways: Callable[..., nn.Module]) -> Any:
    return [(way, first) for way in ways for first in (True, False)]


def plain_blocks(fsdp: Any) -> Any:
    return answers_of(fsdp, both(blocks, wrapped_blocks))


def plain_model(fsdp: Any) -> Any:
    answers = answers_of(fsdp, both(whole, wrapped))
    assert all(answer["breaks"] == 0 for answer in answers.values()), answers
    return answers


def mixed(fsdp: Any) -> Any:
    return answers_of(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def unrolled(fsdp: Any) -> Any:
    return answers_of(fsdp, TWO, kind=Unrolled)


def equal(fsdp: Any) -> Any:
    return answers_of(fsdp, TWO, kind=Equal)


def recomputed_inside(fsdp: Any) -> Any:
    return answers_of(fsdp, kind=Inside)


def recomputed_outside(fsdp: Any) -> Any:
    return answers_of(fsdp, kind=Outside)


def recomputed_by_a_wrapper(fsdp: Any) -> Any:
    return answers_of(fsdp, kind=Wrapped)


def one_unit(fsdp: Any) -> Any:
    return answers_of(fsdp, [(wrapped, True), (whole, False)], shard=root_alone)


def one_list(fsdp: Any) -> Any:
    return answers_of(fsdp, TWO, shard=in_one_list)


def marks(fsdp: Any) -> Any:
    """The modules whose parameters the compiler takes for inputs that may move."""
    model = sharded(fsdp)
    return [name for name, each in model.named_modules() if getattr(each, "_is_fsdp_managed_module", False)]


@pytest.mark.parametrize("program", [
    plain_blocks, plain_model, mixed, unrolled, equal, one_unit, one_list, recomputed_inside, recomputed_outside,
    recomputed_by_a_wrapper, marks,
], ids=lambda program: program.__name__)  # fmt: skip
def test_a_compiled_model_breaks_where_it_breaks_on_torchs_engine(ranks, program: Program) -> None:
    on_both(ranks, 2, program)


# ---- by real backends


def by_backend(fsdp: Any, backend: str, way: Callable[..., nn.Module], first: bool) -> Any:
    """Steps beside the eager twin. A mode that listens, as `Collectives`, would keep all from being compiled."""
    torch._dynamo.reset()
    model, twin = Net(hidden=(8, 8, 8)), Net(hidden=(8, 8, 8))
    if first:
        sharded(fsdp, way(model, backend=backend))
    else:
        way(sharded(fsdp, model), backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    losses = []
    for step in range(STEPS):
        with no_warnings():
            loss = loss_of(model, step)
            loss.backward()
        losses.append(loss.detach())
        expected = twin_gradients(twin, step)
        got = {name.replace("_orig_mod.", ""): value for name, value in gradients(model).items()}
        close(got, expected, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    return losses


def traced(fsdp: Any) -> Any:
    return [by_backend(fsdp, "aot_eager", way, first) for way in (wrapped_blocks, blocks) for first in (True, False)]


def machine_code(fsdp: Any) -> Any:
    return [by_backend(fsdp, "inductor", wrapped_blocks, first) for first in (True, False)]


def test_compiled_blocks(ranks) -> None:
    on_both(ranks, 2, traced)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for CPU")
def test_blocks_compiled_by_inductor(ranks) -> None:
    on_both(ranks, 2, machine_code)


# ---- what torch's engine does not offer, or does otherwise


def recomputed_by_choice(choice: str) -> None:
    def shard(_: Any, model: nn.Module) -> nn.Module:
        return lab_engine.shard_model(model, "full_shard", checkpoint=choice)

    with no_warnings():
        expected = trained(lab_engine, nothing)["losses"]
        for first in (True, False):
            answer = trained(lab_engine, blocks, first, "aot_eager", shard=shard)
            assert answer["losses"] == pytest.approx(expected, rel=1e-5) and answer["breaks"] == 0, answer


@pytest.mark.parametrize("choice", CHECKPOINTS)
def test_checkpoint_is_an_argument_of_compiled_models_too(ranks, choice: str) -> None:
    ranks(2, recomputed_by_choice, choice)


class Calling(Net):
    """Calls the `forward` of its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def called_otherwise() -> None:
    """`forward` called directly, and a method that gathers as `forward` does, each compiled in a graph of its own."""
    with no_warnings():
        expected = trained(lab_engine, nothing, kind=Calling)["losses"]
        answer = trained(lab_engine, wrapped, False, kind=Calling)
        assert answer["losses"] == expected and answer["graphs"] == 3, answer
        model, twin, seen = sharded(lab_engine, Calling()), Calling(), Graphs()
        lab_engine.register_fsdp_forward_method(model, "encode")
        counters.clear()
        torch.compile(model.encode, backend=seen)(data()).square().mean().backward()
        close(gradients(model), twin_gradients(twin, loss=lambda m: m.encode(data()).square().mean()))
        assert seen.graphs == 1 and not counters["graph_break"], (seen.graphs, counters["graph_break"])


def test_methods_called_directly_are_compiled(ranks) -> None:
    ranks(2, called_otherwise)


def compiled_backward() -> str:
    """With torch's engine the root keeps its unsharded parameters, and the optimizer steps none of them."""
    model, twin = sharded(lab_engine, Net(hidden=(8,))), Net(hidden=(8,))
    with no_warnings(), pytest.raises(RuntimeError) as error:
        loss = loss_of(model)
        with compiled_autograd._enable(torch.compile(backend=Graphs())):
            loss.backward()
    model.reset_iter_state()
    model.zero_grad()
    loss_of(model).backward()
    close(gradients(model), twin_gradients(twin))
    return str(error.value)


def test_a_compiled_backward_is_refused(ranks) -> None:
    assert all("compile the forward only" in text for text in ranks(2, compiled_backward))
