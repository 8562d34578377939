"""Functions of earlier exercises, in use later: the learner's where the check passed, else the references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.exercise_file import Exercise, loaded
from fsdplab.teaching.core.registry import find
from fsdplab.teaching.core.workspace import function_name, load_function


def functions(*exercises: str) -> dict[str, Callable[..., Any]]:
    """The functions by name: `functions("05.shard")["shard"]`; on ranks too, where the course is open."""
    return {function_name(exercise): _function(exercise) for exercise in exercises}


def _function(exercise: str) -> Callable[..., Any]:
    workspace, name = current().workspace, function_name(exercise)
    if workspace.has_passed(exercise):
        return load_function(workspace.file_of(exercise), name)
    found = find(exercise, Exercise)
    function: Callable[..., Any] = getattr(loaded(found.reference, f"reference_{name}", str(found.path)), name)
    return function


def whose(*exercises: str) -> str:
    """Whose functions these are: `"with your shard, reshard and the reference unshard"`."""
    mine = [each for each in exercises if current().workspace.has_passed(each)]
    others = [each for each in exercises if each not in mine]
    named = {"your": mine, "the reference": others}
    return "with " + " and ".join(f"{who} {', '.join(map(function_name, of))}" for who, of in named.items() if of)
