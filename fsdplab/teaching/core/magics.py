"""`start`, `%%exercise` and `%%ranks`, which a notebook of the course needs.

`%%exercise 01.ring_all_gather` saves its cell as a file of the learner's folder and runs it here as well. `%%ranks 3`
runs its cell on three fresh processes joined into a group, which end with the cell. After `%ranks 3` three stay, and
`%%ranks` cells find the names of earlier ones. Nothing is copied from the notebook to the ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fsdplab.sessions.launch import warm

from .course_state import Course, open_course, running_shell
from .registry import register_beside

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def start(
    edition: str | None = None, workspace: Path | str | None = None, shell: InteractiveShell | None = None
) -> None:
    """Open the course in this notebook: its edition, the learner's folder `my_fsdp` beside it, and the cell magics.

    `edition` is "learner" (a failed check prints) or "teacher" (it raises); by default FSDPLAB_EDITION, else learner.
    """
    course = open_course(edition, workspace)
    register_beside(Path.cwd())
    _prefer_this_environments_commands()
    warm.begin()  # in the background: the first cell on ranks need not wait for torch to be imported
    shell = shell or running_shell()
    if shell is not None:
        from .cell_magics import register
        from .waiting import watch_cells

        register(shell)
        watch_cells(shell)
        print(_greeting(course))


def _greeting(course: Course) -> str:
    learns = course.edition == "learner"
    consequence = "says what is wrong, and you go on when you like" if learns else "raises an error"
    try:
        folder = course.workspace.path.relative_to(Path.cwd().resolve())
    except ValueError:
        folder = course.workspace.path
    return (
        f"{course.edition.capitalize()} edition: a failed check {consequence}. Your exercises are kept in"
        f" {folder}{os.sep}."
    )


def _prefer_this_environments_commands() -> None:
    """Let `!fsdplab ...` find the command that belongs to this kernel, whatever shell Jupyter was started from."""
    here = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", "").split(os.pathsep)
    if here not in paths:
        os.environ["PATH"] = os.pathsep.join([here, *paths])
