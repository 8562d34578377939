"""The course: exercises that are saved and checked on real ranks, predictions, figures that leave a picture, editions.

A notebook starts with `from fsdplab import teaching; teaching.start(edition="learner")` and then uses the names below.
They load when they are first used, so that a rank process may import `fsdplab.teaching.on_ranks` with torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_HOME = {
    "start": "magics",
    "check": "checking",
    "hint": "checking",
    "answer": "answers",
    "ask": "answers",
    "solution": "checking",
    "solution_file": "checking",
    "CheckFailed": "course_state",
    "predict": "predicting",
    "calibration": "predicting",
    "show": "display",
    "table": "display",
    "explore": "exploring",
    "what_was_real": "provenance",
    "on_a_gpu": "on_a_gpu",
    "Exercise": "exercise",
    "Question": "exercise",
    "Choice": "exercise",
    "register": "exercises",
    "build_course": "course",
    "check_sources": "course",
    "run_course": "course_run",
}

__all__ = [*_HOME, "load_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext fsdplab.teaching`: register `%%exercise` and `%%ranks`, and open the course in this folder."""
    import_module("fsdplab.teaching.magics").start(shell=shell)


def __getattr__(name: str) -> object:
    """Load the chapter that a public name lives in, the first time the name is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'fsdplab.teaching' has no attribute {name!r}; public names: {', '.join(_HOME)}")
    value = getattr(import_module(f"fsdplab.teaching.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
