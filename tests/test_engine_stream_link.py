"""The link between CUDA ranks, as far as no GPU is needed: order, times, ledger and lifetimes on a stream that works in
order; the sleep itself.
"""

from __future__ import annotations

import ctypes
import queue
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import events, shard_model
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.emulation import stream_link
from fsdplab.engine.emulation.link import Link, behind
from fsdplab.engine.emulation.stream_link import StreamChannel, sleep_function
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.gloo import GlooTransport
from fsdplab.engine.transport.streams import Job

WIDTH, BLOCKS = 64, 3
LINK = Link(2e6, 1e-4)  # a gather of one unit takes about 8 ms


class InOrderStream:
    """A stream on the host: one thread that does what was enqueued, in order, while the caller goes on."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._jobs.get()()

    def run(self, job: Job) -> Pending:
        done, failed = threading.Event(), []
        times: list[int] = []

        def work_off() -> None:
            try:
                times.append(time.time_ns())
                job.departure.leave()
                if (work := job.issue(True)) is not None:
                    work.wait()
                job.complete()
                times.append(time.time_ns())
            except BaseException as error:
                failed.append(error)
            done.set()

        def finish() -> None:
            assert done.wait(60)
            if failed:
                raise failed[0]
            job.on_wait()

        if events.listening():
            events.defer(lambda: job.departure.moved(*times, None))
        self._jobs.put(work_off)
        return Pending(finish, *job.buffers)


def sleep_like_the_driver(nanoseconds: int) -> None:
    """What `cuLaunchHostFunc` does on its own thread: call the address with a pointer-sized argument."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(sleep_function())(-(-nanoseconds // 1000))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(linked: bool) -> tuple[list[float], list[dict], float]:
    """Losses, ledger and seconds of two steps on streams that work in order,
    with or without the link in front of them.
    """
    torch.manual_seed(0)
    model = shard_model(Net(), "full_shard", transport="gloo")
    transport = GlooTransport(dist.group.WORLD, torch.device("cpu"))
    transport._gather_stream = transport._reduce_stream = InOrderStream()
    if linked:
        ranks = dist.get_world_size()
        transport = transport.behind(StreamChannel(lambda row: LINK.carry(row, ranks), sleep_like_the_driver))
    for unit in units_of(model):
        unit.memory.config = replace(unit.memory.config, shard=transport)
    rows: list[events.Collective] = []
    unsubscribe = events.subscribe(lambda event: rows.append(event) if isinstance(event, events.Collective) else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses, start = torch.randn(2, WIDTH) + dist.get_rank(), [], time.perf_counter()
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        events.flush()
    unsubscribe()
    return losses, [vars(row) for row in rows], time.perf_counter() - start


def test_a_link_on_streams_changes_times_and_nothing_else(ranks) -> None:
    keys = ("unit", "phase", "kind", "logical_bytes", "wire_bytes", "padding_bytes", "dtype")
    for (losses, rows, _), (slow_losses, slow_rows, _) in zip(ranks(2, trained, False), ranks(2, trained, True)):
        assert slow_losses == losses
        assert [[row[key] for key in keys] for row in slow_rows] == [[row[key] for key in keys] for row in rows]
        assert all(row["emulated"] for row in slow_rows) and not any(row["emulated"] for row in rows)


def test_every_collective_is_done_no_earlier_than_the_formula_says(ranks) -> None:
    results = ranks(2, trained, True)
    passing = [[LINK.collective(row["kind"], row["logical_bytes"], 2)[1] for row in rows] for _, rows, _ in results]
    for (_, rows, seconds), durations in zip(results, passing):
        free = 0
        for row, duration in zip(rows, durations):
            assert row["start_ns"] >= free and row["end_ns"] >= row["start_ns"] + duration
            free = row["start_ns"] + duration
        assert seconds >= sum(durations) / 1e9, "one link carries one collective after the other"


def test_a_collective_is_done_on_no_rank_before_the_last_has_begun(ranks) -> None:
    (_, first, _), (_, second, _) = ranks(2, trained, True)
    for one, two in zip(first, second):
        last_ready = max(one["start_ns"], two["start_ns"])
        assert (
            min(one["end_ns"], two["end_ns"]) >= last_ready + LINK.collective(one["kind"], one["logical_bytes"], 2)[1]
        )


def imitated(count: int) -> list[dict]:
    """The ledger of one forward in a group of one that imitates `count` ranks behind a link of the host."""
    model = shard_model(Net(), "full_shard")
    transport = behind(GlooTransport(dist.group.WORLD, torch.device("cpu")), Link(1e9), count)
    for unit in units_of(model):
        unit.memory.config = replace(unit.memory.config, shard=transport)
    rows: list[dict] = []
    unsubscribe = events.subscribe(
        lambda event: rows.append(vars(event)) if isinstance(event, events.Collective) else None
    )
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    unsubscribe()
    return rows


def test_a_group_of_one_takes_as_long_as_many_ranks(ranks) -> None:
    (rows,) = ranks(1, imitated, 8)
    assert len(rows) == BLOCKS
    for row in rows:
        assert row["wire_bytes"] == row["logical_bytes"] * 7 // 8
        assert row["end_ns"] - row["start_ns"] == row["wire_bytes"]  # at 1 GB/s


def test_a_transfer_behind_another_is_taken_up_when_that_is_over() -> None:
    row = partial(
        events.Collective, unit="a", phase="forward", kind="all_gather", logical_bytes=4, wire_bytes=0,
        padding_bytes=0, dtype="float32",
    )  # fmt: skip
    channel = StreamChannel(lambda row: (partial(row, wire_bytes=2, emulated=True), 4), lambda nanoseconds: None)
    rows: list[events.Collective] = []
    unsubscribe = events.subscribe(rows.append)
    for times in ((0, 5), (3, 9), (20, 25)):
        channel.depart(row).moved(*times, None)
    unsubscribe()
    assert [(row.start_ns, row.end_ns) for row in rows] == [(0, 5), (4, 9), (20, 25)]
    assert all(row.emulated and row.wire_bytes == 2 for row in rows)


@pytest.mark.parametrize(
    "kind,expected", [("all_gather", (3000, 3030)), ("reduce_scatter", (3000, 3030)), ("all_reduce", (6000, 6060))]
)
def test_a_collective_on_the_wire(kind: str, expected: tuple[int, int]) -> None:
    assert Link(1e9, 1e-8).collective(kind, 4_000, 4) == expected


def test_the_sleep_takes_its_argument_as_the_driver_gives_it() -> None:
    start = time.perf_counter()
    sleep_like_the_driver(20_000_000)
    assert time.perf_counter() - start >= 0.02


DRIVER = """
#include <pthread.h>
#include <stdint.h>
typedef void (*function)(void *);
static function called; static void *argument; static pthread_t thread;
static void *serve(void *nothing) { called(argument); return nothing; }
int cuLaunchHostFunc(void *stream, function f, void *data) {
    if ((uintptr_t)stream != 0x700000000001u) return 400;
    called = f; argument = data;
    return pthread_create(&thread, 0, serve, 0);
}
void settle(void) { pthread_join(thread, 0); }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch) -> ctypes.CDLL:
    """A library with the driver's own signature that calls the function on a thread of its own: what travels through
    ctypes is real.
    """
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-pthread", "-o", tmp_path / "driver.so", tmp_path / "driver.c"],
        check=True,
        timeout=60,
    )
    loaded = stream_link._driver.__wrapped__(str(tmp_path / "driver.so"))
    monkeypatch.setattr(stream_link, "_driver", lambda: loaded)
    return loaded


def test_the_driver_is_given_stream_function_and_microseconds(driver) -> None:
    start = time.perf_counter()
    stream_link.launch_sleep(0x700000000001, 300_000)
    assert time.perf_counter() - start < 0.3, "the host goes on"
    driver.settle()
    assert time.perf_counter() - start >= 0.3


def test_a_driver_that_refuses_is_an_error_with_its_code(driver) -> None:
    with pytest.raises(RuntimeError, match="driver error 400; run without an emulated link"):
        stream_link.launch_sleep(7, 1)


def nothing_on_streams() -> tuple[bool, str]:
    """Whether gloo is taken for streams, and what two queues on streams are told."""
    transport = GlooTransport(dist.group.WORLD, torch.device("cpu"))
    taken = transport.streams is not None
    transport.streams = torch.device("cuda")
    with pytest.raises(ValueError, match="one queue") as told:
        behind(transport, Link(1e9, queues=2))
    return taken, str(told.value)


def test_streams_have_one_queue(ranks) -> None:
    ((streams, said),) = ranks(1, nothing_on_streams)
    assert not streams and said.endswith("got 2; give queues=1")
