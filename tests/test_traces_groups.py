"""Who meets whom when a job has several process groups, clocks of its own, and messages between two ranks: on miniature
traces whose right answers can be checked by eye.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdplab.profiling.arrivals import arrivals_of
from fsdplab.profiling.findings import findings
from fsdplab.profiling.tables import Table, tables_of_record
from fsdplab.profiling.tables.bandwidth import bandwidths_by_size
from fsdplab.profiling.tables.critical_path import critical_path
from fsdplab.profiling.traces.clocks import clocks_of
from fsdplab.profiling.traces.import_traces import TracedRecord, record_of_traces
from fsdplab.profiling.traces.meeting import matched
from fsdplab.records import RunRecord
from tests.gpu_traces import COMM, GpuRank

pytestmark = pytest.mark.quick
MS = 1_000_000
STEPS = 8
SHARD, REPLICATE = 20, 24  # streams of two groups


def record(tmp_path: Path, ranks: Sequence[GpuRank]) -> TracedRecord:
    return record_of_traces([rank.write(tmp_path / f"rank{rank.rank}.json") for rank in ranks])


def waiting(found: RunRecord) -> list[float]:
    """How long each rank waits for peers in a step, in us."""
    rows, by_rank = found.table("breakdown"), {}
    for row in rows:
        by_rank[row["rank"]] = by_rank.get(row["rank"], 0) + row["waiting_ns"] / 1000
    return [total / len({row["step"] for row in rows}) for _, total in sorted(by_rank.items())]


def kinds(found: RunRecord) -> list[str]:
    return [finding.kind for finding in findings(found)]


# ---- several groups


def hybrid(
    rank: int, told: Callable[[Sequence[int], str], dict[str, Any]], steps: int = STEPS, slower: int = 0
) -> GpuRank:  # fmt: skip
    """Ranks 0, 1 and 2, 3 gather among themselves, the second pair 4 ms later; all four reduce over 0, 2 and 1, 3 at
    once. `told`: what a kernel says of its group. `slower`: by how many us rank 3 comes later to its gather.
    """
    trace, late = GpuRank(rank, 4), 4000 if rank >= 2 else 0
    shard, replicate = ([0, 1], [2, 3])[rank // 2], ([0, 2], [1, 3])[rank % 2]
    for step in range(steps):
        at = 20_000 * step
        gather = at + 2020 + late + (slower if rank == 3 else 0)
        gathered = at + 3020 + late + (slower if rank >= 2 else 0)
        trace.step(step, at, at + 19_990).kernel(at + 5, at + 20, gather)
        trace.nccl("all_gather", at + 10, gather, gathered, SHARD, 16 << 20, **told(shard, "mesh_shard"))
        trace.kernel(at + 15, gathered, at + 13_020)
        reduced = at + 16_020
        trace.nccl("all_reduce", at + 18, at + 13_020, reduced, REPLICATE, 8 << 20, **told(replicate, "mesh_replicate"))
    return trace


def by_members(ranks: Sequence[int], name: str) -> dict[str, Any]:
    return {"ranks": ranks, "group": name, "number": str(min(ranks))}


def by_many_members(ranks: Sequence[int], name: str) -> dict[str, Any]:
    """As PyTorch cuts the list of a large group short."""
    return {"group": name, "number": f"{ranks}", "size": 2, "Process Group Ranks": f"[{ranks[0]}, {ranks[1]}, ...]"}


def by_name(ranks: Sequence[int], name: str) -> dict[str, Any]:
    """A profiler of before: both pairs call their group mesh_shard, and number it 1."""
    return {"group": name, "number": "1" if name == "mesh_shard" else "2", "size": 2}


@pytest.mark.parametrize("told", [by_members, by_many_members, by_name])
def test_pairs_that_gather_apart_wait_for_nobody(tmp_path, told):
    """And the clocks are one: nothing that pairs do apart says that they are not."""
    found = record(tmp_path, [hybrid(rank, told) for rank in range(4)])
    assert waiting(found) == [0, 0, 0, 0]
    assert not {"skew", "late_rank", "slow_rank"} & set(kinds(found))
    assert critical_path(found.analyses).rows
    (gather, *_) = bandwidths_by_size(found.table("collectives"), 4).rows
    assert (gather["kind"], gather["ranks"], gather["count"]) == ("all_gather", 2, 1)
    assert gather["busbw"] == pytest.approx((16 << 20) * 4 / 1e-3 / 2)
    assert not any("clock" in note for note in found.summary.traces.notes)


def test_a_pair_with_a_late_rank_waits_for_it(tmp_path):
    """Rank 3 computes for 1 ms longer than rank 2 before they gather; the others meet it only where they reduce."""
    # each rank might be named in two groups, so it takes ten steps
    traces = [hybrid(rank, by_members, steps=10, slower=1000) for rank in range(4)]
    found = record(tmp_path, traces)
    assert waiting(found) == [0, 0, pytest.approx(1000), 0]
    (late,) = [each for each in findings(found) if each.kind in ("late_rank", "slow_rank")]
    assert late.rank == 3 and late.seconds == pytest.approx(1e-3)


def test_two_groups_of_the_same_ranks_are_two(tmp_path):
    """Messages of 256 MiB and of 1 MiB on two streams start within 5 us, in another order on each rank."""
    traces = []
    for rank in range(2):
        trace = GpuRank(rank)
        for step in range(STEPS):
            at, (large, small) = 10_000 * step, ((0, 5), (5, 0))[rank]
            trace.step(step, at, at + 9990)
            trace.nccl(
                "all_gather", at + 10, at + 20 + large, at + 4020 + large, 20, 64 << 20, number="1", ranks=[0, 1]
            )
            trace.nccl("all_gather", at + 12, at + 20 + small, at + 70 + small, 24, 256 << 10, number="2", ranks=[0, 1])
            trace.kernel(at + 30, at + 4100, at + 9100)
        traces.append(trace)
    found = record(tmp_path, traces)
    rows = bandwidths_by_size(found.table("collectives"), 2).rows
    assert [row["busbw"] for row in rows] == [
        pytest.approx((256 << 20) / 4e-3 / 2), pytest.approx((1 << 20) / 50e-6 / 2)
    ]  # fmt: skip
    assert [row["count"] for row in rows] == [1, 1] and max(waiting(found)) <= 5


def stages(rank: int, ends: bool) -> GpuRank:
    """Two stages of a pipeline, ranks 0, 1 and 2, 3, with tensor parallelism in each: the second stage begins when the
    first one sends. `ends`: whether messages say between whom they go.
    """
    trace, stage = GpuRank(rank, 4), rank // 2
    pair, peer = ([0, 1], [2, 3])[stage], (rank + 2) % 4
    between = {"Src Rank": min(rank, peer), "Dst Rank": max(rank, peer)} if ends else {}
    for step in range(STEPS):
        at = 20_000 * step
        trace.step(step, at, at + 19_990)
        begin = at + 20 + 6000 * stage
        trace.kernel(at + 5, begin, begin + 3000)
        trace.nccl("all_reduce", at + 8, begin + 3000, begin + 4000, SHARD, group="tp", number="1", ranks=pair)
        trace.kernel(at + 10, begin + 4000, begin + 5900)
        message = at + 5920
        trace.nccl("send_recv", at + 12, message, message + 90, COMM, number="0", ranks=range(4), **between)
    return trace


@pytest.mark.parametrize("ends", [True, False])
def test_tensor_parallelism_inside_of_stages_waits_for_nobody(tmp_path, ends):
    found = record(tmp_path, [stages(rank, ends) for rank in range(4)])
    assert waiting(found) == [0, 0, 0, 0]
    met = [members for members in matched(found.table("collectives")).values() if len(members) > 1]
    pairs = {tuple(row["rank"] for row in members) for members in met}
    assert pairs == ({(0, 1), (2, 3), (0, 2), (1, 3)} if ends else {(0, 1), (2, 3)})


def test_a_rank_that_calls_once_more_does_not_shift_the_others():
    """Rank 0 broadcasts alone in its trace, before both gather: gathers still meet gathers."""

    def row(rank: int, start: int, kind: str) -> dict[str, Any]:
        return {"rank": rank, "step": 1, "unit": "", "phase": "", "kind": kind, "start_ns": start, "end_ns": start + 5,
                "group": "", "group_size": 2, "members": "0,1 #7"}  # fmt: skip

    rows = [row(0, 1, "broadcast"), row(0, 10, "all_gather"), row(1, 11, "all_gather")]
    met = [members for members in matched(rows).values() if len(members) > 1]
    assert [[each["kind"] for each in members] for members in met] == [["all_gather", "all_gather"]]


def test_a_runs_own_groups_are_those_of_its_mesh():
    """hybrid_shard on 2 x 2 ranks: the second pair gathers 5 ms later, and all reduce at once over the replicas."""
    spec = {"strategy": "hybrid_shard", "world_size": 4, "shard_size": 2}
    ledger = [
        {"rank": rank, "step": 3, "unit": "a", "phase": "forward", "kind": kind, "issue_ns": at, "start_ns": at,
         "end_ns": at + MS, "waited_ns": MS, "logical_bytes": 8}
        for rank in range(4)
        for kind, at in (("all_gather", 5 * MS * (rank // 2)), ("all_reduce", 20 * MS))
    ]  # fmt: skip
    found = arrivals_of(RunRecord(Path("nowhere"), spec=spec, tables={"ledger": ledger}), {3})
    assert {key.kind: set() for key in found} == {"all_gather": set(), "all_reduce": set()}
    assert sorted(tuple(times) for key, times in found.items() if key.kind == "all_gather") == [(0, 1), (2, 3)]
    assert sorted(tuple(times) for key, times in found.items() if key.kind == "all_reduce") == [(0, 2), (1, 3)]
    assert all(len(set(times.values())) == 1 for times in found.values())


def test_groups_that_only_the_profiler_lists_tell_a_meshs_axes(tmp_path):
    """gloo's events name no group; FSDP's units gather over the axis of shards, and reduce over that of replicas."""
    for rank in range(2):
        axes = ("mesh_replicate", [rank, rank + 2]), ("mesh_shard", [0, 1])
        groups = [("0", "default_pg", [0, 1, 2, 3]), *((str(n), *axis) for n, axis in enumerate(axes, start=1))]
        trace = GpuRank(rank, 4, backend="gloo").step(1, 0, 900).operator("aten::mm", 0, 90)
        for label, call, at in (("all_gather", "_allgather_base_", 100), ("all_reduce", "allreduce_", 300)):
            trace.range(f"FSDP::{label} (a)", at, at + 90).operator(f"c10d::{call}", at + 5, at + 9)
            trace.range(f"gloo:{label}", at + 10, at + 80, thread=9, **{"Input Dims": [[8]], "Input type": ["float"]})
        content = trace.operator("aten::mm", 500, 800).content()
        content["distributedInfo"]["pg_config"] = [
            {"pg_name": name, "pg_desc": text, "pg_size": len(members), "ranks": members}
            for name, text, members in groups
        ]  # fmt: skip
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    rows = record_of_traces(sorted(tmp_path.iterdir())).table("collectives")
    assert {(row["rank"], row["kind"], row["members"], row["group_size"]) for row in rows} == {
        (0, "all_gather", "0,1", 2), (1, "all_gather", "0,1", 2),
        (0, "all_reduce", "0,2", 2), (1, "all_reduce", "1,3", 2),
    }  # fmt: skip
    assert {row["logical_bytes"] for row in rows if row["kind"] == "all_gather"} == {2 * 8 * 4}, "of 2 shards, not of 4"


# ---- clocks


def alike(rank: int, world: int, ahead: float, groups: Iterable[Sequence[int]] = ()) -> GpuRank:
    """In truth all ranks do everything at once; the rank's clock is `ahead`, in us. It meets its `groups` in turn, all
    ranks together where there are none.
    """
    trace = GpuRank(rank, world)
    for step in range(STEPS):
        at = 10_000 + 12_000 * step + ahead
        trace.step(step, at, at + 11_990).kernel(at + 5, at + 20, at + 6020)
        for number, ranks in enumerate(groups or [range(world)]):
            if rank in ranks:
                begin = at + 6020 + 500 * number
                trace.nccl("all_gather", at + 10, begin, begin + 400, ranks=ranks, number=str(number))
        trace.kernel(at + 15, at + 8020, at + 11_020).synchronise(at + 40, at + 11_040)
    return trace


@pytest.mark.parametrize("ahead", [30, 800, 6000, -70_000, 3_600_000_000])
def test_an_innocent_rank_whose_clock_is_ahead_is_not_accused(tmp_path, ahead):
    found = record(tmp_path, [alike(rank, 4, ahead if rank >= 2 else 0) for rank in range(4)])
    assert waiting(found) == [0, 0, 0, 0] and not {"skew", "late_rank", "slow_rank"} & set(kinds(found))
    assert [each.clock.ahead_ns for each in found.analyses] == [0, 0, 1000 * ahead, 1000 * ahead]
    (said,) = [note for note in found.summary.traces.notes if "clock" in note]
    assert "(± 1.00 µs)" in said and "set to rank 0's" in said
    assert sum(row["ns"] for row in critical_path(found.analyses).rows) == 12_000_000, "on one clock"


def test_groups_connect_the_clocks_of_ranks_that_never_meet(tmp_path):
    chain = [[0, 1], [1, 2], [2, 3]]
    found = record(tmp_path, [alike(rank, 4, 900 * rank, chain) for rank in range(4)])
    assert [each.clock.ahead_ns for each in found.analyses] == [0, 900_000, 1_800_000, 2_700_000]
    assert waiting(found) == [0, 0, 0, 0]


def test_messages_connect_what_no_collective_connects():
    """And only that: a send that ends before its receive says nothing where a collective does."""

    def row(rank: int, end: int, kind: str, members: str) -> dict[str, Any]:
        return {"rank": rank, "step": 1, "unit": "", "phase": "", "kind": kind, "start_ns": end - 5, "end_ns": end,
                "group": "", "group_size": None, "members": members}  # fmt: skip

    rows = []
    for at in range(0, 10 * MS, MS):
        rows += [row(0, at, "all_reduce", "0,1"), row(1, at + 7000, "all_reduce", "0,1")]
        rows += [row(0, at, "send_recv", "0>1 of 0,1"), row(1, at + 99_000, "send_recv", "0>1 of 0,1")]
        rows += [row(1, at + 7000, "send_recv", "1>2 of 1,2"), row(2, at + 27_000, "send_recv", "1>2 of 1,2")]
    clocks = clocks_of(matched(rows).values())
    assert {rank: clock.ahead_ns for rank, clock in clocks.items()} == {0: 0, 1: 7000, 2: 27_000}


def test_the_uncertainty_is_how_far_ends_scatter():
    def ends(rank: int, number: int) -> int:
        return number * MS + rank * (500_000 + (number * 7919 % 11 - 5) * 10_000)

    rows = [
        {"rank": rank, "step": 1, "unit": "", "phase": "", "kind": "all_reduce", "start_ns": 0, "end_ns": ends(rank, n)}
        for rank in (0, 1) for n in range(44)
    ]  # fmt: skip
    clock = clocks_of(matched(rows).values())[1]
    assert clock.ahead_ns == pytest.approx(500_000, abs=3 * clock.error_ns) and 5000 < clock.error_ns < 15_000


# ---- which collective, and how many bytes


def through_send_recv(call: str, dims: list[Any], **arguments: Any) -> GpuRank:
    """NCCL's SendRecv carries what the c10d call around its launch says; the kernel itself says nothing."""
    trace = (
        GpuRank().step(1, 0, 90).operator(f"c10d::{call}", 5, 40, **{"Input Dims": dims, "Input type": ["float"] * 2})
    )
    trace.range("nccl:coalesced", 8, 30).operator("record_param_comms", 7, 35, **arguments)
    return trace.kernel(10, 100, 200, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", stream=20)


@pytest.mark.parametrize(
    "trace,kind,nbytes,members",
    [
        (through_send_recv("alltoall_base_", [[64], [64]]), "all_to_all", 256, ""),
        (through_send_recv("_allgather_base_", [[64], [32]]), "all_gather", 256, ""),
        (through_send_recv("allreduce_", [[[64]], []]), "all_reduce", None, ""),
        (
            through_send_recv(
                "allreduce_", [[[64]], []], **{
                    "Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "BFloat16",
                    "Process Group Name": "3", "Process Group Ranks": "[0, 1]", "Group size": 2,
                },
            ),
            "all_reduce", 128, "0,1 #3",
        ),
        (GpuRank().step(1, 0, 90).nccl("all_to_all", 10, 100, 200, ranks=[0, 1]), "all_to_all", 4096, "0,1 #0"),
    ],
)  # fmt: skip
def test_the_arguments_count_more_than_the_call_and_the_call_more_than_the_kernels_name(
    tmp_path, trace, kind, nbytes, members
):
    (row,) = record_of_traces([trace.write(tmp_path / "t.json")]).table("collectives")
    assert (row["kind"], row["logical_bytes"], row["members"]) == (kind, nbytes, members)


def test_an_unknown_data_type_costs_only_its_own_bytes(tmp_path):
    trace = GpuRank().step(1, 0, 90).nccl("all_gather", 10, 100, 200, elements=1000)
    trace.nccl("all_reduce", 20, 200, 300, dtype="Posit16").nccl("all_gather", 30, 300, 400, dtype="Float8_e4m3fn")
    found = record_of_traces([trace.write(tmp_path / "t.json")])
    assert [row["logical_bytes"] for row in found.table("collectives")] == [4000, None, 1024]
    assert found.summary.comm.bytes_per_step == 2000 + 512
    assert any("does not say how many bytes 1 of 3 collectives moved (all_reduce)" in note
               for note in found.summary.traces.notes)  # fmt: skip


@pytest.mark.parametrize(
    "name,kind",
    [
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int)", "reduce_scatter"),
        ("userbuffers_fp16_sum_inplace_gpu_mc_ag<8>", "all_gather"),
        ("kuserbuffers_pushsend(int*)", "send_recv"),
        ("void mscclpp::collective::allreduceNvls<float>(float*)", "all_reduce"),
        ("nvshmemi_alltoall_kernel", "all_to_all"),
        ("oneccl_allgatherv_small<float>", "all_gather"),
        ("mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>", "all_to_all"),
        ("void pplx::dispatch_kernel<true>(void*)", "all_to_all"),
        ("void (anonymous namespace)::my_allreduce_kernel<ns::T>(int)", "all_reduce"),
        ("triton_poi_fused_all_gather_into_tensor_0", None),
        ("void at::native::elementwise_kernel<at::AllReduceFunctor>(int)", None),
    ],
)
def test_kernels_that_carry_a_collective(name, kind):
    from fsdplab.profiling.traces.comm_kernels import CommKernels

    assert CommKernels().kind(name) == kind


# ---- copies by direction


def test_a_copy_inside_the_device_is_packing_where_an_engine_launched_it(tmp_path):
    """FSDP's copy-in and copy-out of 100 and 50 us belong to the unit's all_gather; a copy of the model's own is idle
    time inside the device, and one from the host is idle time of another kind.
    """
    inside = "Memcpy DtoD (Device -> Device)"
    trace = GpuRank().step(1, 0, 90).range("FSDP::all_gather (blocks.0)", 5, 20).copy(8, 100, 200, name=inside)
    trace.nccl("all_gather", 10, 200, 300).range("FSDP::all_gather_copy_out (blocks.0)", 25, 30)
    trace.copy(27, 300, 350, name=inside).kernel(40, 350, 400).copy(45, 400, 420, name=inside).copy(50, 420, 450)
    found = record_of_traces([trace.kernel(60, 450, 500).write(tmp_path / "t.json")])
    (row,) = found.table("collectives")
    assert (row["unit"], row["packing_ns"], row["unpacking_ns"], row["on_link_ns"]) == (
        "blocks.0", 100_000, 50_000, 100_000
    )  # fmt: skip
    (idle,) = found.table("idle")
    assert (idle["device_copies_ns"], idle["copies_ns"]) == (20_000, 30_000)


@pytest.mark.parametrize("call,kind", [("", "peer_copy"), ("c10d::_allgather_base_", "all_gather")])
def test_a_copy_to_another_device_is_communication(tmp_path, call, kind):
    """Copy engines carry collectives too; the call around the launch says which."""
    trace = GpuRank(world_size=1).step(1, 0, 90).kernel(5, 100, 200)
    trace = trace.operator(call, 8, 20) if call else trace
    trace.copy(10, 200, 260, name="Memcpy PtoP (Device -> Device)")
    found = record_of_traces([trace.write(tmp_path / "t.json")])
    assert [(row["kind"], row["exposed_ns"]) for row in found.table("collectives")] == [(kind, 60_000)]


def test_copies_inside_the_device_bring_no_advice_about_batches(tmp_path):
    trace = GpuRank(world_size=1)
    for step in range(STEPS):
        at = 10_000 * step
        trace.step(step, at, at + 9990).copy(at + 5, at + 20, at + 1520, name="Memcpy DtoD (Device -> Device)")
        trace.kernel(at + 36, at + 1520, at + 9900).synchronise(at + 50, at + 9950)
    (found,) = findings(record(tmp_path, [trace]))
    assert found.kind == "copies_inside" and "batch" not in found.remedy and "pin_memory" not in found.remedy


# ---- which traces of a folder


def test_of_two_cycles_of_a_schedule_the_last_is_shown(tmp_path):
    """`schedule(repeat=2)` leaves two traces a rank; those of two processes are two runs."""

    def cycle(rank: int, number: int) -> Path:
        trace = alike(rank, 2, 0)
        for event in trace.events:
            event["ts"] += 10_000_000 * number
            if event["name"].startswith("ProfilerStep#"):
                event["name"] = f"ProfilerStep#{int(event['name'][13:]) + 100 * number}"
        return trace.write(tmp_path / f"host_42{rank}.{1700 + number}.pt.trace.json")

    files = [cycle(rank, number) for rank in (0, 1) for number in (0, 1)]
    found = record_of_traces(files)
    assert {row["step"] for row in found.table("breakdown")} == set(range(100, 100 + STEPS))
    assert any("each rank left 2 traces" in note and "100 to 107 (8)" in note for note in found.summary.traces.notes)


# ---- several devices in one process


def on_device(trace: GpuRank, launched: float, start: float, end: float, device: int) -> None:
    trace.kernel(launched, start, end)
    trace.events[-1] |= {"pid": device, "args": trace.events[-1]["args"] | {"device": device}}


def test_two_devices_of_one_process_are_idle_half_of_the_time_each(tmp_path):
    """GPU 0 computes the first half of each step, GPU 1 the second."""
    trace = GpuRank(world_size=1)
    for step in range(STEPS):
        at = 10_000 * step
        trace.step(step, at, at + 9990)
        on_device(trace, at + 5, at + 20, at + 5020, 0)
        on_device(trace, at + 8, at + 5020, at + 9990, 1)
    found = record(tmp_path, [trace])
    idle = {row["rank"]: row["other_ns"] / row["step_ns"] for row in found.table("breakdown") if row["step"] == 3}
    assert idle == {0: pytest.approx(0.5, abs=0.01), 1: pytest.approx(0.5, abs=0.01)}
    assert any("one process drives several devices" in note for note in found.summary.traces.notes)


def allocated(trace: GpuRank, at: float, device: int, held: int, reserved: int) -> None:
    arguments = {"Device Type": 1, "Device Id": device}
    arguments |= {"Total Allocated": held << 30, "Total Reserved": reserved << 30}
    trace.events.append({"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": at, "args": arguments})


def test_devices_of_several_processes_are_told_apart(tmp_path):
    """Two ranks drive two GPUs each; the second GPU of rank 1 reduces 300 us after that of rank 0, the first does not.

    Each GPU has an all-reduce of its own a step, and memory of its own.
    """
    traces = []
    for number in range(2):
        trace = GpuRank(number, world_size=2)
        for step in range(STEPS):
            at, first, second = 10_000 * step, 2 * number, 2 * number + 1
            trace.step(step, at, at + 9990)
            on_device(trace, at + 5, at + 20, at + 2020, first)
            reduced_on_device(trace, at + 6, at + 2020, at + 3020, first)
            on_device(trace, at + 7, at + 20, at + 4020 + 300 * number, second)
            reduced_on_device(trace, at + 8, at + 4020 + 300 * number, at + 5020, second)
            for device, held in ((first, 3 + number), (second, 7 + number)):
                allocated(trace, at + 100, device, held, held + 2)
        traces.append(trace)
    found = record(tmp_path, traces)
    assert found.spec["world_size"] == 4
    assert {row["rank"] for row in found.table("breakdown")} == {0, 1, 2, 3}
    assert found.summary.peak_by_rank == tuple(held << 30 for held in (3, 7, 4, 8))
    notes = found.summary.traces.notes
    assert any("device D of rank R is shown as rank 2 x R + D" in note for note in notes)
    assert any("8.59 GB were allocated at most, and 10.7 GB reserved" in note for note in notes)
    waited: dict[int, set[int]] = {}
    for row in found.table("collectives"):
        waited.setdefault(row["rank"], set()).add(row["waiting_ns"])
    assert waited == {0: {0}, 1: {300_000}, 2: {0}, 3: {0}}
    (kernel,) = [row for row in tables_of(found)["operators"].rows if row["kind"] == "kernel"]
    assert kernel["count"] == 1, "of one device"


def tables_of(found: RunRecord) -> dict[str, Table]:
    return {table.name: table for table in tables_of_record(found)}


def reduced_on_device(trace: GpuRank, launched: float, start: float, end: float, device: int) -> None:
    trace.nccl("all_reduce", launched, start, end, ranks=[0, 1])
    trace.events[-1] |= {"pid": device, "args": trace.events[-1]["args"] | {"device": device}}


def test_the_peak_is_of_the_steps_and_of_one_device_allocated_and_reserved(tmp_path):
    """9 GiB before the first step, 7 after the last one, and 3 of 4 that are reserved within."""
    trace = GpuRank(world_size=1).step(1, 100, 200).kernel(110, 120, 190)
    for at, held, reserved in ((5, 9, 9), (150, 3, 4), (160, 2, 4), (900, 7, 7)):
        allocated(trace, at, 0, held, reserved)
    found = record(tmp_path, [trace])
    assert found.summary.peak_memory_bytes.total == 3 << 30
    assert any("3.22 GB were allocated at most, and 4.29 GB reserved" in note for note in found.summary.traces.notes)
