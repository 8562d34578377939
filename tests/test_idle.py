"""The finding on idle time: the largest cause is named, a usual amount is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdplab.profiling.diagnosis import findings
from fsdplab.profiling.idle import idle
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.records import RunRecord
from tests.gpu_traces import GpuRank


def record(tmp_path, rank):
    return record_of_traces([rank.write(tmp_path / "rank0.json")])


def busy(idle_us):
    """Two kernels of 200 us, and as long between them as is asked for."""
    return (
        GpuRank(world_size=1)
        .step(1, 0, 2000)
        .kernel(10, 100, 300)
        .kernel(300 + idle_us - 1, 300 + idle_us, 500 + idle_us)
    )


def test_a_slow_loader_is_named_with_its_seconds_and_its_remedy(tmp_path):
    kind, seconds, title, text, remedy = idle(record(tmp_path, busy(400).loader(310, 690)))
    assert (kind, seconds) == ("data_loading", pytest.approx(380e-6))
    assert title.startswith(
        "nothing ran for 0.4 ms of 0.8 ms a step: for 0.38 ms the host was waiting for its DataLoader"
    )
    assert text.endswith("The rest of it: host bound 0.02 ms.") and "num_workers" in remedy


def test_causes_of_no_time_are_left_out(tmp_path):
    assert idle(record(tmp_path, busy(400)))[3] == "Neither computing nor communication ran."


def test_synchronising_and_late_launches(tmp_path):
    assert idle(record(tmp_path, busy(400)))[0] == "host_bound"
    assert idle(record(tmp_path, busy(400).synchronise(20, 303)))[0] == "synchronisation"


def test_little_idle_time_is_no_finding(tmp_path):
    assert idle(record(tmp_path, busy(30))) is None


def test_a_record_without_idle_time_has_no_finding(tmp_path):
    """Records of earlier versions lack the table."""
    assert idle(RunRecord(tmp_path)) is None
    found = record(tmp_path, busy(400))
    found.tables["idle"] = []
    assert idle(found) is None


def test_the_table_is_saved_and_an_older_record_is_read_without_it(tmp_path):
    saved = RunRecord(
        tmp_path / "new",
        {"strategy": "x", "engine": "trace", "world_size": 1},
        tables=record(tmp_path, busy(400)).tables,
    )
    assert RunRecord.load(saved.save().path).table("idle") == saved.table("idle") != []
    older = RunRecord.load(Path(__file__).resolve().parents[1] / "data" / "traces-08")
    assert older.table("idle") == [] and older.table("breakdown") != []


def test_idle_time_is_among_the_findings_and_claims_no_exposed_time(tmp_path):
    found = findings(record(tmp_path, busy(400)))
    assert [(each.kind, each.of) for each in found] == [("host_bound", "step")]


def test_a_loader_is_told_once(tmp_path):
    found = findings(record(tmp_path, busy(400).loader(310, 690)))
    assert [each.kind for each in found] == ["slow_loading"] and "num_workers" in found[0].remedy


def test_one_rank_s_loader_is_told_by_the_traces_of_two(tmp_path):
    """Three steps: rank 1 takes 300 us to load in each, and rank 0 waits for it in its collective."""
    files = []
    for rank in (0, 1):
        trace, late = GpuRank(rank), 300 * rank
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 999).loader(at + 1, at + 5 + late).kernel(
                at + 6 + late, at + 7 + late, at + 207 + late
            )
            trace.nccl("all_reduce", at + 8 + late, at + 207 + late, at + 520)
        files.append(trace.write(tmp_path / f"rank{rank}.json"))
    first = findings(record_of_traces(files))[0]
    assert first.kind == "slow_loading" and first.title.startswith("rank 1 waits 0.304 ms a step")


def ahead(loading, computes=200):
    """Three steps of one rank, launched 30 us after they began; the host takes `loading` us for each batch."""
    trace = GpuRank(world_size=1)
    for step in range(3):
        at = 1000 * step
        trace.step(step, at, at + 999).loader(at + 1, at + 1 + loading)
        trace.kernel(at + loading + 10, at + loading + 30, at + loading + 30 + computes)
    return trace


def test_loading_that_the_device_works_through_is_no_finding(tmp_path):
    """The host takes 600 us for a batch; the device is busy with the step before for all but 30 us of a step of 970."""
    assert all(each.kind != "slow_loading" for each in findings(record(tmp_path, ahead(600, computes=970))))


def test_loading_before_the_first_work_of_a_step_is_told_as_such(tmp_path):
    (found,) = findings(record(tmp_path, ahead(600)))
    assert (found.kind, found.of, found.seconds) == ("slow_loading", "step", pytest.approx(600e-6))
    assert found.title == "the device does nothing for 0.6 ms a step while data is loaded; a step takes 0.2 ms"
    assert found.text.startswith("The rank waits for its data")
    assert found.text.endswith("Of that 0 ms lies inside the step, the rest before its first work on the device.")


def test_seconds_are_written_as_seconds(tmp_path):
    trace = GpuRank(world_size=1).step(1, 0, 2e6).kernel(10, 100, 300).kernel(1.2e6, 1_200_300, 1_200_500)
    title = idle(record(tmp_path, trace))[2]
    assert title.startswith("nothing ran for 1.2 s of 1.2 s a step: for 1.2 s the host launched")


def test_one_rank_of_several_tells_no_waiting_from_sending(tmp_path):
    """The all_reduce of 900 us may be rank 1's lateness, and rank 1's trace is not there."""
    trace = GpuRank(0, world_size=2).step(1, 0, 100).kernel(5, 100, 200).nccl("all_reduce", 10, 200, 1100)
    first = findings(record(tmp_path, trace))[0]
    assert first.kind == "slow_link" and first.title.startswith("communication takes longer than the work: 0.9 ms of")
    assert "Waiting for 1 of the 2 ranks, whose traces were not given, is in it" in first.text
    assert first.remedy.startswith("Give the other ranks' traces too")


def test_long_idle_time_that_the_trace_does_not_explain_is_told(tmp_path):
    """The second kernel was launched at once and began 900 us later."""
    trace = GpuRank(world_size=1).step(1, 0, 50).kernel(10, 100, 200).kernel(20, 1100, 1200)
    (found,) = findings(record(tmp_path, trace))
    assert (found.kind, found.of) == ("idle", "step") and "for 0.9 ms the trace does not tell why" in found.title
    assert found.text == "Neither computing nor communication ran."
