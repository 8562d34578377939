"""The course: exercises that are saved and checked on real ranks, predictions, figures that leave a picture, editions.

A notebook starts with `from fsdplab import teaching; teaching.start(edition="learner")` and then uses the names below.
They load when they are first used, so that a rank process may import `fsdplab.teaching.on_ranks` with torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MODULES = {
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

__all__ = [*_MODULES, "load_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext fsdplab.teaching`: register `%%exercise` and `%%ranks`, and open the course in this folder."""
    import_module("fsdplab.teaching.magics").start(shell=shell)


__getattr__, __dir__ = names_of(__name__, {name: f"fsdplab.teaching.{module}" for name, module in _MODULES.items()})
