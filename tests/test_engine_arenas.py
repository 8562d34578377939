"""Slices that peers read in place: never written to while somebody reads them, gone with the model, nothing left
mapped.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import compat, fully_shard, shard_model
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.shared_memory.arena import Arena, SharedFile, SharedStorage
from fsdplab.engine.transport.shared_memory.transport import SharedTransport

WIDTH = 64


class Late(nn.Module):
    """A layer before which rank 1 takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Late() for _ in range(4))), torch.randn(2, WIDTH)


def dawdle(module: nn.Module, *_: object) -> None:
    if dist.get_rank() == 1:
        time.sleep(0.05)  # the slow rank of the test, not a wait for something


def written_after_a_forward(with_gradients: bool, settled: bool) -> bool:
    """Rank 0 clears its slices as soon as its forward is over; whether rank 1, still in its own, saw the old ones."""
    model, x = model_and_input()
    expected = model(x)
    for block in model:
        block.register_forward_pre_hook(dawdle)
        fully_shard(block)
    fully_shard(model)
    if not settled:
        SharedTransport.await_peers, kept = lambda self: None, SharedTransport.await_peers
    with torch.no_grad():
        model(x)  # from now on units are gathered ahead, so rank 0 can be a block ahead of rank 1
    with torch.set_grad_enabled(with_gradients):
        out = model(x)
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            parameter.detach().to_local().zero_()
    if not settled:
        SharedTransport.await_peers = kept
    dist.barrier()
    return torch.equal(out.detach(), expected.detach())


def test_slices_may_be_written_as_soon_as_a_forward_is_over(ranks) -> None:
    assert ranks(2, written_after_a_forward, False, True) == [True, True]
    assert ranks(2, written_after_a_forward, True, True) == [True, True]


def test_without_settling_the_slow_rank_would_read_what_was_written_later(ranks) -> None:
    assert ranks(2, written_after_a_forward, False, False) == [True, False]


def bytes_in_use(arena: Arena) -> int:
    """What the file takes of the machine's memory."""
    return os.fstat(arena.descriptor).st_blocks * 512


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("fsdplab-arena")


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


class Units(nn.Module):
    """As many units as are asked for, of different sizes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bool(index % 3)) for index in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def what_units_take(count: int) -> tuple[int, int]:
    """Descriptors and mappings that a model of so many units takes while it trains."""
    dist.barrier()
    before = opened(), mapped()
    model = shard_model(Units(count), "full_shard")
    model(torch.randn(2, WIDTH)).sum().backward()
    return opened() - before[0], mapped() - before[1]


def test_a_group_takes_one_arena_however_many_units_it_has(ranks) -> None:
    for world_size, count in ((2, 100), (4, 230)):
        for descriptors, mappings in ranks(world_size, what_units_take, count):
            assert descriptors <= 2 * world_size, "an arena of each rank, and a handle of each other process"
            assert mappings <= 2 * world_size, "its header and one segment"


def what_models_leave(count: int, ending: str) -> tuple[list[int], list[int], int]:
    """Descriptors, mappings, and bytes of this rank's arena, from the second model on; what a step needed for gathers
    and reductions, which stays.
    """
    used, taken = [], []
    for turn in range(count):
        model = shard_model(Units(5), "full_shard")
        arena = units_of(model)[1].memory.config.shard._slots.arena
        if ending == "untrained":
            del model
            continue
        loss = model(torch.randn(2, WIDTH)).sum()
        if ending == "trained":
            loss.backward()
        if ending == "gathering":
            model.layers[0].unshard(async_op=True)
        del model, loss
        dist.barrier()
        shard_model(Units(1), "full_shard")  # whoever allocates next gives back what peers have read meanwhile
        dist.barrier()
        used.append(bytes_in_use(arena))
        taken.append(opened() + mapped())
    if ending == "untrained":
        return [0], [opened() + mapped()], bytes_in_use(arena)
    return used, taken, 0


def test_models_that_are_made_and_dropped_leave_no_memory_and_no_descriptor(ranks) -> None:
    for ending in ("trained", "forward only", "gathering"):
        for used, taken, _ in ranks(2, what_models_leave, 20, ending):
            assert len(set(used[1:])) == 1 and len(set(taken[1:])) == 1, (ending, used, taken)
    for _, _, left in ranks(2, what_models_leave, 5, "untrained"):
        assert left <= 2 * mmap.PAGESIZE, "the header"


@contextmanager
def limited_files(nbytes: int) -> Iterator[None]:
    """No file may become longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def storages() -> list[str]:
    model, _ = model_and_input()
    shard_model(model, "full_shard", units=[Late])
    return [type(unit.memory.config.storage).__name__ for unit in units_of(model)]


def test_slices_rest_in_shared_memory_among_ranks_of_one_machine_only(ranks) -> None:
    assert set(sum(ranks(2, storages), [])) == {"SharedStorage"}
    assert set(sum(ranks(1, storages), [])) == {"ShardStorage"}


def test_an_arena_knows_what_lies_in_it() -> None:
    arena = Arena(100)
    first, second = arena.allocate(5000), arena.allocate(10)
    for tensor, nbytes in ((first, 5000), (second, 10)):
        assert tensor.untyped_storage().nbytes() == nbytes and tensor.storage_offset() == 0
        assert tensor.data_ptr() % mmap.PAGESIZE == 0 and not tensor.any()
    place = arena.place_of(second[4:])
    assert place is not None and place.offset == arena.place_of(second).offset + 4
    second[4] = 7
    assert arena.part(place, 1).item() == 7
    assert arena.place_of(torch.zeros(4096, dtype=torch.uint8)) is None


def test_memory_that_nobody_uses_is_given_back_and_used_again() -> None:
    arena = Arena(100)
    empty = bytes_in_use(arena)
    held = [arena.allocate(1 << 20).fill_(1) for _ in range(6)]
    addresses = [each.data_ptr() for each in held]
    assert bytes_in_use(arena) == empty + (6 << 20)
    view = compat.own_storage(held[1][:64])
    del held[1:3]
    assert bytes_in_use(arena) == empty + (5 << 20), "a view keeps its whole slice"
    assert view.eq(1).all()
    del view
    assert bytes_in_use(arena) == empty + (4 << 20)
    again = arena.allocate(2 << 20)
    assert again.data_ptr() == addresses[1] and not again.any()
    del held, again
    assert bytes_in_use(arena) == empty
    assert arena.allocate(6 << 20).data_ptr() == addresses[0], "neighbours that are free are joined"


def test_an_arena_grows_by_segments_and_its_memory_outlives_it() -> None:
    arena = Arena(100)
    large, small = arena.allocate(200 << 20), arena.allocate(4)
    assert arena.place_of(large).segment != arena.place_of(small).segment
    descriptor, path = arena.descriptor, f"/proc/self/fd/{arena.descriptor}"
    assert "fsdplab-arena" in os.readlink(path)
    del arena
    large[-1] = 3
    assert large[-1] == 3
    del large, small
    assert not os.path.exists(path) or "fsdplab-arena" not in os.readlink(path), descriptor


def test_a_forked_child_that_lets_go_leaves_its_parents_memory_alone() -> None:
    arena = Arena(100)
    held = [arena.allocate(4096).fill_(5)]
    child = os.fork()
    if child == 0:
        del held[:]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held[0].eq(5).all()


def test_a_peer_reads_through_a_mapping_of_its_own() -> None:
    arena = Arena(100)
    peer = SharedFile(os.open(f"/proc/self/fd/{arena.descriptor}", os.O_RDWR), 100)
    held = arena.allocate(8192)
    held[5000] = 9
    read = peer.part(arena.place_of(held[5000:]), 10)
    assert read[0] == 9 and read.untyped_storage().nbytes() == 10 and read.data_ptr() != held[5000:].data_ptr()
    del arena, held, peer
    assert read[0] == 0, "its owner gave it back"


def test_without_room_in_the_arena_slices_rest_in_ordinary_memory() -> None:
    storage = SharedStorage(Arena(100))
    with limited_files(80 << 20):
        flat = storage.make(100 << 20, "unit")
        assert storage._arena.place_of(flat) is None and not flat.any() and flat.nbytes == 100 << 20
        assert storage._arena.place_of(storage.make(1 << 20, "unit")) is not None
