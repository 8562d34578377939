"""The course: exercises that are saved and checked on real ranks, predictions, figures, editions.

A notebook starts with `from fsdplab import teaching; teaching.start(edition="learner")` and then uses the names below.
They load when they are first used, so that a rank process may import `fsdplab.teaching.core.on_ranks` with torch alone.

`core` is what every lesson uses, `lessons` has a package a notebook, `authoring` makes editions of notebooks and runs
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_SOURCES = {
    "start": "core.magics",
    "check": "core.checking",
    "hint": "core.checking",
    "answer": "core.answers",
    "ask": "core.answers",
    "solution": "core.checking",
    "solution_file": "core.checking",
    "use": "core.checking",
    "owner": "core.functions_in_use",
    "CheckFailed": "core.course_state",
    "predict": "core.predictions",
    "calibration": "core.predictions",
    "show": "core.display",
    "table": "core.display",
    "explore": "core.exploring",
    "doing": "core.waiting",
    "glossary": "core.glossary",
    "predicted_runs": "core.exploring",
    "what_was_real": "core.provenance",
    "on_a_gpu": "core.on_a_gpu",
    "recorded": "core.recorded",
    "picture": "slides",
    "beside": "core.own_run",
    "Exercise": "core.exercise_file",
    "Question": "core.exercise",
    "Choice": "core.exercise",
    "register": "core.registry",
    "build_course": "authoring.course",
    "check_sources": "authoring.course",
    "run_course": "authoring.course_run",
}
_LESSONS = {  # the name that a notebook imports -> the lesson whose lesson.py it is
    "tour": "nb00_tour",
    "collectives": "nb01_collectives",
    "accounting": "nb02_where_memory_goes",
    "ddp_by_hand": "nb03_ddp_by_hand",
    "zero_by_hand": "nb04_zero_by_hand",
    "one_unit": "nb05_one_unit",
    "whole_model": "nb06_whole_model",
    "overlapping": "nb07_overlap",
    "reading": "nb08_reading_traces",
    "reading_memory": "nb09_memory",
    "hiding": "nb10_when_does_it_hide",
    "reading_choices": "nb11_shoot_out",
    "overlapping_axes": "nb12_hybrid",
    "trading": "nb13_trading",
    "failures": "nb14_failures",
    "checkpoints": "nb15_checkpoints",
    "composing": "nb16_composition",
    "porting": "nb17_porting",
    "judging": "nb18_claims",
    "sizing": "nb19_planning_at_scale",
    "own_engine": "nb20_own_fully_shard",
    "matrices": "nb21_whole_matrices",
}

__all__ = [*_SOURCES, *_LESSONS, "load_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext fsdplab.teaching`: register `%%exercise` and `%%ranks`, and open the course in this folder."""
    import_module("fsdplab.teaching.core.magics").start(shell=shell)


__getattr__, __dir__ = names_of(
    __name__,
    {name: f"{__name__}.{module}" for name, module in _SOURCES.items()},
    {name: f"{__name__}.lessons.{lesson}.lesson" for name, lesson in _LESSONS.items()},
)
