"""Smaller promises of the contract with PyTorch's FSDP2: second derivatives, dataclasses, reductions under way,
communicators and memory for collectives, and other composable functions around sharded children.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_engine
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor

from fsdplab import engine
from fsdplab.engine import MixedPrecisionPolicy, compat
from fsdplab.engine.torch_api.custom_collectives import CollectiveIn, CustomTransport, GroupMemory, _stage_in
from fsdplab.engine.transport import staged
from fsdplab.engine.transport.staged import StagedTransport, reduction_group
from fsdplab.sessions.worker.collective_hooks import watch_collectives
from tests.surface import (
    Collectives,
    Net,
    close,
    data,
    error_of,
    gradients,
    lab_over,
    loss_of,
    mesh_of,
    on_both,
    sharded,
    twin_gradients,
    whole,
)  # fmt: skip

# ---- second derivatives


def graph_of_the_backward(fsdp: Any) -> Any:
    """`create_graph=True`: gradients are those of a plain backward, and a step trains."""
    model = sharded(fsdp)
    loss_of(model).backward(create_graph=True)
    close(gradients(model), twin_gradients(Net()))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [whole(parameter) for parameter in model.parameters()]


def gradient_penalty(fsdp: Any) -> Any:
    """The norm of the gradient of an input, and its own backward through the units."""
    model, x = sharded(fsdp), data().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.detach()


Penalised = Callable[[Net, torch.Tensor], torch.Tensor]


def slope_of(model: Net, x: torch.Tensor) -> torch.Tensor:
    """How steep the model is at `x`, beside its value."""
    value = model(x).tanh().sum()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return slope.square().sum() + value


def slope_alone(model: Net, x: torch.Tensor) -> torch.Tensor:
    """No output of a unit has a part in the loss."""
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return slope.square().sum()


def slope_inside(model: Net, x: torch.Tensor) -> torch.Tensor:
    """By what the second block got: nothing announces the second backward of the root."""
    kept: list[torch.Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: kept.append(output))
    value = model(x.detach()).tanh().sum()
    handle.remove()
    (slope,) = torch.autograd.grad(value, kept, create_graph=True)
    return slope.square().sum()


def curvature(model: Net, x: torch.Tensor) -> torch.Tensor:
    """The second derivative too, as differential equations have it."""
    value = model(x).tanh()
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return (bend[:, 0] + slope[:, 0] - value[:, 0]).square().mean()


def trained_with_penalties(fsdp: Any) -> None:
    """Losses made of gradients: torch's engine reads parameters that it has freed, the lab's gathers them again."""
    for penalised in (slope_of, slope_alone, slope_inside, curvature):
        model, twin = sharded(fsdp), Net()
        if fsdp is torch_engine:
            x = data().requires_grad_()
            assert error_of(lambda model=model, x=x, loss=penalised: loss(model, x).backward()) == "RuntimeError"
            continue
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin)]
        for step in range(3):
            model.set_requires_gradient_sync(step != 1)  # of the last two the gradients are accumulated
            penalised(model, data(step).requires_grad_()).backward()
            penalised(twin, data(step).requires_grad_()).backward()
            if step == 1:
                continue
            close(gradients(model), averaged_over_ranks(twin))
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()


def averaged_over_ranks(twin: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients that the twin has, averaged over the ranks; None where it has none."""
    for parameter in twin.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return gradients(twin)


def test_second_derivatives(ranks) -> None:
    on_both(ranks, 2, graph_of_the_backward, gradient_penalty, trained_with_penalties)


# ---- dataclasses


@dataclass
class Answer:
    """What a model returns."""

    hidden: torch.Tensor
    name: str = "answer"
    parts: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Sealed:
    """One that cannot be written to."""

    value: torch.Tensor


@dataclass
class Slotted:
    """One without a `__dict__`."""

    __slots__ = ("value",)
    value: torch.Tensor


class InDataclasses(nn.Module):
    """A block that takes and returns its tensors inside a dataclass of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given: Any) -> Any:
        value = self.layer(given.hidden if isinstance(given, Answer) else given.value)
        return {Answer: lambda: Answer(value, parts=(value * 2,)), Sealed: lambda: Sealed(value)}.get(
            type(given), lambda: Slotted(value)
        )()


class Chain(nn.Module):
    """Three such blocks in a row."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.blocks = kind, nn.ModuleList(InDataclasses() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        given = self.kind(x)
        for block in self.blocks:
            given = block(given)
        return given


def value_of(answer: Any) -> torch.Tensor:
    return answer.hidden if isinstance(answer, Answer) else answer.value


def dataclasses_everywhere() -> None:
    for kind in (Answer, Sealed, Slotted):
        model, twin = sharded(engine, Chain(kind)), Chain(kind)
        with Collectives() as seen:
            value_of(model(data())).square().mean().backward()
        for parameter in twin.parameters():
            parameter.grad = None
        value_of(twin(data())).square().mean().backward()
        close(gradients(model), twin_mean(twin))
        kinds = seen.kinds
        last_gather = len(kinds) - 1 - kinds[::-1].index("gather")
        assert "scatter" in kinds[:last_gather], f"{kind.__name__}: all reductions wait for the end: {kinds}"


def twin_mean(twin: nn.Module) -> dict[str, torch.Tensor | None]:
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def test_reductions_begin_behind_dataclasses(ranks) -> None:
    ranks(2, dataclasses_everywhere)


def output_dtypes() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for kind in (Answer, Sealed, Slotted):
        model = sharded(engine, Chain(kind), mp_policy=policy)
        given = kind(data())
        answer = model.blocks[0](given)
        assert type(answer) is kind and value_of(answer).dtype is torch.float32
        assert value_of(given).dtype is torch.float32, "what the user passed is not written to"
        if kind is Answer:
            assert answer.parts[0].dtype is torch.float32 and answer.name == "answer"


def test_dataclasses_get_the_output_dtype(ranks) -> None:
    ranks(2, output_dtypes)


# ---- reductions under way


class Waited:
    """A collective that is done, and that notes when somebody waits for it."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log

    def wait(self) -> None:
        self.log.append(f"wait {self.number}")


class Noted:
    """A reduce-scatter that notes when it starts."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: torch.Tensor, source: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        number = sum(line.startswith("start") for line in self.log)
        self.log.append(f"start {number}")
        dist.all_reduce(source, group=group)
        output.copy_(source.chunk(group.size())[group.rank()])
        return Waited(number, self.log)


def under_way(most: int, recurse: bool = True) -> list[str]:
    model, noted = sharded(engine), Noted()
    model.set_reduce_scatter_max_input_buffers(most, recurse=recurse)
    for unit in (*model.blocks, model):
        unit.set_custom_reduce_scatter(noted)
    loss_of(model).backward()
    close(gradients(model), twin_gradients(Net()))
    return noted.log


def test_only_the_oldest_reduction_is_waited_for(ranks) -> None:
    """With K reductions under way the next one waits for one, not for all K."""
    for most in (1, 2, 3):
        log = ranks(2, under_way, most)[0]
        expected, started, waited = [], 0, 0
        for _ in range(4):  # three blocks and the root
            if started - waited == most:
                expected.append(f"wait {waited}")
                waited += 1
            expected.append(f"start {started}")
            started += 1
        expected += [f"wait {number}" for number in range(waited, started)]
        assert log == expected
    assert ranks(2, under_way, 3, False)[0] == log, "the largest number that a unit was given counts for all"


def over_replicas(most: int) -> None:
    """All-reduces begin while there is a backward to hide them, also where nothing need wait for a reduce-scatter."""
    for transport in ("gloo", "shm"):
        model, twin = Net(hidden=(4,) * 7), Net(hidden=(4,) * 7)
        sharded(lab_over(transport), model, mesh=mesh_of(2, 2, names=("replicate", "shard")))
        model.set_reduce_scatter_max_input_buffers(most)
        loss = loss_of(model)
        with Collectives() as seen:
            loss.backward()
        kinds = [each.kind for each in seen.seen if each.kind != "gather"]
        assert kinds.count("scatter") == kinds.count("reduce") == 8
        assert kinds.index("reduce") == min(most, 4), "half of the eight units at most wait for their reduce-scatter"
        close(gradients(model), twin_gradients(twin), rtol=1e-5, atol=1e-6)


def test_replicas_do_not_wait_for_the_end_of_the_backward(ranks) -> None:
    for most in (2, 100):
        ranks(4, over_replicas, most)


# ---- communicators and memory


def one_reduction_group() -> None:
    made: list[dist.ProcessGroup] = []
    real = staged.dist.new_group
    below = StagedTransport(dist.group.WORLD, torch.device("cpu"))
    below._reduce_stream = object()  # of a device: only then is there something to separate
    staged.dist.new_group = lambda *args, **kwargs: made.append(real(*args, **kwargs)) or made[-1]
    try:
        first = CustomTransport(below, torch.device("cpu"))
        first._reduce_stream = object()
        first.separate_reductions(True)
        later = CustomTransport(below, torch.device("cpu"))
        other = CustomTransport(StagedTransport(dist.group.WORLD, torch.device("cpu")), torch.device("cpu"))
        other.below._reduce_stream = other._reduce_stream = object()
        other.separate_reductions(True)
    finally:
        staged.dist.new_group = real
    assert len(made) == 1, "one communicator a group, not one a unit"
    assert later._reduce_group is first._reduce_group is other._reduce_group is made[0]
    assert reduction_group(dist.group.WORLD) is made[0] and made[0] is not dist.group.WORLD
    first.separate_reductions(False)
    assert first._reduce_group is below._reduce_group is dist.group.WORLD


def test_a_separate_group_survives_other_settings_and_is_one(ranks) -> None:
    ranks(2, one_reduction_group)


class Counted(GroupMemory):
    """Staging memory that counts who takes it."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.registered = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.taken.append(size[0])
        return torch.empty(*size, dtype=dtype, device=device)

    def register(self, group: dist.ProcessGroup, *tensors: torch.Tensor) -> None:
        self.registered += len(tensors)


def memory_of_the_group() -> None:
    model, memory = sharded(engine), Counted()
    for module in (*model.blocks, model):
        _stage_in(module._unit_hooks.unit, memory)
    loss_of(model).backward()
    close(gradients(model), twin_gradients(Net()))
    gathers, reductions = 7, 4  # three blocks twice and the root once; each reduced once
    assert len(memory.taken) == gathers + 2 * reductions, "gathers, and what reductions send and receive"
    assert memory.registered == gathers + 2 * reductions
    unit = model.blocks[0]._unit_hooks.unit
    assert isinstance(unit.memory.config.shard.gather, CollectiveIn)
    model.blocks[0].set_custom_reduce_scatter(Noted())
    said = error_of(lambda: model.blocks[0].set_allocate_memory_from_process_group_for_comm(True))
    assert said == "AssertionError", said


def test_reductions_are_staged_in_the_groups_memory_too(ranks) -> None:
    ranks(2, memory_of_the_group)


def handles(fsdp: Any) -> Any:
    model = sharded(fsdp)
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    gathered = isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].reshard()
    dist.barrier()
    return isinstance(handle, torch_engine.UnshardHandle), gathered, isinstance(model.blocks[0].up.weight, DTensor)


def test_a_handle_is_torchs(ranks) -> None:
    assert issubclass(engine.UnshardHandle, torch_engine.UnshardHandle)
    on_both(ranks, 2, handles)


# ---- other composable functions


def replicated_around(fsdp: Any) -> Any:
    """DDP of the rest of a model whose blocks are sharded."""
    model, twin = Net(), Net()
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh_of())
    replicate(model)
    output = model(data())
    torch.testing.assert_close(output, twin(data()))
    output.float().square().mean().backward()
    close(gradients(model), twin_gradients(twin))
    return output.detach()


def test_replicate_leaves_sharded_children_alone(ranks) -> None:
    on_both(ranks, 2, replicated_around)


# ---- what others see and read


def patched_collectives(fsdp: Any) -> Any:
    """Whoever replaces a collective, as PyTorch's own tests do, gets the true sizes, dtypes and gradients."""
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    real, seen = {name: getattr(dist, name) for name in (gather, scatter)}, []

    def noting(name: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            output = kwargs["output"] if "output" in kwargs else args[0]
            source = kwargs["input"] if "input" in kwargs else args[1]
            seen.append((name, output.numel(), source.numel(), str(output.dtype), str(source.dtype)))
            if name == scatter:
                assert source.abs().sum() > 0, "the gradients themselves"
            return real[name](*args, **kwargs)

        return noted

    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(fsdp, mp_policy=policy)
    for name in real:
        setattr(dist, name, noting(name))
    try:
        loss_of(model).backward()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    assert {dtype for name, *_, dtype, _ in seen if name == scatter} == {"torch.float32"}
    return seen, gradients(model)


def test_patched_collectives_see_what_travels(ranks) -> None:
    on_both(ranks, 2, patched_collectives)


def watched_by_the_lab() -> None:
    """The lab's own hooks count collectives: nothing is made for them."""
    assert not compat.collectives_are_replaced()
    with watch_collectives(lambda name, nbytes: None):
        assert not compat.collectives_are_replaced()
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)
    try:
        assert compat.collectives_are_replaced()
    finally:
        dist.all_reduce = real


def test_only_others_are_shown_buffers(ranks) -> None:
    ranks(1, watched_by_the_lab)


def counted_by_the_lab(transport: str) -> list[str]:
    """The collectives of a step that the lab's hooks see: what a rank stood in when it hung is told by them."""
    seen: list[str] = []
    model = sharded(lab_over(transport))
    with watch_collectives(lambda name, nbytes: seen.append(name.partition("_")[0])):
        loss_of(model).backward()
    return seen


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_who_only_counts_is_shown_every_collective(ranks, transport: str) -> None:
    for seen in ranks(2, counted_by_the_lab, transport):
        assert {"all", "reduce"} == set(seen) and len(seen) > 4


def observed_without_the_profiler(folder: str) -> list[str]:
    """What torch's execution trace, which needs no profiler, has of a step."""
    path = f"{folder}/{dist.get_rank()}.json"
    model, observer = sharded(lab_over("shm")), torch.profiler.ExecutionTraceObserver()
    observer.register_callback(path)
    observer.start()
    loss_of(model).backward()
    observer.stop()
    observer.unregister_callback()
    return [node["name"] for node in json.loads(Path(path).read_text())["nodes"]]


def test_an_observer_without_the_profiler_sees_ranges_and_collectives(ranks, tmp_path: Path) -> None:
    for names in ranks(2, observed_without_the_profiler, str(tmp_path)):
        assert any(name.startswith("FSDP::all_gather") for name in names)
        assert any("_allgather_base_" in name for name in names), names


def read_before_the_first_forward(fsdp: Any) -> Any:
    model, twin = sharded(fsdp), Net()
    for module in (*model.blocks, model):
        state = torch_engine.fully_shard.state(module)
        assert state._fsdp_param_groups and state._state_ctx.is_last_backward
        assert not state._state_ctx.all_states and state._fsdp_param_groups[0].fsdp_params
    loss_of(model).backward()
    close(gradients(model), twin_gradients(twin))
    return len(torch_engine.fully_shard.state(model.blocks[0])._state_ctx.all_states)


def test_reading_a_state_makes_no_root(ranks) -> None:
    on_both(ranks, 2, read_before_the_first_forward)
