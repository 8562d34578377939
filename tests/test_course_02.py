"""Notebook 02: figures and tables say what the planner and the record say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdplab.common.sizes import size
from fsdplab.figures import alt_text
from fsdplab.planning.memory import memory_of
from fsdplab.planning.planner import plan_of, plan_spec
from fsdplab.sessions import RunSpec, run
from fsdplab.teaching import accounting
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from tests.lesson_cells import run_cell
from tests.solutions import must_name_each_slip

MODEL_STATE_BYTES = registry.find("02.model_state_bytes", Exercise)
model_state_bytes = MODEL_STATE_BYTES.module().model_state_bytes  # the references
largest_batch = registry.find("02.largest_batch", Exercise).module().largest_batch


def test_the_questions_accept_the_right_number_and_name_each_slip(course):
    must_name_each_slip(registry.find("02.equal"), {"states": 33_595_460.0, "a row": 20_480.0})
    must_name_each_slip(registry.find("02.cards"))


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "zero2", "full_shard"])
def test_the_reference_is_the_planners_resting_state(strategy):
    """The planner's shards and moments of the GPT, less padding; gradients do not rest there."""
    count, gradient = 21_589_248, 2 if strategy in ("zero2", "full_shard") else 4
    resting = memory_of(
        plan_spec("gpt-20m", "h100", gpus=2, strategy=strategy, param_dtype="fp32", seq=64)
    ).resting.by_category
    kept = model_state_bytes(strategy, count, 2, "fp32") - gradient * count
    assert resting["optimizer_state"] + resting["sharded_parameters"] == pytest.approx(kept, rel=0.01)


def test_the_reference_gives_zeros_published_table():
    for ranks, published in accounting.ZERO_TABLE.items():
        found = [model_state_bytes(name, 7.5e9, ranks, "bf16") / 1e9 for name in accounting.ZERO_STAGES]
        assert found == pytest.approx(published, rel=0.01)
    shown = run_cell("02", "zero-table", solution=lambda _: model_state_bytes)["_"]
    assert "31.4 | 31.4" in str(shown)


# --- figures and tables


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_stack_names_the_strategies_that_fit(checkpointing):
    figure = accounting.stack(8, 1, checkpointing)
    words = alt_text(figure)
    assert "full_shard" in words and "The card holds 85.9 GB" in words
    title = figure.layout.title.text
    assert "full_shard" in title and "no_shard" not in title
    assert "no strategy fits" in accounting.stack(2, 4, "none").layout.title.text


JOB = RunSpec(model="gpt-20m", strategy="full_shard", world_size=2, batch_size=2, sequence_length=64, device="cpu")
CARD = 320e6


def test_the_moments_are_the_planners_own():
    names = run_cell("02", "batch", solution=lambda _: largest_batch, job=JOB)
    batch = names["batch"]
    assert names["card"] == CARD
    peaks = [sum(accounting.predicted(replace(JOB, batch_size=count)).values()) for count in (batch, batch + 1)]
    assert peaks[0] <= CARD < peaks[1] and batch == 8
    assert CARD / peaks[0] > 1.03, "a plan is right within a few percent: the run must have that much room"
    for row in run_cell("02", "big", largest_batch=largest_batch)["_"].rows:
        assert row[1] == row[2]
    assert "backward of the last block" in str(run_cell("02", "moments", job=JOB)["_"])


def test_each_bar_of_the_stack_is_one_instant():
    """The parts of a bar are there at the same time: together they are one moment of that strategy's plan."""
    figure = accounting.stack(8, 1, "none")
    spec = plan_spec(accounting.BIG, accounting.BIG_GPU, gpus=8, seq=accounting.SEQUENCE, gpus_per_node=8)
    for place, name in enumerate(("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard")):
        drawn = sum(trace.x[place] for trace in figure.data if len(trace.x) == 5)
        moments = [each.total / 1e9 for each in plan_of(replace(spec, strategy=name)).memory.moments]
        assert drawn == pytest.approx(max(moments), rel=0.01)


@pytest.mark.timeout(300)
def test_sentences_come_from_the_record():
    record = run(RunSpec(model="gpt-20m", strategy="full_shard", batch_size=1, sequence_length=16, steps=1))
    figure = accounting.predicted_beside(record)
    peak = record.summary.peak_memory_bytes
    assert f"measured {size(peak.total)}" in figure.layout.title.text and "predicted" in alt_text(figure)
    rests = run_cell("02", "beside", small=record, peak=peak)["rests"]
    assert 0.5 * peak.total < rests < peak.total
