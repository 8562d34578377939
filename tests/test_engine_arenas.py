"""Slices that peers read in place: never written to while somebody reads them, gone with the model, nothing left
mapped.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import fully_shard, shard_model
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.shared_memory.arenas import Arena, SharedStorage
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
        SharedTransport.settle, kept = lambda self: None, SharedTransport.settle
    with torch.no_grad():
        model(x)  # from now on units are gathered ahead, so rank 0 can be a block ahead of rank 1
    with torch.set_grad_enabled(with_gradients):
        out = model(x)
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            parameter.detach().to_local().zero_()
    if not settled:
        SharedTransport.settle = kept
    dist.barrier()
    return torch.equal(out.detach(), expected.detach())


def test_slices_may_be_written_as_soon_as_a_forward_is_over(ranks) -> None:
    assert ranks(2, written_after_a_forward, False, True) == [True, True]
    assert ranks(2, written_after_a_forward, True, True) == [True, True]


def test_without_settling_the_slow_rank_would_read_what_was_written_later(ranks) -> None:
    assert ranks(2, written_after_a_forward, False, False) == [True, False]


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("fsdplab-slices")


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def what_a_model_leaves() -> tuple[int, int, int]:
    """Mappings while a model lives; mappings and descriptors that a second model's life adds for good."""
    for turn in range(2):
        before = mapped(), opened()
        model, x = model_and_input()
        shard_model(model, "full_shard", units=[Late])
        model(x).sum().backward()
        alive = mapped()
        del model
        after = mapped(), opened()
    return alive, after[0] - before[0], after[1] - before[1]


def test_a_deleted_model_leaves_no_mapping_and_no_descriptor(ranks) -> None:
    for alive, mappings, descriptors in ranks(3, what_a_model_leaves):
        assert alive >= 4 * 3  # four units, read from three ranks (the root holds nothing)
        assert (mappings, descriptors) == (0, 0)


def storages() -> list[str]:
    model, _ = model_and_input()
    shard_model(model, "full_shard", units=[Late])
    return [type(unit.config.storage).__name__ for unit in units_of(model)]


def test_slices_rest_in_shared_memory_among_ranks_of_one_machine_only(ranks) -> None:
    assert set(sum(ranks(2, storages), [])) == {"SharedStorage"}
    assert set(sum(ranks(1, storages), [])) == {"ShardStorage"}


def test_an_arena_is_found_by_exactly_its_bytes() -> None:
    storage = SharedStorage()
    flat = storage.make(4096, "unit")
    assert isinstance(storage.arena_under(flat), Arena)
    assert storage.arena_under(flat[:64]) is None
    assert storage.arena_under(torch.zeros(4096, dtype=torch.uint8)) is None
    assert storage.arena_under(None) is None and storage.arena_under(storage.make(0, "empty")) is None


def test_a_peer_maps_again_what_its_owner_has_replaced() -> None:
    mine, first, second = Arena(4096), Arena(4096), Arena(4096)
    first[:1], second[:1] = b"\x01", b"\x02"
    assert mine.of(1, os.getpid(), first.place)[0] == 1
    assert mine.of(1, os.getpid(), first.place)[0] == 1 and len(mine.theirs) == 1
    assert mine.of(1, os.getpid(), second.place)[0] == 2
