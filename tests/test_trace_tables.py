"""The tables of operators, launches, bandwidth, idle time, critical path and differences, on traces checked by eye."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from markupsafe import escape
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fsdplab.cli.app import app
from fsdplab.figures.report.page import tabbed
from fsdplab.figures.trace_tables import cells
from fsdplab.profiling import TraceError, analyse_trace, tables
from fsdplab.profiling.tables import of_record
from fsdplab.profiling.tables.work import flops_of, work_of
from fsdplab.profiling.traces import side_by_side
from fsdplab.profiling.traces.event_reader import read_events
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.records import RunRecord
from fsdplab.sessions.device_peak import peak_of
from fsdplab.workloads import build_model, loss_of
from tests.gpu_traces import GpuRank

DATA = Path(__file__).parent.parent / "data" / "traces-08"


def rows(table: tables.Table) -> list[dict]:
    assert table.sentence.endswith(".") and "\n" not in table.sentence
    for row in table.rows:
        assert {column.key for column in table.columns} <= set(row)
    return list(table.rows)


def a_step(rank: GpuRank, number: int = 1, late: float = 0) -> GpuRank:
    """100 us of computing, a reduction of 30 us, and a copy."""
    rank.step(number, 0, 200).kernel(5, 10 + late, 70 + late, name="gemm").kernel(6, 70 + late, 110 + late, name="add")
    return rank.nccl("all_reduce", 7, 110, 150 + late, elements=2**20).copy(8, 150 + late, 160 + late)


# ---- operators and kernels


@pytest.mark.quick
def test_kernels_by_time_with_shares_of_their_kind(tmp_path):
    table = tables.operators(a_step(GpuRank()).write(tmp_path / "t.json"))
    found = {(row["kind"], row["name"].split("(")[0]): row for row in rows(table)}
    assert found["kernel", "gemm"]["time_ns"] == 60_000 and found["kernel", "gemm"]["share"] == 0.6
    assert found["kernel", "add"]["share"] == 0.4
    assert found["communication", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"]["share"] == 1.0
    assert found["copy", "Memcpy HtoD "]["time_ns"] == 10_000
    assert table.sentence == "gemm takes 60% of the kernels' time: 60.0 µs a step in 1 calls."


@pytest.mark.quick
def test_operators_count_without_what_they_call(tmp_path):
    rank = GpuRank(world_size=1).operator("aten::linear", 0, 100).operator("aten::addmm", 20, 90)
    rank.operator("aten::linear", 100, 110)
    found = {row["name"]: row for row in rows(tables.operators(rank.write(tmp_path / "t.json")))}
    assert found["aten::linear"]["time_ns"] == 40_000 and found["aten::linear"]["count"] == 2
    assert found["aten::addmm"]["time_ns"] == 70_000 and found["aten::addmm"]["share"] == 70 / 110


@pytest.mark.quick
def test_kernels_are_of_the_unit_that_launched_them(tmp_path):
    rank = GpuRank().step(1, 0, 50)
    for unit, launched, start in (("blocks.0", 2, 100), ("blocks.1", 12, 200)):
        rank.range(f"FSDP::pre_forward ({unit})", launched - 1, launched - 0.5)
        rank.kernel(launched, start, start + 50, name="gemm").range(
            f"FSDP::post_forward ({unit})", launched + 3, launched + 4
        )
    rank.nccl("all_gather", 20, 250, 260)
    found = {
        row["unit"]: row["time_ns"]
        for row in rows(tables.operators(rank.write(tmp_path / "t.json"), by_unit=True))
        if row["kind"] == "kernel"
    }
    assert found == {"blocks.0": 50_000, "blocks.1": 50_000}


@pytest.mark.quick
def test_times_are_of_a_mean_step_and_of_profiled_steps_only(tmp_path):
    rank = GpuRank().step(1, 0, 10).kernel(5, 20, 40, name="gemm").step(2, 10, 20).kernel(15, 40, 80, name="gemm")
    rank.kernel(30, 90, 190, name="gemm").nccl("all_gather", 6, 40, 41)
    found = next(row for row in rows(tables.operators(rank.write(tmp_path / "t.json"))) if row["name"] == "gemm")
    assert found["time_ns"] == 30_000 and found["count"] == 1 and found["mean_ns"] == 30_000


def test_a_real_trace_of_cpu_ranks_lists_matrix_products_first():
    table = tables.operators(next(DATA.glob("traces/rank0*")))
    found = rows(table)
    assert found[0]["kind"] == "operator" and found[0]["name"].startswith("aten::")
    assert sum(row["share"] for row in found) == pytest.approx(1)
    assert "a step in" in table.sentence


# ---- launches


@pytest.mark.quick
def test_delays_and_queues_of_a_host_that_runs_ahead(tmp_path):
    rank = GpuRank(world_size=1).step(1, 0, 20)
    for number in range(4):  # four launches of 1 us at 0, 2, 4, 6; each kernel takes 100 us
        rank.kernel(2 * number, 10 + 100 * number, 110 + 100 * number)
    (row,) = rows(tables.launches(rank.write(tmp_path / "t.json")))
    assert row["stream"] == "7" and row["launches"] == 4 and row["queue_most"] == 4
    assert row["delay_median_ns"] == 156_000 and row["queue_empty"] == 0.25
    assert row["short_kernels"] == 0


@pytest.mark.quick
def test_the_slowest_step_is_that_of_the_slowest_rank(tmp_path):
    """Step 1 takes 500 us on rank 0 and 100 on rank 1, step 2 takes 200 on both: no rank's lengths stand for all."""
    analyses = []
    for number, first in ((0, 500), (1, 100)):
        rank = GpuRank(number).step(1, 0, 10).kernel(1, 0, first, name="gemm").nccl("all_reduce", 2, first - 10, first)
        rank.step(2, 10, 20).kernel(11, first, first + 200, name="gemm")
        analyses.append(analyse_trace(rank.write(tmp_path / f"{number}.json")))
    assert "Step 1 " in tables.critical_path(analyses).sentence


@pytest.mark.quick
def test_a_cuda_graph_is_one_launch(tmp_path):
    """Three kernels of 2 us on 10 us of device time, of one call of 1 us; they begin 4 us after its end."""
    rank = GpuRank(world_size=1).step(1, 0, 20).kernel(0, 5, 7)
    for start in (9, 13):
        rank.events.append({**rank.events[-1], "ts": start})
    (row,) = rows(tables.launches(rank.write(tmp_path / "t.json")))
    assert (row["launches"], row["queue_most"], row["delay_median_ns"]) == (1, 1, 4000)


@pytest.mark.quick
def test_streams_of_two_devices_have_queues_of_their_own(tmp_path):
    """One process launches a kernel on each device; both begin at once, so each found an empty queue."""
    rank = GpuRank(world_size=1).step(1, 0, 20).kernel(0, 5, 90).kernel(2, 5, 90)
    rank.events[-1] |= {"pid": 1, "args": {**rank.events[-1]["args"], "device": 1}}
    found = {row["stream"]: row["queue_empty"] for row in rows(tables.launches(rank.write(tmp_path / "t.json")))}
    assert found == {"7 of device 0": 1, "7 of device 1": 1}


@pytest.mark.quick
def test_a_host_that_cannot_keep_up(tmp_path):
    rank = GpuRank(world_size=1).step(1, 0, 400)
    for number in range(4):  # each kernel of 0.5 us starts right after its launch
        rank.kernel(100 * number, 100 * number + 2, 100 * number + 2.5)
    table = tables.launches(rank.write(tmp_path / "t.json"))
    (row,) = rows(table)
    assert row["queue_most"] == 1 and row["queue_empty"] == 1 and row["short_kernels"] == 1
    assert "the host sets the pace" in table.sentence


@pytest.mark.quick
def test_cpu_ranks_launch_nothing():
    table = tables.launches(next(DATA.glob("traces/rank0*")))
    assert not table.rows and "no work of a device" in table.sentence


@pytest.mark.quick
def test_a_trace_without_correlations_says_so(tmp_path):
    table = tables.launches(a_step(GpuRank(correlated=False)).write(tmp_path / "t.json"))
    assert not table.rows and "no correlation numbers" in table.sentence


# ---- bandwidth


@pytest.mark.quick
def test_bandwidth_takes_the_rank_that_waited_for_nobody(tmp_path):
    early = GpuRank(0).step(1, 0, 10).kernel(1, 20, 30).nccl("all_gather", 2, 30, 130, elements=2**20)
    late = GpuRank(1).step(1, 0, 10).kernel(1, 20, 90).nccl("all_gather", 2, 90, 130, elements=2**20)
    paths = [each.write(tmp_path / f"{each.rank}.json") for each in (early, late)]
    found = [row for path in paths for row in analyse_trace(path).rows("collectives")]
    table = tables.bandwidths_by_size(found, link_bytes_per_s=100e9)
    (row,) = rows(table)
    assert row["size"] == 2**22 and row["time_ns"] == 40_000 and row["ranks"] == 2
    assert row["busbw"] == pytest.approx(2**22 / 40e-6 / 2) and row["of_link"] == pytest.approx(row["busbw"] / 100e9)
    assert "all_gather of 4.19 MB over 2 ranks, at 52.4 GB/s of bus bandwidth" in table.sentence and not table.notes
    (alone,) = rows(tables.bandwidths_by_size(found[:1]))
    assert alone["time_ns"] == 100_000 and alone["of_link"] is None
    assert "waiting for peers" in tables.bandwidths_by_size(found[:1]).notes[0]


@pytest.mark.quick
def test_sizes_and_process_groups_are_told_apart(tmp_path):
    rank = GpuRank().step(1, 0, 10).kernel(1, 20, 30)
    rank.nccl("all_gather", 2, 30, 40, elements=2**10).nccl("all_gather", 3, 40, 80, elements=2**20)
    rank.nccl("all_reduce", 4, 80, 90, elements=2**20, group="mesh_replicate")
    table = tables.bandwidths_by_size(analyse_trace(rank.write(tmp_path / "t.json")).rows("collectives"))
    assert {(row["kind"], row["group"], row["size"]) for row in rows(table)} == {
        ("all_gather", "default_pg", 2**12), ("all_gather", "default_pg", 2**22),
        ("all_reduce", "mesh_replicate", 2**22),
    }  # fmt: skip


# ---- idle time


@pytest.mark.quick
def test_idle_time_sums_to_what_neither_computed_nor_communicated(tmp_path):
    rank = GpuRank().step(1, 0, 100).kernel(1, 10, 20).kernel(60, 61, 70).nccl("all_gather", 62, 70, 75)
    analysis = analyse_trace(rank.write(tmp_path / "t.json"))
    (row,) = rows(tables.idle_time(analysis.rows("idle"), analysis.rows("breakdown")))
    assert row["idle_ns"] == 76_000 == analysis.rows("breakdown")[0]["other_ns"]
    assert row["host_bound_ns"] == 10_000 + 41_000 + 25_000 and row["share"] == 0.76


# ---- critical path


def two_ranks(tmp_path: Path, slow: int, collective_ends: float = 140) -> list:
    """One rank computes for 80 us, the slow one for 110; both reduce until 140, then 20 us of optimizer."""
    found = []
    for rank in (0, 1):
        computed = 120 if rank == slow else 90
        trace = GpuRank(rank).step(1, 0, 10).kernel(1, 10, computed, name="backward")
        trace.nccl("all_reduce", 2, computed, collective_ends).kernel(3, collective_ends, collective_ends + 20)
        found.append(analyse_trace(trace.write(tmp_path / f"{slow}-{rank}.json")))
    return found


@pytest.mark.quick
@pytest.mark.parametrize("slow", (0, 1))
def test_the_path_goes_through_the_rank_that_arrived_last(tmp_path, slow):
    table = tables.critical_path(two_ranks(tmp_path, slow), in_order=True)
    found = [(row["rank"], row["what"], row["ns"]) for row in rows(table)]
    assert found == [
        (slow, "idle", 10_000), (slow, "compute", 110_000), (0, "all_reduce", 20_000), (0, "compute", 20_000),
    ]  # fmt: skip
    most = 110 if slow else 130  # rank 0 goes on after the collective
    assert f"The largest part is compute on rank {slow}, {most} µs" in table.sentence


@pytest.mark.quick
def test_the_parts_sum_to_the_step_of_a_real_run():
    found = [analyse_trace(path) for path in sorted(DATA.glob("traces/rank*"))]
    table = tables.critical_path(found, in_order=True)
    whole = max(row["step_ns"] for each in found for row in each.rows("breakdown"))
    total = sum(row["ns"] for row in rows(table))
    assert total == pytest.approx(whole, rel=0.05)
    assert sum(row["ns"] for row in rows(tables.critical_path(found))) == total
    assert all(a["start_ns"] + a["ns"] == b["start_ns"] for a, b in zip(table.rows, table.rows[1:]))


@pytest.mark.quick
def test_gaps_are_part_of_the_path(tmp_path):
    rank = GpuRank(world_size=1).step(1, 0, 100).kernel(1, 10, 20).kernel(60, 61, 70)
    found = rows(tables.critical_path([analyse_trace(rank.write(tmp_path / "t.json"))], in_order=True))
    assert [(row["what"], row["ns"]) for row in found] == [
        ("idle", 10_000), ("compute", 10_000), ("idle", 41_000), ("compute", 9_000), ("idle", 30_000),
    ]  # fmt: skip


@pytest.mark.quick
def test_computing_on_the_path_is_what_the_breakdown_calls_computing(tmp_path):
    """400 kernels of 5 us, 10 us apart: the timeline joins them to one row, and yet half of the step is idle."""
    rank = GpuRank(world_size=1).step(1, 0, 10)
    for number in range(400):
        rank.kernel(1, 100 + 10 * number, 105 + 10 * number)
    found = analyse_trace(rank.write(tmp_path / "t.json"))
    assert sum(row["lane"] == "compute" for row in found.steps[0].timeline) == 1
    path = {row["what"]: row["ns"] for row in rows(tables.critical_path([found]))}
    (breakdown,) = found.rows("breakdown")
    assert path == {"compute": 2_000_000, "idle": 100_000 + 1_995_000}
    assert path == {"compute": breakdown["compute_ns"], "idle": breakdown["other_ns"]}


@pytest.mark.quick
def test_the_path_begins_with_the_first_rank_s_work(tmp_path):
    """Rank 1 begins 500 us after rank 0, which waits for it in the collective: the step is 770 us long, not 270."""
    found = []
    for rank, late in ((0, 0), (1, 500)):
        trace = GpuRank(rank).step(1, late, 760).kernel(1 + late, 10 + late, 110 + late)
        trace.nccl("all_reduce", 2 + late, 110 + late, 750).kernel(3 + late, 750, 770)
        found.append(analyse_trace(trace.write(tmp_path / f"{rank}.json")))
    table = tables.critical_path(found, in_order=True)
    assert [(row["rank"], row["what"], row["ns"]) for row in rows(table)] == [
        (1, "before its step", 500_000),
        (1, "idle", 10_000),
        (1, "compute", 100_000),
        (0, "all_reduce", 140_000),
        (0, "compute", 20_000),
    ]
    assert table.sentence.startswith("Step 1 lasts 770 µs from the first rank's start to the last rank's end: 500 µs")


@pytest.mark.quick
def test_clocks_that_disagree_are_refused(tmp_path):
    found = two_ranks(tmp_path, 1)
    apart = GpuRank(1).step(1, 9000, 9010).kernel(9001, 9010, 9120).nccl("all_reduce", 9002, 9120, 9140)
    found[1] = analyse_trace(apart.write(tmp_path / "apart.json"))
    with pytest.raises(TraceError, match="clocks disagree: all_reduce ended on one rank 8.98 ms before rank 1"):
        tables.critical_path(found)


@pytest.mark.quick
def test_a_step_that_no_trace_has_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"no trace has step 7; expected one of 1\."):
        tables.critical_path(two_ranks(tmp_path, 0), step=7)


# ---- difference


@pytest.mark.quick
def test_differences_sum_to_the_difference_of_the_whole(tmp_path):
    first = GpuRank(world_size=1).step(1, 0, 10).kernel(1, 10, 40, name="gemm").kernel(2, 40, 50, name="add")
    second = GpuRank(world_size=1).step(1, 0, 10).kernel(1, 10, 30, name="gemm").kernel(2, 40, 75, name="softmax")
    paths = [each.write(tmp_path / f"{at}.json") for at, each in enumerate((first, second))]
    table = tables.difference(*paths)
    assert [(row["name"], row["difference_ns"]) for row in rows(table)] == [
        ("softmax", 35_000),
        ("gemm", -10_000),
        ("add", -10_000),
    ]
    assert table.sentence == (
        "The second is 15.0 µs a step longer in operators and kernels;"
        " softmax makes the largest difference, 35.0 µs more, which the first does not have."
    )  # fmt: skip
    assert [row["state"] for row in table.rows] == ["new", "both", "gone"]
    assert "the same time" in tables.difference(paths[0], paths[0]).sentence


def linear(rank: GpuRank, at: float, rows: int, launched: float, start: float, end: float) -> GpuRank:
    """`aten::addmm` of `rows` x 64 by 64 x 32, and the kernel that it launches."""
    rank.operator("aten::addmm", at, at + 5)
    rank.events[-1]["args"] = {
        "Input Dims": [[32], [rows, 64], [64, 32], [], []],
        "Input type": ["float"] * 3 + ["Scalar"] * 2,
    }
    return rank.kernel(launched, start, end, name="sgemm")


@pytest.mark.quick
def test_a_kernel_has_the_shapes_of_the_operator_that_launched_it(tmp_path):
    first = linear(linear(GpuRank(world_size=1).step(1, 0, 100), 1, 8, 2, 10, 30), 40, 16, 41, 50, 60)
    second = linear(GpuRank(world_size=1).step(1, 0, 100), 1, 8, 2, 10, 25)
    paths = [each.write(tmp_path / f"{at}.json") for at, each in enumerate((first, second))]
    found = {row["shapes"]: row for row in rows(tables.difference(*paths, by_shape=True)) if row["kind"] == "kernel"}
    assert {shape: (row["difference_ns"], row["state"]) for shape, row in found.items()} == {
        "32, 8x64, 64x32": (-5_000, "both"), "32, 16x64, 64x32": (-10_000, "gone"),
    }  # fmt: skip


@pytest.mark.quick
def test_achieved_rates_beside_the_peak(tmp_path):
    """8 x 64 by 64 x 32 are 32,768 operations; in 20 us 1.64e9 a second. Their tensors are 10,368 bytes."""
    peak = tables.DevicePeak({"fp32": 1e10, "bf16": 1e12}, 1e9, "a data sheet")
    rank = linear(GpuRank(world_size=1).step(1, 0, 100).range("FSDP::pre_forward (a)", 0, 1), 1, 8, 2, 10, 30)
    work = work_of(read_events(rank.write(tmp_path / "t.json"), shapes=True))
    table = tables.achieved(work, peak)
    (row,) = rows(table)
    assert (row["unit"], row["flops"], row["time_ns"]) == ("a", 2 * 8 * 64 * 32, 20_000)
    assert row["flops_per_s"] == pytest.approx(1.6384e9) and row["of_flops"] == pytest.approx(0.16384)
    assert row["bytes_per_s"] == pytest.approx(4 * (32 + 8 * 64 + 64 * 32) / 20e-6)
    assert (
        "fastest is a with 1.64 GFLOP/s, 16% of the device's peak." in table.sentence
        and "a data sheet" in table.notes[0]
    )
    without = tables.achieved(work_of(read_events(tmp_path / "t.json")))
    assert "record_shapes=True" in without.sentence and rows(without)[0]["flops_per_s"] is None


@pytest.mark.quick
@pytest.mark.parametrize("name, given, flops", [
    ("aten::mm", "[[[4, 8], [8, 2]], []]", 128), ("aten::bmm", "[[[3, 4, 8], [3, 8, 2]], []]", 384),
    ("aten::addmm", "[[[2], [4, 8], [8, 2]], []]", 128), ("aten::relu", "[[[4, 8]], []]", 0),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "[[[1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8]], []]", 1024),
    ("aten::mm", "", 0), ("aten::mm", "[[], []]", 0), ("aten::mm", '[["x"], []]', 0), ("aten::mm", "[null]", 0),
])  # fmt: skip
def test_operations_of_a_call(name, given, flops):
    assert flops_of(name, given) == flops


def test_operations_are_those_that_torch_counts(tmp_path):
    """A step of gpt-tiny under the profiler, and under torch's own counter."""
    model, tokens = build_model("gpt-tiny", seed=0), torch.zeros(2, 16, dtype=torch.long)

    def train() -> None:
        loss_of(model, tokens, tokens).backward()

    with FlopCounterMode(display=False) as counted:
        train()
    with torch.profiler.profile(record_shapes=True) as profile:
        train()
    profile.export_chrome_trace(str(tmp_path / "t.json"))
    table = tables.achieved(work_of(read_events(tmp_path / "t.json", shapes=True)))
    heads = [(2, 4, 16, 16)] * 3  # torch counts the CPU's attention not at all, so its formula is asked
    attention = 2 * (sdpa_flop_count(*heads) + sdpa_backward_flop_count(heads[0], *heads))
    assert sum(row["flops"] or 0 for row in table.rows) == counted.get_total_flops() + attention


def units_of(rank: GpuRank, times: dict[str, float]) -> GpuRank:
    """A kernel of so many us in each unit, behind each other."""
    at = 100.0
    for number, (unit, lasts) in enumerate(times.items()):
        host = 10 * number
        rank.range(f"FSDP::pre_forward ({unit})", host, host + 1).kernel(host + 2, at, at + lasts)
        rank.range(f"FSDP::post_forward ({unit})", host + 3, host + 4)
        at += lasts
    return rank


@pytest.mark.quick
def test_the_difference_of_two_traces_by_unit(tmp_path):
    sides = ({"blocks.0": 100, "blocks.1": 50, "old": 7}, {"blocks.0": 105, "blocks.1": 90, "new": 7})
    paths = [
        units_of(GpuRank(world_size=1).step(1, 0, 90), each).write(tmp_path / f"{number}.json")
        for number, each in enumerate(sides)
    ]
    table = tables.difference_by_module(*paths)
    assert [(row["unit"], row["kind"], row["difference_ns"], row["state"]) for row in rows(table)] == [
        ("blocks.1", "kernel", 40_000, "both"), ("old", "kernel", -7_000, "gone"), ("new", "kernel", 7_000, "new"),
        ("blocks.0", "kernel", 5_000, "both"),
    ]  # fmt: skip
    assert table.sentence == "blocks.1 differs most: 40.0 µs a step more in its kernels, of 45.0 µs in all."
    assert tables.difference_by_module(paths[0], paths[0]).sentence == "No module takes longer in one of the two."


class Model(torch.nn.Module):
    """Two layers in modules of their own; the second is as wide as it is told."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(64, 64))
        self.second = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _trace_of_width(folder: Path, width: int) -> Path:
    """The trace of two backwards of a model whose second module has this width."""
    model, x = Model(width), torch.randn(256, 64)
    model(x).sum().backward()
    with torch.profiler.profile(record_shapes=True, with_stack=True) as profile:
        for _ in range(2):
            model(x).sum().backward()
    path = folder / f"{width}.json"
    profile.export_chrome_trace(str(path))
    return path


@pytest.mark.quick
def test_the_difference_by_module_of_traces_without_units(tmp_path):
    """The backward of a module is its own; the model around them is no module beside them."""
    for _ in range(3):  # a rank that loses its core in one operator makes that module slower
        paths = [_trace_of_width(tmp_path, width) for width in (64, 2048)]
        by_unit = {row["unit"]: row for row in rows(tables.difference_by_module(*paths))}
        first, second = by_unit["Sequential_0"], by_unit["Sequential_1"]
        if second["difference_ns"] > 10 * abs(first["difference_ns"]):
            break
    assert second["difference_ns"] > 10 * abs(first["difference_ns"]) and second["state"] == "both"
    work = work_of(read_events(paths[1], shapes=True))
    of_products = {
        module
        for module, row in zip(work.modules, work.rows.tolist())
        if work.found.names[int(work.found.name[row])] in ("aten::mm", "aten::addmm")
    }
    assert of_products == {"Sequential_0", "Sequential_1"}, "of forward and backward"


def step_record(tmp_path: Path, computing: list[int], waiting: list[int]) -> RunRecord:
    """A record of one rank with a profiled step for each value, in us."""
    breakdown = [
        {"rank": 0, "step": step, "step_ns": 1000 * (busy + wait), "compute_ns": 1000 * busy,
         "compute_only_ns": 1000 * busy, "overlapped_ns": 0, "exposed_ns": 1000 * wait, "other_ns": 0, "on_link_ns": 0,
         "copying_ns": 0, "waiting_ns": 1000 * wait, "no_core_ns": 0}
        for step, (busy, wait) in enumerate(zip(computing, waiting))
    ]  # fmt: skip
    return RunRecord(tmp_path, {"strategy": "x", "engine": "lab", "world_size": 1}, tables={"breakdown": breakdown})


@pytest.mark.quick
def test_steps_differ_beyond_their_spread_or_not_at_all(tmp_path):
    first = step_record(tmp_path, [100, 110], [10, 40])
    slower = tables.difference_of_steps(first, step_record(tmp_path, [150, 160], [12, 50]))
    found = {row["part"]: row for row in rows(slower)}
    assert (found["compute only"]["difference_ns"], found["compute only"]["beyond"]) == (50_000, "yes")
    assert (found["exposed: waiting"]["difference_ns"], found["exposed: waiting"]["beyond"]) == (6_000, "no")
    assert slower.sentence == (
        "A profiled step of the second is 56.0 µs longer; the part that changes most is compute only, 50.0 µs more."
    )
    same = tables.difference_of_steps(first, step_record(tmp_path, [105, 108], [11, 44]))
    assert same.sentence == "The steps do not differ beyond their spread, and neither does any part of them."
    assert rows(tables.difference_of_steps(first, step_record(tmp_path, [500], [10])))[0]["beyond"] == "one step"


@pytest.mark.quick
def test_loading_data_is_a_row_of_its_own(tmp_path):
    both = [step_record(tmp_path, [100, 100], [0, 0]) for _ in range(2)]
    for record, loading in zip(both, (0.001, 0.004)):
        record.tables["steps"] = [
            {"rank": 0, "step": step, "loss": 1.0, "step_time_s": None, "tokens": 1, "loading_s": loading}
            for step in (0, 1)
        ]
    (loading,) = [row for row in rows(tables.difference_of_steps(*both)) if row["part"] == "loading data"]
    assert loading["difference_ns"] == pytest.approx(3e6) and loading["beyond"] == "yes"
    # a step whose batch was there at once counts in the mean, and what nobody noted is no 0
    both[1].tables["steps"][0]["loading_s"] = 0.0
    (loading,) = [row for row in rows(tables.difference_of_steps(*both)) if row["part"] == "loading data"]
    assert loading["difference_ns"] == pytest.approx(1e6)
    both[0].tables["steps"] = [{**row, "loading_s": None} for row in both[0].tables["steps"]]
    assert "loading data" not in [row["part"] for row in rows(tables.difference_of_steps(*both))]


# ---- the roofline: operators by shape, and copies


def product(rank: GpuRank, at: float, start: float, end: float, dtype: str, kernel: str) -> GpuRank:
    """A product of 64 x 64 by 64 x 64: 524,288 operations; in fp32 32,768 bytes, 16 operations a byte."""
    given = {"Input Dims": [[64, 64], [64, 64]], "Input type": [dtype, dtype]}
    return rank.operator("aten::mm", at, at + 5, **given).kernel(at + 1, start, end, name=kernel)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dtype", "kernel", "number_format", "share"),
    [
        ("float", "ampere_sgemm_128x64_nn", "fp32", 0.524288),
        ("float", "cutlass_80_tensorop_s1688gemm_tf32_128x128", "tf32", 0.0524288),
        ("float", "nvjet_something", "fp32", None),  # its kernel does not tell in which format it multiplies
        ("c10::BFloat16", "nvjet_tst_128x256", "bf16", 0.00524288),
        ("c10::Float8_e4m3fn", "nvjet_qqtst", "fp8", None),  # no such peak is known
    ],
)
def test_a_rate_is_set_beside_the_peak_of_its_number_format(tmp_path, dtype, kernel, number_format, share):
    rank = product(GpuRank(world_size=1).step(1, 0, 100), 10, 50, 60, dtype, kernel)
    work = work_of(read_events(rank.write(tmp_path / "t.json"), shapes=True))
    peak = tables.DevicePeak({"fp32": 1e11, "tf32": 1e12, "bf16": 1e13}, 1e10)
    (row,) = rows(tables.roofline(work, peak))
    assert (row["name"], row["shapes"], row["format"]) == ("aten::mm", "64x64, 64x64", number_format)
    assert row["flops_per_s"] == pytest.approx(524_288 / 10e-6)
    assert row["of_flops"] == (None if share is None else pytest.approx(share))
    (of_unit,) = rows(tables.achieved(work, peak))
    assert of_unit["of_flops"] == row["of_flops"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H200", {"bf16": 989, "fp16": 989, "fp8": 1979, "tf32": 494.5, "fp32": 67, "fp64": 67}),
        ("Tesla T4", {"fp32": 8.1, "fp16": 65}),  # no bf16
        ("NVIDIA A10G", {}),
        ("AMD Instinct MI300X", {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "tf32": 653.7, "fp32": 163.4}),
        ("Some accelerator", {}),
    ],
)
def test_the_peaks_of_a_device_are_its_data_sheets(tmp_path, name, peaks):
    record = RunRecord(tmp_path, {"world_size": 1}, environment={"device": "cuda", "device_name": name})
    assert peak_of(record).flops_per_s == {format_: pytest.approx(tflops * 1e12) for format_, tflops in peaks.items()}


@pytest.mark.quick
def test_operators_by_shape_with_what_limits_them(tmp_path):
    rank = product(GpuRank(world_size=1).step(1, 0, 400), 10, 50, 60, "float", "sgemm")
    product(product(rank, 20, 60, 70, "float", "sgemm"), 30, 70, 90, "c10::BFloat16", "nvjet_tst")
    given = {"Input Dims": [[1000, 1000]], "Input type": ["float"]}
    rank.operator("aten::relu", 40, 45, **given).kernel(41, 100, 200, name="elementwise")
    work = work_of(read_events(rank.write(tmp_path / "t.json"), shapes=True))
    peak = tables.DevicePeak({"fp32": 1e11, "bf16": 1e13}, 1e11)  # 1 and 100 operations a byte
    table = tables.roofline(work, peak)
    relu, *products = rows(table)
    assert (relu["name"], relu["time_ns"], relu["flops_per_s"]) == ("aten::relu", 100_000, None)
    assert relu["bytes_per_s"] == pytest.approx(4e6 / 100e-6) and relu["bound"] == "memory"
    by_format = {row["format"]: row for row in products}
    assert by_format["fp32"]["count"] == 2 and by_format["fp32"]["time_ns"] == 20_000
    assert by_format["fp32"]["intensity"] == pytest.approx(16) and by_format["fp32"]["bound"] == "computing"
    assert by_format["bf16"]["intensity"] == pytest.approx(32) and by_format["bf16"]["bound"] == "memory"
    assert sum(row["share"] for row in rows(table)) == pytest.approx(1)
    assert table.sentence == (
        "aten::relu of 1000x1000 in fp32 takes 71 % of the time of computing (100 µs a step), and is given 40.0 GB/s,"
        " 40 % of the memory's peak."
    )
    assert cells(table)[1][6] == "52.4 GFLOP/s"
    without = tables.roofline(work_of(read_events(tmp_path / "t.json")))
    assert "record_shapes=True" in without.sentence


@pytest.mark.quick
def test_rates_are_in_tflops_where_they_are(tmp_path):
    dims = [[4096, 4096], [4096, 4096]]
    rank = GpuRank(world_size=1).step(1, 0, 100)
    rank.operator("aten::mm", 10, 15, **{"Input Dims": dims, "Input type": ["c10::BFloat16"] * 2})
    rank.kernel(11, 50, 250, name="nvjet_tst")
    work = work_of(read_events(rank.write(tmp_path / "t.json"), shapes=True))
    for table in (tables.achieved(work), tables.roofline(work)):
        assert "687 TFLOP/s" in cells(table)[0], cells(table)


@pytest.mark.quick
def test_copies_by_direction_with_their_bandwidth(tmp_path):
    rank = GpuRank(world_size=1).step(1, 0, 400).kernel(1, 10, 20)
    rank.copy(30, 40, 140, name="Memcpy HtoD (Pageable -> Device)", bytes=400_000)
    rank.copy(50, 140, 150, name="Memcpy HtoD (Pinned -> Device)", bytes=200_000)
    rank.copy(60, 150, 160, name="Memcpy DtoD (Device -> Device)", bytes=10_000_000)
    rank.copy(70, 160, 161, name="Memcpy DtoH (Device -> Pageable)")
    table = tables.copies(work_of(read_events(rank.write(tmp_path / "t.json"))))
    found = {(row["direction"], row["memory"]): row for row in rows(table)}
    assert {key: row["bytes_per_s"] and round(row["bytes_per_s"]) for key, row in found.items()} == {
        ("host to device", "pageable"): 4 * 10**9, ("host to device", "pinned"): 20 * 10**9,
        ("inside the device", ""): 10**12, ("device to host", "pageable"): None,
    }  # fmt: skip
    assert table.sentence == "Most copying is host to device (pageable memory): 100 µs a step at 4.00 GB/s."
    none = tables.copies(work_of(read_events(next(DATA.glob("traces/rank0*")))))
    assert not none.rows and none.sentence == "Nothing was copied in the profiled steps."


@pytest.mark.quick
def test_tables_are_in_the_json(tmp_path, capsys):
    path = a_step(GpuRank(world_size=1)).write(tmp_path / "rank0.json")
    app(["report", str(path), "--tables", "--json", str(tmp_path / "out.json")], standalone_mode=False)
    written = json.loads((tmp_path / "out.json").read_text())
    (of_run,) = written["tables"].values()
    assert of_run["copies"]["rows"][0]["direction"] == "host to device"
    assert of_run["operators"]["sentence"].startswith("gemm takes 60%")
    app(["report", str(path), "--json", str(tmp_path / "without.json")], standalone_mode=False)
    assert "tables" not in json.loads((tmp_path / "without.json").read_text())


# ---- all


def test_a_frame_has_the_columns_of_the_table(tmp_path):
    table = tables.operators(a_step(GpuRank()).write(tmp_path / "t.json"))
    frame = table.frame()
    assert list(frame.columns) == [column.key for column in table.columns] and len(frame) == len(table.rows)


@pytest.mark.quick
def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(TraceError):
        tables.operators(tmp_path / "t.json")


# ---- of a record, in the report and on the page


@pytest.mark.quick
def test_every_table_of_a_record_has_a_sentence_and_the_record_s_steps():
    record = RunRecord.load(DATA)
    found = {table.name: table for table in tables.tables_of_record(record)}
    assert list(found) == ["critical_path", "idle", "bandwidth", "operators", "achieved", "roofline"]
    assert all(rows(table) for table in found.values())
    (step,) = {row["step"] for row in record.table("breakdown")}
    assert found["critical_path"].title == f"Critical path of step {step}"
    link = record.summary.link.bytes_per_s
    best = max(row["busbw"] for row in found["bandwidth"].rows)
    assert 0.5 < best / link <= 1.001, "an emulated link lets nothing pass faster than it is"
    assert {row["unit"] for row in found["operators"].rows} >= {"", "blocks.0"}


@pytest.mark.quick
def test_a_record_of_gpu_traces_has_launches_too(tmp_path):
    paths = [a_step(GpuRank(rank)).write(tmp_path / f"rank{rank}.json") for rank in (0, 1)]
    found = {table.name: rows(table) for table in tables.tables_of_record(record_of_traces(paths))}
    assert list(found) == ["critical_path", "idle", "bandwidth", "operators", "copies", "launches"]
    assert {row["stream"] for row in found["launches"]} == {"7", "20"}


@pytest.mark.quick
def test_the_tables_read_no_trace_a_second_time_that_was_analysed(tmp_path, monkeypatch):
    paths = [a_step(GpuRank(rank)).write(tmp_path / f"rank{rank}.json") for rank in (0, 1)]
    record, analysed = record_of_traces(paths), []
    monkeypatch.setattr(side_by_side, "analyse_trace", lambda path, **options: analysed.append(path))
    assert tables.tables_of_record(record)[1].rows and not analysed


def test_the_traces_of_a_recorded_run_are_read_side_by_side(monkeypatch):
    alone, read = tables.tables_of_record(RunRecord.load(DATA)), side_by_side.read_all
    monkeypatch.setattr(of_record, "read_all", lambda readings: read(readings, processes=2))
    assert tables.tables_of_record(RunRecord.load(DATA)) == alone


def test_the_terminal_and_the_page_show_the_same_cells(capsys):
    app(["report", str(DATA), "--tables"], standalone_mode=False)
    printed = capsys.readouterr().out
    page = str(tabbed("", [RunRecord.load(DATA)], []))
    record = RunRecord.load(DATA)
    for table in tables.tables_of_record(record, peak_of(record)):  # which this machine's calibration may tell
        assert table.title in printed and table.title in page
        assert str(escape(table.sentence)) in page and table.sentence.split(".")[0][:60] in " ".join(printed.split())
        for cell in cells(table)[0]:
            assert cell in printed and str(escape(cell)) in page


def test_the_tables_of_a_record_are_made_once_for_terminal_and_page(tmp_path, monkeypatch, capsys):
    paths = [str(a_step(GpuRank(rank)).write(tmp_path / f"rank{rank}.json")) for rank in (0, 1)]
    made, idle_time = [], of_record.idle_time
    monkeypatch.setattr(of_record, "idle_time", lambda *rows: made.append(1) or idle_time(*rows))
    app(["report", *paths, "--tables", "--html", str(tmp_path / "page.html")], standalone_mode=False)
    assert len(made) == 1 and "Idle time by cause" in capsys.readouterr().out
    assert "Idle time by cause" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_record_without_traces_says_so(tmp_path):
    record = replace(RunRecord.load(DATA), path=tmp_path)
    page = str(tabbed("", [record], []))
    assert "its traces were not kept with it" in page and "was not profiled" not in page
    assert "the run was not profiled" in str(tabbed("", [replace(record, tables={})], []))


@pytest.mark.quick
def test_the_tables_of_traces_know_the_kernels_that_were_said_to_communicate(tmp_path):
    rank = GpuRank(world_size=1).step(1, 0, 10).kernel(1, 100, 200).kernel(2, 200, 500, name="my_dispatch")
    path = rank.write(tmp_path / "rank0.json")
    record = record_of_traces([path], comm_patterns=["my_dispatch=all_to_all"])
    found = {table.name: table for table in tables.tables_of_record(record)}
    assert {row["what"] for row in found["critical_path"].rows} == {"idle", "compute", "all_to_all"}
    assert [row["name"] for row in found["operators"].rows if row["kind"] == "communication"] == ["my_dispatch"]


# ---- convolutions, fp8 products and the kernels of FlashAttention


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "given", "flops"),
    [
        ("aten::cudnn_convolution", [[[32, 64, 56, 56], [64, 64, 3, 3]], None], 2 * 32 * 64 * 64 * 9 * 56 * 56),
        (
            "aten::cudnn_convolution",
            [[[2, 8, 10, 10], [4, 8, 3, 3]], None, ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False"]],
            2 * 2 * 4 * 8 * 9 * 5 * 5,
        ),
        ("aten::convolution", [[[2, 8, 10, 10], [4, 8, 3, 3]], None], 0),  # only chooses who computes
        ("aten::convolution_backward", [[[2, 4, 5, 5], [2, 8, 10, 10], [4, 8, 3, 3]], None], 4 * 2 * 4 * 8 * 9 * 25),
        ("aten::_scaled_mm", [[[16, 8], [8, 4]], None], 2 * 16 * 8 * 4),
        ("aten::_flash_attention_forward", [[[2, 16, 4, 8]] * 3, None], 4 * 2 * 4 * 16 * 16 * 8),
    ],
)  # fmt: skip
def test_operations_that_torchs_flop_counter_knows(name, given, flops):
    assert flops_of(name, json.dumps(given)) == flops


@pytest.mark.quick
def test_where_most_of_the_time_is_not_counted_nothing_is_said_of_all_units(tmp_path):
    """A convolution of 1 ms at 7.4 TFLOP/s beside 4 ms of another kernel."""
    trace = GpuRank(world_size=1).step(1, 0, 9000)
    dims = [[32, 64, 56, 56], [64, 64, 3, 3]]
    trace.operator("aten::cudnn_convolution", 5, 30, **{"Input Dims": dims, "Input type": ["float", "float"]})
    trace.kernel(10, 100, 1100, name="conv").kernel(50, 1100, 5100, name="other")
    table = tables.achieved(work_of(read_events(trace.write(tmp_path / "t.json"), shapes=True)))
    assert "take 20% of the time of computing, and achieve 7.40 TFLOP/s in it" in table.sentence
    assert "all units" not in table.sentence
