"""Step times of a model of one's own, predicted from one measured run of it: by hand, behind a link, and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fsdplab
from fsdplab.engine import shard
from fsdplab.engine.core import hooks
from fsdplab.figures.conclusion import step_sources
from fsdplab.figures.lab.answers import Look, view_of
from fsdplab.figures.table import predicted_of
from fsdplab.figures.view import view
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Comm, Profile
from fsdplab.sessions import RunSpec
from fsdplab.sessions.first_run import predict_from_the_first, step_here, why_no_base
from fsdplab.sessions.prediction import predict
from fsdplab.widgets.lab_state import LabState
from fsdplab.workloads.own.sources import name_of, source_of
from tests.own_models import zoo

pytestmark = pytest.mark.quick

STEPS = [0.199, 0.200, 0.200, 0.201, 0.200]
COPIES, OPTIMIZER, LONGER = 0.020, 0.030, 1.25  # profiled steps take a quarter longer


def spec_of(strategy: str = "no_shard", **settings: Any) -> RunSpec:
    work = fsdplab.Workload(zoo.stack, zoo.numbers, zoo.squares)
    return RunSpec(**{"model": work, "strategy": strategy, "device": "cpu", **settings})


def measured(spec: RunSpec, steps: list[float] = STEPS, **edits: Any) -> RunRecord:
    """The record of a run of `spec` that took these steps."""
    told = {"name": name_of(spec.model), "digest": source_of(spec.model).digest}
    summary = Summary(
        step_time_s=Spread.of(steps),
        comm=Comm(copying_s=COPIES * LONGER),
        profile=Profile(2, LONGER - 1, "trace", OPTIMIZER * LONGER, 0.0),
    )
    return RunRecord(
        Path("made"), spec={**vars(spec), "model": name_of(spec.model)}, status="finished",
        environment={"workload": told}, summary=replace(summary, **edits),
    )  # fmt: skip


def test_without_a_link_the_parts_of_a_step_add_up() -> None:
    """The operators as long, copies by the bytes that are sent, and the optimizer by what a rank updates."""
    first, other = spec_of("no_shard"), spec_of("full_shard")
    found = step_here(measured(first), other)
    assert found is not None and found.of == "no_shard" and found.scatter == pytest.approx(0.0, abs=0.01)
    more = predict(other).bytes_per_step / predict(first).bytes_per_step
    assert found.seconds == pytest.approx(0.200 - COPIES - OPTIMIZER + COPIES * more + OPTIMIZER / 2, rel=1e-3)
    again = step_here(measured(first), first)
    assert again is not None and again.seconds == pytest.approx(0.200, rel=1e-6)


def test_behind_a_link_the_recorded_program_is_played() -> None:
    """The link's messages lie under the operators: a slow one adds what does not fit under these."""
    first = spec_of("full_shard", link="1GB/s")
    base = measured(first)
    steps = [step_here(base, replace(first, link=link)).seconds for link in ("1GB/s", "100MB/s", "100KB/s", "10KB/s")]
    assert steps[0] == pytest.approx(0.200) and steps == sorted(steps)
    sent = predict(first).bytes_per_step
    assert 0.5 * sent / 10e3 < steps[-1] - steps[0] <= 1.01 * sent / 10e3
    late = step_here(measured(replace(first, link="100KB/s"), [sent / 100e3] * 5), replace(first, prefetch=0))
    assert late is None or late.seconds >= sent / 100e3


def test_a_run_that_is_shorter_than_its_link_alone_predicts_nothing() -> None:
    slow = spec_of("full_shard", link="1KB/s")
    assert step_here(measured(slow), replace(slow, prefetch=0)) is None


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"cpu_share": 0.5}, "its ranks were short of cores"),
        ({"profile": None}, "no step of it was profiled"),
        ({"step_time_s": Spread()}, "no finished run of the lab's engine with timed steps"),
    ],
)
def test_why_a_run_tells_nothing_of_others(edits: dict[str, Any], words: str) -> None:
    base = measured(spec_of(), **edits)
    assert words in why_no_base(base) and step_here(base, spec_of("full_shard")) is None


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"world_size": 3}, {"checkpoint": "full"}, {"engine": "torch-fsdp2"}]
)
def test_a_run_of_other_work_predicts_nothing(settings: dict[str, Any]) -> None:
    assert step_here(measured(spec_of()), spec_of("full_shard", **settings)) is None
    preset = RunSpec(model="gpt-tiny", device="cpu")
    assert step_here(measured(spec_of()), preset) is None
    other = measured(spec_of())
    other.environment["workload"]["digest"] = "of an earlier edit"
    assert step_here(other, spec_of("full_shard")) is None


def test_the_lab_shows_it_for_strategies_that_were_not_measured() -> None:
    """Without a link too, where no clock simulates a step."""
    base = measured(spec_of("no_shard"))
    work = fsdplab.Workload(zoo.stack, zoo.numbers, zoo.squares)
    state = LabState({"device": "cpu"}, model=work, link="none")
    state.choose(strategies=("no_shard", "full_shard"))
    rows = view_of(state.choices, Look(), state.fixed).answer([base])["rows"]
    assert [row["here"]["of"] for row in rows] == ["no_shard"] * 2 and rows[0]["here"]["words"] == "200 ms ±0.0 %"
    assert rows[1]["here"]["step_s"] == step_here(base, state.request.specs[1]).seconds
    assert not any(row["here"] for row in view_of(state.choices, Look(), state.fixed).answer()["rows"])


def test_records_of_a_comparison_show_it_beside_what_was_measured(tmp_path: Path) -> None:
    specs = [spec_of(name) for name in ("no_shard", "zero2", "full_shard")]
    records = [replace(measured(spec), path=tmp_path / spec.strategy) for spec in specs]
    predict_from_the_first(list(zip(specs, records)))
    assert records[0].summary.predicted.step_time_s is None, "it is where the others' are from"
    kept = [RunRecord.load(tmp_path / name).summary.predicted for name in ("zero2", "full_shard")]
    assert [(each.step_from, bool(each.step_time_s)) for each in kept] == [("no_shard", True)] * 2
    (sentence,) = step_sources([view(record) for record in records])
    assert sentence.startswith("From the run of no_shard a step of zero2 is predicted at ")
    assert "; of full_shard is predicted at" in sentence and sentence.endswith("measured 200 ms ±0.0 %.")
    assert "ms ±0.0 % (" in predicted_of(view(records[1]))


def test_a_micro_batch_is_recorded_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks at what trains before its first forward; a recording has no shards to look at."""
    monkeypatch.setitem(hooks.before_training, shard._check_first, None)  # as the first sharding does
    assert predict(spec_of("full_shard")).peak_bytes
