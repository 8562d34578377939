"""Notebook 02: right answers pass and known wrong ones are diagnosed; figures and tables say what the planner and the
record say.
"""

from __future__ import annotations

import pytest

from fsdplab.figures import alt_text
from fsdplab.planning.fit import fit
from fsdplab.planning.memory import memory_of
from fsdplab.planning.planner import plan_spec
from fsdplab.records import CATEGORIES
from fsdplab.sessions import RunSpec, run
from fsdplab.teaching import accounting
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from tests.solutions import ended_of, must_name_each_slip, solutions_of, try_ended

EXERCISES = [item for item in registry.items_of("02") if isinstance(item, Exercise)]
RIGHT = {  # other right answers than the references
    "02.model_state_bytes": {
        "one line a state, in numpy": (
            "import numpy as np\n\n\ndef model_state_bytes(strategy, parameters, ranks, param_dtype):\n"
            "    size = np.int64(2 if param_dtype == 'bf16' else 4)\n"
            "    optimizer = (12 if size == 2 else 8) / (1 if strategy == 'no_shard' else ranks)\n"
            "    gradient = size / (ranks if strategy in ('zero2', 'full_shard') else 1)\n"
            "    parameter = size / (ranks if strategy == 'full_shard' else 1)\n"
            "    return np.float64(parameters) * (optimizer + gradient + parameter)\n"
        ),
        "whole slices": (
            "from math import ceil\n\n\ndef model_state_bytes(strategy, parameters, ranks, param_dtype):\n"
            "    slice_ = ceil(parameters / ranks)\n"
            "    o, g, p = {'no_shard': (parameters,) * 3, 'zero1': (slice_, parameters, parameters),\n"
            "               'zero2': (slice_, slice_, parameters), 'full_shard': (slice_,) * 3}[strategy]\n"
            "    return 8 * o + 4 * (g + p) if param_dtype == 'fp32' else 12 * o + 2 * g + 2 * p\n"
        ),
        "a tensor": (
            "import torch\n\n\ndef model_state_bytes(strategy, parameters, ranks, param_dtype):\n"
            "    cut = {'no_shard': [1, 1, 1], 'zero1': [ranks, 1, 1], 'zero2': [ranks, ranks, 1]}\n"
            "    each = torch.tensor([8.0, 4, 4] if param_dtype == 'fp32' else [12.0, 2, 2], dtype=torch.float64)\n"
            "    return (each / torch.tensor(cut.get(strategy, [ranks] * 3))).sum() * parameters\n"
        ),
    },
    "02.largest_batch": {
        "by division": (
            "import math\n\n\ndef largest_batch(card, moments):\n    if any(fixed > card for fixed, _ in moments):\n"
            "        return 0\n    return min(math.floor((card - fixed) / each) for fixed, each in moments if each)\n"
        ),
        "by halving, in numpy": (
            "import numpy as np\n\n\ndef largest_batch(card, moments):\n    fixed, each = np.array(moments).T\n"
            "    low, high = 0, 4096\n    while high - low > 1:\n        middle = (low + high) // 2\n"
            "        if np.all(fixed + middle * each <= card):\n            low = middle\n        else:\n"
            "            high = middle\n    return np.int32(low)\n"
        ),
    },
}
SOLUTIONS = solutions_of(EXERCISES, RIGHT)
MODEL_STATE_BYTES = registry.find("02.model_state_bytes", Exercise)
model_state_bytes = MODEL_STATE_BYTES.module().model_state_bytes  # the references
largest_batch = registry.find("02.largest_batch", Exercise).module().largest_batch


@pytest.mark.timeout(300)
@pytest.mark.parametrize("solution", SOLUTIONS, ids=str)
def test_right_solutions_pass_and_wrong_ones_are_diagnosed(tried, solution):
    solution.must_report(tried[solution.key], names_rank=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "exercise,known", ended_of(EXERCISES), ids=lambda value: getattr(value, "id", None) or f"line {value.line}"
)
def test_solutions_that_raise_are_diagnosed(workspace, exercise, known):
    feedback = try_ended(exercise, known, workspace)
    assert known.cause in feedback.cause


def test_a_pure_function_is_told_of_no_rank(tried):
    known = next(known for known in MODEL_STATE_BYTES.mistakes if "master + 4" in known.source)
    feedback = tried[MODEL_STATE_BYTES.id, f"line {known.line}"]
    assert feedback.rank is None and "rank 0" not in feedback.headline and "zero1, 3,000,000" in feedback.headline


def test_the_questions_accept_the_right_number_and_name_each_slip(course):
    must_name_each_slip(registry.find("02.equal"), {"states": 33_595_460.0, "a row": 20_480.0})
    must_name_each_slip(registry.find("02.cards"))


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "zero2", "full_shard"])
def test_the_reference_is_the_planners_resting_state(strategy):
    """The planner's slices and moments of the GPT, less padding; gradients do not rest there."""
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
    assert "31.4 | 31.4" in str(accounting.beside_zero(model_state_bytes))


# --- figures and tables


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_stack_names_the_strategies_that_fit(checkpointing):
    figure = accounting.stack(8, 1, checkpointing)
    words = alt_text(figure)
    assert "full_shard" in words and "The card holds 85.9 GB" in words
    title = figure.layout.title.text
    assert "full_shard" in title and "no_shard" not in title
    assert "no strategy fits" in accounting.stack(2, 4, "none").layout.title.text


def test_the_moments_are_the_planners_own():
    batch = largest_batch(accounting.CARD / 1e6, accounting.moments())
    peaks = [sum(accounting._predicted(count).values()) for count in (batch, batch + 1)]
    assert peaks[0] <= accounting.CARD < peaks[1] and batch == 8
    assert accounting.CARD / peaks[0] > 1.03, "a plan is right within a few percent: the run must have that much room"
    for row in accounting.real_batches(largest_batch).rows:
        assert row[1] == row[2]
    assert fit(plan_spec("llama-3.1-8b", "h100", gpus=8)).best is not None
    assert "backward of the last block" in str(accounting.moments_table())


@pytest.mark.timeout(300)
def test_sentences_come_from_the_record():
    record = run(RunSpec(model="gpt-20m", strategy="full_shard", batch_size=1, sequence_length=16, steps=1))
    figure, told = accounting.predicted_beside(record), str(accounting.gap(record))
    assert f"measured {accounting.size(accounting.peak(record) * 1e6)}" in figure.layout.title.text
    assert any(name.replace("_", " ") in told for name in CATEGORIES) and "predicted" in alt_text(figure)
    assert accounting.on_the_card(8).card == 320_000_000
