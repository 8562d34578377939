"""Every exercise, question and choice of the course: right answers pass, known wrong ones are refused.

Known wrong answers stand in `known_mistakes/`, right ones besides the references in `right_answers/`. All
solutions of a notebook that return are tried in one launch for each number of ranks; one that raises or hangs needs a
launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from fsdplab.teaching.core import answers, registry
from fsdplab.teaching.core.exercise import Choice, Question
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.verdicts import Feedback
from tests.solutions import (
    NOTEBOOKS,
    Mistake,
    Solution,
    ended_of,
    must_name_each_slip,
    solutions_of,
    try_all,
    try_ended,
)
from tests.tiers import values_of

ITEMS = [item for notebook in NOTEBOOKS for item in registry.items_of(notebook)]
EXERCISES = [item for item in ITEMS if isinstance(item, Exercise)]
QUESTIONS = [item for item in ITEMS if isinstance(item, Question) and not callable(item.expected)]
CHOICES = [item for item in ITEMS if isinstance(item, Choice)]
ENDED = ended_of([each for each in EXERCISES if each.id != "01.ring_all_gather"])  # its own: test_teaching_ranks.py
SOLUTIONS = solutions_of(EXERCISES)
# Mistakes of which more is asked than a refusal, by a line of theirs.
MISTAKES = {
    "02.model_state_bytes": "master + 4",
    "03.small_together": "divided already",
    "07.exposed": "return max(0, length",
}
FULL = pytest.mark.full("the default tier tries of each exercise one solution that is right, and one that is wrong")
pytestmark = pytest.mark.timeout(900)  # dozens of solutions share one launch


@pytest.fixture(scope="module")
def tried(request, workspace) -> Callable[[Solution], Feedback | None]:
    """The feedback on a solution; all of its notebook's that this run has chosen are tried when the first of them is
    asked for, together with the references that they are compared with.
    """
    here = [item for item in request.session.items if item.path == request.path]
    chosen = {values["solution"] for item in here if "solution" in (values := values_of(item))}
    exercises = {solution.exercise.id for solution in chosen}
    needed = [each for each in SOLUTIONS if each in chosen or each.is_reference and each.exercise.id in exercises]

    @cache
    def of_notebook(notebook: str) -> dict[tuple[str, str], Feedback | None]:
        return try_all([solution for solution in needed if solution.exercise.id[:3] == notebook], workspace)

    return lambda solution: of_notebook(solution.exercise.id[:3])[solution.key]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_every_item_is_complete(item):
    assert item.statement and all(getattr(item, "hints", ["."]))
    assert not isinstance(item, Exercise) or item.complaints() == []


def in_tiers(solutions: list[Solution]) -> list[Any]:
    """Each solution as a parameter: the default tier has of each exercise the reference and one known mistake."""
    kept: dict[tuple[str, bool], Solution] = {}
    for solution in solutions:
        exercise, right = solution.exercise.id, solution.right
        line = MISTAKES.get(exercise, "")
        if right or solution.name.startswith("line ") and line in solution.source:
            kept.setdefault((exercise, right), solution)
    chosen = set(kept.values())
    return [
        pytest.param(each, id=str(each), marks=pytest.mark.default if each in chosen else FULL) for each in solutions
    ]


def ended_in_tiers(ended: list[tuple[Exercise, Mistake]]) -> list[Any]:
    """Each mistake that ends a launch as a parameter: the default tier has one that raises and one that hangs."""
    kept = {known.ends: known for _, known in reversed(ended)}
    return [
        pytest.param(
            exercise, known, id=f"{exercise.id}-line {known.line}",
            marks=pytest.mark.default if known is kept[known.ends] else FULL,
        )
        for exercise, known in ended
    ]  # fmt: skip


@pytest.mark.parametrize("solution", in_tiers(SOLUTIONS))
def test_right_solutions_pass_and_wrong_ones_are_refused(tried, solution):
    solution.must_report(tried(solution))


@pytest.mark.parametrize("exercise,known", ended_in_tiers(ENDED))
def test_solutions_that_raise_or_hang_are_refused(workspace, exercise, known):
    feedback = try_ended(exercise, known, workspace)
    assert feedback.got and feedback.cause
    assert ("raised an error" if known.ends == "raises" else "did not return within") in feedback.headline


def feedback_on_the_mistake(tried, exercise: str) -> Feedback | None:
    """The feedback on the mistake of MISTAKES."""
    line = MISTAKES[exercise]
    known = (each for each in SOLUTIONS if each.exercise.id == exercise and not each.right and line in each.source)
    return tried(next(known))


def test_a_pure_function_is_told_of_no_rank(tried):
    feedback = feedback_on_the_mistake(tried, "02.model_state_bytes")
    assert feedback.rank is None and "rank 0" not in feedback.headline and "zero1, 3,000,000" in feedback.headline


def test_the_feedback_names_step_parameter_and_index(tried):
    feedback = feedback_on_the_mistake(tried, "03.small_together")
    assert "gradients of step 0['blocks.0.attention_norm.weight']" in feedback.tensor and feedback.index == (0,)


@pytest.mark.parametrize("item", QUESTIONS, ids=lambda item: item.id)
def test_a_right_number_is_accepted_however_it_is_written_and_slips_are_named(course, item):
    must_name_each_slip(item)


def test_a_narrow_tolerance_is_told_in_full(course):
    assert "(Right within 0.1 %.)" in str(answers.grade_answer("02.cards", 13.9))
    assert "(Right within 1 %.)" in str(answers.grade_answer("07.least", 290))


def test_what_differs_is_not_called_a_tensor_where_it_is_a_number(tried):
    rows = dict(feedback_on_the_mistake(tried, "07.exposed").rows())
    assert rows["what"] == "ms" and "tensor" not in rows


@pytest.mark.parametrize("item", CHOICES, ids=lambda item: item.id)
def test_choices_accept_the_right_letter_and_explain_every_one(course, item):
    for letter in item.options:
        for written in (f" {letter.upper()} ", f"{letter})"):
            verdict = answers.grade_answer(item.id, written)
            because = item.because[letter]
            said = because[0].upper() + because[1:] if letter == item.right else because  # "passed." ends a sentence
            assert verdict.passed == (letter == item.right) and said in str(verdict)
    words = item.options[item.right]
    assert all(
        answers.grade_answer(item.id, said).passed
        for said in (words, f"({item.right}) {words}", f"Option {item.right}")
    )
    for other in ("z", 2, "bz"):
        assert "not one of the letters" in str(answers.grade_answer(item.id, other))
