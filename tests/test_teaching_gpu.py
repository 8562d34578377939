"""What lessons show of a GPU: a record that was made on one, or the line that none was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdplab.common.places import shared_folder
from fsdplab.figures import rank_timeline
from fsdplab.records import RecordError
from fsdplab.teaching.core.on_a_gpu import KEPT, on_a_gpu

RECORDED = shared_folder("data") / "lesson-07" / "early"  # full_shard on CPU ranks


def kept_check(folder: Path, **environment: object) -> Path:
    """A folder of gpu-check with this record, said to be made elsewhere."""
    record = folder / "records" / "full_shard"
    shutil.copytree(RECORDED, record)
    content = json.loads((record / "run.json").read_text())
    content["environment"] |= environment
    content["spec"]["link"] = None
    (record / "run.json").write_text(json.dumps(content))
    return folder


def test_where_nothing_was_measured_the_cell_says_so(tmp_path, capsys):
    on_a_gpu(rank_timeline, folder=tmp_path)
    said = capsys.readouterr().out
    assert "Not measured on a GPU: no check was made on one yet." in said and "fsdplab gpu-check --out data/gpu" in said


def test_a_rehearsal_on_the_cpu_is_not_shown(tmp_path, capsys):
    on_a_gpu(rank_timeline, folder=kept_check(tmp_path))
    assert "the check that is kept ran on the CPU, as a rehearsal" in capsys.readouterr().out


def test_a_record_from_a_gpu_is_drawn_and_says_where_it_was_made(tmp_path, capsys):
    drawn = []
    folder = kept_check(tmp_path, device="cuda", gpus=[{"name": "NVIDIA H200"}])
    on_a_gpu(lambda record: drawn.append(record) or rank_timeline(record), folder=folder)
    said = capsys.readouterr().out
    assert drawn[0].spec["strategy"] == "full_shard" and drawn[0].table("timeline")
    assert "Measured on NVIDIA H200, torch 2.13.0" in said
    on_a_gpu(rank_timeline, strategy="zero1", folder=folder)
    assert "has no zero1 run" in capsys.readouterr().out


def test_a_damaged_record_is_one_line(tmp_path):
    (kept_check(tmp_path) / "records" / "full_shard" / "run.json").write_text("{")
    with pytest.raises(RecordError):
        on_a_gpu(rank_timeline, folder=tmp_path)


def test_what_is_kept_was_made_on_a_gpu():
    for path in KEPT.glob("records/*/run.json"):
        assert json.loads(path.read_text())["environment"]["device"] == "cuda"
