"""Muon in runs, predictions and plans: what is said before agrees with what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.memory import all_units
from fsdplab.planning.muon import OwnersStep, state_bytes
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.step_time import step_time
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.recorded_model import recording_of
from fsdplab.sessions.spec import SpecError
from fsdplab.workloads.shapes import model

# small matrices: on CPUs without products in bfloat16 those take forty times what they take in float32
SHORT = {"model": "gpt-tiny", "world_size": 2, "steps": 1, "profile": 0}


@pytest.mark.parametrize(("tokens", "within"), [((1, 32), 0.035), ((4, 64), 1e-3)], ids=["optimizer", "activations"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_memory_and_bytes_are_predicted(strategy: str, tokens: tuple[int, int], within: float) -> None:
    """Where the peak is the optimizer's exchange of a few matrices, the pages of its buffers count."""
    batch, length = tokens
    spec = RunSpec(optimizer="muon", strategy=strategy, batch_size=batch, sequence_length=length, **SHORT)
    record, said = run(spec), predict(spec)
    summary = record.summary
    assert summary.comm.bytes_per_step == summary.formula_bytes_per_step == said.bytes_per_step
    measured = summary.peak_memory_bytes
    assert said.peak_bytes == pytest.approx(measured.total, rel=within)
    assert said.by_category["optimizer_state"] == pytest.approx(measured.by_category["optimizer_state"], rel=2e-4)


def test_the_matrices_of_blocks_are_muons_whatever_the_units_are() -> None:
    """Three blocks of two matrices each; the layers around them are AdamW's, also where the whole model is a unit."""
    mine = str(Path(__file__).parent / "own_models" / "mine.py")
    specs = [
        RunSpec(optimizer="muon", units=units, **{**SHORT, "model": mine}) for units in ("auto", "model", "linear")
    ]
    matrices = [recording_of(spec).matrices for spec in specs]
    assert matrices == [((128, 32), (32, 128)) * 3] * 3
    record, said = run(specs[1]), predict(specs[1])
    assert record.summary.comm.bytes_per_step == said.bytes_per_step
    measured = record.summary.peak_memory_bytes.by_category
    assert said.by_category["optimizer_state"] == pytest.approx(measured["optimizer_state"], rel=2e-3)


@pytest.mark.quick
def test_one_moment_of_a_matrix_and_two_of_the_rest() -> None:
    shape = model("llama-3.1-8b")
    inside = shape.layers * sum(each.count for each in shape.block if each.is_matrix)
    assert state_bytes(shape) * shape.parameters == pytest.approx(4 * inside + 8 * (shape.parameters - inside))
    for name, moments in (("adamw", 2 * shape.parameters), ("muon", 2 * shape.parameters - inside)):
        plan = PlanSpec(model=shape, gpu=find_gpu("h100-80gb"), gpus=16, optimizer=name)
        assert all_units(plan).optimizer_state == pytest.approx(4 * moments / 16, rel=1e-3)
    with pytest.raises(PlanError, match="whole matrices"):
        PlanSpec(model=shape, gpu=find_gpu("h100-80gb"), gpus=16, optimizer="muon", tensor_parallel=2)


@pytest.mark.quick
def test_muons_step_takes_longer_on_more_work() -> None:
    """Newton-Schulz costs FLOPs that AdamW has not, divided by the ranks."""
    shape = model("llama-3.1-8b")
    plans = {
        name: PlanSpec(model=shape, gpu=find_gpu("h100-80gb"), gpus=16, optimizer=name) for name in ("adamw", "muon")
    }
    assert step_time(plans["muon"]).step_s > step_time(plans["adamw"]).step_s


@pytest.mark.quick
def test_what_travels_follows_the_formula() -> None:
    step = OwnersStep.of(model("llama-3.1-8b"), 16, whole=False)
    elements = sum(matrix.numel for matrix in step.matrices)
    sent = sum(row.step_bytes for row in step.traffic())
    assert sent == pytest.approx(2 * 2 * elements * 15 / 16**2, rel=0.05)  # of the rank that sends most
    assert OwnersStep.of(model("gpt-tiny"), 1, whole=False).traffic() == []


@pytest.mark.quick
def test_engines_that_hide_matrices_are_refused() -> None:
    with pytest.raises(SpecError, match="needs whole matrices"):
        RunSpec(engine="torch-fsdp1", optimizer="muon")
