"""Every public method of `FSDPModule`, and the functions beside `fully_shard`: both engines answer alike."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_engine
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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
    reference_is_here,
    sharded,
    shown,
    twin_gradients,
    whole,
    wholes,
)  # fmt: skip

# ---- what there is


def test_every_name_and_argument_of_the_reference_exists() -> None:
    functions = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    classes = ("FSDPModule", "UnshardHandle", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy")
    assert [name for name in (*functions, *classes, "CPUOffloadPolicy") if not hasattr(lab_engine, name)] == []
    theirs = {n: f for n, f in vars(torch_engine.FSDPModule).items() if inspect.isfunction(f) and not n.startswith("_")}
    inherited = [name for name, method in theirs.items() if getattr(lab_engine.FSDPModule, name) is method]
    assert inherited == [], "torch's own methods look for torch's own state"
    pairs = [(getattr(lab_engine, name), getattr(torch_engine, name)) for name in functions]
    pairs += [(getattr(lab_engine.FSDPModule, name), method) for name, method in theirs.items()]
    for mine, other in pairs if reference_is_here() else []:
        assert arguments_of(mine) == arguments_of(other), mine


def arguments_of(function: Any) -> list[tuple]:
    """Name, kind and default of every argument, without the lab's own `transport`."""
    return [
        (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name != "transport"
    ]


# ---- unshard, reshard


def by_hand(fsdp: Any) -> Any:
    """Gathered by hand: not gathered again by the forward; neither call reaches the units below."""
    answers = []
    for policy in (fsdp.MixedPrecisionPolicy(), fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model, twin = sharded(fsdp, mp_policy=policy), Net()
        for asynchronous in (False, True):
            with Collectives() as seen:
                handle = model.unshard(async_op=asynchronous)
                again = model.unshard(async_op=asynchronous)
                for each in (handle, again):
                    assert each.wait() is None if asynchronous else each is None
                assert asynchronous is False or isinstance(handle, fsdp.UnshardHandle)
                answers += [shown(model), whole(model.first.weight), seen.take()]
                model.blocks[1].unshard()
                answers += [shown(model), seen.take()]
                model.reshard()
                answers += [shown(model), seen.take()]
                model.reshard(), model.blocks[1].reshard(), model.unshard(), model.blocks[0].unshard()
                loss_of(model).backward()
                answers += [shown(model), seen.take(), gradients(model)]
            model.zero_grad()
    model.unshard()
    with torch.no_grad():
        torch.testing.assert_close(whole(model.first.bias), twin.first.bias.bfloat16())
    return answers


def handle_waited_by_forward(fsdp: Any) -> Any:
    """A handle that nobody waits on: the forward does."""
    model = sharded(fsdp)
    with Collectives() as seen:
        for block in model.blocks:
            block.unshard(async_op=True)
        loss = loss_of(model)
        loss.backward()
    close(gradients(model), twin_gradients(Net()))
    return loss.detach(), sorted(seen.seen)


def test_unshard_and_reshard(ranks) -> None:
    on_both(ranks, 2, by_hand, handle_waited_by_forward)


# ---- prefetch


def explicit_prefetch(fsdp: Any) -> Any:
    """The order in which units are gathered, forward and backward, with lists as they are given."""
    answers = []
    for forward, backward in (
        ({"root": [0], 0: [1], 1: [2]}, {"root": [2], 2: [1], 1: [0]}),
        ({"root": [0, 1], 0: [1, 2]}, {2: [1, 0]}),
        ({"root": [2, 1, 0]}, {"root": [0]}),
    ):
        model = sharded(fsdp)
        units = {"root": model} | dict(enumerate(model.blocks))
        for unit, ahead in forward.items():
            units[unit].set_modules_to_forward_prefetch([units[each] for each in ahead])
        for unit, ahead in backward.items():
            units[unit].set_modules_to_backward_prefetch([units[each] for each in ahead])
        loss_of(model).backward()
        model.zero_grad()
        with Collectives() as seen:
            loss_of(model).backward()
        close(gradients(model), twin_gradients(Net()))
        answers.append([each for each in seen.seen if each[0] == "gather"])
    return answers


def prefetch_in_recomputation(fsdp: Any) -> Any:
    """The order of gathers in a backward that computes blocks again, with units in them, without lists and with."""
    answers = []
    for with_lists in (False, True):
        model = Net()
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
        for block in model.blocks:
            fsdp.fully_shard(block.up, mesh=mesh_of())
        sharded(fsdp, model, reshard_after_forward=True)
        first, second, third = model.blocks
        if with_lists:
            model.set_modules_to_backward_prefetch([third])
            third.set_modules_to_backward_prefetch([second, second.up])
            second.set_modules_to_backward_prefetch([first, first.up])
        loss = loss_of(model)
        with Collectives() as seen:
            loss.backward()
        twin = dict(twin_gradients(Net()))
        close({n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients(model).items()}, twin)
        answers.append([each for each in seen.seen if each[0] == "gather"])
    return answers


def test_explicit_prefetch_lists(ranks) -> None:
    on_both(ranks, 2, explicit_prefetch, prefetch_in_recomputation)


# ---- micro-batches


def steps_with(fsdp: Any, prepare: Any, micro_batches: int = 3, model: nn.Module | None = None, **options: Any) -> Any:
    """Collectives of every micro-batch, the losses, and the gradients at the end, checked against the twin's."""
    model = sharded(fsdp, model, **options)
    answers = []
    for step in range(2):
        twin = Net()
        for micro in range(micro_batches):
            prepare(model, micro == micro_batches - 1)
            with Collectives() as seen:
                loss = loss_of(model, micro)
                loss.backward()
            answers.append((loss.detach(), sorted(seen.seen), shown(model)))
        close(gradients(model), twin_gradients(twin, *range(micro_batches)), rtol=2e-6, atol=1e-6)
        model.zero_grad()
    return answers, gradients(model)


def without_sync(fsdp: Any) -> Any:
    return steps_with(fsdp, lambda model, last: model.set_requires_gradient_sync(last))


def without_sync_kept_gathered(fsdp: Any) -> Any:
    def prepare(model: Any, last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)

    return steps_with(fsdp, prepare)


def sync_every_time(fsdp: Any) -> Any:
    return steps_with(fsdp, lambda model, last: model.set_is_last_backward(last))


def reduce_in_full_precision(fsdp: Any) -> Any:
    """Unsharded gradients wait in `reduce_dtype`."""
    model = sharded(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, micro).backward()
    return gradients(model), [p.grad.dtype for p in model.parameters()]


def shards_first_replicas_last(fsdp: Any) -> Any:
    """HSDP: a reduce-scatter every micro-batch, one all-reduce at the end."""
    return steps_with(
        fsdp, lambda m, last: m.set_requires_all_reduce(last), mesh=mesh_of(2, 2, names=("replicate", "shard"))
    )


def test_micro_batches(ranks) -> None:
    on_both(ranks, 2, without_sync, without_sync_kept_gathered, sync_every_time, reduce_in_full_precision)


def test_micro_batches_on_replicas_of_shards(ranks) -> None:
    on_both(ranks, 4, shards_first_replicas_last)


# ---- what may differ from unit to unit


def switches(fsdp: Any) -> Any:
    """`set_reshard_after_forward`, with and without the units below;
    `set_unshard_in_backward` on one that needs none.
    """
    model, answers = sharded(fsdp), []
    for change in (
        lambda: model.set_reshard_after_forward(True),
        lambda: model.set_reshard_after_forward(False),
        lambda: (model.set_reshard_after_forward(True), model.set_reshard_after_forward(False, recurse=False)),
        lambda: model.blocks[1].set_reshard_after_forward(False),
    ):
        change()
        with Collectives() as seen:
            loss = loss_of(model)
            between = shown(model)
            loss.backward()
        answers.append((between, seen.seen))
    return answers


class Text(nn.Module):
    """An embedding unit in front of a block: its backward reads no weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block = nn.Embedding(12, 8), Block(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(tokens))


def not_needed_in_backward(fsdp: Any) -> Any:
    model, twin = Text(), Text()
    for unit in (model.embedding, model.block, model):
        fsdp.fully_shard(unit, mesh=mesh_of())
    model.embedding.set_unshard_in_backward(False)
    loss = lambda m: m(torch.arange(4) + dist.get_rank()).square().mean()  # noqa: E731
    for _ in range(2):
        with Collectives() as seen:
            loss(model).backward()
    model.zero_grad(), loss(model).backward()
    close(gradients(model), twin_gradients(twin, loss=loss))
    return seen.seen


def test_switches_of_single_units(ranks) -> None:
    on_both(ranks, 2, switches, not_needed_in_backward)


# ---- functions beside fully_shard


class TwoDoors(Net):
    """Runs by another name than `forward` too."""

    def encode(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return self.forward(x).tanh() * gain


def another_forward(fsdp: Any) -> Any:
    model, twin = sharded(fsdp, TwoDoors()), TwoDoors()
    fsdp.register_fsdp_forward_method(model, "encode")
    plain = nn.Linear(2, 2)
    fsdp.register_fsdp_forward_method(plain, "no_such_method_and_nobody_minds")
    fsdp.register_fsdp_forward_method(model.blocks[0], "forward")
    loss = lambda m: m.encode(data(), gain=2.0).square().mean()  # noqa: E731
    with Collectives() as seen:
        value = loss(model)
        value.backward()
    close(gradients(model), twin_gradients(twin, loss=loss))
    return value.detach(), seen.kinds, shown(model)


def shared_context(fsdp: Any) -> Any:
    """Two roots, as the stages of a pipeline are; an empty list is no error."""
    first, second = sharded(fsdp), sharded(fsdp, Net(seed=1))
    fsdp.share_comm_ctx([])
    fsdp.share_comm_ctx([first, second])
    second(first(data())).square().mean().backward()
    twins = nn.Sequential(Net(), Net(seed=1))
    expected = list(twin_gradients(twins, loss=lambda m: m(data()).square().mean()).values())
    close(dict(enumerate([*gradients(first).values(), *gradients(second).values()])), dict(enumerate(expected)))


def optimizer_in_backward(fsdp: Any) -> Any:
    """Hooks run once a parameter and reduction, with the reduced slice in place; the optimizer may step in them."""
    model, twin, calls = sharded(fsdp), Net(), []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def hook(p: torch.Tensor, name: str = name, optimizer: Any = optimizer) -> None:
            calls.append((name, tuple(p.grad.shape), tuple(p.grad.to_local().shape)))
            optimizer.step(), optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, step).backward()
        twin_gradients(twin, step), reference.step(), reference.zero_grad()
    close(dict(enumerate(wholes([*model.parameters()]))), dict(enumerate(wholes([*twin.parameters()]))))
    return sorted(calls)


def test_functions_beside_fully_shard_and_gradient_hooks(ranks) -> None:
    on_both(ranks, 2, another_forward, shared_context, optimizer_in_backward)
