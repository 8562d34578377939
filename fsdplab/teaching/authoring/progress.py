"""What a class has done: exercises passed and predictions made, from the learners' folders `my_fsdp/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.predictions import calibration_of
from fsdplab.teaching.core.workspace import Workspace

from .course import CourseError


@dataclass(frozen=True)
class Learner:
    """One learner: exercises passed, by notebook; failed tries at exercises not yet passed; scored predictions."""

    name: str
    passed: dict[str, int]
    stuck: tuple[str, ...]
    predictions: int
    within_two: int


def exercises(notebooks: Sequence[str]) -> dict[str, list[str]]:
    """Return the ids of the exercises of each notebook that has some."""
    by_notebook = {}
    for notebook in notebooks:
        ids = [item.id for item in registry.items_of(notebook) if isinstance(item, Exercise)]
        if ids:
            by_notebook[notebook] = ids
    return by_notebook


def workspaces_in(folders: Sequence[Path]) -> Iterator[tuple[str, Workspace]]:
    """Yield (name, workspace) of every learner's folder at or below `folders`; CourseError where there is none."""
    for folder in folders:
        files = folder.rglob("progress.json")
        workspaces = sorted(file.parent for file in files if file.parent.name == "my_fsdp")
        if not workspaces:
            raise CourseError(
                f"{folder} holds no my_fsdp with a progress.json; give the folders in which learners work"
            )
        for path in workspaces:
            yield _learner_name(path, folder), Workspace(path)


def _learner_name(workspace: Path, folder: Path) -> str:
    """Return the name of the folder in which a learner works, as seen from `folder`.

    `anna/course-learner/my_fsdp` is `anna`: that folder has the name of the edition.
    """
    parent = workspace.parent
    if parent == folder:
        return folder.resolve().name
    name = parent.relative_to(folder)
    if name.name == "course-learner" and name.parent.name:
        name = name.parent
    return str(name)


def learner(name: str, workspace: Workspace, asked: dict[str, list[str]]) -> Learner:
    """Read what one folder says; an exercise that was changed after it passed counts as not passed."""
    passed = {}
    stuck = []
    for notebook, ids in asked.items():
        passed[notebook] = 0
        for id in ids:
            tries = workspace.failed_tries(id)
            if workspace.has_passed(id):
                passed[notebook] += 1
            elif tries >= 3:
                stuck.append(f"{id} ({tries})")
    calibration = calibration_of(workspace)
    return Learner(name, passed, tuple(stuck), len(calibration.scores), calibration.within_two)


def table_of(learners: Sequence[Learner], asked: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table: a learner each, passed of all by notebook that somebody began, then the class."""
    begun = [name for name in asked if any(_has_begun(learner, name) for learner in learners)]
    width = max([len("learner"), *(len(learner.name) for learner in learners)])
    header = "".join(f"{name:>6}" for name in begun)
    lines = [f"{'learner':<{width}}{header}  predictions  stuck at (failed tries)"]
    done_by = dict.fromkeys(begun, 0)
    for learner in learners:
        cells = ""
        for name in begun:
            passed, of = learner.passed[name], len(asked[name])
            done_by[name] += passed == of
            cells += f"{passed}/{of}".rjust(6)
        guesses = "none"
        if learner.predictions:
            guesses = f"{learner.within_two} of {learner.predictions} near"
        lines.append(f"{learner.name:<{width}}{cells}  {guesses:<11}  {', '.join(learner.stuck)}".rstrip())
    done = "".join(f"{count:>6}" for count in done_by.values())
    return [*lines, f"{'all done':<{width}}{done}  of {len(learners)}"]


def _has_begun(learner: Learner, notebook: str) -> bool:
    """Return whether a learner has passed an exercise of a notebook, or is stuck at one."""
    is_stuck = any(exercise.startswith(notebook) for exercise in learner.stuck)
    return bool(learner.passed[notebook]) or is_stuck
