"""The course's cell magics as IPython takes them: a name each for the functions of cell_runs.py. Loaded in a notebook only."""

from __future__ import annotations

from IPython.core.magic import Magics, cell_magic, magics_class

from .cell_runs import run_exercise, run_ranks


@magics_class
class CourseMagics(Magics):
    """The cell magics of the course."""

    @cell_magic
    def exercise(self, line: str, cell: str) -> None:
        """Save the cell as `my_fsdp/<id>.py`, where ranks can import it, and run it here too."""
        run_exercise(line, cell, self.shell.user_ns)

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on fresh ranks, `%%ranks 2`, and print what each printed, in rank order."""
        run_ranks(line, cell)
