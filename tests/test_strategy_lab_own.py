"""A model of one's own in the strategy lab: in the list, predicted from its recording, measured, and its errors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import fsdplab
from fsdplab.figures.lab.answers import Look, view_of
from fsdplab.figures.lab.choices import PRESETS, Choices
from fsdplab.figures.lab.copies import copies
from fsdplab.figures.lab.outcomes import outcome
from fsdplab.figures.lab.what_if import what_if
from fsdplab.planning.plan_traffic import bytes_by_axis
from fsdplab.sessions import RunSpec
from fsdplab.sessions.changes import best_change, edits
from fsdplab.sessions.recorded_model import plan_of_file, steady_work
from fsdplab.sessions.spec import SpecError
from fsdplab.widgets.lab_state import LabState
from fsdplab.widgets.strategy_lab import Instrument, StrategyLab
from tests.own_models import zoo

FIXED = {"device": "cpu"}
BOTH = ("no_shard", "full_shard")
MINE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.inner(x).relu()

def model():
    return nn.Sequential(nn.Linear(8, 64), *(Block() for _ in range(LAYERS)), nn.Linear(64, 1))

def batch(at):
    return torch.randn(16, 8, generator=at.generator).to(at.device)

def loss(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of one's own, in a folder without runs of an earlier kernel."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("LAYERS", "4"))
    return path


def asked(state: LabState) -> dict:
    return view_of(state.choices, Look(), state.fixed).answer(state.records)


@pytest.mark.quick
def test_it_is_in_the_list_and_predicted_from_its_recording(mine: Path) -> None:
    state = LabState(FIXED, model=str(mine), strategies=BOTH)
    assert state.choices.model == "mine.py" and state.message == "ready to measure 2 runs"
    found = asked(state)
    whole, sharded = found["rows"]
    assert whole["peak"] > sharded["peak"] > 0 and whole["step_s"] and sharded["step_s"]
    assert found["card"] is None and "full_shard" in found["difference"] and len(found["timeline"]) == 2
    assert all(each["at"] for each in view_of(state.choices, Look(), state.fixed).marks())
    state.choose(model="gpt-20m", card="330MB")
    assert state.request.specs[0].batch_size == 2 and asked(state)["rows"][0]["peak"] > 100 * whole["peak"]


@pytest.mark.quick
def test_an_edited_file_is_recorded_again(mine: Path) -> None:
    state = LabState(FIXED, model=str(mine), strategies=("full_shard",))
    before = asked(state)["rows"][0]["peak"]
    mine.write_text(MINE.replace("LAYERS", "8"))
    os.utime(mine, (1, 1))
    assert asked(state)["rows"][0]["peak"] > 1.5 * before


@pytest.mark.quick
def test_its_units_and_its_optimizer_are_controls(mine: Path) -> None:
    state = LabState(FIXED, model=str(mine), strategies=("full_shard",))
    peaks = {units: outcome(replace(state.request.specs[0], units=units)).peak for units in ("auto", "model")}
    assert peaks["model"] > peaks["auto"]
    state.choose(optimizer="muon")
    exchanges = [each for each in outcome(state.request.specs[0]).blocks["messages"] if each[3] == "optimizer"]
    assert [each[4] for each in exchanges] == ["all-to-all", "all-to-all"]
    state.choose(units="Nothing")
    assert "expected one of auto, block, linear, model" in state.request.errors["units"]


@pytest.mark.quick
def test_the_steady_cards_step_holds_what_the_recording_computes() -> None:
    """Of a preset both are known: its own simulation, and that of the recording."""
    work = fsdplab.Workload(zoo.stack, zoo.numbers, zoo.squares)
    spec = RunSpec(model=work, link="1GB/s", strategy="no_shard", world_size=1)
    step = outcome(spec).step
    assert step.exposed == step.hidden == step.other == 0 and step.total > 0
    two = replace(spec, strategy="full_shard", world_size=2)
    assert steady_work(two).slowed_s == 0, "as of presets: no collective takes a part of this card"
    assert steady_work(two).compute_s < steady_work(spec).compute_s, "each rank updates a half"


@pytest.mark.quick
def test_errors_are_said_at_the_control(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine.write_text(MINE.replace("LAYERS", "4").replace("Linear(8, 64)", "Linear(7, 64)"))
    found = asked(LabState(FIXED, model=str(mine)))
    assert "its micro-batch could not be recorded: RuntimeError" in found["errors"]["model"]
    assert "fake_tensor" not in capfd.readouterr().err
    with pytest.raises(SpecError, match="there is no file gone.py"):
        StrategyLab(model="gone.py")
    with pytest.raises(
        SpecError, match="model is a Sequential; expected a preset.s name, a path, or a fsdplab.Workload"
    ):
        StrategyLab(zoo.stack())


@pytest.mark.quick
def test_what_would_change_is_listed_with_the_fastest_first(mine: Path) -> None:
    state = LabState(FIXED, model=str(mine), strategies=BOTH)
    rows = what_if(state.choices, "full_shard", state.fixed)
    gains = [row["gain"] for row in rows]
    assert gains == sorted(gains, reverse=True) and gains[0] > 0
    assert {"bf16", "units linear", "prefetch 2"} <= {row["words"] for row in rows}
    assert not any("tokens" in row["choices"] for row in rows), "batches are the file's own"
    before = outcome(state.request.specs[1])
    state.choose(**rows[0]["choices"])
    after = outcome(state.request.specs[1])
    assert before.step.total / after.step.total - 1 == pytest.approx(rows[0]["gain"])
    assert rows[0]["peak"] == after.peak and rows[0]["step"] in after.step.words


@pytest.mark.quick
def test_a_change_that_does_not_fit_the_card_comes_last() -> None:
    choices = Choices(card="320MB", strategies=("full_shard",))
    rows = what_if(choices, "full_shard", FIXED)
    assert [row["words"] for row in rows if not row["fits"]] == [rows[-1]["words"]] == ["units model"]
    assert {"tokens": 512} in [row["choices"] for row in rows]
    assert what_if(replace(choices, card="much"), "full_shard", FIXED) == []


@pytest.mark.quick
def test_a_report_advises_the_first_of_the_labs_changes_that_it_may_advise() -> None:
    """Both are of one list, so that a change in it is in both."""
    choices = Choices(strategies=("full_shard",), card="none")
    (spec,) = LabState(FIXED, strategies=("full_shard",), card="none").request.specs
    advised = {(each.setting, each.value): each.remedy.words for each in edits(vars(choices)) if each.remedy.words}
    rows = [row for row in what_if(choices, "full_shard", FIXED) if next(iter(row["choices"].items())) in advised]
    best = best_change(spec)
    assert advised[next(iter(rows[0]["choices"].items()))] == best.words
    assert rows[0]["gain"] == pytest.approx(best.gain) and rows[0]["peak"] == best.peak_bytes


@pytest.mark.quick
@pytest.mark.parametrize("preset", [name for name, each in PRESETS.items() if each.gpu])
def test_it_is_planned_on_every_gpu_that_the_lab_offers(mine: Path, preset: str) -> None:
    """Memory and bytes are those of `fsdplab plan --model mine.py`; units and the card are controls."""
    state = LabState(FIXED, model=str(mine), preset=preset)
    request = state.request
    assert not request.errors and [plan.strategy for plan in request.runs] == [*state.choices.strategies]
    for row, plan in zip(asked(state)["rows"], request.runs):
        alike = {"gpus": plan.gpus, "strategy": plan.strategy, "param_dtype": plan.param_dtype}
        expected = plan_of_file(str(mine), "h100", **alike)
        assert (
            row["peak"] == pytest.approx(expected.memory.peak.total, abs=9) and row["step"] and not row["why_no_step"]
        )
        assert outcome(plan).sent == sum(bytes_by_axis(expected.traffic).values())
    assert asked(state)["clock"] == "simulated on H100 GPUs" and asked(state)["card"] == 80 * 2**30
    assert all(each["words"] for each in view_of(state.choices, Look(), state.fixed).marks())
    rows = what_if(state.choices, "full_shard", state.fixed)
    assert "units model" in [row["words"] for row in rows]
    text = copies(next(plan for plan in request.runs if plan.strategy == "full_shard"))
    assert "Block" in text["PyTorch"] and text["Command line"].startswith("fsdplab plan --strategy ")
    assert "mine.py" in text["Command line"] and "--sequence-length" not in text["Command line"]


@pytest.mark.quick
def test_errors_of_a_planned_model_are_said_at_the_control(mine: Path) -> None:
    mine.write_text(MINE.replace("LAYERS", "4").replace("Linear(8, 64)", "Linear(7, 64)"))
    found = asked(LabState(FIXED, model=str(mine), preset="8 x H100"))
    assert "its micro-batch could not be recorded: RuntimeError" in found["errors"]["model"]


@pytest.mark.quick
def test_what_is_folded_is_not_computed() -> None:
    instrument = Instrument(LabState(FIXED), lambda: None)
    assert instrument.more == {}
    instrument.asked = {"n": 1, "choices": {}, "more": True}
    assert instrument.more["b"] == "full_shard" and instrument.more["what_if"]
    assert [*instrument.more["copies"]] == ["PyTorch", "Accelerate", "Command line"]
    instrument.asked = {"n": 2, "choices": {}, "more": True, "guess": {"on": True}}
    assert instrument.more == {}, "it would tell the answer"


def test_it_is_measured_beside_its_prediction(mine: Path, tmp_path: Path) -> None:
    lab = StrategyLab(FIXED, model=str(mine), strategies=BOTH, steps=2, directory=tmp_path / "runs")
    records = lab.run(timeout=120)
    assert [record.status for record in records] == ["finished"] * 2
    for row in asked(lab.state)["rows"]:
        assert row["measured"]["peak"] == pytest.approx(row["peak"], rel=0.03)
    assert lab.state.batches[0].title == "1: mine.py, 2 ranks, fp32, prefetch 1, link 150MB/s, 2 runs"
