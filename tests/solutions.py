"""Solutions of a notebook's exercises, right and wrong: each is tried on real ranks, as a check tries a learner's, and
judged.

A check must accept every right answer, whoever wrote it, and refuse every known wrong one with what was expected.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fsdplab.teaching.core import answers, checking, judging, run_submission
from fsdplab.teaching.core.exercise import Question
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.verdicts import Feedback
from fsdplab.teaching.core.workspace import Workspace

NOTEBOOKS = sorted(path.name[:2] for path in (Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
REFERENCE = "the reference"
SLEEPING = ("07.hide",)  # ranks sleep while an emulated card computes: four launches try its solutions side by side
# right answers that are the reference, or the stub, with other lines
_EDITS = {
    "03.in_buckets": {
        "a new list each time": [
            ("    def send():\n", "    def send():\n        nonlocal bucket\n"), ("bucket.clear()", "bucket = []"),
        ],
        "scatter and gather": [(
            "            dist.all_reduce(joined)\n",
            """\
            n = dist.get_world_size()
            joined = torch.cat([joined, joined.new_zeros(-len(joined) % n)])
            blocks, own = list(joined.chunk(n)), torch.empty(len(joined) // n)
            dist.reduce_scatter(own, blocks)
            dist.all_gather(blocks, own)
            joined = joined[: sum(each.numel() for each in bucket)]
""",
        )],
    },
    "03.small_together": {
        "divides the pieces, of the stub": [("copy_(piece)", "copy_(piece / n)")],
        "divides first, of the stub": [("in small])\n        dist", "in small]) / n\n        dist")],
    },
    "04.reduce_rows": {
        "torch's own average": [
            ("blocks)\n    mine", "blocks, op=dist.ReduceOp.AVG)\n    mine"),
            ("    mine.grad /= dist.get_world_size()\n", ""),
        ],
    },
    "06.hooks": {
        "names the arguments": [(
            "    def after_forward():",
            "    def before_forward():\n        unshard(mine=unit.mine, whole=unit.whole)\n\n    def after_forward():",
        )],
        "adds to a gradient that is there": [(
            "unit.mine.grad = reduce(unit.take_gradient())",
            "new, old = reduce(unit.take_gradient()), unit.mine.grad\n"
            "        unit.mine.grad = new if old is None else old + new",
        )],
    },
    "07.hide": {"two ahead": [('"prefetch": 1', '"prefetch": 2')]},
    "19.order": {
        "more of the slower cards": [('"gpu": "h100"', '"gpu": "a100"'), ('"gpus": 128', '"gpus": 192')],
        "just in time": [('"gpus": 128', '"gpus": 72')],
        "as many as the budget allows": [('"gpus": 128', '"gpus": 208')],
    },
}  # fmt: skip


def right_answers(exercise: Exercise) -> dict[str, str]:
    """Right answers besides the reference, source by name: the functions `shard__pad_first` of
    `right_answers/nb05.py`, each with all else that stands there, and edits of the reference.
    """
    found = {}
    for name, edits in _EDITS.get(exercise.id, {}).items():
        found[name] = exercise.stub if name.endswith("of the stub") else exercise.reference
        for old, new in edits:
            assert old in found[name], f"{exercise.id}: {name} edits {old!r}, which is not there"
            found[name] = found[name].replace(old, new)
    return found | _written("right_answers", exercise)


def wrong_answers(exercise: Exercise) -> dict[str, str]:
    """Wrong answers besides the known mistakes, as somebody wrote them who had not seen the check: the functions
    `late__last_most_often` of `wrong_answers/nb14.py`.
    """
    return _written("wrong_answers", exercise)


_SIGNS = {"- ": "returns", "! ": "raises", "~ ": "hangs"}


@dataclass(frozen=True)
class Mistake:
    """A known wrong version of the whole source, and how it `ends`: "returns", "raises", "hangs"."""

    source: str
    ends: str
    line: int


def mistakes_of(exercise: Exercise) -> list[Mistake]:
    """The known mistakes in `known_mistakes/05.shard.txt`: under a line of the reference, `> mine = ...`, stand lines
    that take its place: `- ` begins one that returns, `! ` one that raises, `~ ` one that hangs. `>2` is the second of
    equal lines; `>` alone is the end.
    """
    path = Path(__file__).with_name("known_mistakes") / f"{exercise.id}.txt"
    place, found = ("", 1), list[tuple[tuple[str, int], str, list[str], int]]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        if line.startswith(">"):
            count, _, text = line[1:].partition(" ")
            place = text, int(count or 1)
        elif line[:2].ljust(2) in _SIGNS:
            found.append((place, _SIGNS[line[:2].ljust(2)], [line[2:]], number))
        else:
            found[-1][2].append(line[2:])
    return [Mistake(_instead(exercise.reference, *place, lines), ends, line) for place, ends, lines, line in found]


def _instead(source: str, text: str, count: int, lines: Sequence[str]) -> str:
    """A source with `lines` in place of the line `text`, the `count`-th of those; at its end where `text` is empty."""
    kept = source.splitlines()
    places = [at for at, line in enumerate(kept) if line.strip() == text] if text else [len(kept)]
    at = places[count - 1]
    indent = kept[at][: len(kept[at]) - len(kept[at].lstrip())] if text else ""
    return "\n".join([*kept[:at], *(indent + line for line in lines), *kept[at + 1 :]]) + "\n"


def _written(folder: str, exercise: Exercise) -> dict[str, str]:
    """The answers to an exercise in the file of its notebook, each with all there that is no answer."""
    found = {}
    path = Path(__file__).with_name(folder) / f"nb{exercise.id[:2]}.py"
    nodes = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    shared = "\n".join(ast.unparse(node) for node in nodes if "__" not in getattr(node, "name", ""))
    for node in nodes:
        function, _, name = getattr(node, "name", "").partition("__")
        if function == exercise.function and name:
            node.name = function
            found[name.replace("_", " ")] = f"{shared}\n\n\n{ast.unparse(node)}\n"
    return found


@dataclass(frozen=True)
class Solution:
    """A learner's program for an exercise."""

    exercise: Exercise
    name: str
    source: str
    right: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """What its feedback is kept under: the exercise's id, and its own name."""
        return self.exercise.id, self.name

    @property
    def is_reference(self) -> bool:
        """Whether it is the solution that others of its exercise are compared with."""
        return self.name == REFERENCE

    def __str__(self) -> str:
        return "-".join(self.key)

    def must_report(self, feedback: Feedback | None) -> None:
        """A right solution passed; a wrong one was told what it got, what was expected, what is wrong with that in the
        words of its exercise, and (where it can be told) on which rank.
        """
        if self.right:
            assert feedback is None, f"{self} is right, and was refused: {feedback}"
            return
        assert feedback is not None, f"{self} is wrong, and passed"
        assert feedback.expected and feedback.got and feedback.headline and feedback.cause != judging.OTHERWISE
        assert feedback.rank is not None or self.exercise.world_size == 1


def solutions_of(exercises: Sequence[Exercise]) -> list[Solution]:
    """The references, the other right answers, and the known wrong ones that return."""
    found = []
    for exercise in exercises:
        passing = {REFERENCE: exercise.reference, **right_answers(exercise)}
        found += [Solution(exercise, name, source) for name, source in passing.items()]
        found += [
            Solution(exercise, f"wrong: {name}", source, right=False)
            for name, source in wrong_answers(exercise).items()
        ]
        found += [
            Solution(exercise, f"line {known.line}", known.source, right=False)
            for known in mistakes_of(exercise)
            if known.ends == "returns"
        ]
    return found


def ended_of(exercises: Sequence[Exercise]) -> list[tuple[Exercise, Mistake]]:
    """The known mistakes that do not return: they raise, or hang."""
    return [(exercise, known) for exercise in exercises for known in mistakes_of(exercise) if known.ends != "returns"]


FeedbackByKey = dict[tuple[str, str], Feedback | None]


def try_all(solutions: Sequence[Solution], workspace: Workspace) -> FeedbackByKey:
    """The feedback on each solution by its key; all that need the same number of ranks are tried in one launch."""
    launch = lambda solution: (solution.exercise.world_size, solution.exercise.id in SLEEPING)  # noqa: E731
    feedback_by_key: FeedbackByKey = {}
    for (ranks, sleeping), group in groupby(sorted(solutions, key=launch), key=launch):
        todo, launches = list(group), 4 if sleeping else 1
        parts = [todo[number::launches] for number in range(launches)]
        folders = [workspace.path / f"{todo[0].exercise.id}-{number}-on-{ranks}" for number in range(launches)]
        with ThreadPoolExecutor(launches) as pool:
            for found in pool.map(_try_together, parts, [workspace] * launches, folders):
                feedback_by_key |= found
    return feedback_by_key


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
        learner = by_key[each.key]
        reference = by_key[exercise.id, REFERENCE] if exercise.expected is None else None
        found[each.key] = checking.unwaited(judging.judge(exercise, learner, reference), learner.source)
        if found[each.key] is None:
            path = paths[todo.index(each)]
            found[each.key] = checking.feedback_on_other_ranks(exercise, path, workspace)
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


def must_name_each_slip(question: Question, against: object = None) -> None:
    """The right number is accepted however it is written, and each known wrong one is answered by its cause, and not
    by the right number; the course must be open.
    """
    right = question.right(against)
    for value in (right, right * (1 + question.tolerance / 2), f"{right} {question.unit}"):
        assert answers.grade_answer(question.id, value, against).passed
    for slip in question.slips:
        value = slip.value(against) if callable(slip.value) else slip.value
        value = right * slip.factor if slip.factor else value
        several = isinstance(value, list)  # of which some may be those of another slip
        causes = [each.cause for each in question.slips] if several else [slip.cause]
        for wrong in value if several else [value]:
            verdict = answers.grade_answer(question.id, wrong, against)
            assert not verdict.passed and any(cause in str(verdict) for cause in causes)
            number = f" {right:.4g} {question.unit}"
            told = question.unit and number not in question.statement and number in str(verdict)
            assert not told, "a failed answer must not give the number away"
