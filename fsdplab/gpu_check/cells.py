"""From a notebook of the course to a plain Python script: the same code, its magics said as function calls.

The script needs no Jupyter. A comment before each cell tells which one it was, so that whoever runs it can say where it
stopped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

MARKER = "# %% cell"
_MARKED = re.compile(rf"{MARKER} (\d+) (\S+)$")
_MAGIC = re.compile(r"%%(\w+)(.*)")
_CALLS = {"exercise": "run_exercise({line!r}, {cell!r}, globals())", "ranks": "run_ranks({line!r}, {cell!r})"}
_HEADER = {
    "exercise": "from fsdplab.teaching.core.cell_runs import run_exercise",
    "ranks": "from fsdplab.teaching.core.cell_runs import manage_ranks, run_ranks",
    "!": "import subprocess",
}


class NotebookError(ValueError):
    """A file is no notebook, or holds a magic that has no counterpart in a script."""


@dataclass(frozen=True)
class Cell:
    """A code cell: its place among all cells of the notebook (from 1), its id, its source."""

    number: int
    id: str
    source: str


def code_cells(path: Path) -> list[Cell]:
    """The code cells of a notebook's teacher edition, which is what the sources are; NotebookError where it cannot be
    read.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [
            Cell(number, cell.get("id", "-"), "".join(cell["source"]))
            for number, cell in enumerate(cells, 1)
            if cell["cell_type"] == "code"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotebookError(
            f"{path.name} is no notebook ({type(error).__name__}: {error}); expected the JSON of an .ipynb file"
        ) from error


def script_of(path: Path) -> str:
    """The notebook as one Python script.

    A cell `%%ranks 2` with the text `print(rank)` becomes the line `run_ranks('2', 'print(rank)')`; `%ranks 2` becomes
    `manage_ranks('2')`, `!ls` a `subprocess.run`.
    """
    cells = code_cells(path)
    used = [name for name in _HEADER if any(_uses(cell, name) for cell in cells)]
    parts = [f'"""{path.name} as a script."""', "", *(_HEADER[name] for name in used)]
    for cell in cells:
        parts += ["", f"{MARKER} {cell.number} {cell.id}", as_python(cell)]
    return "\n".join(parts) + "\n"


def _uses(cell: Cell, name: str) -> bool:
    if name == "!":
        return any(line.startswith("!") for line in cell.source.splitlines())
    return cell.source.startswith(f"%%{name}") or any(line.startswith(f"%{name}") for line in cell.source.splitlines())


def as_python(cell: Cell) -> str:
    """One cell without magics; NotebookError for one that no script can say."""
    first, _, rest = cell.source.partition("\n")
    magic = _MAGIC.match(first)
    if magic:
        name, line = magic[1], magic[2].strip()
        if name not in _CALLS:
            raise NotebookError(
                f"cell {cell.number} begins with %%{name}, expected one of %%{', %%'.join(_CALLS)}; say how a script"
                " does it in cells.py"
            )
        return _CALLS[name].format(line=line, cell=rest)
    return "\n".join(_line(cell, line) for line in cell.source.splitlines())


def _line(cell: Cell, line: str) -> str:
    if line.startswith("!"):
        return f"subprocess.run({line[1:].strip()!r}, shell=True, check=True)"
    if line.split(maxsplit=1)[:1] == ["%ranks"]:
        return f"manage_ranks({line[len('%ranks') :].strip()!r})"
    if line.startswith("%"):
        raise NotebookError(
            f"cell {cell.number} has the magic {line!r}, which a script does not know; say it in Python"
        )
    return line


def marked_cells(script: str) -> list[tuple[int, int, str]]:
    """(line in the script, cell's number, cell's id) of every cell, in order."""
    found = [(number, _MARKED.match(line)) for number, line in enumerate(script.splitlines(), 1)]
    return [(number, int(mark[1]), mark[2]) for number, mark in found if mark]
