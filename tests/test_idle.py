"""The finding on idle time: the largest cause is named, a usual amount is not."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    assert "host bound 0.02 ms" in text and "num_workers" in remedy


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
