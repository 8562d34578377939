"""What the lab says before anything runs: predictions beside measurements, without a process, and what does not fit."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.figures import outlook
from fsdplab.figures.outlook import outlook_html, outlook_of
from fsdplab.sessions import RunSpec
from fsdplab.sessions.calibration import Calibration, Found, calibration_file
from fsdplab.sessions.prediction import Prediction, predict
from fsdplab.teaching.core import exploring
from fsdplab.widgets.lab_state import LabState

pytestmark = pytest.mark.quick
FIXED = {"device": "cpu", "sequence_length": 32}
TINY: dict[str, Any] = {"model": "gpt-tiny", "steps": 2, "strategies": ("no_shard", "full_shard")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No calibration of this machine, and no runs of an earlier kernel, is met."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


class Operations(TorchDispatchMode):
    """Counts the operations on tensors that have memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.seen.append(str(func))
        return made


def test_a_prediction_builds_no_model_and_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a prediction started a process")

    for owner, name in ((os, "fork"), (os, "posix_spawn"), (subprocess.Popen, "__init__")):
        monkeypatch.setattr(owner, name, started)
    with Operations() as operations:
        rows = outlook_of([RunSpec(strategy=name, model="gpt-20m", seed=41) for name in ("no_shard", "full_shard")])
        assert "predicted" in outlook_html(rows)
    assert operations.seen == []
    assert [row.predicted.bytes_per_step for row in rows] == [86356992, 128944128]


def test_every_row_is_what_the_one_function_predicts() -> None:
    state = LabState(FIXED, **TINY | {"engines": ("lab", "torch-fsdp2", "twin"), "link": "none"})
    rows = outlook_of(state.request.specs)
    assert [(row.label, row.predicted) for row in rows] == [
        (name, predict(spec)) for name, spec in zip(("no_shard", "full_shard", "torch-fsdp2"), state.request.specs)
    ]
    page = outlook_html(rows)
    assert "no peak: the buffers of torch-fsdp2 are its own" in page and "sends 764 kB" in page


def test_a_calibration_is_used_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(strategy="full_shard", model="gpt-tiny", seed=42, **FIXED)
    (row,) = outlook_of([spec])
    assert (
        row.predicted.step_time_s is None
        and "before this machine is measured" in row.remark
        and row.remark in outlook_html([row])
    )

    def timed(spec: RunSpec, calibration: Calibration | None) -> Prediction:
        return replace(predict(spec), step_time_s=0.25 if calibration and not spec.linked else None)

    made = Found(Calibration(2, SimpleNamespace(), {}, "2026-01-01"), "from the calibration of 2026-01-01")
    monkeypatch.setattr(outlook, "find_calibration", lambda ranks: made)
    monkeypatch.setattr(outlook, "predict", timed)
    calibration_file().parent.mkdir(parents=True)
    calibration_file().write_text("{}")
    (row,) = outlook_of([spec])
    assert row.predicted.step_time_s == 0.25 and "step 250 ms" in outlook_html([row]) and "2026-01-01" in row.remark
    (linked,) = outlook_of([RunSpec(strategy="full_shard", model="gpt-tiny", link="eth10", **FIXED)])
    assert linked.predicted.step_time_s is None and "for a link" in linked.remark


def test_sliders_of_a_notebook_show_the_same_prediction() -> None:
    view = exploring.predicted_runs(model="gpt-tiny", device="cpu", strategies=("zero1", "full_shard"))
    shown = view(world_size=4)
    assert [(row.label, row.spec.world_size) for row in shown.rows] == [("zero1", 4), ("full_shard", 4)]
    assert shown.rows[1].predicted == predict(shown.rows[1].spec) and "full_shard: predicted" in str(shown)
    assert "does not fit" in view(world_size=2, card=10_000)._repr_html_()
    assert "sequence_length" in str(view(world_size=2, sequence_length=0)), "what is impossible is said in a line"
