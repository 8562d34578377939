"""Shared memory as a process group: every collective equals gloo's, and torch's own engines train on it as they do on
gloo.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from fsdplab.engine import compat, shard_model
from fsdplab.engine.transport.selection import forget_destroyed, transport_of
from fsdplab.engine.transport.shared_memory.arena import machine_of_this_rank
from fsdplab.engine.transport.shared_memory.process_group import NAME, SharedMemoryGroup, register_backend
from fsdplab.engine.transport.shared_memory.transport import SharedTransport
from fsdplab.workloads import block_types, build_model, loss_of

pytestmark = pytest.mark.skipif(machine_of_this_rank() is None, reason="shared memory needs x86-64 Linux")
WORLDS = pytest.mark.parametrize("world_size", [2, 3, 4])
SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN
# nothing, fewer than ranks, one round, two rounds, uneven shares, several pieces
LENGTHS = (0, 1, 5, 1000, 20_011, 1_500_001)


def drawn(length: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Each rank's own numbers; whole ones, so that sums are exact in any order and precision."""
    generator = torch.Generator().manual_seed(length + rank)
    return torch.randint(-8, 8, (length,), generator=generator).to(dtype)


def both(act: Callable[[dist.ProcessGroup], Any]) -> None:
    """What `act` returns is the same on gloo and on shared memory."""
    torch.testing.assert_close(act(_shm()), act(dist.group.WORLD), rtol=0, atol=0)


def _shm() -> dist.ProcessGroup:
    if not _made or _made[0] not in compat.groups_alive():
        _made[:] = [dist.new_group(backend=register_backend())]
    return _made[0]


_made: list[dist.ProcessGroup] = []


def reduces() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8):
        for length in LENGTHS if dtype == torch.float32 else LENGTHS[2:5:2]:
            for operation in (SUM, MAX, MIN):

                def all_reduced(group: dist.ProcessGroup) -> torch.Tensor:
                    mine = drawn(length, dtype, rank)
                    dist.all_reduce(mine, operation, group=group)
                    return mine

                both(all_reduced)

            def scattered(group: dist.ProcessGroup) -> torch.Tensor:
                output = torch.empty(length, dtype=dtype)
                compat.reduce_scatter_single(output, drawn(ranks * length, dtype, rank), group=group)
                return output

            both(scattered)
    average = drawn(5000, torch.float32, rank)
    dist.all_reduce(average, AVG, group=_shm())
    torch.testing.assert_close(average, sum(drawn(5000, torch.float32, each) for each in range(ranks)) / ranks)


def low_precision_sums_in_float32() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = [torch.randn(30_000, generator=torch.Generator().manual_seed(each)) for each in range(ranks)]
    low = [each.bfloat16() for each in draw]
    expected = low[0].float()
    for each in low[1:]:
        expected += each
    mine = low[rank].clone()
    dist.all_reduce(mine, group=_shm())
    assert torch.equal(mine, expected.bfloat16())
    wide = draw[rank].clone()
    dist.all_reduce(wide, AVG, group=_shm())
    total = draw[0].clone()
    for each in draw[1:]:
        total += each
    assert torch.equal(wide, total / ranks)  # in rank order, bit for bit


def gathers() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for length in LENGTHS if dtype == torch.float32 else LENGTHS[2:5:2]:

            def whole(group: dist.ProcessGroup) -> torch.Tensor:
                output = torch.empty(ranks * length, dtype=dtype)
                compat.all_gather_single(output, drawn(length, dtype, rank), group=group)
                return output

            def listed(group: dist.ProcessGroup) -> list[torch.Tensor]:
                outputs = [torch.empty(length, dtype=dtype) for _ in range(ranks)]
                dist.all_gather(outputs, drawn(length, dtype, rank), group=group)
                return outputs

            def given(group: dist.ProcessGroup) -> torch.Tensor:
                mine = drawn(length, dtype, rank)
                dist.broadcast(mine, src=ranks - 1, group=group)
                return mine

            for act in (whole, listed, given):
                both(act)
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, {"rank": rank}, group=_shm())
    assert told == [{"rank": each} for each in range(ranks)]


def uneven_lists_and_strides() -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), _shm()
    sizes = [3_000_000 * (each == 1) + 7 * each for each in range(ranks)]  # rank 0 has nothing, rank 1 several pieces
    outputs = [torch.empty(size) for size in sizes]
    dist.all_gather(outputs, torch.full((sizes[rank],), float(rank)), group=group)
    assert all(bool((each == peer).all()) for peer, each in enumerate(outputs))
    mine = torch.empty(sizes[rank])
    dist.reduce_scatter(mine, [torch.full((size,), 1.0 + rank) for size in sizes], group=group)
    assert bool((mine == ranks * (ranks + 1) / 2).all())
    across = torch.full((40, 300), 1.0).t()  # not contiguous
    dist.all_reduce(across, group=group)
    assert bool((across == ranks).all())
    parameter = torch.nn.Parameter(torch.full((10,), float(rank)))
    dist.broadcast(parameter, src=0, group=group)
    assert parameter._version == 0 and not parameter.any()


def coalesced_functional_and_delegated() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def functionals(group: dist.ProcessGroup) -> list[torch.Tensor]:
        mine = drawn(24 * ranks, torch.float32, rank)
        pairs = [mine, mine[: 2 * ranks] + 1]
        made = [
            functional.all_reduce(mine, "sum", group),
            getattr(functional, "all_gather_single", functional.all_gather_tensor)(mine, 0, group),
            getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)(mine, "sum", 0, group),
            *functional.all_reduce_coalesced(pairs, "sum", group),
            *getattr(functional, "all_gather_single_coalesced", functional.all_gather_into_tensor_coalesced)(
                pairs, group
            ),
            *getattr(functional, "reduce_scatter_single_coalesced", functional.reduce_scatter_tensor_coalesced)(
                pairs, "sum", [0, 0], group
            ),
            functional.broadcast(mine, 0, group),
            functional.all_to_all_single(mine, None, None, group),
        ]
        return [functional.wait_tensor(each) for each in made]

    def delegated(group: dist.ProcessGroup) -> list[torch.Tensor]:
        mine, got = drawn(8, torch.float32, rank), torch.zeros(8)
        dist.scatter(got, [mine] * ranks if rank == 0 else None, src=0, group=group)
        passed = torch.zeros(8)
        if rank == 0:
            dist.send(mine, 1, group=group)
        if rank == 1:
            dist.recv(passed, 0, group=group)
        with dist._coalescing_manager(group):
            dist.all_reduce(mine, group=group)
        return [mine, got, passed]

    both(functionals)
    both(delegated)
    work = dist.all_reduce(torch.ones(3), group=_shm(), async_op=True)
    assert work.is_completed() and work.get_future().done()
    dist.barrier(group=_shm())


def all_in_turn() -> None:
    reduces()
    gathers()
    low_precision_sums_in_float32()
    uneven_lists_and_strides()
    coalesced_functional_and_delegated()


@WORLDS
def test_every_collective_equals_gloos(ranks, world_size: int) -> None:
    ranks(world_size, all_in_turn)


def trained(engine: str, group: dist.ProcessGroup) -> tuple[list[float], dict[str, int]]:
    """The losses of three steps, and how many collectives of each kind the last one made."""
    model = build_model("gpt-tiny", seed=1)
    if engine == "ddp":
        model = DistributedDataParallel(model, process_group=group)
    elif engine == "fsdp1":
        model = FullyShardedDataParallel(
            model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True
        )
    else:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        for module in [each for each in model.modules() if isinstance(each, block_types(model))]:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), []
    for step in range(3):
        tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with CommDebugMode() if step == 2 else nullcontext() as comms:
            loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {str(kind): count for kind, count in comms.get_comm_counts().items()}


def trained_on_both() -> None:
    for engine in ("ddp", "fsdp1", "fsdp2"):
        (ours, counts), (theirs, expected) = trained(engine, _shm()), trained(engine, dist.group.WORLD)
        if dist.get_world_size() == 2:
            assert ours == theirs, engine  # two summands: the same bits in any order
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, msg=lambda text, name=engine: f"{name}: {text}")
        assert counts == expected and sum(counts.values()) > 0, engine


@WORLDS
def test_torchs_engines_train_to_the_same_losses_with_the_same_collectives(ranks, world_size: int) -> None:
    ranks(world_size, trained_on_both)


def refusals() -> None:
    group, ranks = _shm(), dist.get_world_size()
    one = torch.ones(4)
    for message, call in (
        (
            "reduces with SUM, AVG, MAX, MIN, not PRODUCT: use a gloo group",
            lambda: dist.all_reduce(one, dist.ReduceOp.PRODUCT, group=group),
        ),
        ("does not reduce torch.bool with SUM: use a gloo group", lambda: dist.all_reduce(one.bool(), group=group)),
        ("does not reduce torch.int64 with AVG", lambda: dist.all_reduce(one.long(), AVG, group=group)),
        ("dense tensors on the CPU, not torch.strided on meta", lambda: dist.all_reduce(one.to("meta"), group=group)),
        (
            "all_gather: 5 x float32 is not 2 times 4 x float32",
            lambda: compat.all_gather_single(torch.ones(5), one, group=group),
        ),
        ("all_gather: 8 x float64 is not", lambda: compat.all_gather_single(torch.ones(8).double(), one, group=group)),
        (
            "reduce_scatter: 4 x float32 is not 2 times 4 x float32",
            lambda: compat.reduce_scatter_single(torch.ones(4), one, group=group),
        ),
        ("expected 2, its own like its input", lambda: dist.all_gather([one], one, group=group)),
        ("expected 2, its own like the output", lambda: dist.reduce_scatter(one, [one], group=group)),
        ("broadcast: expected one tensor a rank, got 2", lambda: group.broadcast([one, one], dist.BroadcastOptions())),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    dist.all_reduce(one, group=group)  # it still works
    assert one.tolist() == [ranks] * 4


def test_wrong_input_is_rejected_before_anything_moves(ranks) -> None:
    ranks(2, refusals)


def out_of_step() -> str:
    group = _shm()
    try:
        if dist.get_rank():
            dist.all_reduce(torch.ones(4), group=group)
        else:
            dist.broadcast(torch.ones(8), src=1, group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_in_different_collectives_are_told(ranks) -> None:
    assert any(
        "all_reduce SUM float32 (16 bytes)" in said and "broadcast from 1 (32 bytes)" in said
        for said in ranks(2, out_of_step)
    )


def on_two_nodes() -> None:
    os.environ["GROUP_RANK"] = str(dist.get_rank())
    try:
        with pytest.raises(ValueError, match="one x86-64 Linux machine; got 2 machines: use a gloo group"):
            SharedMemoryGroup(dist.group.WORLD)
    finally:
        del os.environ["GROUP_RANK"]


def test_ranks_of_different_machines_are_refused(ranks) -> None:
    ranks(2, on_two_nodes)


def everything_on_it(folder: str) -> None:
    """The default group itself on shared memory: meshes and their parts, DTensors, the lab's own engine; nothing is
    left behind.
    """
    rank, left = dist.get_rank(), []
    dist.barrier()  # a rank that destroyed the group sooner would leave others unconnected
    dist.destroy_process_group()
    for turn in range(2):
        dist.init_process_group(
            register_backend(), rank=rank, world_size=4, store=dist.FileStore(f"{folder}/store{turn}", 4)
        )
        assert dist.get_backend() == NAME and isinstance(dist.group.WORLD, SharedMemoryGroup)
        assert dist.group.WORLD.name() == NAME
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert isinstance(mesh["shard"].get_group(), SharedMemoryGroup)
        whole = torch.arange(30.0).view(5, 6)
        cut = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        assert torch.equal((cut @ cut.t()).full_tensor(), whole @ whole.t())
        transport = transport_of(mesh["shard"].get_group(), torch.device("cpu"))
        assert isinstance(transport, SharedTransport) and transport is transport_of(
            mesh["shard"].get_group(), torch.device("cpu")
        )
        for strategy in ("full_shard", "no_shard"):
            model = shard_model(build_model("gpt-tiny", seed=1), strategy)
            tokens = torch.randint(0, 256, (2, 17))
            loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
        del mesh, cut, transport, model
        dist.barrier()
        dist.destroy_process_group()
        forget_destroyed()
        gc.collect()
        left.append(len(os.listdir("/proc/self/fd")))
    assert left[1] <= left[0], f"{left[1] - left[0]} descriptors more after the second time"


def dies(folder: str) -> str:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(register_backend(), rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(10))
    except RuntimeError as error:
        return str(error)
    return "reduced"


def test_it_can_be_the_default_group(ranks, tmp_path: Path) -> None:
    ranks(4, everything_on_it, str(tmp_path))


def test_a_dead_peer_ends_the_wait(ranks, tmp_path: Path) -> None:
    said, died = ranks.ends(2, dies, str(tmp_path))
    assert died == "died with exit code -9" and "rank 1 has died" in said
