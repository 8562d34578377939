"""The course's magics for IPython, which call the functions of cell_runs.py; loaded in a notebook only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from .cell_runs import manage_ranks, run_exercise, run_ranks

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_CHOSEN = "%%ranks["


@magics_class
class CourseMagics(Magics):
    """The magics of the course."""

    @cell_magic
    def exercise(self, line: str, cell: str) -> None:
        """Save the cell as `my_fsdp/<id>.py`, where ranks can import it, and run it here too."""
        run_exercise(line, cell, self.shell.user_ns)

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """Run the cell on ranks, and show what they print, labelled, while they run.

        `%%ranks 3`: on three fresh ranks, which end with the cell. `%%ranks`: on all ranks that stay, or two fresh ones
        where none do. `%%ranks[0,2]`: on two of those that stay; a collective of the whole group would wait for the
        others there. `--limit 5` gives a cell five seconds instead of ninety.

        `%ranks 4` starts four ranks that stay: what a cell defines on them is there for the next. `%ranks status` says
        what they hold, `%ranks reset` starts fresh ones of the same number, `%ranks stop` ends them.
        """
        manage_ranks(line) if cell is None else run_ranks(line, cell)


def register(shell: InteractiveShell) -> None:
    """Register the magics with the shell, also the form `%%ranks[0,2]`."""
    shell.register_magics(CourseMagics(shell))
    if chosen_ranks not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(chosen_ranks)


def chosen_ranks(lines: list[str]) -> list[str]:
    """`%%ranks[0,2]` as `%%ranks [0,2]`, since a magic's name ends at a blank; the cell below is left as it is."""
    if lines and lines[0].startswith(_CHOSEN):
        return [lines[0].replace(_CHOSEN, "%%ranks [", 1), *lines[1:]]
    return lines
