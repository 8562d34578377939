"""What `report` says first of each kind of input: the diagnosis with its share of the step, and the page's first figure
shows the same.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from markupsafe import escape

from fsdplab.cli import main
from fsdplab.figures import alt_text, comparison_page
from fsdplab.figures.plots.allocator import allocator_peak
from fsdplab.figures.plots.step_causes import step_causes
from fsdplab.profiling.diagnosis import diagnosis
from fsdplab.profiling.memory.snapshot_file import read_snapshot
from fsdplab.profiling.memory.snapshot_memory import memory_of
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.records import RunRecord, comparison_json
from tests.gpu_traces import GpuRank
from tests.test_faults import DDP, MS, REPLICATED, job
from tests.test_memory_snapshots import MB, a_job

pytestmark = pytest.mark.quick
DATA = Path(__file__).parents[1] / "data"
# what a program without an engine must not be told of
OF_AN_ENGINE = re.compile(r"\bunits?\b|shard|gather|FSDP|prefetch=|collective|buckets?\b", re.IGNORECASE)
SHARE = re.compile(r"\d+ %")


def first_line(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[str, str]:
    """The first line that `report` prints, and all of it."""
    with pytest.raises(SystemExit) as end:
        main(["report", str(path)])
    assert not end.value.code
    printed = capsys.readouterr().out
    return printed.splitlines()[0], printed


def gpu_program(waits_for_loader: float, kernels: int, lasts: float) -> GpuRank:
    """Four steps of 1 ms of a program on one GPU: a loader first, then kernels of equal length behind each other."""
    rank = GpuRank(world_size=1)
    for step in range(4):
        at = 1000 * step
        rank.step(step, at, at + 990).loader(at, at + waits_for_loader)
        every = (990 - waits_for_loader) / kernels
        for number in range(kernels):
            begin = at + waits_for_loader + every * number
            rank.kernel(begin + 2, begin + 8, begin + 8 + lasts)
    return rank


def trace(tmp_path: Path, rank: GpuRank) -> Path:
    return rank.write(tmp_path / "rank0.json")


def recorded_job(tmp_path: Path) -> Path:
    """A recorded job that saves its state in each step."""
    job(tmp_path / "job", DDP, REPLICATED, saving=(1, 20 * MS, 0)).save()
    return tmp_path / "job"


def job_without_fault(tmp_path: Path) -> Path:
    job(tmp_path / "job", DDP, REPLICATED).save()
    return tmp_path / "job"


def late_rank(tmp_path: Path) -> Path:
    """A folder of two ranks' traces: rank 1 computes 400 us longer in each of ten steps."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for number in range(2):
        rank = GpuRank(number)
        for step in range(10):
            at = 2000 * step
            rank.step(step, at, at + 1990).kernel(at + 5, at + 10, at + 1010 + 400 * number)
            rank.nccl("all_reduce", at + 6, at + 1010 + 400 * number, at + 1500)
        rank.write(folder / f"rank{number}.json")
    return folder


Made = Callable[[Path], Path]
INPUTS: dict[str, tuple[Made, str]] = {
    "own record": (lambda _: DATA / "traces-08", r"All-gathers are issued too late: 16.4 ms of each step \(17 %\)"),
    "recorded job": (recorded_job, r"The model's state is gathered or saved in each step: 1 call of torch.save"),
    "recorded job without a fault": (job_without_fault, r"No fault is found in a step of 100 ms: computing takes 60 %"),
    "one trace of several": (
        lambda _: DATA / "traces-torch-2.1" / "rank0.pt.trace.json.gz",
        r"Communication has nothing to overlap with for 22.3 ms of each step \(29 %\)",
    ),
    "folder of traces": (
        lambda _: DATA / "traces-torch-2.1",
        r"Communication has nothing to overlap with for 20.4 ms of each step \(26 %\)",
    ),
    "folder of GPU traces": (late_rank, r"Rank 1 is slow: it computes for 1.40 ms a step, the others for 1.00 ms"),
    "GPU program that loads": (
        lambda folder: trace(folder, gpu_program(600, 1, 300)),
        r"Loading data takes 600 µs of a step of 997 µs \(60 %\)",
    ),
    "GPU program that launches late": (
        lambda folder: trace(folder, gpu_program(0, 20, 8)),
        r"Nothing ran for \d+ µs of each step \(8\d %\): the host launched its next work too late",
    ),
    "GPU program that computes": (
        lambda folder: trace(folder, gpu_program(0, 1, 980)),
        r"No fault is found in a step of 997 µs: computing takes 9\d % of it",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_first_sentence_is_the_diagnosis_with_its_share(name, tmp_path, capsys):
    made, said = INPUTS[name]
    path = made(tmp_path)
    first, printed = first_line(capsys, path)
    assert re.match(said, first), first
    assert SHARE.search(first) or "each step" in first
    assert "the trace does not show" not in printed.lower()
    if "program" in name:
        assert not OF_AN_ENGINE.search(printed), OF_AN_ENGINE.search(printed)


@pytest.mark.parametrize("name", INPUTS)
def test_the_first_figure_shows_where_the_step_goes_and_what_the_first_finding_costs(name, tmp_path):
    made, _ = INPUTS[name]
    path = made(tmp_path)
    traces = [path] if path.is_file() else sorted(path.glob("*.json*"))
    record = RunRecord.load(path) if (path / "run.json").exists() else record_of_traces(traces)
    figure = step_causes(record)
    assert diagnosis(record).rstrip(".")[:40] in figure.layout.title.text.replace("<br>", " ")
    rows = {row for bar in figure.data for row in bar.y}
    step = sum(bar.x[0] for bar in figure.data)
    end = figure.layout.xaxis.range[1]
    assert end < 3 * step, "no bar is alone on an axis three times as long"
    (marked,) = [bar for bar in figure.data if bar.name == "what the diagnosis names"] or [None]
    assert (marked is not None) == (len(rows) == 2)
    if marked is not None:
        assert 0 < marked.x[1] <= step * 1.001
    page = comparison_page(comparison_json([record]), [record])
    alternatives = re.findall(r"<noscript><p>(.*?)</p></noscript>", page.partition('<section id="answer">')[2])
    assert alternatives[0] == str(escape(alt_text(figure))), "the page's first figure"


def test_the_parts_of_the_figure_are_the_step(tmp_path):
    record = record_of_traces([trace(tmp_path, gpu_program(600, 1, 300))])
    figure = step_causes(record)
    parts = {bar.name: bar.x[0] for bar in figure.data}
    assert parts["idle: data loading"] == pytest.approx(0.6, rel=0.02)
    assert parts["computing alone"] == pytest.approx(0.3, rel=0.02)
    assert sum(parts.values()) == pytest.approx(record.table("breakdown")[0]["step_ns"] / 1e6, rel=0.01)
    (cost,) = [bar.x[1] for bar in figure.data if bar.name == "what the diagnosis names"]
    assert cost == pytest.approx(0.6, rel=0.02)


def test_a_run_that_was_not_profiled_has_no_such_figure():
    with pytest.raises(ValueError, match="--profile 2"):
        step_causes(RunRecord.load(DATA / "lesson-11" / "full_shard"))


# ---- memory snapshots


def test_a_snapshot_begins_with_what_fills_it_and_so_does_its_page(tmp_path, capsys):
    allocator = a_job()
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    first, _ = first_line(capsys, path)
    assert first.startswith("195 MB were in use at the peak") and SHARE.search(first)
    (memory,) = memory_of(read_snapshot(path))
    figure = allocator_peak(memory)
    held = {bar.name: bar.x[0] for bar in figure.data}
    assert sum(held.values()) == pytest.approx(memory.reserved_at_peak / MB)
    assert held.pop("reserved, used by nothing", 0.0) == pytest.approx((memory.reserved_at_peak - memory.peak) / MB)
    assert held == {name: pytest.approx(nbytes / MB) for name, nbytes in memory.by_category.items()}


def test_a_request_that_failed_is_drawn_beside_what_was_free(tmp_path):
    allocator = a_job()
    allocator.fail(102 * MB, 3 * MB)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    (memory,) = memory_of(read_snapshot(path))
    figure = allocator_peak(memory)
    failed = {bar.name: bar.x[1] for bar in figure.data if bar.x[1]}
    assert failed["asked for"] == 102 and failed["free on the device"] == 3
    assert "102 MB" in figure.layout.title.text
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        main(["report", str(path), "--html", str(page)])
    html = page.read_text(encoding="utf-8")
    assert html.index("A bar of the reserved memory") < html.index("Memory over time")
