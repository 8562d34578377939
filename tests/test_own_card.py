"""`fsdplab calibrate FILE.json`: bounded, told what it measures, and read back by a plan."""

from __future__ import annotations

import json

import pytest

from fsdplab.planning.efficiency import HBM_EFFICIENCY
from fsdplab.planning.planner import plan
from fsdplab.sessions import own_card
from tests.test_plan import ended

pytestmark = pytest.mark.quick


@pytest.fixture
def small(monkeypatch):
    """Pieces of work that take no time on a busy machine."""
    monkeypatch.setattr(own_card, "_MOST", {"cuda": (256, 2**20), "cpu": (256, 2**20)})


def test_what_is_measured_is_what_a_plan_reaches(small, tmp_path, capsys):
    path = tmp_path / "mine.json"
    code, out, _ = ended(["calibrate", str(path), "--seconds", "1", "--json", str(tmp_path / "all.json")], capsys)
    assert code == 0 and f"plan --gpu {path}" in " ".join(out.split()) or "mine.json" in out
    measured = json.loads((tmp_path / "all.json").read_text())
    file = json.loads(path.read_text())
    assert file == measured["file"]
    assert file["hbm_tb_per_s"] * 1e12 * HBM_EFFICIENCY == pytest.approx(measured["traffic"]["per_s"], rel=1e-3)
    if measured["device"] == "cpu":
        assert "there is no GPU here: these are the CPU's figures" in " ".join(out.split())
    found = plan("gpt2", str(path), gpus=2, seq=128)
    assert found.spec.gpu.name == file["name"] and found.time and found.time.step_s > 0


def test_progress_is_told_and_the_time_is_kept(small):
    told: list[str] = []
    found = own_card.measure_card(0.3, told.append)
    assert told[:2] == ["matrix products in bfloat16", "memory"] and found.products.repetitions >= 3


def test_a_busy_machine_is_named(small, monkeypatch):
    monkeypatch.setattr(own_card.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert any("the machine is busy: 99.0 processes" in each for each in own_card.measure_card(0.1).doubts)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["mine.txt"], "ends in .json"),
        (["mine.json", "--seconds", "0"], "expected 1 to 600"),
        (["no/such/folder/mine.json", "--seconds", "1"], "cannot be written"),
    ],
)
def test_wrong_requests_end_in_one_line(arguments, words, small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_card, "measure_card", None)  # before it takes its time
    code, _, said = ended(["calibrate", *arguments], capsys)
    assert code == 2 and words in said and said.count("\n") == 1
