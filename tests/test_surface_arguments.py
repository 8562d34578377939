"""Every argument of `fully_shard`: the same program with one import changed gives the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from fsdplab.engine import DataParallelMeshDims
from tests.surface import (
    Collectives,
    Net,
    close,
    data,
    engines_under_test,
    error_of,
    gradients,
    look,
    loss_of,
    mesh_of,
    on_both,
    reference_is_here,
    sharded,
    shown,
    twin_gradients,
    whole,
)  # fmt: skip

# ---- a module, or a list of modules


def one_list(fsdp: Any) -> Any:
    """Blocks 0 and 1 travel as one unit: one gather, one reduction, the list itself comes back."""
    model = Net()
    pair = [model.blocks[0], model.blocks[1]]
    assert fsdp.fully_shard(pair, mesh=mesh_of()) is pair
    fsdp.fully_shard(model.blocks[2], mesh=mesh_of())
    fsdp.fully_shard(model, mesh=mesh_of())
    with Collectives() as seen:
        losses = [loss_of(model).detach(), loss_of(model)]
        losses[1].backward()
    close(gradients(model), twin_gradients(Net()))
    return losses[0], seen.seen, shown(model), [type(each).__name__ for each in model.modules()]


class Chunked(nn.Module):
    """Norm and head share a unit; the forward runs the norm only, the head runs later on pieces of its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = Net(), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, with_head: bool = False) -> torch.Tensor:
        x = self.norm(self.body(x))
        return self.head(x) if with_head else x


def chunked_loss(model: Chunked, seed: int = 0) -> torch.Tensor:
    features = model(data(seed))
    return sum(model.head(piece).square().sum() for piece in features.chunk(2)) / features.shape[0]


def head_in_chunks(fsdp: Any) -> Any:
    model, twin, losses = Chunked(), Chunked(), []
    for unit in (*model.body.blocks, [model.norm, model.head], model):
        fsdp.fully_shard(unit, mesh=mesh_of())
    for step in range(2):
        losses.append(chunked_loss(model, step))
        losses[-1].backward()
        close(gradients(model), twin_gradients(twin, loss=lambda m: chunked_loss(m, step)))
        model.zero_grad(), twin.zero_grad()
    return [loss.detach() for loss in losses]


def part_of_a_list(fsdp: Any) -> Any:
    """The head of the list never runs in some steps: its gradients are none or zeros, the norm's are right."""
    model, twin = Chunked(), Chunked()
    for unit in ([model.norm, model.head], model):
        fsdp.fully_shard(unit, mesh=mesh_of())
    for with_head in (False, True, False):
        model(data(), with_head).square().mean().backward()
        close(gradients(model), twin_gradients(twin, loss=lambda m: m(data(), with_head).square().mean()))
        model.zero_grad(), twin.zero_grad()


def test_a_list_of_modules_is_one_unit(ranks) -> None:
    on_both(ranks, 2, one_list, head_in_chunks, part_of_a_list)


# ---- reshard_after_forward


def kept_between_forward_and_backward(fsdp: Any) -> Any:
    """True, False, None (blocks drop, the root keeps) and 2 (blocks keep one half on each pair of ranks)."""
    answers = []
    for choice in (True, False, None, 2, 4):
        model, twin = sharded(fsdp, reshard_after_forward=choice), Net()
        loss_of(model).backward()
        model.zero_grad()
        with Collectives() as seen:
            loss = loss_of(model)
            between = shown(model)
            loss.backward()
        close(gradients(model), twin_gradients(twin))
        answers.append((choice, loss.detach(), between, seen.seen, shown(model)))
    return answers


def not_a_divisor(fsdp: Any) -> Any:
    return error_of(lambda: fsdp.fully_shard(Net(), mesh=mesh_of(), reshard_after_forward=3))


def uneven_rows_on_pairs(fsdp: Any) -> Any:
    """Rows that do not divide by the pair of ranks: the values that come back are right all the same."""
    model, twin = Net(hidden=(5, 6, 7)), Net(hidden=(5, 6, 7))
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh_of(), reshard_after_forward=2)
    fsdp.fully_shard(model, mesh=mesh_of())
    loss_of(model).backward()
    close(gradients(model), twin_gradients(twin))


def test_reshard_after_forward(ranks) -> None:
    on_both(ranks, 4, kept_between_forward_and_backward, not_a_divisor)


def test_reshard_to_pairs_with_uneven_rows(ranks) -> None:
    on_both(ranks, 4, uneven_rows_on_pairs)


# ---- shard_placement_fn


def other_dimensions(fsdp: Any) -> Any:
    model, twin, answers = Net(), Net(), []
    place = lambda p: Shard(-1 if p.shape[0] == 4 else 1) if p.ndim == 2 else None  # noqa: E731
    sharded(fsdp, model, shard_placement_fn=place)
    answers.append(shown(model))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for step in range(2):
        with Collectives() as seen:
            answers.append(loss_of(model, step).detach())
            loss_of(model, step).backward()
        answers.append(seen.seen)
        close(gradients(model), twin_gradients(twin, step))
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    return answers


def wrong_dimensions(fsdp: Any) -> Any:
    return [
        error_of(lambda: fsdp.fully_shard(Net(hidden=(4, 5, 6)), mesh=mesh_of(), shard_placement_fn=place)) == "none"
        for place in (lambda p: Shard(p.ndim), lambda p: "rows")
    ]


def uneven_columns(fsdp: Any) -> None:
    """Nine columns on two ranks: torch refuses; whoever accepts it must have the right numbers."""
    model, twin = nn.Linear(9, 4), nn.Linear(9, 4)
    twin.load_state_dict(model.state_dict())
    try:
        fsdp.fully_shard(model, mesh=mesh_of(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    except (NotImplementedError, ValueError) as error:
        assert "even" in str(error), error
        return
    for each in (model, twin):
        each(torch.ones(2, 9)).square().sum().backward()
    close(gradients(model), gradients(twin))


class Flattens(nn.Linear):
    """Reads its weight as one row of memory, as fused kernels do: only a contiguous one can be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.is_contiguous()
        return x @ self.weight.view(-1).view(self.weight.shape).t() + self.bias


def contiguous_columns(fsdp: Any) -> None:
    """Cut along columns a parameter is contiguous at rest and gathered, and so is its gradient."""
    for low in (None, torch.bfloat16):
        torch.manual_seed(0)
        model, twin = Flattens(8, 12), Flattens(8, 12)
        twin.load_state_dict(model.state_dict())
        policy = fsdp.MixedPrecisionPolicy(low, torch.float32)
        fsdp.fully_shard(model, mesh=mesh_of(), shard_placement_fn=lambda p: Shard(p.ndim - 1), mp_policy=policy)
        for _ in range(2):
            for each in (model, twin):
                each(data()).float().square().sum().backward()
            for parameter in model.parameters():
                assert parameter.to_local().is_contiguous() and parameter.grad.to_local().is_contiguous()
                assert parameter.is_contiguous() and parameter.grad.is_contiguous()
        for parameter in twin.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        close(gradients(model), gradients(twin), **({} if low is None else {"rtol": 0.05, "atol": 0.5}))


def columns_over_pairs(fsdp: Any) -> None:
    """Cut along columns, and kept over fewer ranks between forward and backward: the numbers are the twin's."""
    torch.manual_seed(0)
    model, twin = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)), nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    twin.load_state_dict(model.state_dict())
    for layer in model:
        place = lambda p: Shard(p.ndim - 1)  # noqa: E731
        fsdp.fully_shard(layer, mesh=mesh_of(), shard_placement_fn=place, reshard_after_forward=2)
    fsdp.fully_shard(model, mesh=mesh_of())
    for _ in range(2):
        twin.zero_grad(), model.zero_grad()
        loss_of(model).backward()
        close(gradients(model), twin_gradients(twin))


def test_shard_placement_fn(ranks) -> None:
    on_both(ranks, 2, other_dimensions, wrong_dimensions, uneven_columns, contiguous_columns)


def with_each_transport(program: Any) -> None:
    for engine in engines_under_test().values():
        program(engine)


def test_columns_over_fewer_ranks(ranks) -> None:
    """PyTorch's engine raises an IndexError, so only the lab's is asked."""
    ranks(4, with_each_transport, columns_over_pairs)


# ---- a mesh for each parameter


def experts_on_a_mesh_of_their_own(fsdp: Any) -> Any:
    """Two meshes in one unit: what is cut over pairs and replicated, and what is cut over all; three steps of AdamW."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    pairs, everybody = mesh_of(2, 2, names=("replicas", "pairs")), mesh_of(names=("all",))
    near, all_of_them = HSDPMeshInfo(pairs, 1, 0), FSDPMeshInfo(everybody, 0)
    model, twin = Net(), Net()
    for block in model.blocks:
        experts = {id(p) for p in block.down.parameters()}

        def place(p: Any, experts: Any = experts) -> Any:
            return ShardPlacementResult(Shard(0), near if id(p) in experts else all_of_them)

        fsdp.fully_shard(block, mesh=everybody, shard_placement_fn=place)
    fsdp.fully_shard(model, mesh=everybody)
    answers = [shown(model), [len(fsdp.fully_shard.state(block)._fsdp_param_groups) for block in model.blocks]]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, twin)]
    for step in range(3):
        loss_of(model, step).backward()
        close(gradients(model), twin_gradients(twin, step), rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    model.blocks[0].unshard()
    answers.append({name: tuple(parameter.shape) for name, parameter in model.blocks[0].named_parameters()})
    model.blocks[0].reshard()
    hook = lambda reduced: None  # noqa: E731
    return answers, shown(model), error_of(lambda: model.blocks[0].set_all_reduce_hook(hook))


@pytest.mark.skipif(not reference_is_here(), reason="ShardPlacementResult is not in every torch")
def test_a_mesh_for_each_parameter(ranks) -> None:
    on_both(ranks, 4, experts_on_a_mesh_of_their_own)


# ---- mp_policy


class Watched(Net):
    """Remembers the dtypes that its last layer saw."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, index: torch.Tensor) -> dict:
        self.saw = x.dtype, self.first.weight.dtype, scale.dtype, index.dtype
        return {"out": super().forward(x), "index": index}


def precision(fsdp: Any) -> Any:
    low, half, full = torch.bfloat16, torch.float16, torch.float32
    policies = [
        (low, full, None, True), (low, None, full, True), (None, low, None, True), (low, full, full, False),
        (None, None, low, True), (half, full, full, True),
    ]  # fmt: skip
    answers = []
    for policy in policies:
        model, policy_inside = Watched(), fsdp.MixedPrecisionPolicy(policy[0], policy[1], None, policy[3])
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh_of(), mp_policy=policy_inside)
        fsdp.fully_shard(model, mesh=mesh_of(), mp_policy=fsdp.MixedPrecisionPolicy(*policy))
        x = data() if policy[3] else data().to(low)
        with Collectives() as seen:
            out = model(x, scale=torch.ones(1), index=torch.arange(3))
            out["out"].float().square().mean().backward()
        parameters = {name: (look(p), look(p.grad)) for name, p in model.named_parameters()}
        dtypes = model.saw, out["out"].dtype, out["index"].dtype
        answers.append((dtypes, out["out"].detach(), seen.seen, parameters, gradients(model)))
    return answers


def precision_of_each_unit(fsdp: Any) -> Any:
    """Low-precision blocks in a full-precision root: the input is cast at the block's door, its output back."""
    model, answers = Net(), []
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for block in model.blocks[:2]:
        fsdp.fully_shard(block, mesh=mesh_of(), mp_policy=policy)
        block.register_forward_hook(lambda _, args, out: answers.append((args[0].dtype, out.dtype)))
    fsdp.fully_shard(model, mesh=mesh_of())
    loss = loss_of(model)
    loss.backward()
    return answers, loss.detach(), gradients(model)


def test_mixed_precision_policy(ranks) -> None:
    on_both(ranks, 2, precision, precision_of_each_unit)


# ---- offload_policy, ignored_params


def offloaded(fsdp: Any) -> Any:
    model, twin, losses = sharded(fsdp, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)), Net(), []
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, twin)]
    for step in range(3):
        losses.append(loss_of(model, step))
        losses[-1].backward()
        close(gradients(model), twin_gradients(twin, step))
        assert all(p.device.type == "cpu" and p.grad.device.type == "cpu" for p in model.parameters())
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    return [loss.detach() for loss in losses], shown(model)


def ignored(fsdp: Any) -> Any:
    model, twin = Net(), Net()
    kept = {model.first.weight, model.blocks[1].up.bias}
    sharded(fsdp, model, ignored_params=kept)
    assert {p for p in model.parameters() if p in kept} == kept and type(model.first.weight) is nn.Parameter
    with Collectives() as seen:
        loss_of(model).backward()
    own = loss_of(twin)
    own.backward()
    for name in ("first.weight", "blocks.1.up.bias"):  # nobody averages these
        torch.testing.assert_close(model.get_parameter(name).grad, twin.get_parameter(name).grad)
    return (
        own.detach(),
        seen.seen,
        shown(model),
        {n: whole(p.grad) for n, p in model.named_parameters() if p not in kept},
    )


def test_offload_policy_and_ignored_parameters(ranks) -> None:
    on_both(ranks, 2, offloaded, ignored)


# ---- meshes


def hybrid(fsdp: Any) -> Any:
    model, twin = sharded(fsdp, mesh=mesh_of(2, 2, names=("replicate", "shard"))), Net()
    loss_of(model).backward()
    model.zero_grad()
    with Collectives() as seen:
        loss = loss_of(model)
        loss.backward()
    close(gradients(model), twin_gradients(twin))
    return loss.detach(), sorted(seen.seen), shown(model), {n: look(p.grad) for n, p in model.named_parameters()}


def named_dimensions(fsdp: Any) -> Any:
    """Parameters that are already DTensors on the mesh of everything; FSDP takes the dimensions that it is told."""
    answers = []
    for dims, shape, names in (
        (DataParallelMeshDims(shard="dp"), (2, 2), ("dp", "tp")),
        (DataParallelMeshDims(shard="dp", replicate="tp"), (2, 2), ("tp", "dp")),
        (DataParallelMeshDims(shard=("a", "b")), (2, 2), ("a", "b")),
    ):
        mesh = mesh_of(*shape, names=names)
        model = distribute_module(Net(), mesh)
        mesh = model.first.weight.device_mesh  # an equal one, where DTensor remembers it from an earlier test
        sharded(fsdp, model, mesh=mesh, dp_mesh_dims=dims)
        x = distribute_tensor(data(everywhere=True), mesh, [Replicate()] * 2)
        loss = model(x).square().mean()
        loss.backward()
        close(gradients(model), twin_gradients(Net(), loss=lambda m: m(data(everywhere=True)).square().mean()))
        answers.append((whole(loss), shown(model), {n: look(p.grad) for n, p in model.named_parameters()}))
    return answers


def test_a_mesh_of_two_dimensions(ranks) -> None:
    on_both(ranks, 4, hybrid)


def test_named_dimensions_of_a_larger_mesh(ranks) -> None:
    on_both(ranks, 4, named_dimensions)
