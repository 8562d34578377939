"""Steps of GPU ranks: what the host launched in them, on miniature traces whose answers can be checked by eye."""

from __future__ import annotations

import numpy as np
import pytest

from fsdplab.profiling import TraceError, analyse_trace, with_peers
from fsdplab.profiling.intervals import length
from fsdplab.profiling.traces.meeting import matched
from fsdplab.profiling.traces.steps import device_windows, wall_windows
from tests.gpu_traces import BACKWARD, COPY, GpuRank

pytestmark = pytest.mark.quick
PARTS = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")


def analysed(tmp_path, rank, **options):
    return analyse_trace(rank.write(tmp_path / f"rank{rank.rank}.json"), **options)


def parts(step):
    """compute only, overlapped, exposed and other, in microseconds."""
    assert sum(step.breakdown[name] for name in PARTS) == step.breakdown["step_ns"]
    return [step.breakdown[name] / 1000 for name in PARTS]


def window(step):
    (row,) = [row for row in step.timeline if row["lane"] == "step"]
    return row["start_ns"] / 1000, row["end_ns"] / 1000


def idle(step):
    """The causes of idle time that are not 0, in microseconds."""
    found = {name: step.idle[name] / 1000 for name in step.idle if name.endswith("_ns") and step.idle[name]}
    assert sum(found.values()) * 1000 == step.breakdown["other_ns"]
    return found


# ---- steps by launch


def run_ahead():
    """The host launches two steps in 100 us; the device works on them from 500 to 1500 us."""
    return (
        GpuRank()
        .step(5, 0, 50)
        .kernel(10, 500, 700)
        .nccl("all_gather", 20, 650, 800)
        .kernel(30, 800, 1000)
        .step(6, 50, 100)
        .kernel(60, 1000, 1200)
        .nccl("all_gather", 70, 1150, 1300)
        .kernel(80, 1350, 1500)
    )


def test_a_host_that_runs_ahead(tmp_path):
    """In the host's own ranges, 0 to 50 and 50 to 100 us, the device did nothing at all."""
    found = analysed(tmp_path, run_ahead())
    first, second = found.steps
    assert [step.step for step in found.steps] == [5, 6]
    assert window(first) == (0, 1000) and parts(first) == [350, 50, 100, 500], "the device began 500 us after the host"
    assert window(second) == (1000, 1500) and parts(second) == [300, 50, 100, 50]
    assert [step.breakdown["device_busy_ns"] for step in found.steps] == [500_000, 450_000]
    assert first.overlap == pytest.approx(1 / 3) and found.no_step.ns == 0 and found.no_step.sentences() == []


def test_units_and_phases_are_those_of_the_launching_ranges(tmp_path):
    rank = (
        GpuRank()
        .step(1, 0, 100)
        .range("FSDP::pre_forward (blocks.0)", 5, 15)
        .range("FSDP::all_gather (blocks.0)", 6, 12)
        .nccl("all_gather", 8, 200, 300)
        .kernel(20, 300, 400)
        .range("FSDP::post_forward (blocks.0)", 25, 28)
        .range("autograd::engine::evaluate_function: MmBackward0", 30, 60, thread=BACKWARD)
        .range("FSDP::pre_backward (blocks.0)", 31, 40, thread=BACKWARD)
        .range("FSDP::backward_prefetch (blocks.1 for blocks.0)", 32, 39, thread=BACKWARD)
        .range("FSDP::all_gather (blocks.1)", 33, 38, thread=BACKWARD)
        .nccl("all_gather", 35, 400, 450, thread=BACKWARD)
        .kernel(45, 420, 600, thread=BACKWARD)
        .range("FSDP::post_backward_reduce (blocks.0)", 50, 58, thread=BACKWARD)
        .nccl("reduce_scatter", 52, 600, 700, thread=BACKWARD)
        .range("Optimizer.step#AdamW.step", 70, 95)
        .kernel(75, 700, 800)
    )
    (step,) = analysed(tmp_path, rank).steps
    assert [(row["kind"], row["unit"], row["phase"]) for row in step.collectives] == [
        ("all_gather", "blocks.0", "forward"),
        ("all_gather", "blocks.1", "backward"),
        ("reduce_scatter", "blocks.0", "backward"),
    ]
    assert [(row["unit"], row["phase"]) for row in step.timeline if row["lane"] == "compute"] == [
        ("blocks.0", "forward"),
        ("blocks.0", "backward"),
        ("", "optimizer"),
    ]


def test_work_of_no_step_is_reported_and_counts_in_no_step(tmp_path):
    """100 us launched before the trace, 50 us launched between the steps; 300 us belong to steps."""
    rank = (
        GpuRank()
        .kernel(None, 0, 100)
        .step(1, 10, 50)
        .kernel(20, 100, 200)
        .nccl("all_reduce", 30, 200, 250)
        .kernel(55, 250, 300)
        .step(2, 60, 100)
        .kernel(70, 300, 450)
    )
    found = analysed(tmp_path, rank)
    assert [parts(step) for step in found.steps] == [[100, 0, 50, 0], [150, 0, 0, 50]]
    assert (found.no_step.ns, found.no_step.device_ns) == (150_000, 450_000)
    (sentence,) = found.no_step.sentences()
    assert "0.15 ms of device work (33.3%) belong to no profiled step" in sentence


def test_the_first_step_begins_when_older_work_has_ended(tmp_path):
    """Its batch (10 us) is copied at 100 while the device still does 400 us of work launched before the trace."""
    rank = GpuRank(world_size=1).kernel(None, 0, 400).step(1, 10, 50).copy(15, 100, 110, stream=COPY)
    found = analysed(tmp_path, rank.kernel(20, 405, 500).step(2, 50, 90).kernel(60, 500, 600))
    assert [window(step) for step in found.steps] == [(400, 500), (500, 600)]
    assert found.no_step.ns == 400_000  # the copy ran beside older work, and is counted once


def test_work_of_an_unknown_launch_behind_a_step_is_no_older_work(tmp_path):
    """A copy whose launch the trace lacks, after the only step's kernels: the step stays, and the copy is of none."""
    rank = GpuRank(world_size=1).step(1, 0, 1000).kernel(10, 200, 400).copy(None, 500, 510)
    found = analysed(tmp_path, rank)
    assert [window(step) for step in found.steps] == [(0, 1000)]
    assert found.no_step.ns == 10_000


def test_a_step_that_launched_nothing_is_named(tmp_path):
    rank = run_ahead().step(7, 100, 150)
    found = analysed(tmp_path, rank)
    assert [step.step for step in found.steps] == [5, 6]
    assert found.no_step.sentences() == ["no device work was launched in steps 7: left out"]


def test_steps_that_overlap_on_two_streams_are_cut_where_least_is_lost(tmp_path):
    """Step 2's batch is copied (20 us) while step 1 computes its last 100 us: the cut is at step 1's end."""
    rank = (
        GpuRank(world_size=1)
        .step(1, 0, 50)
        .kernel(10, 100, 300)
        .step(2, 50, 90)
        .copy(60, 210, 230, stream=COPY)
        .kernel(70, 310, 400)
    )
    found = analysed(tmp_path, rank)
    assert [window(step) for step in found.steps] == [(0, 300), (300, 400)]
    assert [parts(step) for step in found.steps] == [[200, 0, 0, 100], [90, 0, 0, 10]]
    assert found.no_step.ns == 20_000


def test_a_device_that_waits_for_its_loader_between_two_steps_has_long_steps(tmp_path):
    """The host takes 70 us for each batch, the device works for 30: a step takes 100, not 30."""
    rank = GpuRank(world_size=1)
    for step in range(3):
        at = 100 * step
        rank.step(step, at, at + 100).loader(at, at + 70).kernel(at + 69, at + 70, at + 99).synchronise(
            at + 71, at + 100
        )
    found = analysed(tmp_path, rank)
    assert [window(step) for step in found.steps] == [(0, 100), (100, 200), (200, 300)]
    assert [step.breakdown["device_busy_ns"] for step in found.steps] == [29_000] * 3
    assert [idle(step)["data_loading_ns"] for step in found.steps] == [70, 70, 70]


def test_a_step_without_device_work_is_no_time_of_the_step_before(tmp_path):
    """Steps 2 and 9: one launched nothing, the other was profiled later."""
    rank = GpuRank(world_size=1).step(1, 0, 100).kernel(5, 10, 60).step(2, 100, 900).step(9, 5000, 5100)
    found = analysed(tmp_path, rank.kernel(5010, 5020, 5080))
    assert [(step.step, window(step)) for step in found.steps] == [(1, (0, 100)), (9, (5000, 5100))]
    two = GpuRank(world_size=1).step(1, 0, 100).kernel(5, 10, 60).step(9, 5000, 5100).kernel(5010, 5020, 5080)
    found = analysed(tmp_path, two)
    assert [(step.step, window(step)) for step in found.steps] == [(1, (0, 100)), (9, (5000, 5100))]


def test_random_steps_are_periods_that_touch():
    """Whatever a host and a device do: steps in order, none empty, each until the next one begins."""
    chance = np.random.default_rng(3)
    for _ in range(300):
        edges = np.cumsum(chance.integers(1, 60, size=6))
        steps = [(index, int(begin), int(end)) for index, (begin, end) in enumerate(zip(edges, edges[1:]))]
        device, at = {}, 0
        for index, begin, _ in steps:
            first = max(at, begin) + int(chance.integers(0, 30))
            at = first + int(chance.integers(1, 90))
            device[index] = first, at
        found = wall_windows(device, steps, int(chance.integers(0, 50)))
        assert [each.start for each in found[1:]] == [each.end for each in found[:-1]]
        assert all(each.start < each.end for each in found) and found[-1].end >= at


def test_no_nanosecond_is_in_two_windows_whatever_overlaps():
    """Random steps: windows are in order and disjoint, and each lies inside the reach of its own work."""
    chance = np.random.default_rng(7)
    for _ in range(200):
        own, at = [], 0
        for _ in range(int(chance.integers(2, 6))):
            starts = at + np.cumsum(chance.integers(1, 30, size=int(chance.integers(1, 5))))
            ends = np.minimum(starts + chance.integers(1, 25, size=len(starts)), [*(starts[1:] - 1), 10**6])
            own.append(np.stack([starts, np.maximum(ends, starts + 1)], axis=1))
            at = max(0, int(starts[-1]) - int(chance.integers(0, 60)))
        own.sort(key=lambda each: each[0, 0])
        windows = device_windows([np.array(each) for each in own])
        edges = [edge for each in windows for edge in each]
        assert edges == sorted(edges), (own, windows)
        assert length(windows) == sum(end - start for start, end in windows)


def test_a_trace_without_correlation_falls_back_to_the_hosts_ranges_and_says_so(tmp_path):
    rank = GpuRank(correlated=False).step(1, 0, 400).kernel(10, 100, 300).nccl("all_reduce", 20, 250, 350)
    found = analysed(tmp_path, rank)
    assert [parts(step) for step in found.steps] == [[150, 50, 50, 150]]
    (sentence,) = found.no_step.sentences()
    assert "no correlation numbers" in sentence and "host's ranges" in sentence


def test_without_step_ranges_the_whole_trace_is_one_step(tmp_path):
    rank = GpuRank().operator("aten::mm", 0, 90).kernel(10, 100, 300).nccl("all_reduce", 20, 250, 350)
    (step,) = analysed(tmp_path, rank).steps
    assert window(step) == (0, 350) and parts(step) == [150, 50, 50, 100]


def test_steps_whose_launches_are_not_in_the_trace_are_refused(tmp_path):
    rank = GpuRank().step(1, 0, 10).kernel(500, 600, 700).nccl("all_reduce", 500, 700, 800)
    with pytest.raises(TraceError, match="1 ProfilerStep ranges and device work, but no range launched any of it"):
        analysed(tmp_path, rank)


def test_two_communicators_at_once(tmp_path):
    """A gather and a reduction side by side on two streams: the instant goes to the one that ends first."""
    rank = (
        GpuRank()
        .step(1, 0, 100)
        .kernel(10, 100, 200)
        .nccl("all_gather", 20, 200, 300, stream=20)
        .nccl("reduce_scatter", 30, 250, 400, stream=21)
        .kernel(40, 400, 500)
    )
    (step,) = analysed(tmp_path, rank).steps
    assert parts(step) == [200, 0, 200, 100]
    assert {row["kind"]: row["exposed_ns"] for row in step.collectives} == {
        "all_gather": 100_000,
        "reduce_scatter": 100_000,
    }


def test_a_late_rank_begins_last_in_its_own_step(tmp_path):
    def of(number, late):
        rank = GpuRank(number).step(1, 0, 50).kernel(10, 100, 200 + late)
        rank.nccl("all_reduce", 20, 200 + late, 600)
        return analysed(tmp_path, rank.step(2, 50, 90).kernel(60, 600, 700).nccl("all_reduce", 70, 700, 750))

    both = with_peers([of(0, 0), of(1, 300)])
    met = matched(row for each in both for row in each.rows("collectives"))
    starts = [[row["start_ns"] for row in sorted(members, key=lambda row: row["rank"])] for members in met.values()]
    assert [last - first for first, last in starts] == [300_000, 0]
    waited = [(row["cause"], row["waiting_ns"], row["on_link_ns"]) for row in both[0].rows("collectives")]
    assert waited[0] == ("waiting_for_peer", 300_000, 100_000), "both hosts issued at 20 us, and rank 1 began last"
    assert waited[1][1] == 0


def test_a_collective_queued_long_ago_is_not_behind_one_that_ended_long_ago(tmp_path):
    """The host ran ahead: what passed between issue and start counts only if it ran until this one could begin."""
    rank = (
        GpuRank()
        .step(1, 0, 50)
        .nccl("all_gather", 5, 100, 300)
        .kernel(10, 300, 700)
        .nccl("reduce_scatter", 20, 700, 800)
        .nccl("all_gather", 30, 800, 850)
    )
    (step,) = analysed(tmp_path, rank).steps
    causes = [row["cause"] for row in step.collectives]
    assert causes == ["nothing_to_hide_behind", "nothing_to_hide_behind", "link_busy"]


def test_collectives_of_two_communicators_do_not_queue_behind_each_other(tmp_path):
    """A gather among the shards, issued at 20, begins at 600 because its own stream waited for its input; a sum over
    the replicas ran from 200 to 600 on another communicator.
    """

    def rank(number, ranks):
        return (
            GpuRank(world_size=4)
            .step(1, 0, 100)
            .kernel(10, 100, 200)
            .nccl("all_reduce", 15, 200, 600, stream=21, number="1", ranks=[0, 2], group="mesh_replicate")
            .nccl("all_gather", 20, 600, 700, stream=20, number=number, ranks=ranks, group="mesh_shard")
            .kernel(40, 700, 800)
        )

    (step,) = analysed(tmp_path, rank("2", [0, 1])).steps
    assert [row["cause"] for row in step.collectives] == ["nothing_to_hide_behind", "nothing_to_hide_behind"]
    (step,) = analysed(tmp_path, rank("1", [0, 2])).steps
    assert step.collectives[1]["cause"] == "link_busy", "on one communicator the gather was behind the sum"


def test_a_copy_behind_a_reduction_packs_nothing_for_the_next_micro_batch(tmp_path):
    """In each of two ranges of a unit a copy of 20 us comes before its reduction and one of 40 us behind it."""
    inside = "Memcpy DtoD (Device -> Device)"
    rank = GpuRank().step(1, 0, 1100).kernel(1, 10, 200)
    for at in (20, 1020):
        rank.range("FSDP::post_backward_reduce (a)", at, at + 40).copy(at + 1, at + 180, at + 200, name=inside)
        rank.nccl("reduce_scatter", at + 10, at + 200, at + 300)
        rank.copy(at + 20, at + 300, at + 340, name=inside).kernel(at + 50, at + 340, at + 400)
    (step,) = analysed(tmp_path, rank).steps
    assert [row["packing_ns"] for row in step.collectives] == [20_000, 20_000]


def test_a_collective_is_not_behind_one_that_still_runs(tmp_path):
    """The trace does not tell the groups: the gather waited for the first sum, and runs beside the second."""
    untold = {"group": "", "number": "", "size": 2}
    rank = (
        GpuRank(world_size=4)
        .step(1, 0, 100)
        .kernel(10, 100, 200)
        .nccl("all_reduce", 15, 200, 900, stream=21, **untold)
        .nccl("all_gather", 20, 600, 700, stream=20, **untold)
        .nccl("all_gather", 30, 700, 800, stream=20, **untold)
        .kernel(40, 900, 1000)
    )
    (step,) = analysed(tmp_path, rank).steps
    assert [row["cause"] for row in step.collectives][1:] == ["nothing_to_hide_behind", "link_busy"]


# ---- idle time by cause


def test_a_late_launch_is_the_hosts(tmp_path):
    """The step begins 100 us before its first kernel; the device is done at 200, and the next kernel, launched at 250,
    starts at 255.
    """
    (step,) = analysed(tmp_path, GpuRank(world_size=1).step(1, 0, 300).kernel(10, 100, 200).kernel(250, 255, 400)).steps
    assert idle(step) == {"host_bound_ns": 155}


def test_a_launch_that_takes_long_is_the_hosts(tmp_path):
    """The first launch of a kernel loads its code: called at 190, done at 600, the kernel runs at 610."""
    rank = GpuRank(world_size=1).step(1, 0, 700).kernel(10, 100, 200).kernel(190, 610, 700)
    launch = next(each for each in rank.events if each["ts"] == 190)
    launch["dur"] = 410
    assert idle(analysed(tmp_path, rank).steps[0]) == {"host_bound_ns": 100 + 410}


def test_a_gap_between_queued_kernels_is_the_devices(tmp_path):
    rank = GpuRank(world_size=1).step(1, 0, 50).kernel(10, 100, 200).kernel(20, 203, 300).kernel(30, 350, 400)
    assert idle(analysed(tmp_path, rank).steps[0]) == {"host_bound_ns": 100, "kernel_gap_ns": 3, "rest_ns": 50}


def test_a_slow_loader(tmp_path):
    """Of 300 us between two kernels the host took a batch for 240; 100 us pass before the first and behind the last."""
    rank = GpuRank(world_size=1).step(1, 0, 700).kernel(10, 100, 200).loader(210, 450).kernel(495, 500, 600)
    assert idle(analysed(tmp_path, rank).steps[0]) == {"data_loading_ns": 240, "host_bound_ns": 60 + 200}


def test_a_synchronising_call(tmp_path):
    """The host waits for the device until 203 and launches the next kernel at 240: nothing was queued ahead."""
    rank = GpuRank(world_size=1).step(1, 5, 300).kernel(10, 12, 200).synchronise(20, 203).kernel(240, 245, 300)
    assert idle(analysed(tmp_path, rank).steps[0]) == {"host_bound_ns": 7, "synchronisation_ns": 45}


def test_copies(tmp_path):
    """100 us of copying, 30 of them beside a kernel."""
    rank = (
        GpuRank(world_size=1).step(1, 0, 50).kernel(10, 100, 200).copy(20, 170, 270, stream=COPY).kernel(30, 272, 300)
    )
    assert idle(analysed(tmp_path, rank).steps[0]) == {"host_bound_ns": 100, "copies_ns": 70, "kernel_gap_ns": 2}


def test_on_the_cpu_only_the_loader_is_known(tmp_path):
    rank = (
        GpuRank(world_size=1, backend="gloo")
        .step(1, 0, 500)
        .operator("aten::mm", 0, 200)
        .loader(250, 350)
        .operator("aten::mm", 400, 500)
    )
    (step,) = analysed(tmp_path, rank).steps
    assert idle(step) == {"data_loading_ns": 100, "rest_ns": 100}


# ---- an emulated link


def linked_row(unit, start_us, end_us, kind="all_gather", rank=0):
    return {
        "rank": rank, "step": 5, "unit": unit, "phase": "forward", "kind": kind, "logical_bytes": 4096,
        "start_ns": start_us * 1000, "end_ns": end_us * 1000, "emulated": True,
    }  # fmt: skip


def behind_a_link():
    """Gathers of 10 us each, for which the stream waited 290 us for the link before it started the kernel."""
    return (
        GpuRank()
        .step(5, 0, 1000)
        .range("FSDP::all_gather (a)", 5, 12)
        .range("FSDP::all_gather (b)", 15, 22)
        .nccl("all_gather", 10, 290, 300)
        .nccl("all_gather", 20, 590, 600)
        .kernel(30, 400, 700)
        .kernel(40, 700, 990)
    )


def test_a_gpu_waits_for_an_emulated_link_as_long_as_the_ledger_says(tmp_path):
    """Without the ledger the link's 600 us would be the 20 us of the kernels, and the rest idle."""
    ledger = [linked_row("a", 0, 300), linked_row("b", 300, 600), linked_row("a", 0, 300, rank=1)]
    (bare,), (step,) = (analysed(tmp_path, behind_a_link(), ledger=rows).steps for rows in ([], ledger))
    assert parts(bare)[1:3] == [10, 10]
    assert parts(step) == [390, 200, 400, 10]
    assert [(row["unit"], row["start_ns"], row["end_ns"]) for row in step.collectives] == [
        ("a", 0, 300_000),
        ("b", 300_000, 600_000),
    ]


def test_rows_of_a_link_outside_the_trace_and_without_a_kernel(tmp_path):
    """A row of an earlier step is left out; one without a kernel is still a transfer of its own."""
    ledger = [linked_row("a", -900, -600), linked_row("c", 100, 200, "reduce_scatter")]
    (step,) = analysed(tmp_path, behind_a_link(), ledger=ledger).steps
    assert [(row["unit"], row["kind"]) for row in step.collectives if row["end_ns"] - row["start_ns"] == 100_000] == [
        ("c", "reduce_scatter")
    ]
