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
    begun: bool  # whether anything was checked or predicted


def exercises(notebooks: Sequence[str]) -> dict[str, list[str]]:
    """The ids of the exercises of each notebook that has some."""
    found = {name: [item.id for item in registry.items_of(name) if isinstance(item, Exercise)] for name in notebooks}
    return {name: ids for name, ids in found.items() if ids}


def workspaces_in(folders: Sequence[Path]) -> Iterator[tuple[str, Workspace]]:
    """(name, workspace) of every learner's folder at or below `folders`, also of one who has not begun.

    CourseError for a folder that does not exist, and where no folder holds a `my_fsdp`.
    """
    begun = False
    for folder in folders:
        if not folder.is_dir():
            raise CourseError(f"{folder} is no folder; give the folders in which learners work")
        found = sorted(path for path in folder.rglob("my_fsdp") if path.is_dir())
        begun = begun or bool(found)
        if not found:
            yield folder.resolve().name, Workspace(folder / "my_fsdp")
        for path in found:
            beside = path.parent.relative_to(folder) if path.parent != folder else Path(folder.resolve().name)
            yield (
                str(beside.parent if beside.name == "course-learner" and beside.parent.name else beside),
                Workspace(path),
            )
    if not begun:
        raise CourseError(
            f"no my_fsdp lies below {', '.join(map(str, folders))}; give the folders in which learners work"
        )


def learner(name: str, workspace: Workspace, asked: dict[str, list[str]]) -> Learner:
    """What one folder says; an exercise that was changed after it passed counts as not passed."""
    done = {notebook: sum(map(workspace.has_passed, ids)) for notebook, ids in asked.items()}
    tried = {each: workspace.failed_tries(each) for ids in asked.values() for each in ids}
    stuck = [f"{each} ({tries})" for each, tries in tried.items() if tries >= 3 and not workspace.has_passed(each)]
    scores = calibration_of(workspace)
    begun = bool(workspace.read("progress.json") or workspace.read("predictions.json"))
    return Learner(name, done, tuple(stuck), len(scores.scores), scores.within_two, begun)


def table_of(learners: Sequence[Learner], asked: dict[str, list[str]]) -> list[str]:
    """Lines of a table: a learner each, passed of all by notebook that somebody began; the last line is the class's."""
    begun = [name for name in asked if any(each.passed[name] or _stuck_in(each, name) for each in learners)]
    wide = max([len(each.name) for each in learners] + [7])
    lines = [
        f"{'learner':<{wide}}" + "".join(f"{name:>6}" for name in begun) + "  predictions  stuck at (failed tries)"
    ]
    for each in learners:
        cells = "".join(f"{each.passed[name]}/{len(asked[name])}".rjust(6) for name in begun)
        guessed = f"{each.within_two} of {each.predictions} near" if each.predictions else "none"
        if not each.begun:
            guessed = "not begun"
        lines.append(f"{each.name:<{wide}}{cells}  {guessed:<11}  {', '.join(each.stuck)}".rstrip())
    done = "".join(f"{sum(each.passed[name] == len(asked[name]) for each in learners)}".rjust(6) for name in begun)
    return [*lines, f"{'all done':<{wide}}{done}  of {len(learners)}"]


def _stuck_in(each: Learner, notebook: str) -> bool:
    return any(exercise.startswith(notebook) for exercise in each.stuck)
