"""Reductions and collectives in the user's hands: divide factors, hooks, own collectives; and the state that others
read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_engine
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor.debug import CommDebugMode

from tests.surface import (
    Collectives,
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
)  # fmt: skip

# ---- dividing


def summed(ranks_factor: float) -> dict[str, torch.Tensor]:
    """The twin's gradients, summed over the ranks and divided by a factor."""
    averaged = twin_gradients(Net())
    return {name: value * (dist.get_world_size() / ranks_factor) for name, value in averaged.items()}


def divided_by(fsdp: Any, factor: float, force_sum: bool, **options: Any) -> dict[str, torch.Tensor]:
    model = sharded(fsdp, **options)
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(force_sum)
    loss_of(model).backward()
    close(gradients(model), summed(factor), rtol=2e-6, atol=1e-6)
    return gradients(model)


def divided_by_zero(fsdp: Any) -> str:
    """Refused at the latest in the backward, as PyTorch's engine does; gradients are never infinite without a word."""
    try:
        model = fsdp.fully_shard(Net(), mesh=mesh_of())
        model.set_gradient_divide_factor(0)
        loss_of(model).backward()
    except ZeroDivisionError as error:
        return type(error).__name__
    return "none"


def divide_factors(fsdp: Any) -> Any:
    answers = [divided_by(fsdp, factor, force_sum=True) for factor in (1.0, 2.0, 3.0)]
    answers.append(divided_by(fsdp, float(dist.get_world_size()), force_sum=False))
    model = sharded(fsdp)
    with no_warnings():
        model.set_reduce_scatter_divide_factor(1.0)  # the root's alone
    model.set_force_sum_reduction_for_comms(True)
    loss_of(model).backward()
    return answers, gradients(model)


def divide_factors_on_replicas(fsdp: Any) -> Any:
    return divided_by(fsdp, 3.0, force_sum=True, mesh=mesh_of(2, 2, names=("replicate", "shard")))


def any_factor_on_gloo(fsdp: Any) -> Any:
    """gloo has no PREMUL_SUM, so torch's engine fails here; the lab's does not."""
    if fsdp is torch_engine:
        assert error_of(lambda: divided_by(fsdp, 3.0, force_sum=False)) == "RuntimeError"
    else:
        divided_by(fsdp, 3.0, force_sum=False)


def half_precision(fsdp: Any) -> Any:
    """fp16 gradients travel divided in two steps where they could overflow: nothing becomes infinite."""
    model = sharded(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(torch.float16, torch.float16))
    (model(data()).float().square().mean() * 2.0**10).backward()
    return gradients(model)


def test_gradient_divide_factors(ranks) -> None:
    on_both(ranks, 2, divide_factors, half_precision)


def test_gradient_divide_factors_on_four_ranks(ranks) -> None:
    on_both(ranks, 4, divide_factors_on_replicas)


def test_any_divide_factor_on_gloo(ranks) -> None:
    on_both(ranks, 2, any_factor_on_gloo)


# ---- hooks and own collectives


def all_reduce_hook(fsdp: Any, **options: Any) -> Any:
    """The hook sees each unit's reduced slice in one flat tensor, and what it writes is what the optimizer reads."""
    model, seen = sharded(fsdp, **options), []

    def hook(reduced: torch.Tensor) -> None:
        seen.append((reduced.ndim, reduced.numel(), str(reduced.dtype), reduced.detach().float().norm()))
        reduced.mul_(2)

    for unit in (*model.blocks, model):
        unit.set_all_reduce_hook(hook)
    loss_of(model).backward()
    close({n: g / 2 for n, g in gradients(model).items()}, twin_gradients(Net()), rtol=2e-6, atol=1e-6)
    return sorted(seen, key=lambda each: each[1])


def hook_on_shards(fsdp: Any) -> Any:
    return all_reduce_hook(fsdp), all_reduce_hook(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32))


def hook_on_replicas(fsdp: Any) -> Any:
    return all_reduce_hook(fsdp, mesh=mesh_of(2, 2, names=("replicate", "shard")))


def hook_on_a_stream(fsdp: Any) -> Any:
    """The hook runs on the stream that it came with; with replicas no stream may be given, in the same words."""
    model, stream, seen = sharded(fsdp), torch.cpu.Stream(), []
    model.set_all_reduce_hook(lambda _: seen.append(torch.cpu.current_stream() is stream), stream=stream)
    loss_of(model).backward()
    replicated = sharded(fsdp, mesh=mesh_of(1, 2, names=("replicate", "shard")))
    try:
        replicated.set_all_reduce_hook(print, stream=stream)
    except ValueError as error:
        return seen, str(error)


class Gather(AllGather):
    """Counts, and gathers by a broadcast of each rank's slice."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str]] = []
        self.made: list[int] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.made.append(torch.Size(size).numel())
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel(), str(input_tensor.dtype)))
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank == group.rank():
                part.copy_(input_tensor)
            dist.broadcast(part, group=group, group_src=rank)
        return None


class Scatter(ReduceScatter):
    """Counts, and reduces by an all-reduce of everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel(), str(input_tensor.dtype)))
        dist.all_reduce(input_tensor, group=group, op=op)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None


def own_collectives(fsdp: Any) -> Any:
    model, gather, scatter = sharded(fsdp), Gather(), Scatter()
    for unit in (*model.blocks, model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    for _ in range(2):
        model.zero_grad()
        with CommDebugMode() as seen:
            loss_of(model).backward()
    close(gradients(model), twin_gradients(Net()))
    assert gather.made, "buffers come from the user's `allocate`"
    counts = {str(op).removeprefix("c10d."): count for op, count in seen.get_comm_counts().items()}
    return gather.calls, scatter.calls, counts


def knobs(fsdp: Any) -> Any:
    """Settings for CUDA: accepted here, and training goes on."""
    model = sharded(fsdp)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_separate_reduce_scatter_group(False)
    if hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    model.set_post_optim_event(torch.cpu.current_stream().record_event())
    loss_of(model).backward()
    close(gradients(model), twin_gradients(Net()))
    model.set_separate_reduce_scatter_group(True, recurse=True)
    model.zero_grad()
    loss_of(model).backward()
    close(gradients(model), twin_gradients(Net()))


def allocated_by_the_group(fsdp: Any) -> Any:
    """gloo has no allocator of its own: both engines train on, or both say so."""
    model = sharded(fsdp)
    said = error_of(lambda: (model.set_allocate_memory_from_process_group_for_comm(True), loss_of(model).backward()))
    model.set_allocate_memory_from_process_group_for_comm(False)
    return said


def symmetric_memory(fsdp: Any) -> Any:
    """Symmetric memory is NCCL's: on CPU an error at the call, or at the first step."""
    model = sharded(fsdp)
    return error_of(lambda: (model.set_symm_mem_for_comm(), loss_of(model).backward())) != "none"


def test_hooks_on_reductions(ranks) -> None:
    on_both(ranks, 2, hook_on_shards, hook_on_a_stream)


def test_hooks_on_reductions_over_replicas(ranks) -> None:
    on_both(ranks, 4, hook_on_replicas)


def test_own_collectives(ranks) -> None:
    on_both(ranks, 2, own_collectives)


def test_settings_for_other_machines(ranks) -> None:
    on_both(ranks, 2, knobs, allocated_by_the_group, symmetric_memory)


# ---- the number and the order of collectives


def collectives(fsdp: Any) -> Any:
    """Two steps of training, one evaluation: kinds, sizes, order."""
    model, answers = sharded(fsdp), []
    for _ in range(2):
        with Collectives() as seen, CommDebugMode() as counted:
            loss_of(model).backward()
        answers.append((seen.seen, {str(op): n for op, n in counted.get_comm_counts().items()}))
    with Collectives() as seen, torch.no_grad():
        model(data())
    model.reshard()  # torch's engine leaves the root gathered after an evaluation
    return answers, seen.seen, shown(model)


def test_the_same_collectives_in_the_same_order(ranks) -> None:
    on_both(ranks, 2, collectives)
    on_both(ranks, 1, collectives)


# ---- what pipelines and trainers read


def the_state(fsdp: Any) -> Any:
    """What `torch.distributed.pipelining` does at the end of its micro-batches,
    with torch's own `fully_shard.state`.
    """
    model, twin = sharded(fsdp), Net()
    with no_warnings():
        (
            model.set_is_last_backward(False),
            model.set_reshard_after_backward(False),
            model.set_requires_gradient_sync(False),
        )
        for micro in range(2):
            loss_of(model, micro).backward()
        model.set_is_last_backward(True), model.set_reshard_after_backward(True), model.set_requires_gradient_sync(True)
        for state_of in (fsdp.fully_shard.state, torch_engine.fully_shard.state):
            assert state_of(model)._state_ctx.all_states and state_of(model.blocks[0]) is not None
        with Collectives() as seen:
            for state in torch_engine.fully_shard.state(model)._state_ctx.all_states:
                for group in state._fsdp_param_groups:
                    group.post_backward()
            torch_engine.fully_shard.state(model)._root_post_backward_final_callback()
    close(gradients(model), twin_gradients(twin, 0, 1), rtol=2e-6, atol=1e-6)
    return sorted(seen.seen), shown(model), {n: look(p.grad) for n, p in model.named_parameters()}


def names_in_the_state(fsdp: Any) -> Any:
    """The names of units and parameters, as the root has them; none before there is a root."""
    nested, together = sharded(fsdp), Net()
    fsdp.fully_shard([together.blocks[0], together.blocks[1]])
    fsdp.fully_shard(together)

    def names() -> list[Any]:
        states = [fsdp.fully_shard.state(each) for model in (nested, together) for each in (*model.blocks, model)]
        groups = [state._fsdp_param_group for state in states if state is not None]
        return [(group._module_fqn, [param._param_fqn for param in group.fsdp_params]) for group in groups if group]

    before = names()
    for model in (nested, together):
        loss_of(model).backward()
    return before, names()


def test_the_state_that_pipelines_read(ranks) -> None:
    on_both(ranks, 2, the_state, names_in_the_state)
