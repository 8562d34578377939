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

_CHOSEN = "%%ranks["


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
        from .waiting import watch_cells

        _register(shell)
        watch_cells(shell)
        print(_greeting(course))


def _register(shell: InteractiveShell) -> None:
    """Register the magics with the shell, also the form `%%ranks[0,2]`."""
    from .cell_runs import manage_ranks, run_exercise, run_ranks

    def exercise(line: str, cell: str) -> None:
        """Save the cell as `my_fsdp/<id>.py`, where ranks can import it, and run it here too."""
        run_exercise(line, cell, shell.user_ns)

    def ranks(line: str, cell: str | None = None) -> None:
        """Run the cell on ranks, and show what they print, labelled, while they run.

        `%%ranks 3`: on three fresh ranks, which end with the cell. `%%ranks`: on all ranks that stay, or two fresh ones
        where none do. `%%ranks[0,2]`: on two of those that stay; a collective of the whole group would wait for the
        others there. `--limit 5` gives a cell five seconds instead of ninety.

        `%ranks 4` starts four ranks that stay: what a cell defines on them is there for the next. `%ranks status` says
        what they hold, `%ranks reset` starts fresh ones of the same number, `%ranks stop` ends them.
        """
        manage_ranks(line) if cell is None else run_ranks(line, cell)

    shell.register_magic_function(exercise, "cell")
    # `%ranks 4` comes without a cell, `%%ranks` with one
    shell.register_magic_function(ranks, "line_cell")
    # once, also where `start` runs again
    if chosen_ranks not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(chosen_ranks)


def chosen_ranks(lines: list[str]) -> list[str]:
    """Return `%%ranks[0,2]` as `%%ranks [0,2]`, since a magic's name ends at a blank.

    The cell below is left as it is.
    """
    if lines and lines[0].startswith(_CHOSEN):
        return [lines[0].replace(_CHOSEN, "%%ranks [", 1), *lines[1:]]
    return lines


def _greeting(course: Course) -> str:
    """Return the line under the first cell: the edition, and the folder of the exercises."""
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
