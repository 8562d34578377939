"""What a class has done: exercises passed and predictions made, from the learners' folders `my_fsdp/`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.predictions import FILE, calibration_of
from fsdplab.teaching.core.workspace import Workspace, WorkspaceError

from .course import CourseError

_EDITION = "course-learner"  # the folder that `fsdplab lab` makes


@dataclass(frozen=True)
class Learner:
    """One learner: exercises passed and predictions made, by notebook; failed tries at exercises not yet passed.

    `predictions` were scored, and `within_two` of these were right within a factor of two.
    """

    name: str
    passed: dict[str, int]
    stuck: tuple[str, ...]
    predicted: dict[str, int]
    predictions: int
    within_two: int
    begun: bool  # whether anything was checked or predicted
    damaged: str = ""  # why the folder cannot be read; the other fields are then empty


def exercises(notebooks: Sequence[str]) -> dict[str, list[str]]:
    """Return the ids of the exercises of each notebook that has some."""
    by_notebook = {}
    for notebook in notebooks:
        ids = [item.id for item in registry.items_of(notebook) if isinstance(item, Exercise)]
        if ids:
            by_notebook[notebook] = ids
    return by_notebook


def workspaces_in(folders: Sequence[Path]) -> Iterator[tuple[str, Workspace]]:
    """Yield (name, workspace) of every learner's folder at or below `folders`, also of one who has not begun.

    CourseError for a folder that does not exist, and where no folder holds a `my_fsdp`.
    """
    found_any = False
    for folder in folders:
        if not folder.is_dir():
            raise CourseError(f"{folder} is no folder; give the folders in which learners work")
        workspaces = sorted(path for path in folder.rglob("my_fsdp") if path.is_dir())
        found_any = found_any or bool(workspaces)
        if not workspaces:
            yield _absolute(folder).name, Workspace(folder / "my_fsdp")
        for path in workspaces:
            yield _learner_name(path, folder), Workspace(path)
    if not found_any:
        raise CourseError(
            f"no my_fsdp lies below {', '.join(map(str, folders))}; give the folders in which learners work"
        )


def _learner_name(workspace: Path, folder: Path) -> str:
    """Return the name of the folder in which a learner works, as seen from `folder`.

    `anna/course-learner/my_fsdp` is `anna`, also as seen from `anna` itself: `course-learner` is the edition's name.
    """
    seen_from, home = _absolute(folder), _absolute(workspace).parent
    if home.name == _EDITION:
        home = home.parent
    if seen_from in home.parents:
        return str(home.relative_to(seen_from))
    return home.name


def _absolute(path: Path) -> Path:
    """Return the whole path; a link keeps its name, which may be a learner's."""
    return Path(os.path.abspath(path))


def learner(name: str, workspace: Workspace, asked: dict[str, list[str]]) -> Learner:
    """Read what one folder says; an exercise that was changed after it passed counts as not passed.

    A damaged folder, which must not hide those of the others, gives a learner of whom only that is known.
    """
    try:
        return _read(name, workspace, asked)
    except (WorkspaceError, OSError) as error:
        damaged = str(error)
    except (KeyError, TypeError, ValueError) as error:  # JSON that the lab has not written
        damaged = f"{workspace.path} holds odd values ({error})"
    nothing = dict.fromkeys(asked, 0)
    return Learner(name, nothing, (), nothing, 0, 0, begun=True, damaged=damaged)


def _read(name: str, workspace: Workspace, asked: dict[str, list[str]]) -> Learner:
    """Read what one folder says."""
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
    predicted = dict.fromkeys(asked, 0)
    for id, prediction in workspace.read(FILE).items():
        notebook, _, _ = id.partition(".")
        if prediction.get("by_learner"):
            predicted[notebook] = predicted.get(notebook, 0) + 1
    calibration = calibration_of(workspace)
    begun = bool(workspace.read("progress.json") or workspace.read(FILE))
    return Learner(name, passed, tuple(stuck), predicted, len(calibration.scores), calibration.within_two, begun)


def table_of(learners: Sequence[Learner], asked: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table: a learner each, passed of all by notebook, then the class.

    `asked` has the ids of each notebook's exercises. Notebooks that nobody has begun have no column.
    """
    begun = [notebook for notebook in asked if any(_has_begun(learner, notebook) for learner in learners)]
    names = ["learner", *(learner.name for learner in learners)]
    width = max(map(len, names))
    columns = "".join(f"{notebook:>6}" for notebook in begun)
    lines = [f"{'learner':<{width}}{columns}  {'predictions':<20}  stuck at (failed tries)"]

    done_by = dict.fromkeys(begun, 0)  # learners who have passed all of a notebook
    for learner in learners:
        if learner.damaged:
            lines.append(f"{learner.name:<{width}}  cannot be read: {learner.damaged}")
            continue
        cells = ""
        for notebook in begun:
            passed, of = learner.passed[notebook], len(asked[notebook])
            cells += f"{passed}/{of}".rjust(6)
            if passed == of:
                done_by[notebook] += 1
        guesses = "none" if learner.begun else "not begun"
        made = sum(learner.predicted.values())
        if made:
            guesses = f"{made} made, {learner.within_two} of {learner.predictions} near"
        line = f"{learner.name:<{width}}{cells}  {guesses:<20}  {', '.join(learner.stuck)}"
        lines.append(line.rstrip())

    done = "".join(f"{count:>6}" for count in done_by.values())
    lines.append(f"{'all done':<{width}}{done}  of {len(learners)}")
    return lines


def _has_begun(learner: Learner, notebook: str) -> bool:
    """Return whether a learner has passed an exercise of a notebook, is stuck at one, or has predicted something."""
    is_stuck = any(exercise.startswith(notebook) for exercise in learner.stuck)
    return is_stuck or bool(learner.passed[notebook] or learner.predicted[notebook])
