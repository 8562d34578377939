"""`fsdplab gpu-check` runs four commands and keeps what they write; what doctor says of a machine's GPUs."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from fsdplab.cli.gpu_check import commands
from fsdplab.records import RunRecord
from fsdplab.sessions import gpu_probes as probes
from fsdplab.sessions.launch.limited import answer_in, why_it_ended
from fsdplab.sessions.spec import gpus
from tests.test_cli import ended


def test_the_reason_is_what_a_rank_said():
    said = "gpt-tiny, 2 ranks\nRank 1 raised: out of memory\nTraceback\nSet VERBOSE=1 for more\n"
    assert why_it_ended(1, said) == "Rank 1 raised: out of memory"
    assert why_it_ended(1, "hello\nRuntimeError: no\n") == "RuntimeError: no"
    assert why_it_ended(1, "") == "exit code 1, nothing printed" and why_it_ended(0, said) == ""


@pytest.mark.timeout(300)
def test_a_rehearsal_runs_its_commands_and_keeps_their_results(tmp_path: Path, capfd) -> None:
    folder, told = tmp_path / "check", tmp_path / "told.json"
    code, out, err = ended(["gpu-check", "--device", "cpu", "--out", str(folder), "--json", str(told)], capfd)
    assert code == 0, out + err
    rows = json.loads(told.read_text())["commands"]
    assert [row["command"].split()[1] for row in rows] == ["doctor", "compare", "bench"]
    assert all(row["exit_code"] == 0 and f"\n{row['command']}\n" in out for row in rows)
    assert json.loads((folder / "doctor.json").read_text())["findings"]
    assert all(run["matches_reference"] for run in json.loads((folder / "compare.json").read_text())["runs"])
    assert json.loads((folder / "bench.json").read_text())["rows"]
    records = [RunRecord.load(path.parent) for path in folder.glob("records/*/run.json")]
    assert "full_shard" in {record.spec["strategy"] for record in records}
    code, out, err = ended(["gpu-check", "--device", "cpu", "--out", str(folder)], capfd)
    assert code == 2 and "which is not empty; give a new folder" in err and not out


def test_a_command_that_fails_makes_the_check_fail_and_the_others_run(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("fsdplab.cli.gpu_check.run_module", lambda module, words: int(words[0] == "compare"))
    code, out, _ = ended(["gpu-check", "--device", "cpu", "--out", str(tmp_path / "check")], capfd)
    assert code == 1 and "1 of 3 commands failed" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_the_check_refuses_in_one_line_and_leaves_nothing(tmp_path: Path, capfd) -> None:
    code, out, err = ended(["gpu-check", "--out", str(tmp_path / "check")], capfd)
    assert code == 2 and not out and "or try --device cpu" in err and err.count("\n") == 1
    assert not (tmp_path / "check").exists()


def test_the_tests_for_gpus_are_run_on_gpus_and_in_a_clone_alone(tmp_path: Path, monkeypatch) -> None:
    programs = lambda device: [command.module for command in commands(device, 2, tmp_path)]  # noqa: E731
    assert programs("cuda") == ["fsdplab", "pytest", "fsdplab", "fsdplab"]
    assert programs("cpu") == ["fsdplab", "fsdplab", "fsdplab"]
    monkeypatch.setattr("fsdplab.cli.gpu_check.checkout", lambda: None)
    assert programs("cuda") == ["fsdplab", "fsdplab", "fsdplab"]


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
    assert "start of device string: mars" in probes.ask("ipc", "mars")["error"]
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
