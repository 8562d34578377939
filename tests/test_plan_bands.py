"""Bands beside predicted figures: each holds its prediction, or says that it does not and on which side."""

from __future__ import annotations

import pytest

from fsdplab.planning.bands import memory_band, speed_band
from fsdplab.planning.planner import plan_of, plan_spec
from tests.test_plan import printed
from tests.test_plan_advice import drawn

pytestmark = pytest.mark.quick


def test_every_band_holds_its_prediction_or_says_why_not():
    for spec in drawn():
        for band in (memory_band(spec), speed_band(spec)):
            low, high = band.around(100.0)
            inside = low <= 100 <= high
            assert inside == ("the predicted, which lies" not in band.words), band
            assert inside or ("lies above the band" in band.words) == (high < 100)


def test_experts_are_told_to_be_predicted_too_fast(capsys):
    """Two known runs with experts reached 0.45 and 0.76 of what is predicted."""
    given = ["--model", "qwen3-30b-a3b", "--gpu", "a100-80gb", "--world-size", "8", "--checkpoint", "full"]
    speed = plan_of(plan_spec("qwen3-30b-a3b", "a100-80gb", gpus=8, checkpointing="full")).tokens_per_s_per_gpu
    said = printed(*given, capsys=capsys)
    assert f"{speed:,.0f} (MFU" in said and f"{0.45 * speed:,.0f} to {0.76 * speed:,.0f} in 2 of 2 known runs" in said
    assert "these were 0.45 to 0.76 times the predicted, which lies above the band" in said


def test_a_cut_models_memory_is_told_to_be_predicted_too_small(capsys):
    said = printed("--world-size", "8", "--tp", "2", capsys=capsys)
    assert "these were 1.02 to 1.08 times the predicted, which lies below the band" in said
