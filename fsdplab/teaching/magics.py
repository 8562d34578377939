"""`start`, `%%exercise` and `%%ranks`: the three lines of machinery that a notebook of the course needs.

`%%exercise 01.ring_all_gather` saves its cell as a file of the learner's folder and runs it here as well. `%%ranks 3`
runs its cell on three fresh processes joined into a group. They end with the cell: nothing is carried over, neither from
the notebook to the ranks nor from one such cell to the next.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class

from fsdplab.sessions import RanksFailed, call_on_ranks

from .course_state import Course, current, open_course
from .exercise import Exercise
from .exercises import find
from .home import HomeError
from .trials import ON_RANKS

MOST_RANKS = 16
RANKS_TIME_LIMIT = 90.0
_OWN_FRAMES = re.compile(rf'  File "[^"]*{re.escape(ON_RANKS.name)}", line .*\n(?:    .*\n)*')  # the learner's frames follow


class CellFailed(RuntimeError):
    """A `%%ranks` cell that did not end well; its text is the launcher's one report."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def start(edition: str | None = None, home: Path | str | None = None, shell: Any = None) -> None:
    """Open the course in this notebook: its edition, the learner's folder `my_fsdp` beside it, and the cell magics.

    `edition` is "learner" (a failed check prints) or "teacher" (it raises); by default FSDPLAB_EDITION, else learner.
    """
    course = open_course(edition, home)
    _prefer_this_environments_commands()
    shell = shell or get_ipython()
    if shell is not None:
        shell.register_magics(CourseMagics(shell))
        print(_greeting(course))


def _greeting(course: Course) -> str:
    consequence = "prints and goes on" if course.edition == "learner" else "raises"
    try:
        folder = course.home.path.relative_to(Path.cwd().resolve())
    except ValueError:
        folder = course.home.path
    return f"{course.edition.capitalize()} edition: a failed check {consequence}. Your exercises are kept in {folder}{os.sep}."


def _prefer_this_environments_commands() -> None:
    """Let `!fsdplab ...` find the command that belongs to this kernel, whatever shell Jupyter was started from."""
    here = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", "").split(os.pathsep)
    if here not in paths:
        os.environ["PATH"] = os.pathsep.join([here, *paths])


@magics_class
class CourseMagics(Magics):
    """The cell magics of the course."""

    @cell_magic
    def exercise(self, line: str, cell: str) -> None:
        """Save the cell as `my_fsdp/<id>.py`, where ranks can import it, and run it here too."""
        try:
            found = find(line.strip(), Exercise)
        except (HomeError, LookupError) as error:
            raise UsageError(f"%%exercise: {error}") from error
        path = current().home.save(found.id, cell)
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), self.shell.user_ns)
        if found.function not in self.shell.user_ns:
            raise UsageError(f"%%exercise {found.id}: the cell must define {found.function}(...)")
        print(f"Saved as {path.parent.name}/{path.name}. Next: check({found.id!r})")

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on fresh ranks, `%%ranks 2`, and print what each printed, in rank order."""
        for rank, text in enumerate(run_cell_on_ranks(cell, ranks_wanted(line))):
            lines = text.splitlines() or ["(printed nothing)"]
            print("\n".join(f"[rank {rank}] {each}" for each in lines))


def ranks_wanted(line: str) -> int:
    """The number in `%%ranks 3`; 2 where none is given."""
    text = line.strip() or "2"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise UsageError(f"%%ranks: expected a number of ranks from 1 to {MOST_RANKS}, got {text!r}; write for example %%ranks 3")
    return int(text)


def run_cell_on_ranks(source: str, world_size: int) -> list[str]:
    """What every rank printed, by rank; CellFailed with the launcher's report when one raises, dies or does not end."""
    payload = {"source": source, "home": str(current().home.path)}
    try:
        return call_on_ranks(ON_RANKS, "run_cell", world_size=world_size, payload=payload, time_limit=RANKS_TIME_LIMIT)
    except RanksFailed as failure:
        raise CellFailed(_OWN_FRAMES.sub("", str(failure))) from None
