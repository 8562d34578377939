"""What lessons show of a GPU: a check that was made on one, or the line that none was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdplab.figures import rank_timeline
from fsdplab.gpu_check.__main__ import main
from fsdplab.gpu_check.check import CheckError
from fsdplab.teaching.core.on_a_gpu import KEPT, on_a_gpu


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Path:
    """A check of recorded runs, made on the CPU."""
    folder = tmp_path_factory.mktemp("check")
    assert main(["--device", "cpu", "--parts", "traces", "--out", str(folder)]) == 0
    return folder


def as_from(device: str, folder: Path, target: Path) -> Path:
    """The same check, saying that it was made on another device."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    content = json.loads((target / "check.json").read_text())
    content["provenance"] |= {"device": device, "gpu": "NVIDIA H200", "torch": "2.11.0"}
    (target / "check.json").write_text(json.dumps(content))
    return target


def test_where_nothing_was_measured_the_cell_says_so(tmp_path, capsys):
    on_a_gpu(rank_timeline, folder=tmp_path)
    assert (
        "Not measured on a GPU: no check was made on one yet." in (said := capsys.readouterr().out)
        and "fsdplab gpu-check --out data/gpu" in said
    )


@pytest.mark.timeout(300)
def test_a_rehearsal_on_the_cpu_is_not_shown(rehearsal, capsys):
    on_a_gpu(rank_timeline, folder=rehearsal)
    assert "the check that is kept ran on cpu, as a rehearsal" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_a_check_from_a_gpu_is_drawn_and_says_where_it_was_made(rehearsal, tmp_path, capsys):
    drawn = []
    on_a_gpu(lambda record: drawn.append(record) or rank_timeline(record), folder=as_from("cuda", rehearsal, tmp_path))
    said = capsys.readouterr().out
    assert drawn[0].spec["strategy"] == "full_shard" and drawn[0].table("timeline")
    assert "Measured on NVIDIA H200, torch 2.11.0" in said
    on_a_gpu(rank_timeline, strategy="zero1", folder=tmp_path)
    assert "has no zero1 run" in capsys.readouterr().out


def test_a_damaged_check_is_one_line(tmp_path):
    (tmp_path / "check.json").write_text("{")
    with pytest.raises(CheckError, match="is damaged .* copy the folder again"):
        on_a_gpu(rank_timeline, folder=tmp_path)


def test_what_is_kept_was_made_on_a_gpu():
    if (KEPT / "check.json").exists():
        assert json.loads((KEPT / "check.json").read_text())["provenance"]["device"] == "cuda"
