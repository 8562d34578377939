"""Emulated links: the formula, the order, one clock for all ranks, and no change to what is computed."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdplab.engine import events, shard_model
from fsdplab.engine.emulation.link import Link, Queue, Transfer, emulate, emulate_group
from fsdplab.engine.transport.shared_memory.process_group import register_backend
from tests.lives import Interrupt

WIDTH, BLOCKS = 64, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(
    strategy: str, links: dict, steps: int = 2, prefetch: int = 1, transport: str = "auto"
) -> tuple[list[float], list]:
    """Losses, and every row of the ledger."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if strategy == "hybrid_shard" else (ranks,)
    model = shard_model(Net(), strategy, mesh=init_device_mesh("cpu", shape), prefetch=prefetch, transport=transport)
    emulate(model, **links)
    rows: list[events.Collective] = []
    unsubscribe = events.subscribe(lambda event: rows.append(event) if isinstance(event, events.Collective) else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(2, WIDTH) + dist.get_rank(), []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    unsubscribe()
    return losses, [vars(row) for row in rows]


class Issues:
    """A board whose peers' issues are given."""

    def __init__(self, last: list[int]) -> None:
        self._last = last

    def write(self, number: int, now_ns: int) -> None:
        pass

    def last_issue(self, number: int) -> int:
        return self._last[number - 1]


def test_a_transfer_is_latency_and_bytes_over_bandwidth() -> None:
    assert Link(1e9, 1e-5).transfer_ns(2_000_000, steps=3) == 2_030_000


def test_a_link_carries_one_collective_after_the_other() -> None:
    queue = Queue(Issues([100, 500, 9_000]))
    passages = [queue.enter(1_000, 0) for _ in range(3)]
    assert [queue.times(passage) for passage in passages] == [
        (100, 100, 1_100),
        (500, 1_100, 2_100),
        (9_000, 9_000, 10_000),
    ]


def test_a_queue_may_be_asked_out_of_order() -> None:
    queue = Queue(Issues([100, 500]))
    first, second = queue.enter(1_000, 0), queue.enter(1_000, 0)
    assert (queue.times(second), queue.times(first)) == ((500, 1_100, 2_100), (100, 100, 1_100))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(bytes_per_s=0),
        dict(bytes_per_s=-1.0),
        dict(bytes_per_s=float("nan")),
        dict(bytes_per_s=1, latency_s=-1),
        dict(bytes_per_s=1, queues=3),
    ],
)
def test_a_link_that_cannot_be(wrong: dict) -> None:
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Link(**wrong)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
def test_a_link_changes_times_and_nothing_else(ranks, strategy: str, transport: str) -> None:
    plain = ranks(2, trained, strategy, {}, 2, 1, transport)
    slow = ranks(2, trained, strategy, {"shard": Link(20e6, 1e-4)}, 2, 1, transport)
    keys = ("unit", "phase", "kind", "logical_bytes", "wire_bytes", "padding_bytes", "dtype")
    for (losses, rows), (slow_losses, slow_rows) in zip(plain, slow):
        assert slow_losses == losses
        assert sorted([str([row[key] for key in keys]) for row in rows]) == sorted(
            [str([row[key] for key in keys]) for row in slow_rows]
        )
        assert all(row["emulated"] for row in slow_rows) and not any(row["emulated"] for row in rows)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_all_ranks_see_the_same_times_one_after_the_other(ranks, strategy: str) -> None:
    link = Link(20e6, 1e-4)
    ledgers = [rows for _, rows in ranks(2, trained, strategy, {"shard": link})]
    times = [sorted((row["start_ns"], row["end_ns"]) for row in rows) for rows in ledgers]
    assert times[0] == times[1]
    assert all(end <= start for (_, end), (start, _) in zip(times[0], times[0][1:]))
    for row in ledgers[0]:
        assert row["end_ns"] - row["start_ns"] == link.transfer_ns(
            row["wire_bytes"], 2 if row["kind"] == "all_reduce" else 1
        )
        assert row["waited_ns"] >= 0
    busy = sum(row["end_ns"] - row["start_ns"] for row in ledgers[0])
    assert sum(row["waited_ns"] for row in ledgers[0]) <= busy, (
        "the host is blocked for the link only while it carries something"
    )


def test_two_queues_let_gathers_pass_reductions(ranks) -> None:
    """The link is slow enough for messages to last longer than a busy machine takes to issue the next."""
    rows = ranks(2, trained, "full_shard", {"shard": Link(5e5, queues=2)})[0][1]
    backward = [row for row in rows if row["phase"] == "backward"]
    gathers = [row for row in backward if row["kind"] == "all_gather"]
    reductions = [row for row in backward if row["kind"] == "reduce_scatter"]
    assert any(g["start_ns"] < r["end_ns"] and r["start_ns"] < g["end_ns"] for g in gathers for r in reductions)


def test_hybrid_sharding_has_a_link_within_and_one_across(ranks) -> None:
    within, across = Link(1e9), Link(5e6)
    for _, rows in ranks(4, trained, "hybrid_shard", {"shard": within, "replicate": across}):
        for row in rows:
            link, steps = (across, 2) if row["kind"] == "all_reduce" else (within, 1)
            assert row["end_ns"] - row["start_ns"] == link.transfer_ns(row["wire_bytes"], steps)


def other_models_and_removal() -> list[bool]:
    """Whether the rows of: a linked model, another model of the same group, the linked one without its link, are
    emulated.
    """
    models = [shard_model(Net(), "full_shard") for _ in range(2)]
    emulate(models[0], shard=Link(1e9))
    rows: list[bool] = []
    unsubscribe = events.subscribe(
        lambda event: rows.append(event.emulated) if isinstance(event, events.Collective) else None
    )

    def emulated(model: nn.Module) -> bool:
        rows.clear()
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        (answer,) = set(rows)
        return answer

    answers = [emulated(model) for model in models]
    emulate(models[0])
    answers.append(emulated(models[0]))
    unsubscribe()
    return answers


def test_a_link_is_of_one_model_and_can_be_taken_away(ranks) -> None:
    assert ranks(2, other_models_and_removal) == [[True, False, False]] * 2


def interrupted_in_its_sleep(transport: str) -> tuple[bool, int]:
    """Whether a wait that slept for the link and was interrupted ends when it is tried again; rows in the ledger."""
    model = shard_model(Net(), "full_shard", transport=transport)
    expected = model.blocks[0][0].weight.full_tensor()
    emulate(model, shard=Link(4e3))  # a gather of one unit takes about 2 s
    rows: list[events.Event] = []
    unsubscribe = events.subscribe(lambda event: isinstance(event, events.Collective) and rows.append(event))
    handle = model.blocks[0].unshard(async_op=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(time, "sleep", raise_interrupt)
        handle.wait()
    handle.wait()
    unsubscribe()
    return torch.equal(model.blocks[0][0].weight, expected), len(rows)


def raise_interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_sleep_for_the_link_that_was_interrupted_can_be_slept_again(ranks, transport: str) -> None:
    assert ranks(2, interrupted_in_its_sleep, transport) == [(True, 1)] * 2


def interrupted_as_it_began() -> list[bool]:
    """Rank 0 is interrupted at an operator of the call that begins a gather over a link, and calls again."""
    model, answers = shard_model(Net(), "full_shard", transport="shm"), []
    expected = model.blocks[0][0].weight.full_tensor()
    emulate(model, shard=Link(1e9))
    for at in range(1, 5):
        try:
            with Interrupt(at) if dist.get_rank() == 0 else nullcontext():
                model.blocks[0].unshard(async_op=True)
        except KeyboardInterrupt:
            pass
        model.blocks[0].unshard()
        answers.append(torch.equal(model.blocks[0][0].weight, expected))
        model.blocks[0].reshard()
    return answers


def test_ranks_agree_on_times_after_the_begin_of_a_collective_was_interrupted(ranks) -> None:
    assert ranks(2, interrupted_as_it_began) == [[True] * 4] * 2


def lost_behind_a_link() -> bool:
    """A gather under way over a link, which another model's new beginning has ended, is begun again by hand."""
    model, other = shard_model(Net(), "full_shard", transport="shm"), shard_model(Net(), "full_shard", transport="shm")
    expected = model.blocks[2][0].weight.full_tensor()
    emulate(model, shard=Link(1e9))
    model.blocks[2].unshard(async_op=True)
    other.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        other(torch.ones(1, WIDTH))
    other.reset_iter_state()
    model.blocks[2].unshard()
    return torch.equal(model.blocks[2][0].weight, expected)


def test_a_gather_over_a_link_that_a_new_beginning_has_ended_can_be_begun_again(ranks) -> None:
    assert ranks(2, lost_behind_a_link) == [True, True]


def test_links_are_for_cpu_and_cuda_ranks() -> None:
    config = SimpleNamespace(device=torch.device("xpu"), shard=None)
    unit = SimpleNamespace(memory=SimpleNamespace(config=config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdplab.engine.emulation.link.units_under", lambda model, recurse: [unit])
        with pytest.raises(ValueError, match="between CPU or CUDA ranks, got xpu"):
            emulate(nn.Linear(1, 1), shard=Link(1e9))


def peers(bytes_per_s: float | None) -> tuple[float, int, list, float]:
    """Torch's DDP on a shared-memory group behind a link: loss, collectives in the ledger, their steps' times, seconds
    of a step.
    """
    group = dist.new_group(backend=register_backend())
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group)
    emulate_group(group, None if bytes_per_s is None else Link(bytes_per_s))
    rows: list[events.Collective] = []
    unsubscribe = events.subscribe(rows.append)
    x = torch.ones(2, WIDTH) * (1 + dist.get_rank())
    for _ in range(2):
        start = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        seconds = time.perf_counter() - start
    unsubscribe()
    gradient = next(model.parameters()).grad.sum().item()
    dist.destroy_process_group(group)
    kept = [
        (row.kind, row.phase, row.emulated, row.end_ns - row.start_ns, row.wire_bytes)
        for row in rows
        if isinstance(row, events.Collective)
    ]
    return loss.item(), gradient, kept, seconds


def test_torchs_own_engines_meet_the_link_too(ranks) -> None:
    plain, slow = ranks(2, peers, None), ranks(2, peers, 1e6)
    for (loss, gradient, none, _), (slow_loss, slow_gradient, rows, seconds) in zip(plain, slow):
        assert (slow_loss, slow_gradient) == (loss, gradient) and none == []
        reductions = [row for row in rows if row[0] == "all_reduce" and row[1] == "backward"]
        assert reductions and all(emulated and lasted == 1_000 * wire for _, _, emulated, lasted, wire in reductions)
        assert seconds >= max(lasted for _, _, _, lasted, _ in reductions) / 1e9


def test_deliveries_come_when_the_link_has_carried_them() -> None:
    now = time.time_ns()
    queue, row, order = Queue(Issues([now - 10**9, now, now])), partial(dict, issue_ns=now), []
    durations = (1, 300_000_000, 300_000_000)
    transfers = [Transfer(row, nanoseconds, queue) for nanoseconds in durations]
    for transfer in transfers:
        transfer.leave()
    futures = [transfer.deliver([torch.tensor(number)]) for number, transfer in enumerate(transfers)]
    for future in futures:
        future.add_done_callback(lambda done: order.append(done.value()[0].item()))
    for future in futures:
        future.wait()
    assert time.time_ns() >= now + 600_000_000
    deadline = time.monotonic() + 5
    while len(order) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert order == [0, 1, 2]
