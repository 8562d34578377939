"""Functions of earlier exercises, in use later: the learner's where the check passed, else the references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.registry import find
from fsdplab.teaching.core.workspace import function_name, load_function, loaded


def functions(*exercises: str) -> dict[str, Callable[..., Any]]:
    """Return the functions by name: `functions("05.shard")["shard"]`; on ranks too, where the course is open."""
    return {function_name(exercise): function_of(exercise) for exercise in exercises}


def function_of(exercise: str) -> Callable[..., Any]:
    """Return one function in use."""
    workspace = current().workspace
    if workspace.has_passed(exercise):
        return load_function(workspace.file_of(exercise), function_name(exercise))
    # a function that has not passed is not used, though it may be saved
    return _made(exercise, find(exercise, Exercise).reference)


def stub_of(exercise: str) -> Callable[..., Any]:
    """Return the function as a learner gets it, where the stub is code that runs."""
    return _made(exercise, find(exercise, Exercise).stub)


def _made(exercise: str, source: str) -> Callable[..., Any]:
    """Return the function of an exercise that a source text defines."""
    name = function_name(exercise)
    function: Callable[..., Any] = getattr(loaded(source, f"in_use_{name}", f"{exercise}.py"), name)
    return function


def owner(*exercises: str) -> str:
    """Return `"your"` where the checks of all passed, else `"the reference"`: a caption says whose function it shows,
    as in `f"{owner('05.shard')} function"`.
    """
    if all(map(current().workspace.has_passed, exercises)):
        return "your"
    return "the reference"


def whose(*exercises: str) -> str:
    """Return whose functions these are: `"with your shard, reshard and the reference unshard"`."""
    names: dict[str, list[str]] = {"your": [], "the reference": []}
    for exercise in exercises:
        names[owner(exercise)].append(function_name(exercise))
    parts = [f"{who} {', '.join(functions)}" for who, functions in names.items() if functions]
    return f"with {' and '.join(parts)}"
