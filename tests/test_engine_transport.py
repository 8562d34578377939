"""Transports: gloo and shared memory carry the same bits; a dead peer ends a wait; nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist

from fsdplab.engine import STRATEGIES, shard_model
from fsdplab.engine.core.average import Average
from fsdplab.engine.core.transport import CollectiveLabel, Departure
from fsdplab.engine.emulation.link import Link, behind
from fsdplab.engine.transport.selection import transport_of
from fsdplab.engine.transport.shared_memory.arena import machine_of_this_rank
from fsdplab.engine.transport.shared_memory.transport import Operations, SharedTransport, Step
from fsdplab.workloads import build_model, loss_of

ROWS = [name for name in STRATEGIES if name != "hybrid_shard"]  # that one needs a 2-D mesh
CPU = torch.device("cpu")
shares_memory = pytest.mark.skipif(machine_of_this_rank() is None, reason="shared memory needs x86-64 Linux")


def trained(strategy: str, transport: str) -> list[torch.Tensor]:
    """The local parameters after four AdamW steps."""
    model = shard_model(build_model("gpt-tiny", seed=1), strategy, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 256, (2, 17), generator=generator)
        loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def same_bits() -> None:
    for strategy in ROWS:
        for ours, theirs in zip(trained(strategy, "gloo"), trained(strategy, "shm"), strict=True):
            if strategy == "no_shard" and dist.get_world_size() > 2:  # gloo's own all-reduce has its own order
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
            else:
                assert torch.equal(ours, theirs), strategy


@shares_memory
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gloo_and_shared_memory_train_to_the_same_bits(ranks, world_size: int) -> None:
    ranks(world_size, same_bits)


def interrupted_when_it_has_divided() -> None:
    buffer = torch.full((4,), dist.get_rank() + 1.0)
    work = transport_of(dist.group.WORLD, CPU, "gloo").all_reduce(
        buffer, CollectiveLabel("unit", "backward"), Average(2.0)
    )

    def interrupt(*_: object) -> None:
        if bool((buffer == 1.5).all()):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    work.wait()
    assert torch.equal(buffer, torch.full((4,), 1.5))


def test_a_sum_is_divided_once_however_often_it_is_waited_for(ranks) -> None:
    ranks(2, interrupted_when_it_has_divided)


def chosen() -> list[str]:
    group = dist.group.WORLD
    names = [type(transport_of(group, CPU, wanted)).__name__ for wanted in ("auto", "gloo")]
    assert transport_of(group, CPU) is transport_of(group, CPU) or names[0] == "GlooTransport"
    with pytest.raises(ValueError, match="unknown transport 'pigeon'; expected one of auto, gloo, shm, nccl"):
        transport_of(group, CPU, "pigeon")
    with pytest.raises(ValueError, match="'nccl' does not move tensors on cpu"):
        transport_of(group, CPU, "nccl")
    return names


@shares_memory
def test_ranks_of_one_machine_share_memory_unless_told_otherwise(ranks) -> None:
    assert ranks(2, chosen) == [["SharedTransport", "GlooTransport"]] * 2


def on_two_nodes() -> str:
    """The launcher's node number is part of what makes a machine: ranks of two nodes do not share memory."""
    os.environ["GROUP_RANK"] = str(dist.get_rank())
    try:
        with pytest.raises(
            ValueError, match="needs all ranks on one x86-64 Linux machine that lets them share; got 2 machines"
        ):
            transport_of(dist.group.WORLD, CPU, "shm")
        return type(transport_of(dist.group.WORLD, CPU)).__name__
    finally:
        del os.environ["GROUP_RANK"]


@shares_memory
def test_ranks_of_different_nodes_use_gloo(ranks) -> None:
    assert ranks(2, on_two_nodes) == ["GlooTransport"] * 2


def refused_to_rank_1() -> str:
    """One rank may not open its peers' memory: all of them agree on gloo, and nobody waits."""
    honest = os.open

    def failing_open(path: str, *rest: int) -> int:
        if dist.get_rank() == 1 and str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return honest(path, *rest)

    os.open = failing_open
    try:
        with pytest.raises(ValueError, match="rank 1 may not open its peers' memory: .*Permission denied"):
            transport_of(dist.group.WORLD, CPU, "shm")
        return type(transport_of(dist.group.WORLD, CPU)).__name__
    finally:
        os.open = honest


@shares_memory
def test_a_system_that_forbids_sharing_gets_gloo(ranks) -> None:
    assert ranks(3, refused_to_rank_1) == ["GlooTransport"] * 3


def many_in_flight() -> None:
    """More operations than buffers: the oldest is completed early, and every reader still gets its own data."""
    operations = Operations(dist.group.WORLD)
    slots, staging = operations.slots, operations.staging(3)
    got: list[list[float]] = []

    def read(number: int) -> None:
        got.append([number, *(slots.read(peer, number, 4).view(torch.float32).item() for peer in range(slots.ranks))])

    started = []
    for step in range(1, 9):
        nbytes = 4 + 4096 * step  # buffers grow as payloads do
        operation = operations.claim(nbytes, "test", "block", Departure(partial(dict, issue_ns=0)))
        buffer = operations.stage(staging, nbytes, "")
        assert len(got) == max(0, step - 3), "no sooner and no later than its buffer is needed"
        buffer[:4].view(torch.float32).fill_(100 * slots.rank + step)
        steps = [Step(lambda number=operation.number: read(number))]
        started.append(operations.publish(operation, buffer, staging, steps))
    for pending in started:
        pending.wait()
    assert got == [[step, float(step), 100.0 + step] for step in range(1, 9)]


@shares_memory
def test_a_fast_rank_overwrites_nothing_unread(ranks) -> None:
    ranks(2, many_in_flight)


def summed_early(linked: bool) -> float:
    """Rank 1 ends an all-reduce while rank 0 has only made its sum."""
    transport, rank = transport_of(dist.group.WORLD, torch.device("cpu"), "shm"), dist.get_rank()
    transport = behind(transport, Link(1e9)) if linked else transport
    buffer = torch.full((5,), float(rank + 1))
    work = transport.all_reduce(buffer, CollectiveLabel("block", "backward"), Average(2.0))
    if rank == 0:
        work.advance()
        dist.barrier()
    work.wait()
    if rank == 1:
        dist.barrier()
    assert buffer.unique().numel() == 1
    return buffer[0].item()


@pytest.mark.parametrize("linked", [False, True])
def test_a_rank_that_has_made_its_sum_keeps_nobody_waiting(ranks, linked: bool) -> None:
    assert ranks(2, summed_early, linked) == [1.5, 1.5]


def open_descriptors() -> tuple[int, int]:
    trained("full_shard", "shm")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        trained("full_shard", "shm")
    return before, len(os.listdir("/proc/self/fd"))


@shares_memory
def test_deleted_models_leave_no_descriptor_behind(ranks) -> None:
    for before, after in ranks(2, open_descriptors):
        assert after <= before


def reads_from_the_dead() -> str:
    transport = transport_of(dist.group.WORLD, CPU)
    assert isinstance(transport, SharedTransport), type(transport)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport._slots.read(1, 1, 4)
    except RuntimeError as error:
        return str(error)
    return "read"


@shares_memory
def test_a_dead_peer_ends_the_wait_with_an_error_that_names_it(ranks) -> None:
    said, died = ranks.ends(2, reads_from_the_dead)
    assert died == "died with exit code -9"
    assert "rank 0 waited for rank 1 to write operation 1, but rank 1 has died" in said
