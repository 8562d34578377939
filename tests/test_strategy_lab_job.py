"""A recorded job in the strategy lab: opened beside its runs, and what a run takes less, where that is no noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdplab.figures.lab.beside_job import job_words
from fsdplab.records import RecordError, RunRecord, Spread, Summary
from fsdplab.records.summary import Peak
from fsdplab.widgets.strategy_lab import StrategyLab
from fsdplab.widgets.tabs import kept, still

pytestmark = pytest.mark.quick
STEPS = [0.209, 0.209, 0.212, 0.215, 0.215]  # the middle half is 3 ms from the median


def record(times: list[float], path: str | Path = "made", **spec: Any) -> RunRecord:
    known = {"strategy": "full_shard", "engine": "lab", "world_size": 2, "units": "auto", "model": "mine.py"}
    summary = Summary(step_time_s=Spread.of(times), peak_memory_bytes=Peak(400_000_000, {}))
    units = {"workload": {"units": "6 x Block"}}
    return RunRecord(Path(path), spec={**known, **spec}, environment=units, status="finished", summary=summary)


JOB = record(STEPS, engine="torch-fsdp2", job="train.py", model="Network")
TOLD = "Your job (train.py, torch-fsdp2 full_shard, 2 ranks) took 212 ms ±1 % a step and 400 MB"


def test_the_fastest_run_that_is_faster_beyond_the_spread() -> None:
    runs = [record([each - by for each in STEPS], strategy=name) for name, by in (("zero2", 0.010), ("zero1", 0.025))]
    assert (
        job_words(JOB, [JOB, *runs])
        == f"{TOLD}; zero1 in units of 6 x Block takes 187 ms ±2 % and 400 MB in the lab, 12 % less."
    )


def test_a_difference_within_the_spread_is_not_named() -> None:
    noisy = record([0.15, 0.20, 0.21, 0.28, 0.19])
    assert (
        job_words(JOB, [JOB, noisy]) == f"{TOLD}; no measured run of the lab is faster beyond the spread of the steps."
    )
    assert "beyond the spread" in job_words(JOB, [record([0.1])]), "one step says nothing"


@pytest.mark.parametrize(
    "other", [{"link": "1GB/s"}, {"world_size": 4}, {"engine": "torch-fsdp2"}, {"emulate": "8xH100"}]
)
def test_runs_that_are_no_comparison_do_not_count(other: dict[str, Any]) -> None:
    words = job_words(JOB, [JOB, record([0.1] * 5, **other)])
    assert words == f"{TOLD}; measure runs of 2 ranks without a link to see them beside it."


def test_a_busy_machine_is_said_before_all_else() -> None:
    busy = record([0.1] * 5)
    busy.summary = replace(busy.summary, cpu_share=0.4)
    assert "had a core for 40 % of their step" in job_words(JOB, [busy]) and "less" not in job_words(JOB, [busy])


def test_the_lab_opens_it_as_a_batch(tmp_path: Path) -> None:
    record(STEPS, tmp_path / "out", engine="torch-fsdp2", job="train.py").save()
    lab = StrategyLab({"device": "cpu"}, job=tmp_path / "out", directory=tmp_path / "runs")
    assert lab.records[0].spec["job"] == "train.py" and "your job" in lab.details.batch.title
    assert lab.instrument.answer["job"].startswith("Your job (train.py")
    assert "Your job (train.py" in still(kept(None), lab.instrument.answer)["text/plain"], "in the saved notebook too"
    with pytest.raises(RecordError):
        StrategyLab(job=tmp_path / "gone", directory=tmp_path / "runs")


def test_what_the_lab_measures_is_comparable_with_the_job(tmp_path: Path) -> None:
    """As many ranks as the job had, and no emulated link: nothing else stands beside it."""
    record(STEPS, tmp_path / "out", engine="torch-fsdp2", job="train.py", world_size=3).save()
    lab = StrategyLab({"device": "cpu"}, job=tmp_path / "out", directory=tmp_path / "runs")
    (spec, *_) = lab.state.request.specs
    assert (spec.link, spec.world_size) == (None, 3)
    given = StrategyLab({"device": "cpu"}, job=tmp_path / "out", directory=tmp_path / "runs", link="1GB/s", ranks=2)
    assert (given.state.choices.link, given.state.choices.ranks) == ("1GB/s", 2), "what is given counts"
    gpus = StrategyLab(job=tmp_path / "out", directory=tmp_path / "runs", preset="8 x H100")
    assert gpus.state.choices.link == "450GB/s"
