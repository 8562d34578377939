"""What torch's engine refuses, the lab's refuses too, with the same type of error: arguments, containers, order of
calls.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdplab.engine import DataParallelMeshDims, fully_shard
from tests.surface import (
    Net,
    close,
    data,
    error_of,
    gradients,
    loss_of,
    mesh_of,
    no_warnings,
    on_both,
    sharded,
    twin_gradients,
)  # fmt: skip


def bad_arguments(fsdp: Any) -> Any:
    scalar = Net()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    shard, plain, two = fsdp.fully_shard, mesh_of(), mesh_of(2, 1, names=("a", "b"))
    tries = {
        "a container": lambda: shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=plain),
        "another container": lambda: shard(nn.ModuleDict({"a": nn.Linear(2, 2)}), mesh=plain),
        "three dimensions": lambda: shard(Net(), mesh=mesh_of(1, 1, dist.get_world_size(), names=("a", "b", "c"))),
        "0-d parameter": lambda: shard(scalar, mesh=plain),
        "dims without names": lambda: shard(Net(), mesh=plain, dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        "unknown dim": lambda: shard(Net(), mesh=two, dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        "plain parameters": lambda: shard(Net(), mesh=two, dp_mesh_dims=DataParallelMeshDims(shard="a")),
        "no dim": lambda: DataParallelMeshDims(),
        "positional mesh": lambda: shard(Net(), plain),
        "twice in one list": lambda: shard([once := nn.Linear(2, 2), once], mesh=plain),
    }
    with no_warnings():
        twice = error_of(lambda: (shard(m := Net(), mesh=plain), shard(m, mesh=plain)))
        return {name: error_of(action) for name, action in tries.items()} | {"twice": twice != "none"}


def first_words(fsdp: Any) -> Any:
    """Programs match on what an error says: the first words are the same, and so is its type."""
    scalar, early = Net(), sharded(fsdp)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    early.blocks[0](data())
    with torch.device("meta"):
        meta = fsdp.fully_shard(Net().blocks[0], mesh=mesh_of())
    shard, plain, two = fsdp.fully_shard, mesh_of(), mesh_of(2, 1, names=("a", "b"))
    once = shard(nn.Linear(2, 2), mesh=plain)
    tries = {
        "container": (lambda: shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=plain), 10),
        "dimensions": (lambda: shard(Net(), mesh=mesh_of(1, 1, 2, names=("a", "b", "c"))), 9),
        "unnamed": (lambda: shard(Net(), mesh=mesh_of(2, 1)), 10),
        "0-d": (lambda: shard(scalar, mesh=plain), 14),
        "twice": (lambda: shard(once, mesh=plain), 14),
        "copy": (lambda: copy.deepcopy(once), 5),
        "after forward": (lambda: shard(Net(), mesh=plain, reshard_after_forward=3), 14),
        "what after forward": (lambda: shard(Net(), mesh=plain, reshard_after_forward="yes"), 15),
        "dim": (lambda: shard(Net(), mesh=plain, shard_placement_fn=lambda p: Shard(1)), 8),
        "placement": (lambda: shard(Net(), mesh=plain, shard_placement_fn=lambda p: "rows"), 3),
        "unnamed dims": (lambda: shard(Net(), mesh=plain, dp_mesh_dims=DataParallelMeshDims(shard="dp")), 8),
        "unknown dim": (lambda: shard(Net(), mesh=two, dp_mesh_dims=DataParallelMeshDims(shard="dp")), 8),
        "plain": (lambda: shard(Net(), mesh=two, dp_mesh_dims=DataParallelMeshDims(shard="a")), 20),
        "meta": (lambda: meta(data()), 16),
        "root after block": (lambda: early(data()), 18),
        "register": (lambda: fsdp.register_fsdp_forward_method(early, "no_such_method"), 8),
        "prefetch": (lambda: early.set_modules_to_forward_prefetch([early.first]), 4),
        "share": (lambda: fsdp.share_comm_ctx([early, nn.Linear(2, 2)]), 6),
        "buffers": (lambda: early.set_reduce_scatter_max_input_buffers(0), 6),
        "reshard": (lambda: early.set_reshard_after_forward(2), 6),
    }
    return {name: words_of(*each) for name, each in tries.items()}


def words_of(action: Any, count: int) -> tuple[str, list[str]]:
    """The type of the error that `action` raises, and so many of its first words, without punctuation and classes."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, [
            word.rstrip(":;,.") for word in str(error).split()[:count] if "FSDPNet" not in word
        ]
    return "none", []


class Listed(nn.ModuleList):
    """A container that can run is a module like any other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self:
            x = each(x)
        return x


def containers(fsdp: Any) -> Any:
    """Slices of a container are plain; copies are refused; a container with a forward is a unit."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for layer in model[:2]:
        fsdp.fully_shard(layer, mesh=mesh_of())
    fsdp.fully_shard(model, mesh=mesh_of())
    part, listed = model[1:3], fsdp.fully_shard(Listed([nn.Linear(8, 8)]), mesh=mesh_of())
    loss_of(listed).backward()
    errors = [error_of(lambda: copy.deepcopy(each)) for each in (model, model[0])]
    names = [type(each).__name__ for each in (model, part, *part, listed, listed[0])]
    shapes = [p.grad.shape for p in listed.parameters()]
    return names, len(part), part[0] is model[1], errors, isinstance(part, fsdp.FSDPModule), shapes


def order_of_calls(fsdp: Any) -> Any:
    """A block that ran alone is a root already; parameters on the meta device cannot run."""
    early, meta = sharded(fsdp), None
    early.blocks[0](data())
    with torch.device("meta"):
        meta = Net()
    sharded(fsdp, meta)
    tries = {
        "root after block": lambda: early(data()),
        "meta": lambda: meta(data()),
        "meta unshard": lambda: meta.blocks[0].unshard(),
        "register": lambda: fsdp.register_fsdp_forward_method(early, "no_such_method"),
        "share": lambda: fsdp.share_comm_ctx([early, nn.Linear(2, 2)]),
        "prefetch": lambda: early.set_modules_to_forward_prefetch([early.first]),
        "prefetch in backward": lambda: early.set_modules_to_backward_prefetch([early.first]),
        "reshard": lambda: early.set_reshard_after_forward(2),
        "reset": lambda: (early_root := sharded(fsdp), early_root(data()), early_root.blocks[0].reset_iter_state()),
        "buffers": lambda: early.set_reduce_scatter_max_input_buffers(0),
        "buffers bool": lambda: early.set_reduce_scatter_max_input_buffers(True),
    }
    with no_warnings():
        return {name: error_of(action) for name, action in tries.items()}


def a_list_as_the_root(fsdp: Any) -> None:
    """Torch refuses to run a list without a root above it; whoever runs it must have the right numbers."""
    model, twin = (nn.ModuleList(Net().blocks) for _ in range(2))
    fsdp.fully_shard([*model], mesh=mesh_of())
    loss = lambda blocks: blocks[2](blocks[1](blocks[0](data()))).square().mean()  # noqa: E731
    try:
        loss(model).backward()
    except RuntimeError as error:
        assert "single root" in str(error), error
        return
    close(gradients(model), twin_gradients(twin, loss=loss))


def materialised(fsdp: Any) -> Any:
    """From the meta device: shard, `to_empty`, set the values, train."""
    with torch.device("meta"):
        model = Net()
    sharded(fsdp, model)
    model.to_empty(device="cpu")
    twin = Net()
    with torch.no_grad():
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            mine.copy_(torch.distributed.tensor.distribute_tensor(other.detach(), mine.device_mesh, mine.placements))
    loss = loss_of(model)
    loss.backward()
    close(gradients(model), twin_gradients(twin))
    return loss.detach()


def tied_across_units(fsdp: Any) -> Any:
    """A weight that two units would both hold is refused, at the latest when the root first runs."""
    model = Net()
    model.last.weight = model.blocks[0].down.weight = nn.Parameter(torch.zeros(8, 8))
    model.blocks[0].up = nn.Linear(8, 8)
    return error_of(lambda: sharded(fsdp, model)(data()))


def strided(fsdp: Any) -> None:
    """Torch refuses parameters that are not contiguous; whoever accepts them must have the right numbers."""
    model, twin = nn.Linear(8, 8), nn.Linear(8, 8)
    twin.load_state_dict(model.state_dict())
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    try:
        fsdp.fully_shard(model, mesh=mesh_of())
    except (NotImplementedError, ValueError) as error:
        assert "contiguous" in str(error), error
        return
    loss_of(model).backward()
    close(gradients(model), twin_gradients(twin))


def ignored_by_name() -> None:
    """Torch ignores nothing where names are given; here parameters may come from an iterator too."""
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="ignored_params holds 'bias', a str; expected the parameters themselves"):
        fully_shard(model, mesh=mesh_of(), ignored_params={"bias"})
    fully_shard(model, mesh=mesh_of(), ignored_params=iter([model.bias]))
    assert isinstance(model.weight, DTensor) and not isinstance(model.bias, DTensor)


def test_bad_arguments(ranks) -> None:
    on_both(ranks, 2, bad_arguments, first_words, strided)
    ranks(2, ignored_by_name)


def test_containers_and_copies(ranks) -> None:
    on_both(ranks, 2, containers)


def test_the_order_of_calls(ranks) -> None:
    on_both(ranks, 2, order_of_calls, a_list_as_the_root, materialised, tied_across_units)
