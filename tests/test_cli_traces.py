"""`fsdplab run`, `report` and `bench` on time: findings, pages with tabs, traces that somebody hands in, exports,
nodes, links.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.cli import main
from fsdplab.cli.answer import Line, Table
from fsdplab.cli.bench import _answer
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.sessions.bench_engines import Bench, Timing
from tests.test_cli import ended


def fsdplab(*arguments: str, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdplab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and error.startswith("fsdplab: ") and "\n" not in error, error
    return error


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("runs") / "full"
    done = fsdplab(
        "run",
        "full_shard",
        "--model",
        "gpt-tiny",
        "--steps",
        "2",
        "--link",
        "20MB/s",
        "--prefetch",
        "0",
        "--out",
        str(folder),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_a_run_ends_with_findings(recorded: tuple[str, Path]) -> None:
    out, folder = recorded
    assert "what a step lost time to" in out and "1. " in out and "->" in out
    assert "emulated: a link of 20MB/s" in out
    assert RunRecord.load(folder).spec["prefetch"] == 0


def test_a_report_shows_the_same_and_a_page_with_tabs(recorded: tuple[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = fsdplab("report", str(recorded[1]), "--html", str(page))
    assert done.returncode == 0 and "what a step lost time to" in done.stdout
    text = page.read_text(encoding="utf-8")
    assert (
        all(name in text for name in ("Timeline", "Exposed", "Diagnosis", "What to do")) and "<script src=" not in text
    )


def test_traces_that_somebody_hands_in(recorded: tuple[str, Path]) -> None:
    traces = sorted(map(str, (recorded[1] / "traces").iterdir()))
    done = fsdplab("report", *traces, "--json", "-")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["runs"]
    assert entry["engine"] == "trace" and entry["world_size"] == 2
    assert entry["step_time_s"]["median"] > 0 and entry["comm"]["exposed_s"] > 0
    assert "what a step lost time to" in done.stderr


def test_exports(recorded: tuple[str, Path], tmp_path: Path) -> None:
    places = {"--tensorboard": tmp_path / "tb", "--perfetto": tmp_path / "all.json.gz", "--csv": tmp_path / "csv"}
    done = fsdplab("report", str(recorded[1]), *(str(part) for pair in places.items() for part in pair))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "tb").rglob("*.pt.trace.json.gz"))) == 2
    assert places["--perfetto"].stat().st_size > 1000 and (tmp_path / "csv" / "exposed.csv").exists()
    assert "tensorboard --logdir" in done.stdout


def test_exports_from_traces(recorded: tuple[str, Path], tmp_path: Path) -> None:
    """A folder of ranks, without a record around them."""
    folder, log = tmp_path / "ranks", tmp_path / "tb"
    shutil.copytree(recorded[1] / "traces", folder)
    done = fsdplab("report", str(folder), "--tensorboard", str(log), "--perfetto", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stderr
    assert len(list(log.rglob("rank[01].*.pt.trace.json.gz"))) == 2
    assert json.loads((tmp_path / "all.json").read_text())["mergedRanks"] == [0, 1]


def test_what_is_no_trace_is_refused(
    recorded: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, empty = tmp_path / "notes.json", tmp_path / "empty.json"
    text.write_text("no trace")
    empty.write_text("")
    trace = str(next((recorded[1] / "traces").iterdir()))
    assert "notes.json" in refused(["report", str(text)], capsys)
    assert "empty.json" in refused(["report", str(empty)], capsys)
    assert "both of rank" in refused(["report", trace, trace], capsys)
    unprofiled = RunRecord(tmp_path / "unprofiled", spec={"strategy": "x", "engine": "lab", "world_size": 1}).save()
    assert "no traces" in refused(["report", str(unprofiled.path), "--tensorboard", str(tmp_path / "tb")], capsys)
    half = tmp_path / "half.json.gz"
    half.write_bytes(Path(trace).read_bytes()[:3000])
    assert "half.json.gz" in refused(["report", str(half)], capsys)


def test_a_link_that_leads_back_to_itself_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "link")
    said = refused(["report", str(tmp_path / "link")], capsys)
    assert "Too many levels of symbolic links" in said


def test_requests_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fast" in refused(["run", "--link", "fast", "--out", str(tmp_path / "a")], capsys)
    assert "whole numbers" in refused(["bench", "--prefetch", "0,x"], capsys)
    assert "give both" in refused(["compare", "--emulate", "8xH100"], capsys)
    assert not (tmp_path / "a").exists()


def made_bench(floors: list[float], **over_floor: float) -> Bench:
    """Engines that take so many times the floor of each round, alternately 1 % more and less."""
    timings = (
        Timing("alone" if name == "alone" else "lab", name, tuple(
            floor * over * (0.99 if number % 2 else 1.01) for number, floor in enumerate(floors)
        ), 3.4)
        for name, over in over_floor.items()
    )  # fmt: skip
    return Bench(RunSpec(device="cpu"), tuple(timings), tuple(floors))


STEADY = [3.0] * 10


@pytest.mark.parametrize(
    "floors,others,words",
    [
        (STEADY, {"zero1": 1.30}, "lab full_shard is fastest."),
        ([3.0, 4.5] * 5, {"zero1": 1.15}, "lab full_shard is fastest. | The floor itself took 3,000 to 4,500 ms:"),
        (STEADY, {"zero1": 1.06}, "No difference between lab full_shard and lab zero1 is seen in 10 rounds (their"),
        ([3.0, 3.0], {"zero1": 1.30}, "No engine is called fastest, as too few rounds were timed (4 are needed)."),
        (STEADY, {}, ""),
    ],
)
def test_a_bench_calls_an_engine_fastest_only_beyond_its_rounds(
    floors: list[float], others: dict[str, float], words: str
) -> None:
    """A machine that becomes half slower for a round slows engine and floor alike."""
    found = _answer(made_bench(floors, alone=1.01, full_shard=1.05, **others), len(floors))
    table, *lines = found.parts
    assert isinstance(table, Table) and ("±" in table.columns) == (len(floors) > 2)
    said = " | ".join(line.text for line in lines[:-1] if isinstance(line, Line))
    assert said.startswith(words) and (bool(said) == bool(words))
    assert found.data["floors_s"] == tuple(floors)
    assert found.data["rows"][1]["over_floor_by_round"]["median"] == pytest.approx(1.05, rel=0.011)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for CPU")
def test_engines_of_a_bench_take_turns_with_compiled_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    small = ["--model", "gpt-tiny", "--strategies", "full_shard", "--sequence-length", "32", "--rounds", "2"]
    code, out, err = ended(["bench", "--compile", "blocks", *small, "--json", str(file)], capsys)
    assert code == 0, err
    bench = json.loads(file.read_text())
    assert bench["spec"]["compile"] == "blocks" and "compiled blocks" in out
    _, *rows = bench["rows"]
    assert {row["engine"] for row in rows} == {"lab", "torch-ddp", "torch-fsdp2"}
    assert all(row["over_torch-fsdp2"] > 0 for row in rows)
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * len(rows), rel=1e-5)


def test_a_bench_behind_a_link_has_a_row_for_each_prefetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    arguments = [
        "--model",
        "gpt-tiny",
        "--strategies",
        "full_shard",
        "--engines",
        "torch-ddp",
        "--link",
        "50MB/s",
        "--prefetch",
        "0,1",
        "--rounds",
        "2",
    ]
    code, out, err = ended(["bench", *arguments, "--sequence-length", "32", "--json", str(file)], capsys)
    assert code == 0, err
    rows = json.loads(file.read_text())["rows"]
    ours = [row for row in rows if row["engine"] == "lab"]
    assert [row["prefetch"] for row in ours] == [0, 1] and all(
        0 <= row["overlap"] <= 1 and len(row["blocked"]) == 2 for row in ours
    )
    assert ours[0]["loss"] == pytest.approx(rows[-1]["loss"], rel=1e-5)
    assert "blocked" in out and "overlap" in out
