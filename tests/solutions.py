"""Solutions of a notebook's exercises, right and wrong: each is tried on real ranks, as a check tries a learner's, and
judged.

A check must accept every right answer, whoever wrote it, and tell of every known wrong one what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fsdplab.teaching.core import answers, checking, diagnosis, run_submission
from fsdplab.teaching.core.exercise import Question
from fsdplab.teaching.core.exercise_file import Exercise, Mistake
from fsdplab.teaching.core.verdicts import Feedback
from fsdplab.teaching.core.workspace import Workspace


@dataclass(frozen=True)
class Solution:
    """A learner's program for an exercise; `says` is what the report on a wrong one must say, None for a right one."""

    exercise: Exercise
    name: str
    source: str
    says: str | None

    @property
    def key(self) -> tuple[str, str]:
        """What its feedback is kept under: the exercise's id, and its own name."""
        return self.exercise.id, self.name

    def __str__(self) -> str:
        return "-".join(self.key)

    def must_report(self, feedback: Feedback | None, names_rank: bool = True) -> None:
        """A right solution passed; a wrong one was told what it got, what was expected, why and (where it can be told)
        on which rank.
        """
        if self.says is None:
            assert feedback is None, f"{self} is right, and was refused: {feedback}"
            return
        assert feedback is not None, f"{self} is wrong, and passed"
        assert self.says in feedback.cause and feedback.expected and feedback.got and feedback.headline
        assert feedback.rank is not None or not names_rank or self.exercise.world_size == 1


def solutions_of(exercises: Sequence[Exercise], right: Mapping[str, Mapping[str, str]]) -> list[Solution]:
    """The references, the other `right` answers (exercise -> name -> source), and the known wrong ones that return."""
    found = []
    for exercise in exercises:
        passing = {"the reference": exercise.reference, **right.get(exercise.id, {})}
        found += [Solution(exercise, name, source, None) for name, source in passing.items()]
        found += [
            Solution(exercise, f"line {known.line}", known.source, known.cause)
            for known in exercise.mistakes
            if known.ends == "returns"
        ]
    return found


def ended_of(exercises: Sequence[Exercise]) -> list[tuple[Exercise, Mistake]]:
    """The known mistakes that do not return: they raise, or hang."""
    return [(exercise, known) for exercise in exercises for known in exercise.mistakes if known.ends != "returns"]


FeedbackByKey = dict[tuple[str, str], Feedback | None]


def try_all(solutions: Sequence[Solution], workspace: Workspace, launch: int = 0) -> FeedbackByKey:
    """The feedback on each solution by its key; all that need the same number of ranks are tried in one launch."""
    feedback_by_key: FeedbackByKey = {}
    ranks = lambda solution: solution.exercise.world_size  # noqa: E731
    for count, group in groupby(sorted(solutions, key=ranks), key=ranks):
        feedback_by_key |= _try_together(list(group), workspace, workspace.path / f"launch-{launch}-on-{count}-ranks")
    return feedback_by_key


def try_side_by_side(solutions: Sequence[Solution], workspace: Workspace, launches: int) -> FeedbackByKey:
    """The same in several launches at once, for solutions that mostly wait."""
    with ThreadPoolExecutor(launches) as pool:
        found = list(pool.map(lambda launch: try_all(solutions[launch::launches], workspace, launch), range(launches)))
    return {key: feedback for feedback_by_key in found for key, feedback in feedback_by_key.items()}


def _try_together(todo: Sequence[Solution], workspace: Workspace, folder: Path) -> FeedbackByKey:
    """The feedback on solutions whose references are among them: they, and the known mistakes, are run once for all."""
    paths = [
        Workspace(folder / f"solution-{index}").save(each.exercise.id, each.source) for index, each in enumerate(todo)
    ]
    seen = run_submission.behaviours([(each.exercise, path) for each, path in zip(todo, paths)], workspace)
    by_key = {each.key: behaviour for each, behaviour in zip(todo, seen, strict=True)}
    found = {}
    for each in todo:
        exercise = each.exercise
        known = [
            diagnosis.Known(by_key[exercise.id, f"line {mistake.line}"], mistake.cause)
            for mistake in exercise.mistakes
            if mistake.ends == "returns" and not exercise.settings.facts_only
        ]
        learner = by_key[each.key]
        reference = by_key[exercise.id, "the reference"] if exercise.expected is None else None
        feedback = diagnosis.judge(exercise, learner, reference, lambda known=known: known)
        found[each.key] = checking.waited_for(feedback, learner.source)
    return found


def in_all_cases(exercise: Exercise) -> list[object]:
    """What the reference of a pure exercise gives in every case, as its file observes it."""
    module, function = exercise.module(), function_of(exercise)
    observe = getattr(module, "observe", lambda function, *given: function(*given))
    return [observe(function, *given) for _, *given in module.cases(0, exercise.world_size)]


def function_of(exercise: Exercise) -> Callable[..., Any]:
    """The reference as a function."""
    space: dict = {}
    exec(exercise.reference, space)
    return space[exercise.function]


def try_ended(exercise: Exercise, known: Mistake, workspace: Workspace, hangs_for: float = 4.0) -> Feedback:
    """The feedback on a solution that raises or hangs, which ends a launch and so has one of its own; time counts from
    when all ranks stand ready.
    """
    path = Workspace(workspace.path / "ends").save(exercise.id, known.source)
    limited = Impatient(exercise.path, hangs_for) if known.ends == "hangs" else exercise
    feedback = checking.feedback_on(limited, path, workspace)
    assert feedback is not None, f"{exercise.id}, line {known.line}: is wrong, and passed"
    return feedback


@dataclass(frozen=True)
class Impatient(Exercise):
    """An exercise with a shorter time limit than its file says."""

    seconds: float = 4.0

    @property
    def time_limit(self) -> float:
        return self.seconds


def must_be_complete(item: object) -> None:
    """An item of a notebook has a statement and hints; an exercise has mistakes too, and programs that compile."""
    assert item.statement and all(getattr(item, "hints", ["."]))
    if isinstance(item, Exercise):
        assert item.complaints() == []
        for source in (item.stub, item.reference, *(known.source for known in item.mistakes)):
            compile(source, item.id, "exec")


def must_name_each_slip(question: Question, against: object = None) -> None:
    """The right number is accepted, and each known wrong one is answered by its cause; the course must be open."""
    right = question.right(against)
    assert answers.grade_answer(question.id, right, against).passed
    for slip in question.slips:
        value = slip.value(against) if callable(slip.value) else slip.value
        verdict = answers.grade_answer(question.id, right * slip.factor if slip.factor else value, against)
        assert not verdict.passed and slip.cause in str(verdict)
