"""Notebook 04: what the references give, and what is trained equals the twin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsdplab.teaching import zero_by_hand
from fsdplab.teaching.core import display, registry
from fsdplab.teaching.core.exercise import Question
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.run_submission import behaviours
from tests.solutions import in_all_cases, must_name_each_slip

ITEMS = registry.items_of("04")
EXERCISES = [item for item in ITEMS if isinstance(item, Exercise)]


def test_golden_values(workspace):
    saved = [(each, workspace.save(each.id, each.reference)) for each in EXERCISES if not each.pure]
    reduced, stepped = behaviours(saved, workspace)
    assert [trial.returned["mine.grad"].tolist() for trial in reduced.trials[1]] == [[111.0], [222.0], [333.0]]
    rows = stepped.trials[0][0].returned["step 1, parameter 1"]
    assert rows.tolist() == [98.0, 196.0, 294.0], "two steps of one, two and three"
    owned = in_all_cases(registry.find("04.rows_of"))[0]
    assert owned["(start, stop) of every rank"] == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize("item", [item for item in ITEMS if isinstance(item, Question)], ids=lambda item: item.id)
def test_questions_accept_the_right_number_and_name_each_slip(course, item):
    must_name_each_slip(item, SimpleNamespace(moment_bytes=564_224))


@pytest.mark.timeout(600)
def test_sharded_optimizers_train_like_the_twin(course):
    runs = [zero_by_hand.zero(stage, steps=2) for stage in (1, 2)]
    for run in (run for pair in runs for run in pair):
        assert (
            run.verdict == "equal in every bit"
            and run.bytes_sent == run.payload
            and run.moments == (run.payload, run.payload)
        )
    held = [max(pair[0].held) for pair in runs]
    assert held[0] == 564_224 and held[1] == (564_224 + 65_536) // 2
    assert "Most gradients held: the reference ZeRO-1 564 kB, the reference ZeRO-2 315 kB" in display.alt_text(
        zero_by_hand.gradient_figure([pair[0] for pair in runs])
    )
    assert "2 P (n-1)/n = 564,224" in str(runs[0])
