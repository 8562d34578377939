"""Shared memory after something went wrong: nobody reads what was not meant, hangs, or is told nothing.

A wait that was interrupted is done again; memory that peers have not read stays although its owner has dropped it; what
cannot be repeated is told to all ranks, who can begin anew; where the system refuses to share, all ranks agree.
"""

from __future__ import annotations

import copy
import gc
import os
import re
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import shard_model
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.selection import forget_destroyed, transport_of
from fsdplab.engine.transport.shared_memory.arena import machine_of_this_rank
from fsdplab.engine.transport.shared_memory.process_group import register_backend
from fsdplab.engine.transport.shared_memory.slots import Broken
from fsdplab.engine.transport.shared_memory.transport import SharedTransport
from tests.lives import WIDTH, Chain, Interrupt, Raised, interrupted_wait, same_lives

pytestmark = pytest.mark.skipif(machine_of_this_rank() is None, reason="shared memory needs x86-64 Linux")
CPU = torch.device("cpu")


def built(seed: int = 0, transport: str = "shm", **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return shard_model(Chain(), "full_shard", transport=transport, **options)


def weights(seed: int) -> list[torch.Tensor]:
    """The whole weights that `built(seed)` shards."""
    torch.manual_seed(seed)
    return [block.weight.detach() for block in Chain().blocks]


def stepped(model: nn.Module) -> float:
    torch.manual_seed(dist.get_rank())
    loss = model(torch.randn(3, WIDTH)).square().mean()
    loss.backward()
    return loss.item()


# ---- memory that peers have not read


def dropped_before_it_was_read() -> bool:
    """Rank 0 drops a model whose slices rank 1 has yet to gather, and makes others that could take their place."""
    model = built(3)
    handle = model.blocks[2].unshard(async_op=True)
    dist.barrier()
    if dist.get_rank() == 0:
        del model, handle
        gc.collect()
    others = [built(seed) for seed in range(4, 8)]
    dist.barrier()
    if dist.get_rank() == 0:
        return len(others) == 4
    handle.wait()
    return torch.equal(model.blocks[2].weight, weights(3)[2])


def test_slices_stay_where_they_are_until_peers_have_read_them(ranks) -> None:
    assert ranks(2, dropped_before_it_was_read) == [True, True]


def group_gone_before_it_was_read() -> bool:
    """The same where rank 0 has destroyed the whole group, as a rank does that is the first to end."""
    group = dist.new_group()
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = built(3, mesh=mesh)
    handle = model.blocks[1].unshard(async_op=True)
    dist.barrier()
    if dist.get_rank() == 0:
        del model, handle, mesh
        dist.destroy_process_group(group)
        forget_destroyed()
        gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        return True
    handle.wait()
    return torch.equal(model.blocks[1].weight, weights(3)[1])


def test_slices_outlive_the_transport_until_peers_have_read_them(ranks) -> None:
    assert ranks(2, group_gone_before_it_was_read) == [True, True]


def raised_dropped_and_built_again() -> list[float]:
    """Forwards that raise on all ranks, each with gathers under way; then a new model, which trains."""
    for index in range(12):
        model = built(index, prefetch=3)
        model.where = ("before", index % 4)
        with pytest.raises(Raised):
            stepped(model)
        if index % 3 == dist.get_rank():
            gc.collect()
        model = built(index)
    return [stepped(model)]


def test_a_model_that_is_built_after_an_exception_trains(ranks) -> None:
    ranks(2, raised_dropped_and_built_again)


# ---- waits that are interrupted


def interrupted_and_tried_again(transport: str) -> None:
    """At every operator of a wait in turn, and of the call that begins the gather."""
    for at in range(1, 40):
        model = built(at, transport)
        begin = lambda: model.blocks[1].unshard(async_op=True)
        handle = interrupted_once(begin, at) if at < 10 else begin()
        interrupted_once(handle.wait, at % 10)
        assert torch.equal(model.blocks[1].weight, weights(at)[1]), at
        model.blocks[1].reshard()


def interrupted_once(act: Callable[[], Any], at: int) -> Any:
    try:
        with Interrupt(at):
            return act()
    except KeyboardInterrupt:
        return act()


def test_a_wait_that_was_interrupted_can_be_done_again(ranks) -> None:
    ranks(2, interrupted_and_tried_again, "gloo")
    ranks(2, interrupted_and_tried_again, "shm")


def interrupted_while_it_slept() -> None:
    """The peer is late, and the sleeper is woken by Ctrl-C."""
    model, gone = built(5), []
    if dist.get_rank() == 0:
        with interrupted_wait(1, lambda: True):
            try:
                model.blocks[0].unshard()
            except KeyboardInterrupt:
                gone.append(True)
        assert gone
        dist.barrier()
    else:
        dist.barrier()
    model.blocks[0].unshard()
    assert torch.equal(model.blocks[0].weight, weights(5)[0])


def test_a_sleep_that_was_interrupted_can_be_slept_again(ranks) -> None:
    ranks(2, interrupted_while_it_slept)


# ---- what cannot be repeated


def interrupted_in_a_sum(again: str) -> list[str]:
    """Rank 0 is interrupted in the middle of a sum: all ranks are told, then all begin anew."""
    model = built()
    expected, said = stepped(model), []
    model.zero_grad()
    if dist.get_rank() == 0:
        transport = units_of(model)[1].memory.config.shard
        transport._sum = lambda *_: raise_(KeyboardInterrupt())
    for _ in range(2):
        try:
            stepped(model)
        except (KeyboardInterrupt, Broken) as error:
            said.append(str(error) or type(error).__name__)
    if dist.get_rank() == 0:
        del transport._sum
    if again == "reset":
        model.reset_iter_state()
        model.zero_grad()
    else:
        model = built()
    assert stepped(model) == expected
    return said


def raise_(error: BaseException) -> None:
    raise error


def test_a_sum_that_was_interrupted_is_told_to_all_ranks(ranks) -> None:
    for again in ("reset", "build"):
        first, second = ranks(2, interrupted_in_a_sum, again)
        assert first[0] == "KeyboardInterrupt" and len(first) == 2 and len(second) >= 1
        for text in (first[1], second[-1]):
            assert "rank 0: completing reduce_scatter of blocks.3 was interrupted by KeyboardInterrupt" in text, text
            assert "call reset_iter_state() on the model on every rank" in text


def out_of_step(again: str) -> list[str]:
    """Rank 1 leaves out a unit; both are told, and both begin anew."""
    model = built()
    expected, said = stepped(model), []
    model.zero_grad()
    for _ in range(2):
        try:
            model.blocks[dist.get_rank()].unshard()
            model.blocks[2].unshard()
        except RuntimeError as error:
            said.append(str(error))
    if again == "reset":
        model.reset_iter_state()
    else:
        model = built()
    assert stepped(model) == expected
    return said


def test_ranks_that_were_out_of_step_can_begin_anew(ranks) -> None:
    for again in ("reset", "build"):
        for said in ranks(2, out_of_step, again):
            assert len(said) == 2 and all("out of step" in text for text in said), said
            assert "call reset_iter_state() on the model on every rank" in said[1]


def left_alone() -> str:
    """Rank 0 leaves its step and begins anew; rank 1, which waits for it, is told, and joins."""
    model = built()
    expected = stepped(model)
    model.zero_grad()
    said = ""
    if dist.get_rank() == 0:
        model.where = ("before", 1)
    try:
        stepped(model)
    except (Raised, Broken) as error:
        said = str(error)
    model.where = ("", 0)
    model.reset_iter_state()
    model.zero_grad()
    assert stepped(model) == expected
    return said


def test_who_waits_for_a_rank_that_begins_anew_is_told(ranks) -> None:
    first, second = ranks(2, left_alone)
    assert first == "before 1"
    assert "rank 0 has left its step unfinished and begins anew: call reset_iter_state()" in second


def begins_anew_alone() -> str:
    """Rank 0 begins anew; rank 1 has just gathered, and never comes to it."""
    slots = transport_of(dist.new_group(), CPU)._slots
    number = slots.claim(4096, "all_gather of blocks.0")
    slots.publish(number, slots.allocate(4096, ""))
    slots.done(number)
    said = ""
    if dist.get_rank() == 0:
        slots._patience_s = 0.1
        with pytest.raises(RuntimeError) as caught:
            slots.recover()
        said = str(caught.value)
    dist.barrier()
    return said


def test_who_waits_in_vain_for_a_new_beginning_names_no_operation(ranks) -> None:
    said, _ = ranks(2, begins_anew_alone)
    assert "rank 0 waited for rank 1 to begin anew; after 0 s rank 1 lives but has not come to it" in said


def left_behind_by_another() -> None:
    """A gather that a forward has left behind, and another model's new beginning: by hand it is gathered again."""
    model, other = built(3, prefetch=3), built(4)
    for each in (model, other):
        each.where = ("before", 1)
        with pytest.raises(Raised):
            stepped(each)
    other.reset_iter_state()
    model.blocks[3].unshard()
    assert torch.equal(model.blocks[3].weight, weights(3)[3])
    model.blocks[3].reshard()


def test_a_gather_that_a_new_beginning_has_ended_can_be_begun_again(ranks) -> None:
    ranks(2, left_behind_by_another)


def interrupted_in_a_collective() -> list[str]:
    """The process group over shared memory: nothing can be repeated, so it says that a new one is needed."""
    group, said = dist.new_group(backend=register_backend()), []
    dist.all_reduce(torch.ones(5), group=group)
    if dist.get_rank() == 0:
        with pytest.raises(KeyboardInterrupt), interrupted_wait(1, lambda: True):
            dist.all_reduce(torch.ones(5), group=group)
    dist.barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(5), group=group)
        said.append(str(caught.value))
    return said


def test_a_collective_that_was_interrupted_breaks_its_group(ranks) -> None:
    for text in sum(ranks(2, interrupted_in_a_collective), []):
        assert "rank 0: all_reduce was interrupted by KeyboardInterrupt" in text
        assert text.endswith("destroy the process group on every rank and make a new one")


# ---- where the system refuses


def refused(kind: str) -> tuple[str, str]:
    """One rank cannot share; what it and the others get when they ask for shared memory, and when they do not."""
    group, undo = dist.group.WORLD, lambda: None
    if dist.get_rank() == 1:
        undo = limited(kind)
    try:
        transport_of(group, CPU, "shm")
        said = ""
    except ValueError as error:
        said = str(error)
    kind_of = type(transport_of(group, CPU)).__name__
    undo()
    return kind_of, said


def limited(kind: str) -> Callable[[], None]:
    """Take from this process what sharing needs; returns what gives it back."""
    if kind == "another file":
        honest = os.open
        other = os.memfd_create("other")
        os.ftruncate(other, 1 << 20)
        swapped = lambda path, *rest: honest(
            f"/proc/self/fd/{other}" if str(path).startswith("/proc/") else path, *rest
        )
        os.open = swapped
        return lambda: setattr(os, "open", honest)
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    what, value = {"descriptors": (resource.RLIMIT_NOFILE, lowest_free), "file size": (resource.RLIMIT_FSIZE, 1 << 20)}[
        kind
    ]
    before = resource.getrlimit(what)
    resource.setrlimit(what, (value, before[1]))
    return lambda: resource.setrlimit(what, before)


@pytest.mark.parametrize(
    "kind,reason",
    [
        ("file size", "rank 1 got no memory to share: .*File too large"),
        ("descriptors", "rank 1 got no memory to share|rank 1 may not open|rank 1 is not on"),
        ("another file", "rank 1 may not open its peers' memory: .*another file"),
    ],
)
def test_where_one_rank_cannot_share_all_use_gloo(ranks, kind: str, reason: str) -> None:
    for name, said in ranks(2, refused, kind):
        assert name == "GlooTransport" and re.search(reason, said), said


def refused_midway() -> list[str]:
    """Rank 1 may not grow its memory when the first reduction needs it: all ranks are told why."""
    torch.manual_seed(0)
    wide = nn.Linear(3000, 3000)
    model, said = shard_model(nn.Sequential(wide), "full_shard", units="root", transport="shm"), []
    if dist.get_rank() == 1:
        held = units_of(model)[0].memory.config.shard._slots.arena.allocate(40 << 20)
        assert not held.any()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))
    for _ in range(2):
        try:
            model(torch.randn(1, 3000)).sum().backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_where_memory_ends_midway_all_ranks_fail_and_say_why(ranks) -> None:
    for said in ranks(2, refused_midway):
        assert len(said) == 2
        for text in said:
            assert "rank 1 got no memory 18006016 bytes to share for reduce_scatter of root" in text, text
            assert "ulimit -f" in text and "transport='gloo'" in text


# ---- threads as ranks


def in_threads(count: int) -> None:
    """Ranks that are threads of one process train over shared memory, as the unsharded twin does."""
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

    dist.destroy_process_group()
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # a thread's groups are no other's, also in C++
    torch.manual_seed(0)
    chains, answers = [Chain()], [None] * count
    chains += [copy.deepcopy(chains[0]) for _ in range(count)]
    store = dist.HashStore()
    threads = [threading.Thread(target=rank_of, args=(rank, store, chains[rank], answers)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert answers == [twin_losses(chains[-1], count, rank) for rank in range(count)]


def rank_of(rank: int, store: dist.Store, chain: nn.Module, answers: list[Any]) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=len(answers), store=store)
    model = shard_model(chain, "full_shard")
    assert isinstance(units_of(model)[1].memory.config.shard, SharedTransport)
    losses = []
    for step in range(3):
        loss = model(drawn(step, rank)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter._local_tensor.data.sub_(parameter.grad._local_tensor)
        model.zero_grad()
        losses.append(loss.item())
    assert transport_of(dist.group.WORLD, CPU) is units_of(model)[1].memory.config.shard, (
        "another rank's world is not ours"
    )
    answers[rank] = losses


def twin_losses(twin: nn.Module, count: int, rank: int) -> list[float]:
    twin, losses = copy.deepcopy(twin), []
    for step in range(3):
        all_losses = [twin(drawn(step, each)).square().mean() for each in range(count)]
        (sum(all_losses) / count).backward()
        for parameter in twin.parameters():
            parameter.data.sub_(parameter.grad)
        twin.zero_grad()
        losses.append(pytest.approx(all_losses[rank].item(), rel=1e-5))
    return losses


def drawn(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def test_ranks_may_be_threads_of_one_process(ranks) -> None:
    ranks(1, in_threads, 3)


# ---- everything in turn


def test_some_lives_are_those_over_gloo(ranks) -> None:
    """In the life of seed 2 a rank is interrupted while the other one begins to train a new model."""
    assert ranks(2, same_lives, [0, 1, 2, 3]) == [4, 4]


@pytest.mark.full("forty lives, of which the default tier has some")
def test_forty_lives_are_those_over_gloo(ranks) -> None:
    """More of them: `same_lives` takes any seeds."""
    assert ranks(2, same_lives, list(range(30))) == [30, 30]
    assert ranks(3, same_lives, list(range(30, 40))) == [10] * 3
