"""`fsdplab gpu-check`: parts that fail, hang, die or refuse are reported and stop nothing; what was found is kept;
nothing outlives it. The parts themselves run dry, on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdplab.common.processes import _all, gone
from fsdplab.gpu_check import __main__ as command
from fsdplab.gpu_check.__main__ import PARTS, chosen, main, run_check
from fsdplab.gpu_check.check import FORMAT, Check, CheckError, Part, Sheet, open_check, shown, table
from fsdplab.gpu_check.foundations import furthest, source_digest
from fsdplab.gpu_check.measures import (
    SIZES,
    Communication,
    Size,
    alone_bytes,
    communication,
    comparable,
    fitting,
    together_bytes,
)
from fsdplab.gpu_check.on_ranks import _case, _wrong
from fsdplab.records import RunRecord, Summary
from fsdplab.sessions import gpu_probes as probes
from fsdplab.sessions.spec import gpus

ROOT = Path(__file__).resolve().parents[1]
FAULTY = "tests.faulty_part"


def begun(folder: Path) -> Check:
    return Check(folder, {"device": "cpu", "commit": "", "command": "the command"})


def wait_until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def sleepers() -> list[int]:
    found = []
    for pid in _all():
        try:
            found += [pid] if b"time.sleep(601.25)" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended since it was listed
    return [pid for pid in found if not gone(pid)]


# ---- the whole, with parts that go wrong


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> tuple[Check, int]:
    """A check of parts that go wrong in every way, between two good ones, and its exit status."""
    names = ["keeps_a_record", "fails", "dies", "refuses", "does_not_hold", "hangs", "is_good"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PROGRAM", FAULTY)
        patch.setattr(command, "PARTS", {name: 8.0 if name == "hangs" else 60.0 for name in names})
        folder = tmp_path_factory.mktemp("check")
        status = run_check(begun(folder), names, 300.0)
    return open_check(folder), status


def test_every_part_is_reported_with_its_reason_and_the_last_one_still_runs(checked):
    check, status = checked
    assert status == 1 and not check.passed
    assert {each.name: (each.status, each.reason) for each in check.parts} == {
        "keeps_a_record": ("finished", ""),
        "fails": ("failed", "RuntimeError: the third row is wrong in (checkout)/tests/faulty_part.py"),
        "dies": ("killed", "by SIGKILL"),
        "refuses": ("failed", "nothing can be checked here; try elsewhere"),
        "does_not_hold": ("finished", ""),
        "hangs": ("out of time", "ended at its limit of 8 s"),
        "is_good": ("finished", ""),
    }


def test_rows_outlive_a_part_that_ended_badly(checked):
    for name in ("fails", "dies", "hangs"):
        assert checked[0].part(name).rows == [{"step": 1, "milliseconds": 2.5}]
    with pytest.raises(LookupError, match="keeps_a_record"):
        checked[0].part("nobody")


def test_what_needs_values_is_not_judged_where_kernels_compute_nothing(checked):
    states = [(check["name"], check["state"]) for check in checked[0].part("does_not_hold").checks]
    assert states == [("peak within 3 %", "failed"), ("losses", "failed"), ("gradients", "not judged")]
    text = str(checked[0])
    for words in (
        "it is 7 % too large",
        "not judged",
        "values are wrong: 0.0",
        "ended at its limit of 8 s",
        "note: all",
    ):
        assert words in text


def test_the_folder_is_small_and_tells_no_paths(checked):
    folder = checked[0].folder
    assert sorted(path.name for path in folder.iterdir()) == ["check.json", "log.txt", "records"]
    log = (folder / "log.txt").read_text()
    assert "fails says hello" in log and "Traceback" in log and str(ROOT) not in log


def test_records_are_opened_again(checked):
    (place,) = checked[0].records()
    assert place.name == "run-a" and RunRecord.load(place).summary.losses == (2.5,)


def test_nothing_of_the_parts_is_left(checked):
    assert sleepers() == []


def test_what_the_whole_limit_does_not_hold_is_named_as_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PROGRAM", FAULTY)
    monkeypatch.setattr(command, "PARTS", {"hangs_and_hears_nothing": 60.0, "is_good": 60.0})
    assert run_check(begun(tmp_path), ["hangs_and_hears_nothing", "is_good"], 7.0) == 1
    parts = open_check(tmp_path).parts
    assert [each.status for each in parts] == ["out of time", "not run"] and "no time was left" in parts[1].reason
    assert sleepers() == []


def started_and_hanging(folder: Path) -> tuple[subprocess.Popen[bytes], int, int]:
    """A check, in a process of its own, whose second part hangs by now; the process, the part's id, and that of what
    the part started.
    """
    code = f"""
import sys
from pathlib import Path
from fsdplab.gpu_check import __main__ as command
from fsdplab.gpu_check.check import Check

command.PROGRAM, command.PARTS = {FAULTY!r}, {{"is_good": 60.0, "hangs": 200.0}}
with command._signals_that_interrupt():
    check = Check(Path({str(folder / "out")!r}), {begun(folder).provenance!r})
    sys.exit(command.run_check(check, command.PARTS, 200.0))
"""
    (folder / "out").mkdir()
    with (folder / "said").open("w") as said:
        runner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=said, stderr=said)
    sheet = folder / "out" / ".unfinished" / "hangs.json"
    wait_until(lambda: sheet.exists() and json.loads(sheet.read_text())["notes"])
    part, child = map(int, json.loads(sheet.read_text())["notes"][0].split())
    return runner, part, child


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_check_leaves_no_process_and_keeps_what_was_there(tmp_path, how):
    runner, part, child = started_and_hanging(tmp_path)
    runner.send_signal(how)
    assert runner.wait(30) == 130 and gone(part) and gone(child)
    assert "interrupted" in (tmp_path / "said").read_text()
    check = open_check(tmp_path / "out")
    assert [(each.name, each.status) for each in check.parts] == [("is_good", "finished"), ("hangs", "interrupted")]
    assert check.part("hangs").rows and "interrupted" in check.notes[0]


def test_a_part_ends_when_the_check_is_killed(tmp_path):
    runner, part, child = started_and_hanging(tmp_path)
    runner.kill()
    runner.wait(30)
    wait_until(lambda: gone(part))
    os.kill(child, signal.SIGKILL)  # ranks are tied to their parents, this sleeper is not
    assert [each.name for each in open_check(tmp_path / "out").parts] == ["is_good"]


def test_a_full_disk_is_one_line(tmp_path):
    # no file above 1 kB
    text = f"ulimit -f 1; exec {sys.executable} -m fsdplab.gpu_check --device cpu --parts nccl --out {tmp_path / 'out'}"
    done = subprocess.run(["bash", "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=120)
    (said,) = done.stderr.splitlines()
    assert done.returncode == 1 and "the result could not be written (" in said and "File too large" in said


# ---- the command line


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--parts", "trace"], "did you mean traces"),
        (["--limit", "0"], "--limit is 0"),
        (["--limit", "soon"], "see `fsdplab gpu-check --help`"),
        (["--device", "tpu"], "see `fsdplab gpu-check --help`"),
        (["--open", "FOLDER"], "holds no check.json"),
        (["--out", "FOLDER"], "not empty"),
    ],
)
def test_a_wrong_request_is_answered_in_one_line(tmp_path, capsys, flags, words):
    (tmp_path / "file").write_text("x")
    try:
        code = main([str(tmp_path) if flag == "FOLDER" else flag for flag in flags])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    assert code == 2 and words in said and said.count("\n") == 1


def test_parts_run_in_the_order_in_which_they_rest_on_each_other():
    assert list(PARTS) == ["environment", "mechanisms", "nccl", "correctness", "traces", "speed"] == chosen("")
    assert chosen("speed, nccl") == ["environment", "nccl", "speed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_the_check_refuses_in_one_line_and_leaves_nothing(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install torch" in said and "--device cpu" in said
    assert not (tmp_path / "new").exists()


def test_the_runner_needs_no_torch():
    code = "import fsdplab.gpu_check.__main__, sys; print({'torch', 'numpy', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n"


# ---- sheets and folders


def test_a_sheet_is_saved_with_every_call(tmp_path):
    sheet = Sheet("nccl", tmp_path)
    sheet.row(bytes=3, loss=2.0, mfu=None)
    sheet.check("peak", "")
    found = json.loads((tmp_path / "nccl.json").read_text())
    assert found["rows"] == [{"bytes": 3, "loss": 2.0, "mfu": None}]
    assert found["checks"] == [{"name": "peak", "state": "held", "got": ""}]


def test_a_check_passes_only_if_all_ran_and_all_held(tmp_path):
    good, late = Part("a", "finished"), Part("a", "out of time")
    bad = Part("a", "finished", checks=[{"name": "b", "state": "failed", "got": "1"}])
    passes = [Check(tmp_path, {}, parts).passed for parts in ([good], [], [good, late], [bad])]
    assert passes == [True, False, False, False]


@pytest.mark.parametrize(
    "text,words",
    [
        (None, "holds no check.json"),
        ("{", "is damaged"),
        ('{"format": "other"}', "has the format 'other'"),
        (json.dumps({"format": FORMAT}), "is damaged"),
        (json.dumps({"format": FORMAT, "parts": [{"nam": "a"}], "provenance": {}, "notes": []}), "is damaged"),
        (json.dumps({"format": FORMAT, "parts": [{"name": "a", "rows": 3}], "provenance": {}, "notes": []}), "damaged"),
    ],
)
def test_a_folder_without_a_check_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "check.json").write_text(text)
    with pytest.raises(CheckError, match=words):
        open_check(tmp_path)


def test_figures_read_well():
    assert [shown(each) for each in (None, 0.123456, 1234567, 2.5e9, 12.0, "a")] == [
        "-", "0.1235", "1,234,567", "2,500,000,000", "12", "a",
    ]  # fmt: skip
    assert table([{"a": 1, "empty": None}, {"b": 2.0}]) == "a  b\n1  -\n-  2"


def test_the_digest_tells_sources_apart(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    first = source_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert source_digest(tmp_path) != first and len(first) == 16


# ---- the sentences on a machine


@pytest.mark.parametrize(
    "driver,torch_cuda,words",
    [
        (12040, "13.0", "CUDA up to 12.4, but this torch is built for CUDA 13.0; update the driver to 580"),
        (11080, "12.8", "update the driver to 525"),
        (None, "13.0", "no NVIDIA driver answers; install one"),
        (13000, None, "pip install torch"),
        (12040, "12.8", ""),
        (13010, "12.8", ""),
    ],
)
def test_a_driver_that_is_too_old_is_a_sentence(driver, torch_cuda, words):
    said = gpus.driver_complaint(driver, torch_cuda)
    assert words in said if words else said == ""


CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    "capability,architectures,runs",
    [
        ((6, 0), CUDA_13, False), ((7, 0), CUDA_13, False), ((7, 5), CUDA_13, True), ((8, 9), CUDA_13, True),
        ((9, 0), ("sm_90a",), True), ((10, 3), ("sm_100a",), False), ((12, 1), ("sm_90", "compute_90"), True),
        ((9, 0), (), False),
    ],
)  # fmt: skip
def test_a_gpu_without_kernels_is_a_sentence(capability, architectures, runs):
    said = gpus.kernel_complaint("Tesla V100", capability, architectures)
    assert said == "" if runs else "Tesla V100 has the compute capability" in said and "install a build" in said


def test_little_shared_memory_and_an_exclusive_gpu_are_sentences():
    assert "--shm-size=8g" in gpus.shm_complaint(64 << 20) and gpus.shm_complaint(8 << 30) == ""
    said = [gpus.mode_complaint(mode) for mode in (0, 2, 3)]
    assert said[0] == "" and all("nvidia-smi -c 0" in each for each in said[1:])


def test_a_probe_that_hangs_or_fails_is_an_error_within_its_limit():
    assert "no answer within 0 s" in probes.ask("machine", "cpu", limit_s=0.01)["error"]
    assert "start of device string: mars" in probes.ask("profiles", "mars")["error"]
    assert "KeyError: 'nobody'" in probes.ask("nobody", "cpu")["error"]


def test_memory_is_opened_by_a_second_process():
    assert probes.ask("ipc", "cpu") == {"refused": ""}


def test_a_process_that_only_asks_has_no_context():
    assert not gpus.has_context(0)


# ---- what the parts judge by


def test_collectives_expect_what_they_must():
    _, source, _, expected = _case("all_gather", 1, 2, 4)
    assert source.tolist() == [2, 2] and expected.tolist() == [1, 1, 2, 2]
    assert (
        _case("reduce_scatter", 0, 2, 4)[3].tolist() == [3, 3] and _case("all_reduce", 0, 3, 3)[3].tolist() == [6] * 3
    )
    assert _wrong(expected, expected) == "" and "element 2 of 4 is 0.0, expected 2.0" in _wrong(
        torch.tensor([1.0, 1, 0, 2]), expected
    )


def test_losses_that_differ_or_lack_are_far_apart():
    assert furthest([2.0, 1.0], [2.0, 1.25]) == pytest.approx(0.2)
    assert furthest([1.0], [1.0, 1.0]) == furthest([None], [1.0]) == float("inf")


def test_a_ledger_and_a_trace_that_differ_are_found(tmp_path):
    assert Communication(0.010, 0.009, 8, linked=True).wrong == Communication(0.010, 0.002, 8, linked=False).wrong == ""
    assert "78.7 ms by the ledger, 3.6 ms by the trace" in Communication(0.0787, 0.0036, 8, linked=True).wrong
    assert Communication(0.010, 0.020, 8, linked=False).wrong and Communication(0.010, 0.0, 8, linked=False).wrong
    where = {"rank": 0, "step": 6}
    tables = {
        "breakdown": [{**where, "exposed_ns": 30, "overlapped_ns": 10}],
        "ledger": [
            {**where, "start_ns": 0, "end_ns": 20},
            {**where, "start_ns": 10, "end_ns": 40},
            {"rank": 0, "step": 1, "start_ns": 0, "end_ns": 9},
        ],
    }
    found = communication(RunRecord(tmp_path, spec={}, tables=tables))
    assert tuple(found) == (40e-9, 40e-9, 2, False)


@pytest.mark.parametrize(
    ("device", "time", "share", "exact"),
    [
        ("cuda", "measured", 0.97, True), ("cuda", "measured", None, True), ("cuda", "measured", 0.6, False),
        ("cuda", "emulated", 0.97, False), ("cpu", "measured", 0.97, False),
    ],
)  # fmt: skip
def test_a_ledger_and_a_trace_are_compared_where_no_wait_is_in_one_alone(tmp_path, device, time, share, exact):
    record = RunRecord(tmp_path, spec={}, provenance={"step_time_s": time}, summary=Summary(cpu_share=share))
    assert comparable(device, record) is exact


@pytest.mark.parametrize("gigabytes,alone,together", [
    (15, "llama-0.3b", "gpt-20m"), (24, "llama-0.3b", "gpt2"),
    (80, "llama-1b", "llama-1b"), (140, "llama-3b", "llama-1b"),
])  # fmt: skip
def test_sizes_follow_from_the_free_memory(gigabytes, alone, together):
    free = gigabytes * 1e9
    chosen_alone = fitting(free, lambda size: alone_bytes(size, 1))
    chosen_together = fitting(free, lambda size: together_bytes(size, 1))
    assert (chosen_alone.model, chosen_together.model) == (alone, together)
    assert alone_bytes(chosen_alone, 1) < free and together_bytes(chosen_together, 1) < free
    assert fitting(0.0, lambda size: alone_bytes(size, 8)) == SIZES[-1] == Size("gpt-tiny", 2, 32)


# ---- the whole, dry

# A module that is None in sys.modules cannot be imported, by ranks neither.
OUTER = ("plotly", "IPython", "ipywidgets", "anywidget", "nbformat", "pandas", "typer", "rich", "pytest", "_pytest")


@pytest.mark.timeout(510)
def test_a_dry_run_passes_where_only_torch_and_numpy_are_installed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({OUTER})\n")
    out = tmp_path / "out"
    flags = ["--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab.gpu_check", *flags], cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    check = open_check(out)
    assert done.returncode == 0 and check.passed, done.stdout + done.stderr
    assert all(check.part(name).rows and check.part(name).checks for name in PARTS)
    assert {row["case"] for row in check.part("correctness").rows} >= {
        "full_shard",
        "hybrid_shard",
        "offload",
        "Shard(1)",
    }
    assert {row["engine"] for row in check.part("speed").rows} >= {"lab", "torch-fsdp2", "torch-ddp", "alone"}
    records = [RunRecord.load(place) for place in check.records()]
    assert len(records) == 4 and all(record.table("breakdown") for record in records)
    assert check.provenance["source_sha256"] and check.provenance["torch"] == torch.__version__
