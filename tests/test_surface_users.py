"""What users do with a sharded model and its parts, the same on both engines: results that leave a module another way
than by its output, hooks, optimizers, parametrizations, dtypes, frozen parts.

Where torch's engine fails for a reason of its own, the lab's is compared with the unsharded twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp as torch_engine
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.surface import (
    Block,
    Net,
    close,
    data,
    error_of,
    gradients,
    look,
    loss_of,
    mesh_of,
    no_warnings,
    on_both,
    sharded,
    shown,
    twin_gradients,
    wholes,
)  # fmt: skip

LossOf = Callable[[nn.Module, int], torch.Tensor]


def stepped(model: nn.Module, loss: LossOf = loss_of, steps: int = 2) -> list[dict[str, torch.Tensor | None]]:
    """The gradients of some steps, each dropped before the next."""
    answers = []
    for step in range(steps):
        loss(model, step).backward()
        answers.append(gradients(model))
        model.zero_grad()
    return answers


# ---- results that leave a module another way than by its output


class Layer(nn.Module):
    """One of three layers; subclasses say how the result leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(8, 8), nn.Linear(8, 3)
        self.extra: torch.Tensor | None = None


class Stack(nn.Module):
    """Three layers of a kind."""

    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bag: list[Any] = []
        notes: dict[str, torch.Tensor] = {}
        for block in self.blocks:
            answer = block(x, bag, notes=notes)
            x = bag.pop() if answer is None else answer
        assert len(notes) in (0, 3), "what a layer writes to a dict of its caller is there"
        return x


class IntoList(Layer):
    def forward(self, x: torch.Tensor, bag: list[Any], notes: dict[str, torch.Tensor]) -> None:
        bag.append(torch.tanh(self.linear(x)))


class Noting(Layer):
    def forward(self, x: torch.Tensor, bag: list[Any], notes: dict[str, torch.Tensor]) -> torch.Tensor:
        notes[f"{len(notes)}"] = x.detach()
        self.extra = self.router(x).softmax(-1).square().mean()
        return x + torch.tanh(self.linear(x))


class Cutting(Noting):
    def forward(self, x: torch.Tensor, bag: list[Any], notes: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(x.detach().requires_grad_(), bag, notes)


def results_in_a_list(fsdp: Any) -> None:
    """Torch's engine drops the parameters, and its backward reads them."""
    if fsdp is torch_engine:
        return
    for after in (True, None):
        model, twin = sharded(fsdp, Stack(IntoList), reshard_after_forward=after), Stack(IntoList)
        for step in range(3):
            loss_of(model, step).backward()
            close(gradients(model), twin_gradients(twin, step))
            model.zero_grad(), twin.zero_grad()


def with_extra(model: Stack, step: int) -> torch.Tensor:
    return loss_of(model, step) + sum(block.extra for block in model.blocks)


def losses_kept_in_modules(fsdp: Any) -> Any:
    return stepped(sharded(fsdp, Stack(Noting)), with_extra, 3)


def only_through_what_is_kept(fsdp: Any) -> Any:
    """No output of a dropped unit has a part in the loss: the lab's notices the backward and trains, torch's fails."""
    model, twin = sharded(fsdp, Stack(Cutting)), Stack(Cutting)
    for step in range(2):
        if fsdp is torch_engine:
            assert error_of(lambda step=step: with_extra(model, step).backward()) == "RuntimeError"
            model.reset_iter_state()
            continue
        with_extra(model, step).backward()
        close(gradients(model), twin_gradients(twin, loss=lambda twin, step=step: with_extra(twin, step)))
        model.zero_grad(), twin.zero_grad()


class Loss(nn.Module):
    """Its root returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 8)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> None:
        self.kept = self.last(torch.tanh(self.blocks[1](self.blocks[0](x)))).square().mean()


def kept_loss(model: Loss, step: int) -> torch.Tensor:
    model(data(step))
    return model.kept


def a_root_that_returns_nothing(fsdp: Any) -> Any:
    return stepped(sharded(fsdp, Loss()), kept_loss)


class Pair(NamedTuple):
    values: list[Any]
    tag: str


class ByName(nn.Module):
    """Takes keyword arguments only and gives nested results with things besides tensors."""

    def __init__(self, inner: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ByName(False) for _ in range(2)) if inner else None
        self.linear = nn.Linear(8, 8)

    def forward(self, *, x: torch.Tensor, tag: str = "") -> Any:
        for block in self.blocks or ():
            x = block(x=x, tag="a").values[1]["value"]
        return Pair([None, {"value": torch.tanh(self.linear(x))}, 3], tag)


def by_name(fsdp: Any) -> Any:
    return stepped(sharded(fsdp, ByName()), lambda model, step: model(x=data(step)).values[1]["value"].square().mean())


class Weights(nn.Module):
    """Its forward returns its parameter, or a view of it, for its caller to compute with."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.weight, self.transposed = nn.Parameter(torch.randn(8, 8) / 3), transposed

    def forward(self) -> torch.Tensor:
        return self.weight.t() if self.transposed else self.weight


class Generated(nn.Module):
    """The root computes with what its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Weights(transposed) for transposed in (False, True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(x @ block())
        return x


def parameters_as_results(fsdp: Any) -> None:
    """Torch's engine drops the parameters that its caller has just got."""
    model, twin = sharded(fsdp, Generated()), Generated()
    if fsdp is torch_engine:
        assert error_of(lambda: model(data())) == "RuntimeError"
        return
    for step in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model(data()), twin(data()))
        assert all(type(parameter) is not nn.Parameter for parameter in model.parameters()), "evaluation leaves shards"
        loss_of(model, step).backward()
        close(gradients(model), twin_gradients(twin, step))
        model.zero_grad(), twin.zero_grad()


def test_results_that_leave_another_way(ranks) -> None:
    on_both(
        ranks, 2, results_in_a_list, losses_kept_in_modules, only_through_what_is_kept, a_root_that_returns_nothing,
        by_name, parameters_as_results,
    )  # fmt: skip


# ---- parameters of every kind


class Odd(nn.Module):
    """Parameters without elements, of one element, of fewer rows than ranks, and of rows of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.none, self.hollow = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(3, 0))
        self.one, self.rows = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(5, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * self.one + self.none.sum() + self.hollow.sum() + (self.rows * x[:1]).sum()


class Strided(nn.Module):
    """Weights that are not contiguous: a transposed one, every second row of another, channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [nn.Linear(8, 8), nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)]
        )
        self.blocks[0].weight = nn.Parameter(torch.randn(8, 8).t())
        self.every_second = nn.Parameter(torch.randn(16, 8)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[0](x) @ self.every_second)
        return self.blocks[1](x.reshape(1, 2, 4, 4)).reshape(4, 8)


def what_torch_refuses(fsdp: Any) -> None:
    """Empty parameters (torch cannot reduce them) and strided ones train here as in the unsharded twin."""
    if fsdp is torch_engine:
        return
    for kind in (Odd, Strided):
        model, twin = sharded(fsdp, kind()), kind()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for step in range(2):
            loss_of(model, step).backward()
            close(gradients(model), twin_gradients(twin, step), rtol=1e-4, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()


class Complex(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.turn = nn.Parameter(torch.randn(5, 8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.blocks[0](x).to(torch.complex64) @ self.turn.t()).abs()


def complex_weights(fsdp: Any) -> Any:
    model = sharded(fsdp, Complex())
    return shown(model), stepped(model)


class Fixed(nn.Module):
    """Integers and booleans among the parameters, as quantised weights are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.codes = nn.Parameter(torch.arange(16).view(8, 2).to(torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.scales = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) @ self.codes.float() @ self.scales * self.mask.sum()


def integers_and_booleans(fsdp: Any) -> Any:
    """Torch's engine has no answer for some of them; both fail or both agree."""
    model = sharded(fsdp, Fixed())
    return shown(model), stepped(model)


def frozen_now_and_then(fsdp: Any) -> Any:
    """What is trained changes inside the units, between steps."""
    model, answers = Net(), []
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    sharded(fsdp, model)
    answers.append(stepped(model, steps=1))
    model.blocks[0].requires_grad_(True)
    model.blocks[1].requires_grad_(False)
    answers.append(stepped(model, steps=1))
    model.requires_grad_(False)
    model.last.bias.requires_grad_(True)
    return answers, stepped(model, steps=1)


def computed_weights(fsdp: Any) -> Any:
    """Weight norm, spectral norm, and a parametrization that is cached for a step."""
    model = Net()
    parametrizations.spectral_norm(model.first)
    parametrize.register_parametrization(model.last, "weight", nn.Tanh())
    for block in model.blocks:
        parametrizations.weight_norm(block.up)
    sharded(fsdp, model)
    with parametrize.cached():
        cached = stepped(model, steps=1)
    return cached, stepped(model), sorted(model.state_dict())


def lazily_made(fsdp: Any) -> Any:
    with no_warnings():
        module = nn.LazyLinear(8)
        return error_of(lambda: fsdp.fully_shard(module, mesh=mesh_of()))


def test_parameters_of_every_kind(ranks) -> None:
    on_both(
        ranks, 2, what_torch_refuses, complex_weights, integers_and_booleans, frozen_now_and_then, computed_weights,
        lazily_made,
    )  # fmt: skip


# ---- around a step


def hooks_that_change_what_passes(fsdp: Any) -> Any:
    """The user's own hooks, some given before sharding and some after."""
    model = Net()
    for when in range(2):
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, output: output * 2)
            block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
            block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
            block.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
        model = model if when else sharded(fsdp, model)
    return stepped(model)


def prefetch_lists_without_sense(fsdp: Any) -> Any:
    """A unit behind itself, twice the same, one that is over, the root, a tuple."""
    model = sharded(fsdp)
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch((model, third, third))
    first.set_modules_to_forward_prefetch([third, third, second])
    second.set_modules_to_forward_prefetch([first])
    third.set_modules_to_backward_prefetch([first, second, model])
    first.set_modules_to_backward_prefetch([third])
    return stepped(model, steps=3)


def an_optimizer_in_the_backward(fsdp: Any) -> Any:
    """Each slice steps as soon as its gradient is there, which is then dropped."""
    model = sharded(fsdp)
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(model, number).backward()
    return wholes([*model.parameters()]), [parameter.grad is None for parameter in model.parameters()]


def optimizers_with_a_closure(fsdp: Any) -> Any:
    answers = []
    for make in (lambda p: torch.optim.LBFGS(p, max_iter=3), lambda p: torch.optim.SGD(p, 0.1)):
        model = sharded(fsdp)
        optimizer = make(model.parameters())

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        answers.append((error_of(lambda o=optimizer, c=closure: o.step(c)), wholes([*model.parameters()])))
    return answers


def saved_elsewhere(fsdp: Any) -> Any:
    """What autograd saves goes through hooks of the user's: copies, and the host's memory."""
    answers = []
    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved),
        torch.autograd.graph.save_on_cpu(),
    ):
        model = sharded(fsdp, reshard_after_forward=True)
        with hooks:
            loss = loss_of(model)
        answers.append(stepped(model, lambda *_, loss=loss: loss, steps=1))
    return answers


def autocast_around_it(fsdp: Any) -> None:
    """The casts that autocast keeps are not those of an earlier step's weights; with PyTorch's engine they are."""
    if fsdp is torch_engine:
        return
    losses: dict[bool, list[float]] = {True: [], False: []}
    for keeps_casts in losses:
        model = sharded(fsdp, reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps_casts):
            for step in range(3):
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step(), optimizer.zero_grad()
                losses[keeps_casts].append(loss.item())
    assert losses[True] == losses[False]


def steps_without_a_backward(fsdp: Any) -> None:
    """Each forward reads the slices anew; torch's root, gathered still, is that of before the step."""
    if fsdp is torch_engine:
        return
    model, twin = sharded(fsdp), Net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, twin)]
    loss_of(model).backward(), twin_gradients(twin)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(loss_of(model, 1), loss_of(twin, 1), rtol=1e-4, atol=1e-5)


def test_around_a_step(ranks) -> None:
    on_both(
        ranks, 2, hooks_that_change_what_passes, prefetch_lists_without_sense, an_optimizer_in_the_backward,
        optimizers_with_a_closure, saved_elsewhere, autocast_around_it, steps_without_a_backward,
    )  # fmt: skip


# ---- parts of a model, modules that call themselves, inference mode


def states_of_a_part(fsdp: Any) -> Any:
    """A layer of the root alone is saved and loaded while the root is gathered."""
    model = sharded(fsdp)
    doubled = {name: 2 * value for name, value in model.last.state_dict().items()}
    loss_of(model)
    saved = {name: look(value) for name, value in model.last.state_dict().items()}
    loss_of(model)
    model.last.load_state_dict(doubled)
    return saved, loss_of(model).detach(), wholes([*model.last.state_dict().values()])


class Again(Net):
    """Calls itself before it uses its own layers, and has a method that does."""

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        return super().forward(self(x, again=False) if again else x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self(self.last(x), again=False))


class Deeper(Block):
    """Calls itself after it has used its layers."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


def calling_themselves(fsdp: Any) -> Any:
    model = Net()
    model.blocks = nn.ModuleList(Deeper(8, 4) for _ in range(2))
    sharded(fsdp, model)
    with torch.no_grad():
        evaluated = model(data(5))
    return evaluated, stepped(model)


def evaluating_themselves(fsdp: Any) -> Any:
    model = sharded(fsdp, Again())
    fsdp.register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        return model(data()), model.generate(data())


def training_through_themselves(fsdp: Any) -> None:
    """Torch's engine drops the parameters of a root that goes on after a backward of what it called."""
    if fsdp is torch_engine:
        return
    model, twin = sharded(fsdp, Again()), Again()
    fsdp.register_fsdp_forward_method(model, "generate")
    generated: LossOf = lambda model, step: model.generate(data(step)).square().mean()  # noqa: E731
    for step, loss in enumerate((loss_of, generated, loss_of, generated)):
        loss(model, step).backward()
        close(gradients(model), twin_gradients(twin, loss=lambda twin, f=loss, s=step: f(twin, s)))
        model.zero_grad(), twin.zero_grad()


def made_in_inference_mode(fsdp: Any) -> Any:
    with torch.inference_mode():
        model = sharded(fsdp)
        answers = [model(data()).clone() for _ in range(2)]
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        answers.append(model(data()).clone())
    other = sharded(fsdp)
    with torch.inference_mode():
        other.to(torch.float64)
        return [*answers, *(other(data().double()).clone() for _ in range(2))]


def trained_after_inference_mode(fsdp: Any) -> Any:
    """Torch's engine keeps buffers of its first forward that nobody may write to later."""
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for options in ({}, {"mp_policy": policy}) if fsdp is not torch_engine else ():
        model, other = (sharded(fsdp, **options) for _ in range(2))
        with torch.inference_mode():
            model(data())
        model.unshard(), model.reshard()
        for each in (model, other):
            loss_of(each, 1).backward()
        close(gradients(model), gradients(other))


def frozen_between_micro_batches(fsdp: Any) -> Any:
    """What earlier micro-batches trained keeps its gradient, as it would in an unsharded model."""
    model = sharded(fsdp)
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    model.set_requires_gradient_sync(True)
    model.blocks[1].requires_grad_(False)
    loss_of(model, 1).backward()
    first = gradients(model)
    model.zero_grad()
    return first, stepped(model, steps=1)


def test_parts_and_modes(ranks) -> None:
    on_both(
        ranks, 2, states_of_a_part, calling_themselves, evaluating_themselves, training_through_themselves,
        made_in_inference_mode, trained_after_inference_mode, frozen_between_micro_batches,
    )  # fmt: skip
