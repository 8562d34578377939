"""`fsdplab gpu-check`: parts that fail, hang, die or write nonsense are reported and stop nothing; what was measured is
kept; nothing outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdplab.gpu_check.__main__ import main, run_check
from fsdplab.gpu_check.check import (
    Check,
    CheckError,
    as_markdown,
    as_text,
    figure,
    open_check,
    pack,
    rows_table,
    unpack,
)
from fsdplab.gpu_check.environment import driver_of, source_digest
from fsdplab.gpu_check.part import Sheet, part_main
from fsdplab.gpu_check.runner import (
    LIMIT_S,
    PARTS,
    BadSheet,
    Outcome,
    PartPlan,
    _all,
    _environment,
    chosen,
    read_sheet,
    running,
)
from fsdplab.gpu_check.tests import CUDA_BROKE, run_files
from fsdplab.records import RunRecord
from fsdplab.sessions.launch import warm

ROOT = Path(__file__).resolve().parents[1]


def behaving(name: str, seconds: float = 60.0) -> PartPlan:
    return PartPlan(name, seconds, seconds, "tests.faulty_part", ("--behave", name))


def gone(pid: int) -> bool:
    return not running(pid)


def wait_until(holds, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


# ---- the whole, with parts that go wrong


@dataclass(frozen=True)
class Checked:
    """A check that was made: its folder, its exit status, what it told, and the starter at each time that it told."""

    folder: Path
    status: int
    told: list[str]
    starters: list[int | None]


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Checked:
    """A check of parts that go wrong in every way, between two good ones."""
    folder, told, starters = tmp_path_factory.mktemp("check"), [], []

    def tell(text: str) -> None:
        told.append(text)
        starters.append(warm.starter_pid())

    plans = [behaving(name) for name in ("keeps_a_record", "fails", "dies", "writes_garbage", "does_not_hold")]
    plans += [behaving("hangs", 8.0), PartPlan("absent", 60, 60, "tests.no_such_part"), behaving("is_good")]
    return Checked(folder, run_check(plans, "cpu", folder, 300.0, "the command", tell), told, starters)


@pytest.mark.skipif(warm.why_not() is not None, reason=f"no warm starts here: {warm.why_not()}")
def test_one_starter_serves_all_parts_however_they_end(checked):
    assert len(set(checked.starters)) == 1 and checked.starters[0] is not None


def test_every_part_is_reported_with_its_reason_and_the_last_one_still_runs(checked):
    status, told = checked.status, checked.told
    check = open_check(checked.folder)
    assert status == 1 and not check.passed
    assert {each.name: each.status for each in check.outcomes} == {
        "keeps_a_record": "finished", "fails": "failed", "dies": "killed", "writes_garbage": "garbage",
        "does_not_hold": "finished",
        "hangs": "timed out", "absent": "failed", "is_good": "finished",
    }  # fmt: skip
    reasons = {each.name: each.reason for each in check.outcomes}
    assert reasons["fails"] == "RuntimeError: the third row cannot be" and reasons["dies"] == "by SIGKILL"
    assert (
        "is no JSON" in reasons["writes_garbage"]
        and reasons["hangs"] == "ended at its limit of 8 s"
        and "no_such_part" in reasons["absent"]
    )
    assert len(told) == 9 and told[1].startswith("fails: failed RuntimeError")


def test_finished_rows_outlive_a_part_that_ended_badly(checked):
    check = open_check(checked.folder)
    for name in ("fails", "dies", "hangs"):
        assert check.rows(name) == [{"step": 1, "milliseconds": 2.5}]
    assert check.rows("writes_garbage") == []
    with pytest.raises(LookupError, match="keeps_a_record"):
        check.outcome("nobody")


def test_the_table_names_what_failed(checked):
    text, markdown = (checked.folder / "table.txt").read_text(), (checked.folder / "table.md").read_text()
    for words in (
        "the third row cannot be",
        "ended at its limit of 8 s",
        "peak within 3 %",
        "at most 3 %",
        "0 of 1",
        "note: all in order",
    ):
        assert words in text and words in markdown
    assert str(open_check(checked.folder)) == text


def test_the_folder_is_small_flat_and_tells_no_paths(checked):
    files = [path for path in checked.folder.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["check.json", "log.txt", "records.tar.gz", "table.md", "table.txt"]
    assert all(path.parent == checked.folder and path.stat().st_size < 16e6 for path in files)
    log = (checked.folder / "log.txt").read_text()
    assert "fails says hello from (scratch)/fails" in log and "Traceback" in log and str(ROOT) not in log


def test_a_hung_part_says_where_it_stood(checked):
    assert "in hangs" in (checked.folder / "log.txt").read_text().partition("==== hangs")[2].partition("====")[0]


def test_records_are_packed_and_opened_again(checked, tmp_path):
    (place,) = open_check(checked.folder).unpack_records(tmp_path)
    assert place == tmp_path / "keeps_a_record" / "run-a" and RunRecord.load(place).summary.losses == (2.5,)


def test_nothing_of_the_parts_is_left(checked):
    assert [pid for pid in _all() if b"time.sleep(601.25)" in command_of(pid) and running(pid)] == []


def command_of(pid: int) -> bytes:
    """The command of a process; empty for one that has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


# ---- the limit of everything, Ctrl-C, kill


def test_what_the_whole_limit_does_not_hold_is_named_as_not_run(tmp_path):
    assert run_check([behaving("hangs"), behaving("is_good")], "cpu", tmp_path, 8.0, "", lambda text: None) == 1
    outcomes = open_check(tmp_path).outcomes
    assert [each.status for each in outcomes] == ["timed out", "not run"] and "no time was left" in outcomes[1].reason


def started_and_hanging(folder: Path) -> tuple[subprocess.Popen[bytes], int, int]:
    """A check, in a process of its own, whose second part hangs by now; the process, the part's id, and that of what
    the part started.
    """
    code = f"""
import signal, sys
from pathlib import Path
from fsdplab.gpu_check import __main__ as gpu_check
from fsdplab.gpu_check.runner import PartPlan

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it deaf to Ctrl-C
with gpu_check._ended_in_order():
    sys.exit(gpu_check.run_check({[behaving("is_good"), behaving("hangs")]!r}, "cpu", Path({str(folder)!r}), 200.0, ""))
"""
    scratch = folder / "scratch"
    scratch.mkdir()
    with (folder / "said").open("w") as said:
        runner = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)}, stdout=said, stderr=said
        )
    wait_until(lambda: list(scratch.glob("*/hangs/pids")))
    part, child = map(int, next(scratch.glob("*/hangs/pids")).read_text().split())
    return runner, part, child


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_check_leaves_no_process_and_keeps_what_was_done(tmp_path, how):
    runner, part, child = started_and_hanging(tmp_path)
    runner.send_signal(how)
    assert runner.wait(30) == 130 and gone(part) and gone(child)
    assert "interrupted" in (tmp_path / "said").read_text() and list((tmp_path / "scratch").iterdir()) == []
    check = open_check(tmp_path)
    assert [each.name for each in check.outcomes] == ["is_good"] and "interrupted" in check.notes[0]


def test_a_part_ends_when_the_check_is_killed(tmp_path):
    runner, part, child = started_and_hanging(tmp_path)
    runner.kill()
    runner.wait(30)
    wait_until(lambda: gone(part))
    os.kill(child, signal.SIGKILL)  # ranks are tied to their parents, this sleeper is not
    assert [each.name for each in open_check(tmp_path).outcomes] == ["is_good"]


def test_a_full_disk_is_one_line(tmp_path):
    # no file above 1 kB
    command = (
        f"ulimit -f 1; exec {sys.executable} -m fsdplab.gpu_check --device cpu --parts memory --out {tmp_path / 'out'}"
    )
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    (said,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and "the result could not be written (" in said and "File too large" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the scratch folder is gone"


# ---- one part


def written(folder: Path, name: str = "memory") -> dict:
    return read_sheet(folder / f"{name}.json", name)


def test_a_sheet_is_saved_with_every_call_and_read_back(tmp_path):
    sheet = Sheet("memory", "cpu", tmp_path, 40.0)
    assert written(tmp_path)["rows"] == [] and 0 < sheet.left() <= 40
    sheet.row(model="gpt-tiny", bytes=np.int64(3), loss=torch.tensor(2.0), mfu=None, ratio=float("nan"), fits=True)
    assert written(tmp_path)["rows"] == [
        {"model": "gpt-tiny", "bytes": 3, "loss": 2.0, "mfu": None, "ratio": "nan", "fits": True}
    ]
    sheet.check("peak", np.bool_(True), 1, 2)
    sheet.note("seen")
    with sheet.trying("a row"):
        raise ValueError("no such row\nmore")
    found = written(tmp_path)
    assert [check["passed"] for check in found["checks"]] == [True, False] and found["checks"][1][
        "got"
    ] == "ValueError: no such row"
    assert found["notes"] == ["seen"] and not list(tmp_path.glob("*.new"))


def test_a_sheet_refuses_what_is_not_flat_and_records_that_are_not_there(tmp_path):
    sheet = Sheet("memory", "cpu", tmp_path, 40.0)
    with pytest.raises(TypeError, match="'times' is a list: a row is flat"):
        sheet.row(times=[1, 2])
    with pytest.raises(FileNotFoundError, match="expected a folder with run.json"):
        sheet.record("run-b")
    assert written(tmp_path)["rows"] == written(tmp_path)["records"] == []


def test_the_exit_codes_of_a_part(tmp_path, capsys):
    flags = ["--device", "cpu", "--out", str(tmp_path), "--seconds", "5"]

    def broken(sheet, device):
        sheet.row(a=1)
        raise RuntimeError("boom")

    assert part_main("memory", lambda sheet, device: sheet.row(device=str(device), limit=sheet.left() > 4), flags) == 0
    assert written(tmp_path)["rows"] == [{"device": "cpu", "limit": True}]
    assert part_main("memory", broken, flags) == 1 and written(tmp_path)["rows"] == [{"a": 1}]
    assert "RuntimeError: boom" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        part_main("memory", broken, ["--device", "tpu", "--out", str(tmp_path)])
    assert stop.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_the_check_refuses_in_one_line_and_leaves_nothing(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "new"), "--parts", "memory"]) == 2
    said = capsys.readouterr()
    assert (
        said.err.count("\n") == 1
        and "finds no CUDA device" in said.err
        and "--device cpu" in said.err
        and not (tmp_path / "new").exists()
    )


@pytest.mark.parametrize(
    "text,complaint",
    [
        (None, "wrote no memory.json"),
        ("", "is no JSON"),
        ("[]", "is not a sheet of the part 'memory'"),
        ('{"part": "memory"}', "has no list of rows"),
        (
            '{"part": "memory", "rows": [{"a": [1]}], "checks": [], "notes": [], "records": []}',
            "rows that are not flat",
        ),
        (
            '{"part": "memory", "rows": [], "checks": [{"name": "a"}], "notes": [], "records": []}',
            "without name, passed",
        ),
        ('{"part": "memory", "rows": [], "checks": [], "notes": [3], "records": []}', "no text"),
    ],
)
def test_a_sheet_that_is_not_one_is_refused(tmp_path, text, complaint):
    if text is not None:
        (tmp_path / "memory.json").write_text(text)
    with pytest.raises(BadSheet, match=complaint):
        written(tmp_path)


# ---- plans, command line


def test_the_limits_fit_into_eight_minutes():
    assert sum(part.cuda_s for part in PARTS) <= LIMIT_S == 480
    assert [part.name for part in chosen(["traces", "tests"])] == ["tests", "traces"] and chosen([]) == PARTS
    assert (
        PARTS[-1].seconds("cuda", 100.0) == 100.0
        and PARTS[0].seconds("cuda", 20.0) == 20.0
        and PARTS[0].seconds("cuda", 400.0) == PARTS[0].cuda_s
    )


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--parts", "trace"], "did you mean traces"),
        (["--limit", "0"], "--limit is 0"),
        (["--limit", "soon"], "see `fsdplab gpu-check --help`"),
        (["--device", "tpu"], "see `fsdplab gpu-check --help`"),
        (["--open", "FOLDER"], "holds no check.json"),
        (["--out", "FOLDER"], "not empty"),
        (["--wheels", "nowhere"], "--wheels is nowhere, which is no folder"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, flags, words):
    (tmp_path / "file").write_text("x")
    command = [
        sys.executable,
        "-m",
        "fsdplab.gpu_check",
        *(str(tmp_path) if flag == "FOLDER" else flag for flag in flags),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_the_command_line_has_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab", "gpu-check", "--open", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "holds no check.json" in done.stderr


def test_the_runner_needs_no_torch():
    code = "import fsdplab.gpu_check.__main__, sys; print({'torch', 'numpy', 'typer'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
        == "set()\n"
    )


def test_the_digest_tells_sources_apart(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    first = source_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert source_digest(tmp_path) != first and len(first) == 16


def test_the_driver_is_known_without_its_tool(tmp_path):
    file = tmp_path / "version"
    assert driver_of(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n")
    assert driver_of(file) == "580.159.03"


# ---- the folder


@pytest.mark.parametrize(
    "text,words",
    [
        (None, "holds no check.json"),
        ("{", "is damaged"),
        ('{"format": "other"}', "has the format 'other'"),
        ('{"format": "fsdplab gpu check 1"}', "is damaged"),
        ('{"format": "fsdplab gpu check 1", "parts": [{"name": "a"}], "provenance": {}, "notes": []}', "is damaged"),
    ],
)
def test_a_folder_that_is_no_check_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "check.json").write_text(text)
    with pytest.raises(CheckError, match=words):
        open_check(tmp_path)


def recorded(folder: Path, table_bytes: int, trace_bytes: int) -> Path:
    (folder / "traces").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "steps.csv.gz").write_bytes(os.urandom(table_bytes))
    (folder / "traces" / "rank0.pt.trace.json.gz").write_bytes(os.urandom(trace_bytes))
    return folder


def test_records_that_are_too_large_go_without_traces_or_are_named(tmp_path):
    sizes = {"small": (10, 10), "heavy_trace": (10, 60_000), "huge": (60_000, 10), "second": (10, 20_000)}
    records = [(f"traces/{name}", recorded(tmp_path / "in" / name, *size)) for name, size in sizes.items()]
    out = tmp_path / "out"
    out.mkdir()
    complaints = pack(records, out, most_bytes=40_000)
    assert [words in each for words, each in zip(("heavy_trace", "huge"), complaints, strict=True)] == [True, True]
    assert "without its traces" in complaints[0] and "is left out" in complaints[1]
    found = unpack(out, tmp_path / "back")
    assert [path.name for path in found] == ["heavy_trace", "second", "small"]
    assert (tmp_path / "back/traces/second/traces/rank0.pt.trace.json.gz").stat().st_size == 20_000
    assert not (tmp_path / "back/traces/heavy_trace/traces").exists() and all(
        path.stat().st_size < 45_000 for path in out.iterdir()
    )


def test_an_archive_that_points_outside_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with tarfile.open(tmp_path / "records.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "file", "../outside")
    with pytest.raises(ValueError, match="outside"):
        unpack(tmp_path, tmp_path / "target")
    assert not (tmp_path / "outside").exists()


def test_figures_read_well():
    shown = [figure(value) for value in (None, True, 0.123456, 1234567, 2.5e9, 12.0, "a")]
    assert shown == ["-", "yes", "0.1235", "1,234,567", "2,500,000,000", "12", "a"]
    header, rows = rows_table([{"a": 1, "empty": None}, {"b": 2.0}])
    assert header == ["a", "b"] and rows == [["1", "-"], ["-", "2"]]
    wide = [{f"figure_{number}": number for number in range(30)}] * 2
    header, rows = rows_table(wide)
    assert header == ["figure", "1", "2"] and len(rows) == 30


def test_a_check_passes_only_if_all_ran_and_all_held():
    good = {
        "rows": [],
        "checks": [{"name": "a", "passed": True, "got": "", "expected": ""}],
        "notes": [],
        "records": [],
    }
    bad = {**good, "checks": [{"name": "a|b", "passed": False, "got": "1\n2", "expected": ""}]}
    assert Check({}, [Outcome("a", "finished", "", 1.0, 2.0, good)]).passed and not Check({}, []).passed
    assert (
        not Check({}, [Outcome("a", "timed out", "", 1.0, 2.0, good)]).passed
        and not Check({}, [Outcome("a", "finished", "", 1.0, 2.0, bad)]).passed
    )
    assert "a\\|b | 1 2" in as_markdown({}, [Outcome("a", "finished", "", 1.0, 2.0, bad)]) and "commit: 1" in as_text(
        {"commit": 1}, []
    )


# ---- the part that runs tests

SOME_TESTS = """
import os
import pytest

@pytest.fixture
def three():
    yield 3
    assert not os.environ.get("LEFT")

@pytest.mark.gpu
@pytest.mark.parametrize("n,square", [(2, 4), pytest.param(3, 10, id="wrong")])
def test_squares(n, square, three):
    assert n * n == square

def test_plain():
    assert False, "only GPU tests are wanted"

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs two of them")
def test_skipped():
    assert False

@pytest.mark.gpu
def test_breaks_cuda():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.gpu
def test_crashes():
    os._exit(9)

@pytest.mark.gpu
def test_after(three, tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="a b"):
        raise ValueError("a b c")
    assert tmp_path.is_dir() and three == 3
"""


def test_tests_are_rows_and_go_on_behind_one_that_breaks_its_process(tmp_path):
    (tmp_path / "pieces").mkdir()
    file = tmp_path / "pieces" / "test_some.py"
    file.write_text(SOME_TESTS)
    sheet = Sheet("tests", "cpu", tmp_path, 150.0)
    codes = [run_files(sheet, [file], tmp_path / "events.jsonl") for _ in range(3)]
    assert codes == [CUDA_BROKE, 9, 0]
    outcomes = {row["test"]: (row["outcome"], row["reason"]) for row in sheet.rows}
    assert outcomes["test_squares[2-4]"] == ("passed", None) and outcomes["test_after"] == ("passed", None)
    assert outcomes["test_squares[wrong]"][0] == "failed" and outcomes["test_skipped"] == (
        "skipped",
        "needs two of them",
    )
    assert (
        outcomes["test_crashes"] == ("failed", "ended its process (code 9)")
        and "illegal memory" in outcomes["test_breaks_cuda"][1]
    )
    assert len(outcomes) == 6 and len(sheet.checks) == 3


# ---- the whole, dry


# A module that is None in sys.modules cannot be imported, by ranks neither.
OUTER = (
    "plotly", "IPython", "ipywidgets", "anywidget", "ipykernel", "nbclient", "nbformat", "pandas", "typer", "rich",
    "pytest",
    "_pytest",
)  # fmt: skip
WITH_PACKAGES = ("tests", "course")


def dry_run(out: Path, *flags: str, **environment: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A dry run into `out`, as it ended."""
    command = [sys.executable, "-m", "fsdplab.gpu_check", "--device", "cpu", "--out", str(out), *flags]
    return out, subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500
    )


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The dry run of everything where only torch and numpy are installed."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({OUTER})\n")
    return dry_run(folder / "out", PYTHONPATH=str(folder))


@pytest.mark.timeout(510)
def test_the_parts_that_need_packages_run_where_these_are(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "cuda.py").write_text("")  # a package that the record names
    out, done = dry_run(tmp_path / "out", "--parts", ",".join(WITH_PACKAGES), "--wheels", str(tmp_path / "wheels"))
    check = open_check(out)
    assert done.returncode == 0 and check.passed, done.stdout
    assert all(check.rows(part) for part in WITH_PACKAGES)
    assert check.provenance["command"].endswith("--parts tests,course --wheels wheels")
    assert "cuda=yes" in check.rows("environment")[0]["packages"] and str(tmp_path) not in (out / "log.txt").read_text()


def test_a_part_finds_what_a_relative_path_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ".:wheels")
    assert _environment(tmp_path, "mark")["PYTHONPATH"] == f"{ROOT}:{tmp_path}:{tmp_path / 'wheels'}"


@pytest.mark.timeout(510)
def test_without_packages_two_parts_say_what_to_install_and_the_others_pass(dry, tmp_path):
    out, done = dry
    check = open_check(out)
    able = [part.name for part in PARTS if part.name not in WITH_PACKAGES]
    assert {each.name: each.status for each in check.outcomes} == {
        **dict.fromkeys(["environment", *able], "finished"), **dict.fromkeys(WITH_PACKAGES, "refused"),
    }, done.stdout  # fmt: skip
    for part, needed in (
        ("tests", "pytest"),
        ("course", "nbclient, nbformat, ipykernel, ipywidgets, anywidget, plotly"),
    ):
        assert f"the part {part} needs {needed}, not found here" in check.outcome(part).reason
        assert "`pip install --target wheels" in (reason := check.outcome(part).reason) and "--wheels wheels" in reason
    assert done.returncode == 1 and not any(check.outcome(part).failed_checks for part in able), done.stdout
    assert all(check.rows(part) for part in able) and check.provenance["source_sha256"]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) < 8 and all(path.parent == out and path.stat().st_size < 16e6 for path in files)
    assert any(RunRecord.load(place).table("breakdown") for place in check.unpack_records(tmp_path))
    assert json.loads((out / "check.json").read_text())["passed"] is False


@pytest.mark.timeout(510)
@pytest.mark.parametrize("part,measures,least_checks", [
    ("one_rank", {"lab", "lab-gathering", "torch-fsdp2", "torch-ddp", "alone"}, 2),
    ("overlap", {"none", "slow", "slower than compute"}, 2),
    ("memory", {"arithmetic", "categories", "runs"}, 5),
])  # fmt: skip
def test_a_part_of_the_dry_run_measures_all_that_it_names(dry, part: str, measures: set[str], least_checks: int):
    outcome = open_check(dry[0]).outcome(part)
    named = {row.get("engine") or row.get("link") or row.get("measure") for row in outcome.sheet["rows"]}
    assert named == measures and len(outcome.sheet["checks"]) >= least_checks and outcome.sheet["notes"]
    assert outcome.failed_checks == []
