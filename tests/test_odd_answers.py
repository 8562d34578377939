"""A check gives feedback on whatever a function returns: it never raises an error of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdplab.sessions import Failure, call_on_ranks
from fsdplab.teaching.core import checking, judging, registry, run_submission
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.verdicts import Feedback
from fsdplab.teaching.core.workspace import Workspace
from tests.solutions import NOTEBOOKS

EXERCISES = [item for notebook in NOTEBOOKS for item in registry.items_of(notebook) if isinstance(item, Exercise)]
PURE = [exercise for exercise in EXERCISES if exercise.pure]
ON_RANKS = [exercise for exercise in EXERCISES if not exercise.pure]
ODD = (
    "None", "True", "-1", "float('nan')", "'text'", "[]", "(None,)", "{}", "{1: 2}", "{'a': 'b'}", "object()",
    "torch.tensor(3)", "torch.tensor([])", "torch.zeros(2, 2, dtype=torch.complex64)", "torch.Tensor",
)  # fmt: skip
ODD_ON_RANKS = ("True", "'text'", "[]", "torch.tensor(3)", "object()")


@pytest.mark.parametrize("exercise", PURE, ids=lambda exercise: exercise.id)
def test_odd_values_that_a_function_returns_are_refused_in_words(workspace, exercise):
    for value in ODD:
        path = workspace.save(exercise.id, returning(exercise, value))
        must_be_in_words(checking.feedback_on(exercise, path, workspace), exercise, value)


@pytest.mark.full("runs all exercises that need ranks")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", sorted({exercise.world_size for exercise in ON_RANKS}))
def test_odd_values_on_ranks_are_refused_in_words(workspace, ranks):
    exercises = [exercise for exercise in ON_RANKS if exercise.world_size == ranks]
    runs = [(exercise, value) for exercise in exercises for value in ODD_ON_RANKS]
    by_rank = call_on_ranks(
        Path(__file__).with_name("odd_answers_on_ranks.py"), "observed_on_this_rank", world_size=ranks, time_limit=600,
        payload={"workspace": str(workspace.path), "programs": [program(workspace, *run) for run in runs]},
    )  # fmt: skip
    references = behaviours_of_references(exercises, workspace)
    for index, (exercise, value) in enumerate(runs):
        seen = [results[index] for results in by_rank]
        raised = [(rank, result["raised"]) for rank, result in enumerate(seen) if "raised" in result]
        if raised:
            rank, text = raised[0]
            failure = Failure("raised", f"Rank {rank} raised: {text.splitlines()[-1]}", rank, traceback=text)
            feedback = checking.feedback_on_failure(exercise, failure)
        else:
            learner = run_submission._behaviour([[result] for result in seen], "")
            feedback = judging.judge(exercise, learner, references.get(exercise.id))
        must_be_in_words(feedback, exercise, value)


def must_be_in_words(feedback: Feedback | None, exercise: Exercise, value: str) -> None:
    """The value is refused with what was expected and got, except where a function's value plays no part."""
    assert feedback is not None or not exercise.returns or exercise.is_stage, f"{exercise.id}: {value} passed"
    assert feedback is None or feedback.expected and feedback.got and feedback.cause


def returning(exercise: Exercise, value: str) -> str:
    """The source of a function that returns this."""
    return f"import torch\n\n\ndef {exercise.function}(*arguments, **named):\n    return {value}\n"


def program(workspace: Workspace, exercise: Exercise, value: str) -> dict[str, Any]:
    """An odd solution in a file of its own, as ranks are told of it."""
    own = Workspace(workspace.path / f"{exercise.id}-{ODD.index(value)}")
    path = own.save(exercise.id, returning(exercise, value))
    return {"exercise": str(exercise.path), "solution": str(path), "time_limit": exercise.time_limit}


def behaviours_of_references(exercises: list[Exercise], workspace: Workspace) -> dict[str, run_submission.Behaviour]:
    """What the references did, by exercise, in one launch; where an exercise says what is EXPECTED none is run."""
    run = [exercise for exercise in exercises if exercise.expected is None]
    pairs = [(exercise, workspace.save(exercise.id, exercise.reference)) for exercise in run]
    seen = run_submission.behaviours(pairs, workspace) if pairs else []
    return {exercise.id: behaviour for exercise, behaviour in zip(run, seen, strict=True)}
