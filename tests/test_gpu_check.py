"""`fsdplab gpu-check`: parts that fail, hang, die or refuse are reported and stop nothing; what was found is kept;
nothing outlives it. The parts themselves run dry, on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from fsdplab.common.processes import _all, gone
from fsdplab.gpu_check import commands
from fsdplab.gpu_check.__main__ import chosen, main, run_check
from fsdplab.gpu_check.check import FORMAT, Check, CheckError, Part, open_check, shown, table
from fsdplab.gpu_check.commands import PARTS, SIZES, TESTS, Command, Size, commands_of, fitting, runs
from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.records import RunRecord, Summary, comparison_json
from fsdplab.sessions import gpu_probes as probes
from fsdplab.sessions.launch.failure_report import Failure, RanksFailed
from fsdplab.sessions.launch.limited import answer_in, why_it_ended
from fsdplab.sessions.spec import gpus
from fsdplab.sessions.worker.environment import source_digest
from fsdplab.sessions.worker.known_collectives import cases, wrong_value
from fsdplab.workloads import preset
from tests.leftovers import until

ROOT = Path(__file__).resolve().parents[1]


def faulty(part: str, words: str, limit_s: float = 60.0, look=None) -> Command:
    """A command of tests/faulty_part.py, of which a good one prints a row."""
    return Command(part, words.split()[0], words, limit_s, look or prints_a_row, module="tests.faulty_part")


def test_the_reason_is_what_a_rank_said():
    said = "gpt-tiny, 2 ranks\nRank 1 raised: out of memory\nTraceback\nSet VERBOSE=1 for more\n"
    assert why_it_ended(1, said) == "Rank 1 raised: out of memory"
    assert why_it_ended(1, "hello\nRuntimeError: no\n") == "RuntimeError: no"
    assert why_it_ended(1, "") == "exit code 1, nothing printed" and why_it_ended(0, said) == ""


def prints_a_row(part: Part, command: Command, wrote: Path) -> None:
    part.row(**answer_in(wrote))


def begun(folder: Path) -> Check:
    return Check(folder, {"device": "cpu"})


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
    """A check whose commands go wrong in every way, between two good ones, and its exit status."""
    folder = tmp_path_factory.mktemp("check")
    table = (
        faulty("environment", "is_good", look=lambda part, command, wrote: part.rows.append(dict(CPU))),
        faulty("records", "keeps_a_record --out {out}", look=runs),
        *(faulty("wrong", words) for words in ("is_good", "fails", "dies", "refuses", "loses_its_numbers")),
        faulty("wrong", f"hangs {folder.parent / 'pids'}", 8.0),
        faulty("good", "is_good"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "TABLE", table)
        status = run_check(begun(folder), ["environment", "records", "wrong", "good"], 300.0)
    return open_check(folder), status


CPU = {"device": "cpu", "exclusive": False, "free": 0, "sum": 0.0, "error": ""}  # its kernels compute nothing


def test_every_command_that_went_wrong_is_reported_and_the_last_one_still_runs(checked):
    check, status = checked
    assert status == 1 and not check.passed
    assert [each.status for each in check.parts.values()] == ["finished"] * 4
    assert {each["name"]: each["wrong"] for each in check.parts["wrong"].failed()} == {
        "fails runs": "RuntimeError: the third row is wrong in (checkout)/tests/faulty_part.py",
        "dies runs": "by SIGKILL",
        "loses_its_numbers runs": "Rank 0 raised: the loss is nan",
        "hangs runs": "ended at its limit of 8 s",
    }
    assert check.parts["wrong"].notes == ["refuses is left out: nothing of this can be done here; try elsewhere"]
    assert check.parts["good"].rows == check.parts["wrong"].rows == [{"milliseconds": 2.5}]
    for words in ("the loss is nan", "ended at its limit of 8 s", "note: refuses is left out"):
        assert words in str(check)


def test_the_folder_is_small_and_tells_no_paths(checked):
    folder = checked[0].folder
    assert sorted(path.name for path in folder.iterdir()) == ["check.json", "log.txt", "records"]
    log = (folder / "log.txt").read_text()
    assert "fails says hello" in log and "Traceback" in log and str(ROOT) not in log


def test_records_are_opened_again(checked):
    (place,) = checked[0].records
    assert place.name == "keeps_a_record" and RunRecord.load(place).summary.losses == (2.5,)
    assert checked[0].parts["records"].rows[0]["model"] == "gpt-tiny"


def test_nothing_of_the_parts_is_left(checked):
    assert sleepers() == []


def test_what_the_whole_limit_does_not_hold_is_named_as_not_run(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    hanging = faulty("environment", f"hangs_and_hears_nothing {pids}", look=lambda *asked: None)
    monkeypatch.setattr(commands, "TABLE", (hanging, faulty("environment", "is_good")))
    (tmp_path / "out").mkdir()
    assert run_check(begun(tmp_path / "out"), ["environment", "good"], 7.0) == 1
    first, second = open_check(tmp_path / "out").parts.values()
    assert (first.status, first.reason) == ("out of time", "no time was left for is_good")
    assert (second.status, second.reason) == ("not run", "the environment is not known")
    assert sleepers() == []


def started_and_hanging(folder: Path) -> tuple[subprocess.Popen[bytes], int, int]:
    """A check, in a process of its own, whose second command hangs by now; the process, the id of that command, and
    that of what it has started.
    """
    code = f"""
import signal, sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from fsdplab.common.processes import interrupt_by
from fsdplab.gpu_check import commands
from fsdplab.gpu_check.__main__ import run_check
from tests.test_gpu_check import begun, faulty

commands.TABLE = (faulty("environment", "is_good"), faulty("environment", "hangs {folder / "pids"}", 200.0))
interrupt_by(signal.SIGTERM, signal.SIGINT)
sys.exit(run_check(begun(Path({str(folder / "out")!r})), ["environment"], 200.0))
"""
    (folder / "out").mkdir()
    with (folder / "said").open("w") as said:
        runner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=said, stderr=said)
    pids = folder / "pids"
    assert until(lambda: pids.exists() and pids.read_text().endswith("."))
    command, child = map(int, pids.read_text().split()[:2])
    return runner, command, child


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_check_leaves_no_process_and_keeps_what_was_there(tmp_path, how):
    runner, command, child = started_and_hanging(tmp_path)
    runner.send_signal(how)
    assert runner.wait(30) == 130 and gone(command) and gone(child)
    assert "interrupted" in (tmp_path / "said").read_text()
    check = open_check(tmp_path / "out")
    assert {name: each.status for name, each in check.parts.items()} == {"environment": "interrupted"}
    assert check.parts["environment"].rows == [{"milliseconds": 2.5}]


def test_a_command_ends_when_the_check_is_killed_and_rows_of_before_are_kept(tmp_path):
    runner, command, child = started_and_hanging(tmp_path)
    runner.kill()
    runner.wait(30)
    assert until(lambda: gone(command))
    os.kill(child, signal.SIGKILL)  # ranks are tied to their parents, this sleeper is not
    assert open_check(tmp_path / "out").parts["environment"].rows == [{"milliseconds": 2.5}]


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
    in_order = ["environment", "mechanisms", "nccl", "correctness", "traces", "speed", "tests"]
    assert list(PARTS) == in_order == chosen("")
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


# ---- folders


def test_a_check_passes_only_if_all_ran_and_all_held(tmp_path):
    good, late = Part("a", "finished"), Part("a", "out of time")
    bad = Part("a", "finished", checks=[{"name": "b", "wrong": "1"}])
    passes = [Check(tmp_path, {}, dict(enumerate(parts))).passed for parts in ([good], [], [good, late], [bad])]
    assert passes == [True, False, False, False]


@pytest.mark.parametrize(
    "text,words",
    [
        (None, "holds no check.json"),
        ("{", "is damaged"),
        ('{"format": "other"}', "has the format 'other'"),
        (json.dumps({"format": FORMAT}), "is damaged"),
        (json.dumps({"format": FORMAT, "parts": [{"nam": "a"}], "provenance": {}}), "is damaged"),
        (json.dumps({"format": FORMAT, "parts": [{"name": "a", "rows": 3}], "provenance": {}}), "damaged"),
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


@pytest.mark.parametrize(
    "cuda,others,for_cpu",
    [
        (": Optional[str] = None", "hip: Optional[str] = None", True), (" = None", "", True),
        (": Optional[str] = '12.8'", "hip: Optional[str] = None", False), (" = '13.0'", "", False),
        (": Optional[str] = None", "hip: Optional[str] = '6.4.4'", False), ("_is_not_said = 1", "", False),
    ],
)  # fmt: skip
def test_what_torch_was_built_for_is_read_without_importing_it(tmp_path, monkeypatch, cuda, others, for_cpu):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda{cuda}\n{others}\nxpu: Optional[str] = None\n")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpus, "find_spec", lambda name: spec)
    assert gpus._is_built_for_cpu.__wrapped__() is for_cpu
    (tmp_path / "version.py").unlink()
    assert not gpus._is_built_for_cpu.__wrapped__()


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


@pytest.mark.parametrize(
    "written", ['a word\n{"a": 1}\n{"a": {"b": 2}}\n[rank0]: a warning\n', '{\n "a": {\n  "b": 2\n }\n}\n']
)
def test_the_answer_is_the_last_json_whatever_is_printed_after_it(tmp_path, written):
    (tmp_path / "log").write_text(written)
    assert answer_in(tmp_path / "log") == {"a": {"b": 2}}
    (tmp_path / "log").write_text("a word\n")
    with pytest.raises(json.JSONDecodeError):
        answer_in(tmp_path / "log")


def test_memory_is_opened_by_a_second_process():
    assert probes.ask("ipc", "cpu") == {"refused": "", "wrong": ""}


def test_a_process_that_only_asks_has_no_context():
    assert not gpus.has_context(0)


# ---- what the parts judge by


def test_a_group_that_is_not_formed_is_a_check_that_failed(monkeypatch):
    def lost(*asked, **how):
        raise RanksFailed(Failure("ranks_failed", "Rank 1 died.\nIts output is empty."))

    monkeypatch.setattr("fsdplab.sessions.call_on_ranks", lost)
    assert probes.collectives("cpu") == [{"what": "a group of 2", "wrong": "Rank 1 died."}]


def test_collectives_expect_what_they_must():
    gather, scatter, reduce = cases(1, 2, 4)
    assert gather.source.tolist() == [2, 2] and gather.expected.tolist() == [1, 1, 2, 2]
    assert scatter.expected.tolist() == [3, 3] and reduce.expected.tolist() == [3] * 4
    wrong = torch.tensor([1.0, 1, 0, 2])
    assert wrong_value(gather.expected, gather.expected) == ""
    assert "element 2 of 4 is 0.0" in wrong_value(wrong, gather.expected)


def test_mfu_is_the_models_arithmetic_over_the_data_sheets():
    spec = {"model": "gpt-20m", "batch_size": 2, "sequence_length": 64}
    found = {"spec": spec, "environment": {"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]}}
    about = 6 * preset("gpt-20m").parameters * 2 * 64 / 989e12  # of four ranks, in a second
    assert 0.5 * about < commands.mfu(found, 4, 1.0) < 2 * about
    assert commands.mfu(found | {"environment": {"gpus": []}}, 4, 1.0) is None


def test_losses_that_differ_and_runs_that_fail_are_checks_that_failed(tmp_path):
    spec = {"model": "gpt-tiny", "batch_size": 2, "sequence_length": 32, "world_size": 2}
    kept = RunRecord(tmp_path / "run", spec=spec, summary=Summary(losses=(2.0,)))
    found = comparison_json([kept] * 3)
    for run, changed in zip(found["runs"], ({}, {"matches_reference": False}, {"status": "failed", "losses": []})):
        run |= {"matches_reference": True, "status": "finished"} | changed
    (tmp_path / "json").write_text(json.dumps(found))
    part = Part("correctness")
    runs(part, Command("correctness", "", "compare --strategies a,b:offload=cpu,c -n 2", 1, None), tmp_path / "json")
    assert [(each["name"], each["wrong"]) for each in part.checks] == [
        ("a trains as the twin", ""), ("b:offload=cpu trains as the twin", "its losses are wrong"),
        ("c trains as the twin", "failed"),
    ]  # fmt: skip
    assert [row["last_loss"] for row in part.rows] == [2.0, 2.0, None]


def planned(size: Size, strategy: str, flash: bool):
    spec = PlanSpec(
        model=preset(size.model), gpu=find_gpu("h100-80gb"), gpus=1, gpus_per_node=1, strategy=strategy,
        seq=size.sequence, micro_batch=size.batch, flash=flash,
    )  # fmt: skip
    return memory_of(spec)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.model}-{size.batch}")
def test_sizes_are_the_planners(size):
    """Alone, DDP holds most: its state, its buckets and 16-bit copies. In turns the states of all engines stay."""
    flash, parameters = size.alone_gb > 25, preset(size.model).parameters
    whole, cut = (planned(size, strategy, flash) for strategy in ("no_shard", "full_shard"))
    alone = whole.peak.total + 6 * parameters
    passing = whole.peak.total - whole.resting.total
    together = 1.5 * whole.resting.total + 3 * cut.resting.total + 4 * parameters + passing
    assert (round(alone / 1e9, 1), round(together / 1e9, 1)) == (size.alone_gb, size.together_gb)


@pytest.mark.parametrize("gigabytes,alone,together", [
    (15, "llama-0.3b", "gpt-20m"), (24, "llama-0.3b", "gpt2"),
    (80, "llama-1b", "llama-0.3b"), (140, "llama-3b", "llama-1b"), (0, "gpt-tiny", "gpt-tiny"),
])  # fmt: skip
def test_sizes_follow_from_the_free_memory(gigabytes, alone, together):
    assert f"--model {alone} " in fitting(gigabytes * 1e9, lambda size: size.alone_gb)
    assert f"--model {together} " in fitting(gigabytes * 1e9, lambda size: size.together_gb)


def on_gpus(count: int, exclusive: bool = False) -> Check:
    gpu = {"device": "cuda:0", "exclusive": exclusive, "free": 80e9, "sum": 8.0, "error": ""}
    return Check(Path(), {"device": "cuda"}, {"environment": Part("environment", rows=[gpu] * count)})


@pytest.mark.parametrize(
    ("count", "exclusive", "correctness", "speed", "rows"),
    [(1, False, "-n 2", "-n 1", 6), (1, True, "-n 1", "-n 1", 6), (4, False, "-n 4", "-n 4", 9)],
)
def test_commands_follow_from_the_gpus(count, exclusive, correctness, speed, rows):
    check = on_gpus(count, exclusive)
    (command,) = commands_of("correctness", check)
    assert correctness in command.words and ("hybrid_shard:shard_size=2" in command.words) == (count == 4)
    found = [*commands_of("speed", check)]
    assert len(found) == rows and all(speed in each.words and "--model llama-" in each.words for each in found)
    assert bool([*commands_of("traces", check)]) is not exclusive


def test_tests_are_those_marked_gpu_and_need_a_clone(monkeypatch):
    (command,) = commands_of("tests", on_gpus(1))
    assert "tests/test_engine_cuda.py" in command.words
    monkeypatch.setattr(commands, "TESTS", TESTS / "nowhere")
    assert commands_of("tests", on_gpus(1)) == []


# ---- the whole, dry


def once_each() -> tuple[Command, ...]:
    """The table without rows that differ from an earlier one of their part in the strategy alone, with which the
    correctness part trains too.
    """
    rows = {(row.part, re.sub(r"^run \w+", "run", row.words)): row for row in reversed(commands.TABLE)}
    return tuple(reversed(rows.values()))


def test_rows_that_differ_in_the_strategy_alone_are_run_once():
    left_out = [row.name for row in commands.TABLE if row.name not in {each.name for each in once_each()}]
    assert left_out == ["shard_grad_op", "no_shard", "lab shard_grad_op", "lab zero2", "lab no_shard"]
    strategies = {re.match(r"run (\w+)", row.words)[1] for row in commands.TABLE if row.name in left_out}
    (correctness,) = commands_of("correctness", on_gpus(2))
    assert strategies <= set(re.search(r"--strategies (\S+)", correctness.words)[1].split(","))


@pytest.mark.full("every command of gpu-check")
@pytest.mark.timeout(510)
def test_a_dry_run_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "TABLE", once_each())
    out = tmp_path / "out"
    status = main(["--device", "cpu", "--out", str(out)])
    check = open_check(out)
    assert status == 0 and check.passed, check
    assert all(part.rows for part in check.parts.values()) and list(check.parts) == list(PARTS)
    assert {row["run"] for row in check.parts["correctness"].rows} >= {"full_shard", "full_shard:offload=cpu"}
    assert len(check.parts["correctness"].checks) == 7
    records = [RunRecord.load(place) for place in check.records]
    assert len(records) == 2 and all(record.table("breakdown") for record in records)
    assert check.provenance["source_sha256"] and check.provenance["torch"] == torch.__version__


# A module that is None in sys.modules cannot be imported, by ranks neither.
OUTER = ("plotly", "IPython", "ipywidgets", "anywidget", "nbformat", "pandas", "typer", "rich", "pytest", "_pytest")


@pytest.mark.timeout(300)
def test_foundations_need_only_torch_and_numpy_and_say_what_the_others_need(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({OUTER})\n")
    flags = ["--device", "cpu", "--out", str(tmp_path / "out"), "--parts", "mechanisms,nccl,correctness,tests"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab.gpu_check", *flags], cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    check = open_check(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(check.parts[name].checks for name in ("environment", "mechanisms", "nccl"))
    notes = {name: check.parts[name].notes for name in ("correctness", "tests")}
    assert "against the twin is left out: " in notes["correctness"][0] and "typer" in notes["correctness"][0]
    assert "marked gpu is left out: " in notes["tests"][0] and "pytest" in notes["tests"][0]
