"""The open course of this process: its edition and the learner's folder.

One value per process, set by `teaching.start`. The editions differ in one thing only: what a failed check does. In the
teacher edition it raises, so that a broken course stops CI; in the learner edition it prints, so that the rest of the
notebook can still be read and run.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .workspace import Workspace

EDITIONS = ("learner", "teacher")


class CheckFailed(AssertionError):
    """A failed check in the teacher edition; its text is the whole report."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback through the library."""
        return [f"CheckFailed: {self}"]


@dataclass(frozen=True)
class Course:
    """The open course: its edition and the learner's folder."""

    edition: str
    workspace: Workspace


_open: list[Course] = []


def open_course(edition: str | None = None, workspace: Path | str | None = None) -> Course:
    """Open the course; defaults: FSDPLAB_EDITION and FSDPLAB_HOME, else learner and ./my_fsdp."""
    chosen = edition or os.environ.get("FSDPLAB_EDITION") or "learner"
    if chosen not in EDITIONS:
        raise ValueError(f"unknown edition {chosen!r}; expected one of: {', '.join(EDITIONS)}")
    folder = Path(workspace or os.environ.get("FSDPLAB_HOME") or Path.cwd() / "my_fsdp").resolve()
    course = Course(chosen, Workspace(folder))
    course.workspace.make_importable()
    _open[:] = [course]
    return course


def running_shell() -> Any:
    """Return the notebook's IPython shell; None in a script, also where IPython is not installed."""
    loaded = sys.modules.get("IPython")
    return loaded.get_ipython() if loaded else None


def current() -> Course:
    """Return the open course; without `start`, the learner edition in the working folder."""
    return _open[0] if _open else open_course()
