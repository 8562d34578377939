"""Traces: tiny hand-written ones for exact arithmetic, broken ones for errors, and real ones of two ranks of every kind
of engine.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdplab.common.collectives import bus_factor, kind_of
from fsdplab.profiling import AccountingError, TraceError, analyse_trace
from fsdplab.profiling.intervals import Cells, clip, close_gaps, length
from fsdplab.profiling.traces.account import PARTS
from fsdplab.profiling.traces.chrome import ChromeTrace, nanoseconds
from fsdplab.profiling.traces.meeting import matched
from fsdplab.profiling.traces.skew import bandwidths, with_peers
from fsdplab.profiling.traces.step_rows import breakdown_of
from fsdplab.records import CAUSES, LANES, TABLES

MAIN, WORKER = 1, 2
ENGINES = ("ddp", "fsdp2", "lab-gloo-full_shard", "lab-gloo-zero1", "lab-shm-full_shard")


def event(name, start, end, tid=MAIN, cat="cpu_op", pid=9, **arguments):
    """One event; times in microseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": end - start,
        "args": arguments,
    }


def mark(name, start, end):
    return event(name, start, end, cat="user_annotation")


def gloo(kind, start, end, numel=0):
    arguments = {"Input Dims": [[numel]], "Input type": ["float"]} if numel else {}
    return event(f"gloo:{kind}", start, end, tid=WORKER, cat="user_annotation", **arguments)


def kernel(name, start, end, correlation, stream=7, **arguments):
    return event(name, start, end, tid=stream, cat="kernel", pid=0, correlation=correlation, **arguments)


def launch(start, correlation):
    return event("cudaLaunchKernel", start, start + 5, cat="cuda_runtime", correlation=correlation)


def write(path, events, world_size=2, rank=0, base=None):
    content = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size}, "traceEvents": events}
    path.write_text(json.dumps(content if base is None else {"baseTimeNanoseconds": base, **content}))
    return path


def analysed(tmp_path, events, **options):
    """The only step of a hand-written trace of 1000 us."""
    (step,) = analyse_trace(write(tmp_path / "trace.json", [mark("ProfilerStep#4", 0, 1000), *events]), **options).steps
    return step


def parts(step):
    """compute only, overlapped, exposed and other, in microseconds."""
    return [step.breakdown[name] / 1000 for name in ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")]


@pytest.mark.quick
def test_the_backward_of_a_closure_is_no_part_of_the_optimizers_step(tmp_path):
    """Lightning gives an optimizer's step a closure, in which forward and backward run: what follows them updates."""
    events = [
        mark("Optimizer.step#AdamW.step", 100, 900), event("aten::mm", 150, 250),
        event("autograd::engine::evaluate_function: MmBackward0", 300, 500), event("aten::mm", 310, 400),
        gloo("all_reduce", 420, 600, 256), event("aten::addcmul_", 700, 800),
    ]  # fmt: skip
    step = analysed(tmp_path, events)
    assert [(row["kind"], row["phase"]) for row in step.collectives] == [("all_reduce", "backward")]
    computed = [(row["start_ns"] // 1000, row["phase"]) for row in step.timeline if row["lane"] == "compute"]
    assert [phase for _, phase in sorted(computed)] == ["forward", "backward", "optimizer"]


# ---- exact arithmetic


@pytest.mark.quick
def test_two_operators_and_a_gather(tmp_path):
    step = analysed(tmp_path, [event("aten::mm", 100, 300), event("aten::mm", 400, 500), gloo("all_gather", 200, 450)])
    assert parts(step) == [150, 150, 100, 600] and step.breakdown["compute_ns"] == 300_000
    assert step.overlap == 0.6 and step.step == 4
    (exposed,) = [row for row in step.timeline if row["lane"] == "exposed"]
    assert (exposed["name"], exposed["start_ns"], exposed["end_ns"]) == ("all_gather", 300_000, 400_000)


@pytest.mark.quick
def test_dispatch_between_operators_computes_on_the_cpu(tmp_path):
    step = analysed(
        tmp_path,
        [
            event("aten::mm", 100, 200),
            event("aten::mm", 219, 300),
            event("aten::mm", 320, 400),
            gloo("all_gather", 0, 1000),
        ],
    )
    assert parts(step) == [0, 280, 720, 0]


@pytest.mark.quick
def test_what_waits_or_only_encloses_is_no_computing(tmp_path):
    unmarked = (
        "autograd::engine::evaluate_function: A",
        "c10d::_allgather_base_",
        "torch::autograd::AccumulateGrad",
        "Optimizer.step#SGD.step",
    )
    step = analysed(tmp_path, [*(event(name, 100, 300) for name in unmarked), gloo("all_gather", 200, 250)])
    assert parts(step) == [0, 0, 50, 950]


@pytest.mark.quick
def test_an_operator_inside_a_c10d_call_does_not_compute(tmp_path):
    step = analysed(
        tmp_path, [event("c10d::allreduce_", 100, 300), event("aten::empty", 100, 110), gloo("all_reduce", 150, 250)]
    )
    assert parts(step) == [0, 0, 100, 900]


@pytest.mark.quick
def test_copies_in_a_marked_range_are_communication(tmp_path):
    """On the same thread no instant is in both; on another thread computing and communicating overlap."""
    marked = [mark("FSDP::all_gather_copy_out (a)", 300, 500), event("aten::copy_", 300, 500)]
    assert parts(analysed(tmp_path, marked)) == [0, 0, 200, 800]
    assert parts(analysed(tmp_path, [*marked, event("aten::mm", 400, 600, tid=3)])) == [100, 100, 100, 700]


@pytest.mark.quick
def test_operators_of_gloos_threads_do_not_compute(tmp_path):
    busy = [event("aten::mm", 0, 10), event("aten::mm", 10, 20)]
    step = analysed(tmp_path, [*busy, gloo("all_gather", 100, 300), event("aten::copy_", 150, 250, tid=WORKER)])
    assert parts(step) == [20, 0, 200, 780]


@pytest.mark.quick
def test_nccl_kernels_belong_to_the_unit_that_launched_them(tmp_path):
    name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        mark("FSDP::pre_forward (blocks.0)", 40, 70), mark("FSDP::all_gather (blocks.0)", 45, 60), launch(50, 3),
        launch(80, 1), launch(90, 2), launch(96, 4),
        mark("FSDP::post_forward (blocks.0)", 95, 99), event("aten::mm", 80, 95),
        kernel(name, 200, 500, 3, stream=20, **{"In msg nelems": 512, "Out msg nelems": 1024, "dtype": "Float"}),
        kernel("sm90_gemm", 100, 300, 1), kernel("sm90_gemm", 500, 700, 2),
        event("Memcpy HtoD", 700, 900, cat="gpu_memcpy", pid=0, tid=7, correlation=4),
        event("cudaDeviceSynchronize", 800, 950, cat="cuda_runtime"),
    ]  # fmt: skip
    step = analysed(tmp_path, events)
    assert parts(step) == [300, 100, 200, 400]  # the step is its range, 0 to 1000 us: its device work ends before
    (collective,) = step.collectives
    assert (collective["unit"], collective["phase"], collective["kind"], collective["logical_bytes"]) == (
        "blocks.0",
        "forward",
        "all_gather",
        4096,
    )
    assert {(row["unit"], row["start_ns"]) for row in step.timeline if row["lane"] == "compute"} == {
        ("blocks.0", 100_000),
        ("blocks.0", 500_000),
    }
    assert [row["end_ns"] for row in step.timeline if row["lane"] == "waiting"] == [950_000]


@pytest.mark.quick
@pytest.mark.parametrize(
    "name,kind",
    [
        ("c10d::_allgather_base_", "all_gather"), ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("gloo:all_reduce", "all_reduce"), ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("c10d::barrier", "barrier"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "send_recv"), ("_c10d_functional::wait_tensor", ""),
    ],
)  # fmt: skip
def test_kinds(name, kind):
    assert kind_of(name) == kind


@pytest.mark.quick
def test_without_step_ranges_the_whole_trace_is_one_step(tmp_path):
    trace = write(tmp_path / "t.json", [event("aten::mm", 100, 300), gloo("all_reduce", 300, 400)], base=10**18)
    (step,) = analyse_trace(trace, first_step=7).steps
    assert step.step == 7 and parts(step) == [200, 0, 100, 0]
    assert step.timeline[0]["start_ns"] == 10**18 + 100_000
    both = write(
        tmp_path / "b.json", [mark("ProfilerStep#1", 0, 50), mark("ProfilerStep#2", 50, 90), gloo("all_reduce", 20, 60)]
    )
    assert [parts(step)[2] for step in analyse_trace(both).steps] == [30, 10]
    assert [step.step for step in analyse_trace(both, first_step=5).steps] == [5, 6]
    assert parts(analyse_trace(both, whole=True).steps[0]) == [0, 0, 40, 50]


@pytest.mark.quick
def test_a_step_that_does_not_add_up_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Cells, "sums", lambda *arguments: np.zeros(arguments[2], dtype=np.int64))
    with pytest.raises(AccountingError, match="step 4 does not add up"):
        analysed(tmp_path, [event("aten::mm", 100, 300)])


@pytest.mark.quick
def test_the_breakdown_is_sums_of_the_parts():
    sums = dict.fromkeys(PARTS, 0) | {"compute_only_ns": 10, "overlapped_ns": 6, "on_link_ns": 2, "packing_ns": 1}
    found = breakdown_of(sums | {"idle rest_ns": 1})
    assert (found["step_ns"], found["compute_ns"], found["exposed_ns"], found["other_ns"]) == (20, 16, 3, 1)
    assert (found["on_link_ns"], found["copying_ns"], found["waiting_ns"]) == (2, 1, 0)


# ---- causes


def fsdp_gather(unit, at, arrived, consumer=None, prefetched_by=None, until=None):
    """A gather issued at `at`: by its consumer, or in another unit's range."""
    inside = consumer or prefetched_by
    return [
        mark(f"FSDP::pre_forward ({inside})", at - 2, until or arrived + 20),
        mark(f"FSDP::all_gather ({unit})", at, at + 4),
        event("c10d::_allgather_base_", at + 1, at + 3), gloo("all_gather", at + 5, arrived, numel=256),
    ]  # fmt: skip


def cause(step, unit="b", kind="all_gather"):
    (row,) = [row for row in step.exposed if row["unit"] == unit and row["kind"] == kind]
    return row["cause"]


BEFORE = [event("aten::mm", 10, 200)]


@pytest.mark.quick
def test_causes_of_gathers(tmp_path):
    assert cause(analysed(tmp_path, [*BEFORE, *fsdp_gather("b", 210, 400, consumer="b")])) == "late_start"
    assert (
        cause(analysed(tmp_path, [*BEFORE, *fsdp_gather("b", 210, 400, prefetched_by="a")])) == "nothing_to_hide_behind"
    )
    # the first: nothing came before it
    assert cause(analysed(tmp_path, fsdp_gather("b", 10, 200, consumer="b"))) == "nothing_to_hide_behind"
    covered = [event("aten::mm", 100, 900), *fsdp_gather("b", 210, 400, prefetched_by="a")]
    assert cause(analysed(tmp_path, [*covered, event("aten::mm", 0, 990, tid=3)])) == "hidden"
    assert cause(analysed(tmp_path, [*BEFORE, gloo("all_gather", 300, 400)]), unit="") == "unknown"


@pytest.mark.quick
def test_a_call_that_holds_the_host_is_late(tmp_path):
    held = [
        mark("FSDP::post_backward_reduce (b)", 300, 500),
        event("c10d::_reduce_scatter_base_", 305, 310),
        gloo("all_reduce", 310, 495),
    ]
    backward = [event("autograd::engine::evaluate_function: A", 100, 900), event("aten::mm", 110, 290)]
    assert (
        cause(analysed(tmp_path, [*backward, *held, event("aten::mm", 600, 800)]), kind="reduce_scatter")
        == "late_start"
    )
    assert cause(analysed(tmp_path, [*backward, *held]), kind="reduce_scatter") == "nothing_to_hide_behind"


def call(name, start, end, *dims):
    return event(f"c10d::{name}_", start, end, **{"Input Dims": list(dims), "Input type": ["float"] * len(dims)})


@pytest.mark.quick
def test_a_sum_over_replicas_inside_the_range_of_a_reduction_has_its_own_exposed_time(tmp_path):
    """FSDP2 reduces among the shards and then sums over the replicas in one range: the slow sum is exposed."""
    hybrid = [
        mark("FSDP::post_backward_reduce (b)", 300, 950),
        call("_reduce_scatter_base", 305, 310, [128], [256]),
        gloo("all_reduce", 310, 400, numel=256),
        call("allreduce", 410, 415, [[128]]),
        gloo("all_reduce", 420, 940, numel=128),
    ]
    step = analysed(tmp_path, [*BEFORE, *hybrid])
    exposed = {row["kind"]: (row["exposed_ns"], row["on_link_ns"]) for row in step.exposed}
    assert exposed == {"reduce_scatter": (110_000, 90_000), "all_reduce": (540_000, 520_000)}


@pytest.mark.quick
def test_transfers_of_two_groups_that_begin_in_another_order_than_issued(tmp_path):
    """The sum over the replicas is issued first and begins last: each call has the transfer of its size."""
    hybrid = [
        mark("FSDP::all_reduce (a)", 210, 220),
        call("allreduce", 212, 216, [[128]]),
        mark("FSDP::post_backward_reduce (b)", 230, 240),
        call("_reduce_scatter_base", 232, 236, [256], [512]),
        gloo("all_reduce", 240, 300, numel=512),
        gloo("all_reduce", 260, 900, numel=128),
    ]
    step = analysed(tmp_path, [*BEFORE, *hybrid])
    ends = {(row["unit"], row["kind"]): row["end_ns"] // 1000 for row in step.collectives}
    assert ends == {("a", "all_reduce"): 900, ("b", "reduce_scatter"): 300}


@pytest.mark.quick
def test_the_kind_of_a_transfer_tells_its_call_where_the_call_tells_no_sizes(tmp_path):
    """The lab's reduce_scatter over gloo is an all_to_all, and its call was given views without elements."""
    hybrid = [
        mark("FSDP::all_reduce (a)", 210, 220),
        call("allreduce", 212, 216, [[256]]),
        mark("FSDP::post_backward_reduce (b)", 230, 240),
        call("_reduce_scatter_base", 232, 236, [0], [0]),
        gloo("all_to_all", 240, 300, numel=256),
        gloo("all_reduce", 260, 900, numel=256),
    ]
    step = analysed(tmp_path, [*BEFORE, *hybrid])
    ends = {row["unit"]: row["end_ns"] // 1000 for row in step.collectives}
    assert ends == {"a": 900, "b": 300}


@pytest.mark.quick
def test_queueing_behind_another_kernel_is_a_busy_link(tmp_path):
    def reduce(name, issue, start, end, correlation):
        return [launch(issue, correlation), kernel(f"ncclDevKernel_{name}_RING_LL", start, end, correlation, stream=20)]

    first, second = reduce("ReduceScatter", 100, 110, 400, 1), reduce("AllGather", 120, 400, 500, 2)
    step = analysed(tmp_path, [*first, *second, launch(20, 3), kernel("mm", 30, 300, 3)])
    assert cause(step, unit="") == "link_busy"


def ledger(start, end, kind="all_gather", unit="b", rank=0):
    return {
        "rank": rank, "step": 4, "unit": unit, "phase": "forward", "kind": kind, "logical_bytes": 2048,
        "wire_bytes": 1024, "padding_bytes": 0,
        "dtype": "float32", "start_ns": start * 1000, "end_ns": end * 1000, "emulated": True, "waited_ns": 0,
    }  # fmt: skip


@pytest.mark.quick
def test_an_emulated_links_transfers_replace_the_transport(tmp_path):
    events = [
        *BEFORE,
        *fsdp_gather("b", 210, 240, prefetched_by="a"),
        mark("FSDP::link (b)", 260, 520),
        event("aten::mm", 220, 260),
    ]
    step = analysed(tmp_path, events, ledger=[ledger(230, 500), ledger(1, 9, rank=1)])
    (row,) = [row for row in step.timeline if row["name"] == "all_gather" and row["lane"] == "all_gather"]
    assert row["emulated"] and (row["start_ns"], row["end_ns"]) == (230_000, 500_000)
    assert parts(step)[1:3] == [30, 4 + 260] and cause(step) == "nothing_to_hide_behind"
    late_peer = analysed(tmp_path, events, ledger=[ledger(450, 500)])
    assert cause(late_peer) == "waiting_for_peer"
    queued = analysed(tmp_path, events, ledger=[ledger(205, 450, unit="c"), ledger(450, 500)])
    assert cause(queued) == "link_busy"


@pytest.mark.quick
def test_a_link_that_knows_no_units_goes_by_the_order_of_issue(tmp_path):
    events = [*BEFORE, *fsdp_gather("b", 210, 240, prefetched_by="a"), *fsdp_gather("c", 300, 320, prefetched_by="a")]
    step = analysed(tmp_path, events, ledger=[ledger(230, 290, unit=""), ledger(310, 400, unit="")])
    assert [(row["unit"], row["end_ns"]) for row in step.collectives] == [("b", 290_000), ("c", 400_000)]


@pytest.mark.quick
def test_a_collective_that_ends_in_the_next_step_is_one_of_the_step_it_began_in(tmp_path):
    """Gloo's range ends late where its thread lost the core: its bytes were counted in both steps."""
    steps = [mark("ProfilerStep#4", 0, 1000), mark("ProfilerStep#5", 1010, 2000)]
    calls = [event("c10d::allreduce_", start, start + 10) for start in (800, 1800)]
    sent = [gloo("all_reduce", 820, 1100, numel=50), gloo("all_reduce", 1820, 1900, numel=50)]
    first, second = analyse_trace(write(tmp_path / "trace.json", [*steps, *calls, *sent])).steps
    assert [[row["logical_bytes"] for row in step.collectives] for step in (first, second)] == [[200], [200]]
    assert [step.breakdown["exposed_ns"] for step in (first, second)] == [180_000, 90_000 + 80_000]
    peers = [analyse_trace(write(tmp_path / f"rank{rank}.json", [*steps, *calls, *sent], rank=rank)) for rank in (0, 1)]
    met = matched(row for peer in with_peers(peers) for row in peer.rows("collectives"))
    assert [len(members) for members in met.values()] == [2, 2]


@pytest.mark.quick
def test_shared_memory_under_torchs_engines(tmp_path):
    """The main thread copies inside `shm:*`, so nothing of it is computing and nothing can hide it; who sleeps there
    waits for a peer.
    """
    inside = [
        mark("FSDP::all_gather (b)", 300, 500),
        event("c10d::_allgather_base_", 305, 490),
        mark("shm:all_gather", 310, 480),
    ]
    step = analysed(tmp_path, [*BEFORE, *inside, event("aten::copy_", 310, 480)])
    assert parts(step) == [190, 0, 200, 610] and cause(step) == "nothing_to_hide_behind"
    assert cause(analysed(tmp_path, [*BEFORE, *inside, event("aten::copy_", 310, 330)])) == "waiting_for_peer"


@pytest.mark.quick
def test_an_exchange_of_matrices_is_the_optimizers_and_no_reduction_of_before(tmp_path):
    """A reduction over shared memory has no transfer of gloo's, and must not take that of a later all-to-all."""
    step = analysed(
        tmp_path,
        [
            mark("FSDP::post_backward_reduce (b)", 100, 120), mark("FSDP::reduce_scatter (b)", 130, 150),
            mark("Optimizer.step#Muon.step", 500, 900), mark("FSDP::all_to_all (optimizer)", 510, 515),
            gloo("all_to_all", 520, 600), event("aten::mm", 600, 800),
        ],
    )  # fmt: skip
    found = [(row["kind"], row["unit"], row["phase"], row["end_ns"]) for row in step.collectives]
    assert found == [("reduce_scatter", "b", "backward", 150_000), ("all_to_all", "optimizer", "optimizer", 600_000)]
    assert parts(step)[2] == pytest.approx(40 + 85)


@pytest.mark.quick
def test_the_units_life_tells_when_an_unmarked_gather_was_issued(tmp_path):
    life = [{"rank": 0, "step": 4, "unit": "b", "state": "unsharding", "phase": "forward", "time_ns": 210_000}]
    (collective,) = analysed(tmp_path, BEFORE, ledger=[ledger(230, 500)], life=life).collectives
    assert collective["issue_ns"] == 210_000


@pytest.mark.quick
def test_peers_explain_what_one_rank_cannot(tmp_path):
    def rank(number, issued):
        events = [mark("ProfilerStep#4", 0, 1000), *BEFORE, *fsdp_gather("b", issued, 700, prefetched_by="a")]
        return analyse_trace(write(tmp_path / f"{number}.json", events, rank=number))

    early, late = with_peers([rank(0, 210), rank(1, 600)])
    assert cause(early.steps[0]) == "waiting_for_peer" and cause(late.steps[0]) == "nothing_to_hide_behind"


# ---- the same collective on several ranks


@pytest.mark.quick
def test_bandwidths():
    factors = {"all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75, "all_reduce": 1.5, "broadcast": 1}
    assert {kind: bus_factor(kind, 4) for kind in factors} == factors
    assert bandwidths("all_reduce", None, 5, 2) == bandwidths("all_reduce", 8, 0, 2) == (None, None)
    assert bandwidths("all_gather", 8_000_000, 1_000_000, 2) == pytest.approx((8e9, 4e9))


# ---- files that are wrong, or of another time


@pytest.mark.quick
@pytest.mark.parametrize(
    "content,complaint",
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x89PNG\r\n", "no Chrome trace"),
        (b"version https://git-lfs.github.com/spec/v1", "no Chrome trace"),
        (b'{"nodes": [], "schema": "1"}', "without a list `traceEvents`"),
        (b'{"traceEvents": 5}', "without a list `traceEvents`"),
        (b'{"traceEvents": [{"ph": "X", "na', "truncated"),
        (b'{"schemaVersion": 1, "trac', "truncated"),
        (b'{"schemaVersion" 1}', "damaged"),
        (b'{"traceEvents": []}', "no event that took time"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": "soon"}]}',
            "profiler does not write",
        ),
        (b"\x1f\x8b\x08\x00broken", "gzip"),
        (gzip.compress(b'{"traceEvents": [' + b" " * 99_999, mtime=0)[:60], "truncated or damaged gzip"),
        (b'{"mergedRanks": [0, 1], "traceEvents": []}', "merged"),
    ],
)
def test_what_is_no_trace_gets_one_line_and_a_remedy(tmp_path, content, complaint):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(TraceError, match=complaint) as caught:
        analyse_trace(tmp_path / "t.json")
    assert "\n" not in str(caught.value) and (
        "export" in str(caught.value) or "profile" in str(caught.value) or "analyse" in str(caught.value)
    )


@pytest.mark.quick
def test_missing_files_and_folders(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            analyse_trace(path)


@pytest.mark.quick
def test_several_ranks_without_communication_are_an_error_not_a_nan(tmp_path):
    events = [event("aten::mm", 0, 10)]
    with pytest.raises(TraceError, match="rank 0 of 2 and shows no communication"):
        analyse_trace(write(tmp_path / "t.json", events))
    (step,) = analyse_trace(write(tmp_path / "t.json", events, world_size=1)).steps
    assert step.overlap is None and parts(step) == [10, 0, 0, 0]


@pytest.mark.quick
def test_older_files(tmp_path):
    """PyTorch 2.1: absolute whole microseconds, no base, no distributedInfo; and the bare list of
    `torch.autograd.profiler`.
    """
    events = [
        event("aten::mm", 1682725898240951, 1682725898240961),
        gloo("all_reduce", 1682725898240961, 1682725898240966),
    ]
    for content in ({"schemaVersion": 1, "traceEvents": events}, events):
        (tmp_path / "t.json").write_text(json.dumps(content))
        analysis = analyse_trace(tmp_path / "t.json", rank=3)
        assert (analysis.rank, analysis.world_size) == (3, None) and parts(analysis.steps[0]) == [10, 0, 5, 0]
        assert analysis.rows("timeline")[0]["start_ns"] == 1682725898240951_000


@pytest.mark.quick
def test_traces_that_pytorch_2_1_wrote():
    folder = Path(__file__).resolve().parents[1] / "data" / "traces-torch-2.1"
    for rank in (0, 1):
        found = analyse_trace(folder / f"rank{rank}.pt.trace.json.gz")
        assert found.rank == rank and found.world_size == 2
        for row in found.rows("breakdown"):
            parts = row["compute_only_ns"], row["overlapped_ns"], row["exposed_ns"], row["other_ns"]
            assert sum(parts) == row["step_ns"] and all(parts)
        reduced = found.steps[-1].collectives
        assert {row["kind"] for row in reduced} == {"all_reduce"} and len(reduced) >= 2
        assert sum(row["logical_bytes"] for row in reduced) == 4 * 3 * (2 * 256 * 1024 + 1024 + 256), (
            "all gradients, fp32"
        )


@pytest.mark.quick
def test_times_are_exact():
    assert nanoseconds(4441797835578.61) == 4441797835578_610 and nanoseconds(7) == 7000 and nanoseconds(0.001) == 1


def test_reading_takes_little_memory(tmp_path):
    one = json.dumps(event("aten::mm", 1.5, 2.5, **{"Input Dims": [[128, 64], [64, 64]]}))
    with gzip.open(tmp_path / "big.json.gz", "wt") as file:
        file.write('{"traceEvents": [' + ",\n".join([one] * 100_000) + '], "traceName": "big"}')
    trace = ChromeTrace(tmp_path / "big.json.gz")
    tracemalloc.start()
    count = sum(1 for _ in trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 100_000 and trace.metadata == {"traceName": "big"}
    assert peak < 8_000_000 < 100_000 * len(one)


@pytest.mark.quick
@pytest.mark.parametrize("seam", [", ", ",\n  ", ",", ",,", " , "])
def test_events_are_the_same_however_they_are_set(tmp_path, seam):
    """Pieces of the file are decoded together up to what looks like an event's end; some only look like one."""
    nested = {"ph": "M", "args": {"list": [{"ph": "X"}, {"ph": "X"}, {"ph": 1}], "text": '}, {"ph": "X"},\n  {"ph"'}}
    events = [event("aten::mm", at, 1.5) | {"args": {"deep": [nested] * (at % 3)}} for at in range(3_000)]
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [' + seam.join(map(json.dumps, events)) + '], "more": [{"ph": 1}, {"ph": 2}]}')
    trace = ChromeTrace(path)
    assert list(trace) == events and trace.metadata == {"more": [{"ph": 1}, {"ph": 2}]}


# ---- real traces


def profiled_steps(engine: str, folder: str) -> str:
    """Train gpt-tiny for three steps on this rank, two of them profiled; returns the trace's path."""
    from torch import distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    from fsdplab.workloads import build_model, loss_of

    rank = dist.get_rank()
    file = str(Path(folder) / f"rank{rank}.pt.trace.json.gz")
    model = _sharded(engine, build_model("gpt-tiny", seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plan = schedule(wait=0, warmup=1, active=2)
    options = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "record_shapes": True, "schedule": plan}
    with profile(**options, on_trace_ready=lambda profiler: profiler.export_chrome_trace(file)) as profiler:
        for step in range(3):
            tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(10 * step + rank))
            loss_of(model, tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return file


def _sharded(engine: str, model: torch.nn.Module) -> torch.nn.Module:
    if engine == "alone":
        return model
    if engine == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    from fsdplab.engine import shard_model

    _, transport, strategy = engine.split("-")
    return shard_model(model, strategy, transport=transport)


@pytest.fixture(scope="module")
def real(ranks, tmp_path_factory):
    """engine -> the analyses of its two ranks, recorded once."""
    found = {}

    def of(engine: str):
        if engine not in found:
            folder = str(tmp_path_factory.mktemp(engine))
            found[engine] = [analyse_trace(path) for path in ranks(2, profiled_steps, engine, folder)]
        return found[engine]

    return of


@pytest.mark.parametrize("engine", ENGINES)
def test_real_traces_add_up_and_fit_the_record(real, engine):
    for rank, analysis in enumerate(real(engine)):
        assert (analysis.rank, analysis.world_size, analysis.device, len(analysis.steps)) == (rank, 2, "cpu", 2)
        for table in ("breakdown", "timeline", "exposed"):
            rows = analysis.rows(table)
            assert rows and all(row.keys() == TABLES[table].keys() for row in rows)
            assert all(
                type(row[name]) is kind for row in rows for name, kind in TABLES[table].items() if kind in (int, str)
            ), table
        assert {row["lane"] for row in analysis.rows("timeline")} <= set(LANES)
        assert {row["cause"] for row in analysis.rows("exposed")} <= set(CAUSES) - {"unknown"}
        for step in analysis.steps:
            assert 0 < step.breakdown["compute_ns"] < step.breakdown["step_ns"] and len(step.timeline) < 300
            assert sum(row["exposed_ns"] for row in step.exposed) == step.breakdown["exposed_ns"]


def collectives(analysis, kind):
    step, *_ = reversed(analysis.steps)
    return sorted((row["unit"], row["phase"]) for row in step.collectives if row["kind"] == kind)


@pytest.mark.parametrize("engine", ["fsdp2", "lab-gloo-full_shard", "lab-shm-full_shard"])
def test_full_shard_gathers_twice_and_reduces_once_a_unit(real, engine):
    blocks = ("blocks.0", "blocks.1")
    for analysis in real(engine):
        assert collectives(analysis, "all_gather") == sorted(
            [("root", "forward"), *((b, p) for b in blocks for p in ("forward", "backward"))]
        )
        assert collectives(analysis, "reduce_scatter") == [
            *((block, "backward") for block in blocks),
            ("root", "backward"),
        ]
        assert {row["unit"] for row in analysis.rows("timeline") if row["lane"] == "compute"} == {"", "root", *blocks}
        assert {row["phase"] for row in analysis.rows("timeline") if row["lane"] == "compute"} == {
            "forward",
            "backward",
            "optimizer",
        }


def test_ddps_all_reduce_is_of_no_unit_and_in_backward(real):
    for analysis in real("ddp"):
        assert collectives(analysis, "all_reduce") == [("", "backward")]


def test_bytes_agree_with_the_models(real):
    from fsdplab.workloads import build_model

    expected = sum(parameter.nbytes for parameter in build_model("gpt-tiny").parameters())
    step, *_ = reversed(real("ddp")[0].steps)
    assert sum(row["logical_bytes"] for row in step.collectives if row["kind"] == "all_reduce") == expected
    step, *_ = reversed(real("lab-gloo-full_shard")[0].steps)
    reduced = sum(row["logical_bytes"] for row in step.collectives if row["kind"] == "reduce_scatter")
    assert expected <= reduced < 1.02 * expected  # padding
    met = matched(row for analysis in real("lab-gloo-full_shard") for row in analysis.rows("collectives"))
    assert len(met) == 2 * 8 and all({row["rank"] for row in members} == {0, 1} for members in met.values())
    assert all(row["logical_bytes"] > 0 for members in met.values() for row in members)


def test_without_communication_every_operator_computes(ranks, tmp_path):
    """And nothing else but the dispatch between them: nine tenths of a step of gpt-tiny where nothing else runs on the
    machine.
    """
    (path,) = ranks(1, profiled_steps, "alone", str(tmp_path))
    trace = ChromeTrace(path)
    spans = [
        (nanoseconds(each["ts"]), nanoseconds(each["dur"]))
        for each in trace
        if each["ph"] == "X" and each["name"].startswith("aten::")
    ]
    operators = [(start, start + duration) for start, duration in spans]
    for step in analyse_trace(path).steps:
        window = step.timeline[0]["start_ns"] - trace.base_ns, step.timeline[0]["end_ns"] - trace.base_ns
        assert step.overlap is None and not step.exposed and step.breakdown["exposed_ns"] == 0
        assert (
            step.breakdown["compute_ns"]
            == length(clip(close_gaps(operators, 20_000), *window))
            >= length(clip(operators, *window))
            > 0
        )
