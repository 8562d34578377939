"""Several ranks on one GPU, rehearsed by real processes in host memory: the bits of shared memory, slots that are never
overwritten unread, and ranks that die, stand still or run something else. The last tests need a GPU."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdplab.engine import STRATEGIES, MixedPrecisionPolicy, shard_model
from fsdplab.engine.core.gathered import Gathered
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.transport import Outgoing, Stamp
from fsdplab.engine.transport.selection import forget_destroyed, transport_of
from fsdplab.engine.transport.shared_gpu.host import HostFabric
from fsdplab.engine.transport.shared_gpu.peers import SharedGpuReduceScatter, put_on_shared_gpu
from fsdplab.engine.transport.shared_gpu.series import Series, watched
from fsdplab.engine.transport.shared_gpu.transport import SharedGpuTransport
from fsdplab.engine.transport.shared_memory.slots import machine_of_this_rank
from fsdplab.figures.view import provenance, views
from fsdplab.gpu_check.foundations import furthest
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, SpecError, run
from fsdplab.workloads import build_model, loss_of
from tests.ranks import RankPool
from tests.test_traces import analysed, event, kernel, launch, mark, parts

ROWS = [name for name in STRATEGIES if name != "hybrid_shard"]  # that one needs a 2-D mesh
CPU = torch.device("cpu")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
pytestmark = pytest.mark.skipif(machine_of_this_rank() is None, reason="sharing needs x86-64 Linux")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def same_bits(*policies: MixedPrecisionPolicy) -> None:
    def trained(transport: str, strategy: str, policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
        return train(shard_model(build_model("gpt-tiny", seed=1), strategy, mp_policy=policy, transport=transport))

    for case in [(strategy, policy) for policy in policies for strategy in ROWS]:
        for ours, theirs in zip(trained("shared_gpu", *case), trained("shm", *case), strict=True):
            assert torch.equal(ours, theirs), case


@pytest.mark.parametrize(
    "world_size,policies", [(2, [MixedPrecisionPolicy(), BF16]), (3, [MixedPrecisionPolicy()])], ids=["2", "3"]
)
def test_it_trains_to_the_bits_of_shared_memory(ranks, world_size: int, policies: list[MixedPrecisionPolicy]) -> None:
    ranks(world_size, same_bits, *policies)


def hybrid_bits() -> None:
    def trained(transport: str) -> list[torch.Tensor]:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return train(
            shard_model(build_model("gpt-tiny", seed=1), "hybrid_shard", mesh=mesh, transport=transport), steps=2
        )

    for ours, theirs in zip(trained("shared_gpu"), trained("shm"), strict=True):
        assert torch.equal(ours, theirs)


def test_shard_groups_and_replicas_each_have_their_own(ranks) -> None:
    ranks(4, hybrid_bits)


def gathers_nothing() -> None:
    transport = transport_of(dist.group.WORLD, CPU, "shared_gpu")
    for elements in (0, 3):
        gather(transport, elements=elements)


def test_a_slice_of_no_bytes_travels(ranks) -> None:
    ranks(2, gathers_nothing)


def gathers_far_ahead(slow: int, first_elements: int) -> None:
    """Many gathers in flight, of slices that grow: one rank issues all of them before another begins."""
    transport = transport_of(dist.group.WORLD, CPU, "shared_gpu")
    rank, n = dist.get_rank(), dist.get_world_size()
    began = dist.new_group(list(range(n)))  # its barrier says when the slow rank may begin
    if rank == slow:
        dist.barrier(group=began)
    flying = []
    for number in range(24):
        elements = first_elements << (number // 8)  # larger arenas at operations 9 and 17
        slice_ = torch.arange(elements, dtype=torch.float32) + 1000 * number + 7 * rank
        whole = Gathered(Layout.of([("w", (n * elements,), 4)], n), CPU)
        flying.append(
            (number, elements, whole, transport.all_gather(Outgoing.of(slice_), whole, Stamp("unit", "forward")))
        )
    if rank != slow:
        dist.barrier(group=began)
    for number, elements, whole, pending in flying:
        pending.wait()
        expected = torch.cat(
            [torch.arange(elements, dtype=torch.float32) + 1000 * number + 7 * peer for peer in range(n)]
        )
        assert torch.equal(whole.tensor.view(torch.float32)[: len(expected)], expected), (
            f"gather {number} on rank {rank}"
        )


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_far_ahead_overwrites_nothing_unread(ranks, slow: int) -> None:
    ranks(3, gathers_far_ahead, slow, 300_000)


def counted() -> dict[str, int]:
    model = shard_model(build_model("gpt-tiny", seed=1), "full_shard", transport="shared_gpu")
    with CommDebugMode() as mode:
        loss_of(model, *batch(0)).backward()
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    return {
        name: sum(count for op, count in counts.items() if part in op)
        for name, part in (("gathers", "gather"), ("reductions", "reduce_scatter"))
    }


def test_what_watches_collectives_sees_the_textbooks(ranks) -> None:
    seen = ranks(2, counted)[0]
    units = 1 + len(build_model("gpt-tiny", seed=1).blocks)
    # the root stays gathered between forward and backward
    assert seen["gathers"] == 2 * units - 1 and seen["reductions"] == units


def peers_train() -> None:
    def torchs(ours: bool) -> list[torch.Tensor]:
        model = build_model("gpt-tiny", seed=1)
        for block in [*model.blocks, model]:
            torch_fully_shard(block)
        if ours:
            put_on_shared_gpu(model, dist.group.WORLD, CPU)
        return train(model)

    labs = train(shard_model(build_model("gpt-tiny", seed=1), "full_shard", transport="shared_gpu"))
    for on_it, on_gloo, lab in zip(torchs(True), torchs(False), labs, strict=True):
        assert torch.equal(on_it, on_gloo) and torch.equal(on_it, lab)


def test_torchs_fsdp2_runs_on_the_same_fabric(ranks) -> None:
    ranks(2, peers_train)


def refused_by_peers() -> None:
    with pytest.raises(
        ValueError, match="holds no module of torch's FSDP2; call torch.distributed.fsdp.fully_shard first"
    ):
        put_on_shared_gpu(nn.Linear(2, 2), dist.group.WORLD, CPU)
    series = Series(dist.group.WORLD, HostFabric(), 2)
    with pytest.raises(
        ValueError, match="shared_gpu reduces with SUM or AVG, got .*; leave FSDP2's gradient divide factor"
    ):
        SharedGpuReduceScatter(series)(torch.empty(2), torch.empty(4), dist.group.WORLD, dist.ReduceOp.MAX)


def test_peers_say_what_they_cannot_do(ranks) -> None:
    ranks(2, refused_by_peers)


# ---- ranks that are missing


def _member(folder: str, patience_s: float, act: Callable[[int, SharedGpuTransport], None]) -> None:
    """Acts, writes down what it raised, and is gone: its peers need not wait until it has."""
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=patience_s))
    transport = transport_of(group, CPU, "shared_gpu")
    try:
        act(rank, transport)
    except RuntimeError as error:
        Path(folder, f"said-{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def said_by(
    ranks: RankPool, count: int, act: Callable[[int, SharedGpuTransport], None], patience_s: float = 60.0
) -> dict[int, str]:
    """What `act(rank, transport)` raised on each of `count` ranks; none may be left waiting."""
    with tempfile.TemporaryDirectory() as folder:
        ends = ranks.ends(count, _member, folder, patience_s, act)
        assert set(ends) <= {"died with exit code 0", "died with exit code -9"}, ends
        return {rank: path.read_text() for rank in range(count) if (path := Path(folder, f"said-{rank}")).exists()}


def gather(transport: SharedGpuTransport, unit: str = "blocks.0", elements: int = 4) -> None:
    layout = Layout.of([("w", (transport.ranks * elements,), 4)], transport.ranks)
    whole = Gathered(layout, torch.device("cpu"))
    transport.all_gather(Outgoing.of(torch.zeros(layout.slice_bytes // 4)), whole, Stamp(unit, "forward")).wait()


def dies_after_one(rank: int, transport: SharedGpuTransport) -> None:
    gather(transport)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather(transport, "blocks.1")


def test_a_dead_rank_ends_everybodys_wait_with_an_error_that_names_it(ranks) -> None:
    said = said_by(ranks, 3, dies_after_one)
    assert set(said) == {0, 2}
    for text in said.values():
        assert text.startswith("PeerLost: ") and "rank 1" in text and "look for its own error in its log" in text
    assert any("to write operation 2 (all_gather of blocks.1), but rank 1 has died" in text for text in said.values())


def next_call_after_a_death(rank: int, transport: SharedGpuTransport) -> None:
    """As on a GPU, nobody on the host waits for the operation that lacks a rank: the next call raises."""
    gather(transport)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.gathers.claim(16, "all_gather of blocks.1")
    transport.gathers.publish(2)
    deadline = time.monotonic() + 30
    while not transport.watchdog.failure and time.monotonic() < deadline:
        time.sleep(0.01)
    transport.settle()


def test_the_next_call_raises_what_the_watchdog_has_found(ranks) -> None:
    assert (
        "rank 0 waited for rank 1 to write operation 2 (all_gather of blocks.1), but rank 1 has died"
        in said_by(ranks, 2, next_call_after_a_death)[0]
    )


def ends_after_its_work(rank: int, transport: SharedGpuTransport) -> None:
    gather(transport)
    dist.barrier()
    if rank == 0:
        other = os.pidfd_open(transport.gathers.processes[1])
        assert select.select([other], [], [], 60)[0], "rank 1 has not ended"
        transport.watchdog.look(list(transport.watchdog.handles))
        transport.settle()


def test_a_rank_that_ended_after_its_work_is_not_missed(ranks) -> None:
    assert said_by(ranks, 2, ends_after_its_work) == {}


def stands_still(rank: int, transport: SharedGpuTransport) -> None:
    gather(transport)
    if rank == 0:
        gather(transport, "blocks.1")
    else:
        while not transport.watchdog.failure:  # it lives, and is told that the others gave up
            time.sleep(0.05)
        transport.settle()


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_is_patient(ranks) -> None:
    said = said_by(ranks, 2, stands_still, patience_s=2.0)
    assert (
        "rank 0 waited 2 s for rank 1 to write operation 2 (all_gather of blocks.1); rank 1 lives but has not come"
        " to it" in said[0]
    )
    assert "rank 1 has died or stands still, as rank 0 noticed" in said[1]


def runs_something_else(rank: int, transport: SharedGpuTransport) -> None:
    gather(transport)
    gather(transport, "blocks.1" if rank else "blocks.2")
    gather(transport, "blocks.3")


def test_ranks_out_of_step_are_told_so(ranks) -> None:
    said = said_by(ranks, 2, runs_something_else)
    told = [text for text in said.values() if "out of step" in text]
    assert told and all("all_gather of blocks.1" in text and "all_gather of blocks.2" in text for text in told), said


def asks_for_larger_slots_alone(rank: int, transport: SharedGpuTransport) -> None:
    gather(transport, elements=4 << 20 if rank else 4)


def test_ranks_that_disagree_about_arenas_are_told_so(ranks) -> None:
    assert all("out of step" in text for text in said_by(ranks, 2, asks_for_larger_slots_alone).values())


def interrupted_in_its_own_work(rank: int, transport: SharedGpuTransport) -> None:
    """With `unseen` waiters (CUDA) the main thread is interrupted wherever it is."""
    fabric = HostFabric()
    fabric.unseen = True
    series = Series(dist.group.WORLD, fabric, 2)
    watchdog = watched(dist.group.WORLD, fabric, [series])
    series.claim(4, "what rank 1 never writes")
    store = distributed_c10d._get_default_store()
    if rank == 0:
        store.set("rank 0 has opened what rank 1 offers", "")
    if rank == 1:
        store.wait(["rank 0 has opened what rank 1 offers"])
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # stands for a synchronisation: nothing here asks the watchdog
        sum(range(1000))
    watchdog.stop()


def test_a_main_thread_that_asks_nobody_is_interrupted(ranks) -> None:
    said = said_by(ranks, 2, interrupted_in_its_own_work)
    assert said[0].startswith(
        "PeerLost: rank 0 waited for rank 1 to write operation 1 (what rank 1 never writes), but rank 1 has died"
    )


# ---- choosing it, and leaving nothing behind


def chosen() -> None:
    transport = transport_of(dist.group.WORLD, CPU, "shared_gpu")
    assert type(transport) is SharedGpuTransport and transport is transport_of(dist.group.WORLD, CPU, "shared_gpu")
    assert type(transport_of(dist.group.WORLD, CPU)) is not SharedGpuTransport, "a rehearsal is not taken by itself"
    os.environ["GROUP_RANK"] = str(dist.get_rank())
    try:
        with pytest.raises(
            ValueError, match="'shared_gpu' needs all ranks on one x86-64 Linux machine .*; got 2 machines: use 'nccl'"
        ):
            transport_of(dist.new_group([0, 1]), CPU, "shared_gpu")
    finally:
        del os.environ["GROUP_RANK"]


def test_it_is_chosen_by_name_and_needs_one_machine(ranks) -> None:
    ranks(2, chosen)


def left_behind() -> tuple[int, int]:
    def once() -> None:
        group = dist.new_group([0, 1])
        transport = transport_of(group, CPU, "shared_gpu")
        gather(transport)
        dist.barrier()
        del transport
        dist.destroy_process_group(group)
        forget_destroyed()
        gc.collect()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.02)  # a watchdog closes its handles at its next look
    return before, len(os.listdir("/proc/self/fd"))


def test_destroyed_groups_leave_no_descriptor_behind(ranks) -> None:
    for before, after in ranks(2, left_behind):
        assert after <= before


# ---- runs


def short(**wanted: object) -> RunSpec:
    return RunSpec(**{"model": "gpt-tiny", "steps": 2, "device": "cpu", "transport": "shared_gpu", **wanted})


def test_a_run_trains_as_its_twin_and_is_labelled_emulated(tmp_path) -> None:
    record = run(short(), directory=tmp_path / "run")
    assert record.summary.losses == run(short(engine="twin", transport="auto")).summary.losses
    labels = RunRecord.load(tmp_path / "run").provenance
    assert {labels[name] for name in ("ranks_on_one_gpu", "step_time_s", "exposed_s")} == {"emulated"} and labels[
        "losses"
    ] == "measured"
    assert record.summary.comm.bytes_per_step == record.summary.formula_bytes_per_step
    assert record.environment["backend"] == "shared_gpu, rehearsed on the CPU"
    assert "ranks take turns on one" in dict(provenance(views([record])))["emulated"]


def test_losses_are_compared_step_by_step() -> None:
    assert furthest([2.0, 1.0], [2.0, 1.25]) == 0.2 and furthest([2.0], [2.0]) == 0.0
    assert furthest([2.0], [2.0, 1.0]) == furthest([2.0, None], [2.0, 1.0]) == float("inf")


def test_an_emulated_link_lies_before_it() -> None:
    free, slow = (run(short(link=link)).summary for link in (None, "100mbit"))
    assert free.losses == slow.losses and slow.comm.bytes_per_step == free.comm.bytes_per_step
    assert slow.step_time_s.min >= slow.comm.bytes_per_step / 12.5e6, "faster than the link carries"


@pytest.mark.parametrize(
    "wanted,complaint",
    [
        (
            dict(engine="torch-ddp", strategy="no_shard"),
            "transport is shared_gpu, but engine torch-ddp brings its own; .* give engine='lab' or 'torch-fsdp2'",
        ),
        (
            dict(engine="torch-fsdp2", strategy="hybrid_shard", shard_size=1),
            "torch-fsdp2 reduces over replicas with the process group",
        ),
        (
            dict(engine="torch-fsdp2", link="1gbit"),
            "on shared_gpu only the lab's engine meets an emulated link, got torch-fsdp2",
        ),
        (dict(profile=1), "on the CPU shared_gpu is a rehearsal, .*; give transport='shm', or profile=0"),
        (dict(device="cuda", transport="nccl"), "device is cuda with 2 ranks, but 0 GPUs were found"),
        (dict(device="cuda"), "device is cuda with 2 ranks, but 0 GPUs were found"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is missing without a GPU")
def test_specs_that_cannot_share_are_refused(wanted: dict[str, object], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        short(**wanted)


def test_a_trace_tells_copies_between_ranks_from_computing(tmp_path) -> None:
    """The gather of blocks.1 (a copy, a wait, a kernel: 300 to 450) lies under the forward's kernel (200 to 400)."""
    copy = event("cudaMemcpyAsync", 110, 112, cat="cuda_runtime", correlation=1)
    gathered = event("Memcpy DtoD (Device -> Device)", 300, 320, tid=20, cat="gpu_memcpy", pid=0, correlation=1)
    other = event("Memcpy HtoD", 500, 510, tid=7, cat="gpu_memcpy", pid=0, correlation=9)
    step = analysed(tmp_path, [
        mark("FSDP::pre_forward (blocks.0)", 95, 145), mark("FSDP::all_gather (blocks.1)", 100, 140),
        mark("shared_gpu:all_gather (4096 bytes)", 105, 135),
        copy, gathered, launch(120, 2), kernel("elementwise_copy", 430, 450, 2, stream=20), launch(160, 3),
        kernel("gemm", 200, 400, 3), other,
    ])  # fmt: skip
    assert parts(step) == [100, 100, 50, 750]  # of the wall step: 0 to 1,000
    (row,) = step.collectives
    assert (row["kind"], row["unit"], row["logical_bytes"], row["start_ns"], row["end_ns"]) == (
        "all_gather",
        "blocks.1",
        4096,
        300_000,
        450_000,
    )


# ---- on a GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("engine,world_size", [("lab", 2), ("torch-fsdp2", 2), ("lab", 4)])
def test_ranks_on_one_gpu_train_as_the_cpu_twin(engine: str, world_size: int) -> None:
    on_gpu = run(short(device="cuda", engine=engine, world_size=world_size)).summary.losses
    twin = run(short(engine="twin", transport="auto", world_size=world_size)).summary.losses
    torch.testing.assert_close(torch.tensor(on_gpu), torch.tensor(twin), rtol=1e-3, atol=0.0)


def _on_gpu(rank: int, folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    device = torch.device("cuda", 0)
    model = shard_model(
        build_model("gpt-tiny", seed=1, device=device),
        "full_shard",
        transport="shared_gpu",
        mesh=dist.device_mesh.init_device_mesh("cuda", (2,)),
    )
    tokens, targets = (each.to(device) for each in batch(0))
    try:
        for step in range(3):
            if rank == 1 and step == 1:
                torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model, tokens, targets).backward()
            torch.cuda.synchronize()
    except RuntimeError as error:
        Path(folder, "said").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_that_waits_for_a_dead_rank_is_freed() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        members = [context.Process(target=_on_gpu, args=(rank, folder)) for rank in range(2)]
        for member in members:
            member.start()
        for member in members:
            member.join(30)
        stuck = [member for member in members if member.exitcode is None]
        for member in stuck:
            member.kill()
        assert not stuck, "a rank still waits for a dead one"
        assert (
            Path(folder, "said").read_text().startswith("PeerLost: ") and "rank 1" in Path(folder, "said").read_text()
        )


@pytest.mark.gpu
@needs_gpu
def test_the_driver_offers_what_is_needed() -> None:
    from fsdplab.engine.transport.shared_gpu.cuda import probe

    probe(torch.device("cuda", 0))
