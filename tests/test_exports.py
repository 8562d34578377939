"""Exports of a real two-rank gloo run: TensorBoard is started and asked over HTTP, the merged trace is read back,
tables are plain CSV.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from fsdplab.profiling import TraceError, analyse_trace, export_csv, export_perfetto, export_tensorboard, merge_traces
from fsdplab.profiling.intervals import clip, intersect, length, union
from fsdplab.profiling.traces.chrome import ChromeTrace, nanoseconds
from fsdplab.records import RecordError, RunRecord
from tests.test_traces import profiled_steps

STARTUP_LIMIT = 120.0


@pytest.fixture(scope="module")
def record(ranks, tmp_path_factory):
    """A record folder with the traces of a two-rank DDP run on gloo."""
    folder = tmp_path_factory.mktemp("runs") / "no_shard-torch-ddp-2-ranks"
    (folder / "traces").mkdir(parents=True)
    ranks(2, profiled_steps, "ddp", str(folder / "traces"))
    return RunRecord(folder)


@pytest.fixture(scope="module")
def tensorboard(record, tmp_path_factory):
    """Asks a TensorBoard that shows the exported record: `tensorboard("overview", worker="rank0", view="Overview")` is
    decoded JSON.
    """
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch_tb_profiler")
    folder = tmp_path_factory.mktemp("tensorboard")
    export_tensorboard(record, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(folder),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    with (folder / "log").open("w") as log:
        # in a session of its own: the plugin reads traces in processes that outlive a TensorBoard that is killed
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    ask = _asker(f"http://127.0.0.1:{port}/data/plugin/pytorch_profiler", record.path.name)
    try:
        _until_loaded(ask, process, folder / "log")
        yield ask
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _asker(base, run):
    def ask(what, **parameters):
        query = "&".join(f"{name}={value}" for name, value in {"run": run, "span": 1, **parameters}.items())
        with urllib.request.urlopen(f"{base}/{what}?{query}", timeout=30) as reply:
            content = reply.read()
        return json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)

    return ask


def _until_loaded(ask, process, log):
    deadline = time.monotonic() + STARTUP_LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if (state := ask("runs"))["runs"] and not state["loading"]:
                return
        except (urllib.error.URLError, ConnectionError, ValueError):
            pass
        time.sleep(0.5)
    pytest.fail(f"TensorBoard showed no run within {STARTUP_LIMIT:.0f} s: {log.read_text()[-2000:]}")


def test_tensorboard_finds_run_workers_and_views(tensorboard, record):
    assert tensorboard("runs")["runs"] == [record.path.name]
    assert set(tensorboard("views")) >= {"Overview", "Operator", "Trace", "Distributed", "Memory"}
    assert tensorboard("workers", view="Overview") == ["rank0", "rank1"]


def test_tensorboards_overview_shows_the_steps(tensorboard):
    steps = tensorboard("overview", worker="rank0", view="Overview")["steps"]
    assert [row[0] for row in steps["rows"]] == ["1", "2"]


def test_tensorboards_memory_view_has_a_curve(tensorboard):
    curve = tensorboard("memory_curve", worker="rank0", view="Memory")
    assert curve["metadata"]["devices"] == ["CPU"] and max(row[1] for row in curve["rows"]["CPU"]) > 0


def test_tensorboards_communication_is_ours(tensorboard, record):
    """Its communication time equals ours to the microsecond. Its computing does not: it counts every host range,
    autograd's waiting ones too, as computing. Given that reading, our algebra gives its figures; read as DESIGN defines
    computing, less was hidden.
    """
    shown = tensorboard("distributed/overlap", worker="All", view="Distributed")["data"]
    for rank in (0, 1):
        trace = record.path / "traces" / f"rank{rank}.pt.trace.json.gz"
        their_way = _as_tensorboard_counts(trace)
        for step in analyse_trace(trace).steps:
            computing, overlapping, communicating, _ = shown[str(step.step)][f"rank{rank}"]
            assert overlapping + communicating == pytest.approx(
                (step.breakdown["overlapped_ns"] + step.breakdown["exposed_ns"]) / 1000, abs=2
            )
            assert overlapping == pytest.approx(their_way[step.step] / 1000, rel=0.01, abs=20)


def _as_tensorboard_counts(trace):
    """step -> overlapped ns, with every operator and range of autograd on any thread as computing."""
    spans = defaultdict(list)
    steps = {}
    for event in ChromeTrace(trace):
        if event.get("ph") != "X" or event["pid"] == "Spans":
            continue
        span = (nanoseconds(event["ts"]), nanoseconds(event["ts"]) + nanoseconds(event["dur"]))
        if event["name"].startswith("ProfilerStep#"):
            steps[int(event["name"].partition("#")[2])] = span
        elif event["name"].startswith("gloo:"):
            spans["communication"].append(span)
        elif event["cat"] == "cpu_op":
            spans["computing"].append(span)
    both = intersect(union(spans["computing"]), union(spans["communication"]))
    return {number: length(clip(both, *span)) for number, span in steps.items()}


def test_a_merged_trace_keeps_ranks_apart_on_one_clock(record, tmp_path):
    file = export_perfetto(record, tmp_path / "all.json.gz")
    trace = ChromeTrace(file)
    events = list(trace)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0", "rank 1"} <= set(names.values()) and len(names) == len(set(names.values()))
    for rank in (0, 1):
        own = record.path / "traces" / f"rank{rank}.pt.trace.json.gz"
        (step,) = [
            event for event in events if event["name"] == "ProfilerStep#2" and names[event["pid"]] == f"rank {rank}"
        ]
        expected = next(row for row in analyse_trace(own).rows("timeline") if row["name"] == "step 2")
        assert trace.base_ns + nanoseconds(step["ts"]) == expected["start_ns"]
    flows = {(event["pid"], event["id"]) for event in events if event["ph"] in ("s", "f")}
    assert len({flow for _, flow in flows}) == len(flows)
    with pytest.raises(TraceError, match=r"ranks \[0, 1\] merged"):
        analyse_trace(file)


def test_merging_nothing_or_damaged_traces(tmp_path):
    with pytest.raises(ValueError, match="no traces"):
        merge_traces({}, tmp_path / "all.json")
    (tmp_path / "bad.json").write_text('{"traceEvents": [{')
    with pytest.raises(TraceError, match="truncated"):
        merge_traces({0: tmp_path / "bad.json"}, tmp_path / "all.json")


def test_a_record_that_was_not_profiled_says_so(tmp_path):
    for export in (export_tensorboard, export_perfetto):
        with pytest.raises(RecordError, match="not profiled.*--profile"):
            export(RunRecord(tmp_path), tmp_path / "out")


def test_csv_has_every_table_with_rows(tmp_path):
    steps = [{"rank": 0, "step": 1, "loss": 5.5, "step_time_s": None, "tokens": 64}]
    files = export_csv(RunRecord(tmp_path, tables={"steps": steps}), tmp_path / "out")
    assert [file.name for file in files] == ["steps.csv", "provenance.csv"]
    with files[0].open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"rank": "0", "step": "1", "loss": "5.5", "step_time_s": "", "tokens": "64"}
        ]


def test_tensorboard_files_share_one_time(record, tmp_path):
    shutil.copytree(record.path / "traces", tmp_path / "again" / "traces")
    run = export_tensorboard(RunRecord(tmp_path / "again"), tmp_path / "log")
    names = sorted(file.name.split(".") for file in run.glob("*.json.gz"))
    assert [name[0] for name in names] == ["rank0", "rank1"] and len({name[1] for name in names}) == 1


def test_an_export_replaces_its_own_files_and_no_others(tmp_path):
    steps = [{"rank": 0, "step": 0, "loss": 1.5, "step_time_s": 0.1, "tokens": 8, "loading_s": None}]
    record = RunRecord(tmp_path, tables={"steps": steps}, provenance={"step_time_s": "measured"})
    folder = tmp_path / "out"
    assert export_csv(record, folder) == export_csv(record, folder), "its own, again"
    (folder / "steps.csv").write_text("name,steps\nmine,1\n")
    (folder / "provenance.csv").unlink()
    with pytest.raises(RecordError, match=r"steps\.csv exists and is no export of fsdplab, so it is not replaced"):
        export_csv(record, folder)
    assert not (folder / "provenance.csv").exists() and "mine" in (folder / "steps.csv").read_text()


def test_a_merged_trace_and_a_log_folder_replace_no_file_of_others(tmp_path):
    record = RunRecord.load(Path(__file__).resolve().parents[1] / "data" / "traces-08")
    mine = tmp_path / "mine.json"
    mine.write_text('{"my": "notes"}')
    with pytest.raises(RecordError, match=r"mine\.json exists and is no export of fsdplab"):
        export_perfetto(record, mine)
    assert mine.read_text() == '{"my": "notes"}'
    marks = tmp_path / record.path.name / "provenance.txt"
    marks.parent.mkdir()
    marks.write_text("where my data is from\n")
    with pytest.raises(RecordError, match=r"provenance\.txt exists and is no export"):
        export_tensorboard(record, tmp_path)
    assert len(list(marks.parent.iterdir())) == 1
