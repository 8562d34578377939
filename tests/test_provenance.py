"""What is labelled measured, emulated or of a place is what the record or the trace says, on pages and in exports."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab.figures.report.page import comparison_page, tabbed
from fsdplab.figures.view import provenance, views
from fsdplab.profiling.exports import export_csv, export_perfetto, export_tensorboard
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.profiling.traces.overlap import MARK, Origin, origin_of
from fsdplab.records import RunRecord, comparison_json
from fsdplab.records.summary import Card
from fsdplab.sessions import RunSpec, run
from tests.gpu_traces import GpuRank

DATA = Path(__file__).parent.parent / "data" / "traces-08"


@pytest.fixture
def foreign(tmp_path: Path) -> RunRecord:
    """One of eight ranks of somebody's job on GPUs."""
    rank = GpuRank(3, world_size=8).step(1, 0, 10).kernel(1, 10, 40).nccl("all_gather", 2, 40, 60)
    content = rank.content() | {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]}
    (tmp_path / "job").mkdir()
    path = tmp_path / "job" / "rank3.pt.trace.json"
    path.write_text(json.dumps(content))
    return record_of_traces([path])


def body(page: str) -> str:
    """The page without plotly's own script."""
    return page[page.index("<body>") :]


def test_a_trace_says_device_backend_and_ranks_and_what_it_lacks(foreign):
    said = dict(provenance(views([foreign])))
    assert said["measured"] == (
        "step time, exposed time, bytes sent: by PyTorch's profiler on 1 of 8 NVIDIA A100-SXM4-80GB ranks, backend nccl"
    )
    assert said["not in the traces"] == "peak memory, tokens/s, losses"
    assert said["emulated"] == "nothing" and "computed" not in said


def test_a_page_on_a_trace_is_titled_by_it_and_claims_nothing_else(foreign):
    page = body(comparison_page(comparison_json([foreign]), [foreign]))
    assert "<h1>What the traces of rank3 show</h1>" in page
    assert "one machine" not in page and "The peak by category" not in page and "no network" not in page
    assert page.count("Not in these traces") == 2
    assert "1 of 8 NVIDIA A100-SXM4-80GB ranks" in page


def test_runs_of_the_lab_keep_their_title_beside_a_trace(foreign):
    own = RunRecord.load(DATA)
    page = body(comparison_page(comparison_json([own, foreign]), [own, foreign]))
    assert "What each sharding strategy costs" in page and "real processes of one machine" in page
    assert "not in the traces" in page


def test_the_difference_leaves_out_a_failed_run_and_no_run_over_its_card():
    own = RunRecord.load(DATA)
    failed, over = replace(own, status="failed"), replace(own, summary=replace(own.summary, card=Card(1, True)))
    assert "Not compared, since full_shard" in str(tabbed("", [failed, own], []))
    assert "Not compared" not in str(tabbed("", [over, own], []))


@pytest.mark.parametrize(
    "metadata",
    ({}, {"deviceProperties": []}, {"deviceProperties": [None]}, {"deviceProperties": "A100"}, {MARK: 7},
     {"deviceProperties": [{"name": 7}], "distributedInfo": [], "pytorch_version": {}, MARK: {"link": None}}),
)  # fmt: skip
def test_odd_metadata_says_nothing(metadata):
    assert origin_of(metadata, False) == Origin()


def test_a_recorded_trace_alone_says_that_its_link_was_emulated(tmp_path):
    record = run(RunSpec(model="gpt-tiny", steps=1, profile=1, link="400MB/s"), directory=tmp_path / "run")
    alone = record_of_traces(sorted((record.path / "traces").glob("rank*")))
    assert alone.summary.link.name == "400MB/s" and alone.provenance["exposed_s"] == "emulated"
    said = dict(provenance(views([alone])))
    assert "the link (400MB/s)" in said["emulated"] and "PyTorch 2." in said["measured"]


def test_an_older_trace_tells_by_its_waits_for_the_link():
    alone = record_of_traces(sorted((DATA / "traces").glob("rank*")))
    assert alone.summary.link.name == "a link" and alone.provenance["link"] == "emulated"


def test_every_export_carries_the_mark(tmp_path):
    record = RunRecord.load(DATA)
    merged = json.loads(export_perfetto(record, tmp_path / "all.json").read_text())
    assert merged["provenance"]["link"] == "emulated" and merged["provenance"]["step_time_s"] == "measured"
    folder = export_tensorboard(record, tmp_path / "tb")
    assert "link: emulated\n" in (folder / "provenance.txt").read_text()
    with open(export_csv(record, tmp_path / "csv")[-1], newline="") as file:
        assert {"quantity": "link", "origin": "emulated"} in list(csv.DictReader(file))
    (entry,) = comparison_json([record])["runs"]
    assert entry["provenance"] == record.provenance


def test_the_merged_trace_shows_the_emulated_link_s_passages(tmp_path):
    record = RunRecord.load(DATA)
    events = json.loads(export_perfetto(record, tmp_path / "all.json").read_text())["traceEvents"]
    profiled = {row["step"] for row in record.table("breakdown")}
    for rank in (0, 1):
        expected = [row for row in record.table("ledger") if row["rank"] == rank and row["step"] in profiled]
        passed = [each for each in events if each.get("cat") == "emulated" and each["pid"] // 1000 == rank]
        passed = [each for each in passed if each["args"]["step"] in profiled]
        assert len(passed) == len(expected) > 5
        assert sum(each["dur"] for each in passed) == pytest.approx(
            sum(row["end_ns"] - row["start_ns"] for row in expected) / 1000, abs=0.01
        )
    names = {each["args"]["name"] for each in events if each.get("name") == "process_name"}
    assert "rank 0 (the emulated link)" in names


def test_without_a_link_no_passages_are_shown(tmp_path):
    record = replace(RunRecord.load(DATA), tables={})
    merged = json.loads(export_perfetto(record, tmp_path / "all.json").read_text())
    assert not [each for each in merged["traceEvents"] if each.get("cat") == "emulated"]
