"""What a model throws at an engine, beyond the zoo: dtypes side by side, few rows, meta buffers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_engine
import torch.nn.functional as F
from torch import nn

import fsdplab.engine as lab_engine
from tests.surface import (
    Block,
    Collectives,
    Net,
    close,
    data,
    gradients,
    loss_of,
    mesh_of,
    on_both,
    sharded,
    shown,
    twin_gradients,
    wholes,
)  # fmt: skip

# ---- dtypes and sizes


class Lora(nn.Module):
    """A frozen bfloat16 base and float32 adapters in one unit."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).bfloat16().requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x.bfloat16()).float() + self.b(self.a(x))


def adapters(fsdp: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Lora() for _ in range(3)))
    torch.manual_seed(0)
    twin, answers = nn.Sequential(*(Lora() for _ in range(3))), []
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh_of())
    fsdp.fully_shard(model, mesh=mesh_of())
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, twin)]
    for step in range(3):
        with Collectives() as seen:
            loss = loss_of(model, step)
            loss.backward()
        close(gradients(model), twin_gradients(twin, step))
        answers.append((loss.detach(), seen.kinds))
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    close(dict(enumerate(wholes([*model.parameters()]))), dict(enumerate(wholes([*twin.parameters()]))))
    return answers, shown(model)


class Few(nn.Module):
    """Parameters of one, two and three rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(8, hidden) for hidden in (1, 2, 3))
        self.gain, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gain + self.shift.sum(0)


def fewer_rows_than_ranks(fsdp: Any) -> Any:
    model, twin = sharded(fsdp, Few()), Few()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(2):
        loss_of(model, step).backward()
        close(gradients(model), twin_gradients(twin, step))
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    values = wholes([*model.parameters()])
    torch.testing.assert_close(values, [p.detach() for p in twin.parameters()], rtol=1e-4, atol=1e-5)
    return values, shown(model)


def trainable_in_two_dtypes(fsdp: Any) -> None:
    """Torch refuses trainable parameters of two dtypes in one unit; the lab's engine trains them, each in its own."""
    if fsdp is torch_engine:
        return
    models = [Net(), Net()]
    for model in models:
        for block in model.blocks:
            block.down.double()
            block.forward = lambda x, b=block: x + b.down(torch.tanh(b.up(x)).double()).float()
    sharded(fsdp, models[0])
    loss_of(models[0]).backward()
    close(gradients(models[0]), twin_gradients(models[1]))
    assert {p.grad.dtype for p in models[0].parameters()} == {torch.float32, torch.float64}


def test_dtypes_side_by_side(ranks) -> None:
    on_both(ranks, 2, adapters, trainable_in_two_dtypes)


def test_fewer_rows_than_ranks(ranks) -> None:
    on_both(ranks, 4, fewer_rows_than_ranks)


# ---- units without gradients


class Branches(nn.Module):
    """Blocks of which some are frozen, some see no gradient, and some do not matter to the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(8, 4) for _ in range(5))
        self.blocks[0].requires_grad_(False)
        self.blocks[3].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks[2](self.blocks[1](self.blocks[0](x)))  # the first unit has neither gradient nor graph
        with torch.no_grad():
            extra = self.blocks[4](x)
        return self.blocks[3](x) + extra, self.blocks[4](x.detach())


def some_without_gradients(fsdp: Any) -> Any:
    model, twin, answers = sharded(fsdp, Branches()), Branches(), []
    loss = lambda m, s: m(data(s))[0].square().mean()  # noqa: E731
    for step in range(3):
        with Collectives() as seen:
            value = loss(model, step)
            value.backward()
        close(gradients(model), twin_gradients(twin, loss=lambda m: loss(m, step)))
        answers.append((value.detach(), seen.kinds.count("scatter"), shown(model)))
        model.zero_grad(), twin.zero_grad()
    return answers


def test_units_without_gradients(ranks) -> None:
    on_both(ranks, 2, some_without_gradients)


# ---- evaluation and generation


class Speaker(nn.Module):
    """A model of 12 tokens that continues a sequence greedily."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.net, self.head = nn.Embedding(12, 8), Net(), nn.Linear(8, 12)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.net.blocks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(self.embedding(tokens)).cumsum(1))

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def speak(fsdp: Any) -> Any:
    """Generation under no_grad and inference_mode between training steps, the head kept gathered for it or not."""
    model, twin, answers = sharded(fsdp, Speaker()), Speaker(), []
    start = torch.arange(3)[None] + dist.get_rank()
    loss = lambda m, s: F.cross_entropy(m((start + s) % 12).flatten(0, 1), start.flatten())  # noqa: E731
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin)]
    for step, silence in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
        model.eval(), model.set_reshard_after_forward(step != 2)
        with silence(), Collectives() as seen:
            spoken = model.generate(start, 4)
            assert torch.equal(spoken, twin.generate(start, 4))
        model.reshard()  # torch's engine leaves the root gathered after an evaluation
        answers += [spoken.clone(), seen.kinds, shown(model)]
        model.train(), model.set_reshard_after_forward(True)
        value = loss(model, step)
        value.backward()
        close(gradients(model), twin_gradients(twin, loss=lambda m: loss(m, step)), rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        answers.append(value.detach())
    return answers


def test_generation_between_training_steps(ranks) -> None:
    on_both(ranks, 2, speak)


# ---- from the meta device


class Rotary(Net):
    """Non-persistent buffers: a table that only the constructor knows, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(1, 9).float(), persistent=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.angles.cos())


def rotary_from_meta() -> list[str]:
    """What is said about a table that `to_empty` left as garbage, until the first forward has ended."""
    with torch.device("meta"):
        model = Rotary()
    sharded(lab_engine, model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        model(data())
    if torch.equal(model.angles, torch.arange(1, 9).float()):
        return ["recomputed: angles"]
    return [str(each.message) for each in said if issubclass(each.category, UserWarning)]


def rotary_as_it_is() -> None:
    """Buffers of a model that was never on the meta device, or that were set again, draw no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = sharded(lab_engine, Rotary())
        loss_of(model).backward()
        torch.testing.assert_close(model.angles, torch.arange(1, 9).float())


def rotary_from_rank_0() -> None:
    """A table that rank 0 has sent (`dist.broadcast` raises no version) draws no warning."""
    with torch.device("meta"):
        model = Rotary()
    sharded(lab_engine, model)
    model.to_empty(device="cpu")
    model.load_state_dict(sharded(lab_engine, Rotary()).state_dict())
    if dist.get_rank() == 0:
        model.angles.copy_(torch.arange(1, 9))
    dist.broadcast(model.angles, src=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model).backward()
    torch.testing.assert_close(model.angles, torch.arange(1, 9).float())


def test_garbage_in_buffers_after_to_empty_is_mentioned(ranks) -> None:
    ranks(2, rotary_from_rank_0)
    said = ranks(2, rotary_from_meta)
    assert all(any("angles" in text for text in rank) for rank in said), said
    ranks(2, rotary_as_it_is)
