"""What opens as one job, and what is refused: folders, files without `distributedInfo`, older profilers, kernels in no
table, runs that are mixed; ranks read side by side.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdplab.cli import main
from fsdplab.figures.plots.stragglers import straggler_map
from fsdplab.profiling import TraceError, analyse_trace, export_perfetto, export_tensorboard
from fsdplab.profiling.traces import side_by_side
from fsdplab.profiling.traces.comm_kernels import CommKernels, comm_pattern
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.profiling.traces.one_job import ranks_by_name, traces_in
from fsdplab.profiling.traces.side_by_side import read_all
from tests.gpu_traces import GpuRank

pytestmark = pytest.mark.quick
SECOND = 10**9


def rank(number=0, steps=(1, 2), **options):
    """100 us of computing and 50 of an exposed all-reduce a step."""
    found = GpuRank(number, **options)
    for index, step in enumerate(steps):
        host, device = 100 * index, 500 + 150 * index
        found.step(step, host, host + 99).kernel(host + 10, device, device + 100)
        found.nccl("all_reduce", host + 20, device + 100, device + 150)
    return found


def without_world(path: Path, content: dict) -> Path:
    content.pop("distributedInfo")
    path.write_text(json.dumps(content))
    return path


def refused(*paths, **options) -> str:
    with pytest.raises(TraceError) as caught:
        record_of_traces(paths, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what opens


def test_a_folder_of_ranks_is_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 0):
        rank(number, world_size=16).write(tmp_path / f"rank{number}.json")
    (tmp_path / "notes.txt").write_text("not a trace")
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "losses.json").write_text("[3.1, 2.9]")
    found = traces_in(tmp_path)
    assert [path.name for path in found] == ["rank0.json", "rank9.json", "rank10.json"]
    record = record_of_traces(found)
    assert sorted({row["rank"] for row in record.table("breakdown")}) == [0, 9, 10]
    (note,) = record.summary.traces.notes
    assert note.startswith("3 of the job's 16 ranks were given")


@pytest.mark.parametrize(
    "names,expected",
    [
        (["rank0.json", "rank1.json"], [0, 1]),
        (["rank-70.Mar_25.2861.pt.trace.json.gz", "rank-71.Mar_25.2861.pt.trace.json.gz"], [70, 71]),
        (["job12_0.json", "job12_1.json"], [0, 1]),
        (["host_4711.json", "host_4712.json"], [None, None]),
        (["a.json", "b.json"], [None, None]),
        (["frank3.json"], [None]),
    ],
)
def test_ranks_by_name(names, expected):
    assert ranks_by_name([Path(name) for name in names]) == expected


def test_files_without_distributed_info(tmp_path):
    """The names tell the ranks; where they do not, an option does; else the question is asked."""
    named = [without_world(tmp_path / f"rank{number}.json", rank().content()) for number in (0, 1)]
    assert {row["rank"] for row in record_of_traces(named).table("breakdown")} == {0, 1}
    unnamed = [without_world(tmp_path / name, rank().content()) for name in ("a.json", "b.json")]
    assert {row["rank"] for row in record_of_traces(unnamed, ranks=[4, 2]).table("breakdown")} == {4, 2}
    assert "both of rank 0" in refused(*unnamed) and "--ranks 0,1,..." in refused(*unnamed)
    assert "1 ranks were given for 2 traces" in refused(*unnamed, ranks=[1])


def test_kineto_of_2021(tmp_path):
    """Categories of another name, correlation numbers as text, no base, no distributedInfo."""
    content = rank().content()
    older = {"kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator", "cpu_op": "Operator"}
    for event in content["traceEvents"]:
        event["cat"] = older[event["cat"]]
        if "correlation" in event["args"]:
            event["args"]["correlation"] = str(event["args"]["correlation"])
    del content["baseTimeNanoseconds"]
    found = analyse_trace(without_world(tmp_path / "worker0.json", content))
    assert found.device == "cuda" and [step.step for step in found.steps] == [1, 2]
    assert [row["exposed_ns"] for row in found.rows("breakdown")] == [50_000, 50_000]


def test_rccls_generic_kernel_is_what_its_call_says(tmp_path):
    trace = GpuRank().step(1, 0, 50).operator("c10d::_reduce_scatter_base_", 8, 15)
    trace.kernel(10, 100, 200, name="ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", stream=20)
    (step,) = analyse_trace(trace.write(tmp_path / "t.json")).steps
    assert [row["kind"] for row in step.collectives] == ["reduce_scatter"]


@pytest.mark.parametrize(
    "name,kind",
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevComm*)", ""),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*, float*)", "all_to_all"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("one_shot_all_reduce_kernel", "all_reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>", "all_reduce"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", None),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", None),
    ],
)
def test_kernels_that_communicate(name, kind):
    assert CommKernels().kind(name) == kind


def test_a_pattern_extends_the_table(tmp_path):
    trace = GpuRank().step(1, 0, 50).kernel(10, 100, 200).kernel(20, 200, 300, name="acme_Exchange_v2<bf16>")
    path = trace.write(tmp_path / "t.json")
    with pytest.raises(TraceError, match="shows no communication"):
        analyse_trace(path)
    (step,) = analyse_trace(path, comm_patterns=["acme_exchange=all_to_all"]).steps
    assert [row["kind"] for row in step.collectives] == ["all_to_all"]
    for wrong, complaint in (("a=gossip", "gossip"), ("(", "no regular expression"), (".*", "every name")):
        with pytest.raises(TraceError, match=complaint):
            comm_pattern(wrong)
    expression, kind = comm_pattern("my_dispatch(?=_v2)")
    assert expression.search("My_Dispatch_v2<bf16>") and not expression.search("my_dispatch_v1")
    assert kind == comm_pattern("my_dispatch")[1], "an equals sign within an expression names no collective"


def test_exports_of_traces(tmp_path):
    """One gzipped, one plain, under names of their own."""
    first, second = rank(0).write(tmp_path / "first.json"), tmp_path / "second.bin"
    second.write_bytes(gzip.compress(json.dumps(rank(1).content()).encode()))
    record = record_of_traces([first, second])
    merged = json.loads(export_perfetto(record, tmp_path / "all.json").read_text())
    assert merged["mergedRanks"] == [0, 1]
    written = sorted(path.name.split(".", 2)[::2] for path in export_tensorboard(record, tmp_path / "tb").iterdir())
    assert written == [["provenance"], ["rank0", "pt.trace.json"], ["rank1", "pt.trace.json.gz"]]


# ---- what is not one job


def test_two_runs_mixed(tmp_path):
    here = rank(0).write(tmp_path / "a.json")
    other_size = rank(1, world_size=4).write(tmp_path / "b.json")
    assert "two runs are mixed" in refused(here, other_size) and "job of 2 ranks" in refused(here, other_size)
    later = rank(1, base=5 * SECOND).write(tmp_path / "c.json")
    assert "begins 5 s after" in refused(here, later)
    other_steps = rank(1, steps=(7, 8)).write(tmp_path / "d.json")
    assert "holds the steps 7 to 8 (2), another rank's trace 1 to 2 (2)" in refused(here, other_steps)
    on_cpu = GpuRank(1).step(1, 0, 99).step(2, 100, 199).operator("aten::mm", 0, 50)
    on_cpu.range("gloo:all_reduce", 60, 90, thread=9)
    assert "e.json of a CPU" in refused(here, on_cpu.write(tmp_path / "e.json"))
    beyond = rank(5).write(tmp_path / "f.json")
    assert "rank 5 of 2" in refused(beyond)


def test_one_rank_twice(tmp_path):
    here = rank(0).write(tmp_path / "a.json")
    assert "both of rank 0" in refused(here, here)


def test_one_rank_cut_short(tmp_path):
    here = rank(0, steps=(1, 2, 3)).write(tmp_path / "a.json")
    found = record_of_traces([here, rank(1, steps=(1, 2)).write(tmp_path / "b.json")])
    assert {(row["rank"], row["step"]) for row in found.table("breakdown")} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert any("rank 1's 1 to 2 (2), another's 1 to 3 (3)" in note for note in found.summary.traces.notes)

    def without_ranges(number, collectives):
        found = GpuRank(number)
        for at in range(collectives):
            found.nccl("all_reduce", 10 * at, 1000 + 10 * at, 1005 + 10 * at)
        return found.write(tmp_path / f"whole{number}.json")

    assert "shows 2 collectives, another rank's trace 9: it was cut short" in refused(
        without_ranges(0, 9), without_ranges(1, 2)
    )


# ---- side by side


def test_ranks_are_read_in_processes_of_their_own_with_the_same_result(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('a file of the reader was imported')")
    monkeypatch.chdir(tmp_path)
    readings = [(rank(number).write(tmp_path / f"rank{number}.json"), {}) for number in (0, 1)]
    told = []
    found = read_all(readings, lambda *one: told.append(one[:2]), processes=2)
    assert found == [analyse_trace(path) for path, _ in readings] and told == [(1, 2), (2, 2)]
    (tmp_path / "rank1.json").write_text("no trace")
    with pytest.raises(TraceError, match="rank1.json is no Chrome trace"):
        read_all(readings, processes=2)


def test_what_still_reads_is_ended_with_the_reading(tmp_path, monkeypatch):
    """A signal, or the first error: a trace of a gigabyte would be read to its end."""
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(side_by_side, "run_of", lambda module: sleeps)
    readers = side_by_side._Readers()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(readers.read, (tmp_path / "rank0.json", {}))
        while not readers._started:
            time.sleep(0.01)
        readers.end()
        with pytest.raises(TraceError, match="rank0.json could not be read: its process ended with status -9"):
            reading.result(30)
    with pytest.raises(TraceError, match="rank1.json was not read"):
        readers.read((tmp_path / "rank1.json", {}))


# ---- the command


def test_the_report_says_what_the_tables_leave_out(tmp_path, capsys):
    """A folder of one rank of two: 70 us of work were launched before the trace, one kernel only an option knows."""
    trace = GpuRank().kernel(None, 0, 70).step(1, 5, 50).kernel(10, 100, 200).kernel(20, 200, 300, name="acme_exchange")
    trace.write(tmp_path / "rank0.json")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--comm-pattern", "acme_exchange=all_to_all"])
    assert not ended.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "note: 1 of the job's 2 ranks were given" in said
    assert "note: rank 0: 0.07 ms of device work (25.9%) belong to no profiled step" in said


@pytest.mark.parametrize(
    "options,complaint",
    [
        (["--ranks", "first"], "--ranks has 'first'; expected whole numbers"),
        (["--ranks", "0,1,2"], "3 ranks were given for 1 traces"),
        (["--comm-pattern", "("], "no regular expression"),
        ([], "shows no communication"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, options, complaint):
    path = GpuRank().step(1, 0, 50).kernel(10, 100, 200).write(tmp_path / "rank0.json")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path), *options])
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and complaint in error and "\n" not in error


def test_a_damaged_trace_in_a_folder_is_not_taken_for_something_else(tmp_path):
    rank(0).write(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").write_text(rank(1).write(tmp_path / "whole.txt").read_text()[:500])
    assert "rank1.json" in refused(*traces_in(tmp_path))


def reported(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return ended.value.code or 0


def test_a_folder_without_traces_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert reported(tmp_path) == 2
    assert "no run.json, so it is no run record, and no trace (.json, .json.gz)." in capsys.readouterr().err


def test_a_page_on_one_rank_of_several_says_so_wherever_it_matters(tmp_path, capsys):
    """What one rank waits for cannot be told from what it sends."""
    path, page = rank(0, world_size=8).write(tmp_path / "rank0.json"), tmp_path / "page.html"
    assert reported(path, "--html", page) == 0
    shown = page.read_text().replace("\\u003cbr\\u003e", " ")
    assert ">1 of 8 GPU ranks<" in shown and ">8 ranks<" not in shown
    assert "of it on the link or waiting for ranks whose traces were not given" in shown
    assert "no collective of two ranks to compare; give the traces of two ranks or more" in shown
    assert "Difference to" not in shown


def test_a_report_without_findings_says_that_there_are_none(tmp_path, capsys):
    trace = GpuRank(world_size=1).step(1, 0, 50).kernel(10, 12, 1000)
    assert reported(trace.write(tmp_path / "rank0.json")) == 0
    assert "nothing stands out in the profiled steps" in capsys.readouterr().out


def test_a_page_on_a_rank_that_sends_nothing_does_not_ask_for_a_profile(tmp_path, capsys):
    trace, page = GpuRank(world_size=1).step(1, 0, 50).kernel(10, 100, 1000), tmp_path / "page.html"
    assert reported(trace.write(tmp_path / "rank0.json"), "--html", page) == 0
    assert "has no exposed table to draw; its profiled steps show no communication" in page.read_text()


def test_backward_of_older_versions_is_told_by_its_nodes(tmp_path):
    """PyTorch 1.9 writes a node of autograd under its own name alone."""
    rank = GpuRank(world_size=1).step(1, 0, 100).operator("aten::mm", 5, 20).kernel(10, 100, 200)
    rank.operator("MmBackward0", 40, 60, thread=4300).kernel(50, 200, 300, thread=4300)
    (step,) = analyse_trace(rank.write(tmp_path / "t.json")).steps
    assert [row["phase"] for row in step.timeline if row["lane"] == "compute"] == ["forward", "backward"]


def test_long_names_of_units_are_cut_in_the_straggler_map(tmp_path):
    files = []
    for number in (0, 1):
        trace = GpuRank(number).step(1, 0, 400)
        for layer in range(4):
            unit, at = f"model.module.transformer.layers.{layer}.feed_forward_with_a_long_name", 100 * layer
            trace.range(f"FSDP::all_gather ({unit})", at + 1, at + 20).nccl("all_gather", at + 5, at + 500, at + 520)
        files.append(trace.kernel(390, 1000, 1100).write(tmp_path / f"rank{number}.json"))
    names = straggler_map(record_of_traces(files)).data[0].x
    assert [name.split()[1] for name in names] == [f"….{layer}.feed_forward_with_a…" for layer in range(4)]


def test_two_processes_in_one_file_are_refused(tmp_path):
    """Their correlation numbers are the same, so work would be said to be of the other's steps."""
    content, other = (GpuRank(rank).step(5, 0, 50).kernel(10, 100, 300).content() for rank in (0, 1))
    content["traceEvents"] += [{**each, "pid": each["pid"] + 1} for each in other["traceEvents"]]
    path = tmp_path / "both.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TraceError, match=r"steps of 2 processes \(4242, 4243\); expected one rank's"):
        record_of_traces([path])


def test_traces_without_steps_count_as_one_and_every_report_says_so(tmp_path):
    def rank(number):
        return GpuRank(number).nccl("all_gather", 8, 100, 200).kernel(10, 150, 300)

    paths = [rank(number).write(tmp_path / f"rank{number}.json") for number in (0, 1)]
    notes = record_of_traces(paths).summary.traces.notes
    assert len(notes) == 1 and notes[0].startswith("every rank: the trace has no ProfilerStep ranges, so all of it")
    stepped = [rank(number).step(1, 0, 50).write(tmp_path / f"rank{number}.json") for number in (0, 1)]
    assert record_of_traces(stepped).summary.traces.notes == ()


def test_a_sign_that_looks_like_a_number_is_text_in_a_name(tmp_path):
    """`"²".isdigit()` is true, and it is no whole number of Python's."""
    for name in ("10²1.json", "9²1.json"):
        rank(0).write(tmp_path / name)
    assert [path.name for path in traces_in(tmp_path)] == ["9²1.json", "10²1.json"]


def test_a_trace_that_is_a_list_of_events_is_found_in_its_folder(tmp_path):
    events = GpuRank(world_size=1).step(1, 0, 50).kernel(10, 100, 300).content()["traceEvents"]
    (tmp_path / "rank0.json").write_text(json.dumps(events))
    (tmp_path / "settings.json").write_text("[1, 2]")
    assert [path.name for path in traces_in(tmp_path)] == ["rank0.json"]
