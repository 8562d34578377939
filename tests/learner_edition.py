"""The learner edition of a notebook, run in the kernel that has just run its teacher edition: only what differs runs
again.

notebooks/conftest.py loads this file into the kernel that nbval has started. `watch` notes of every cell of the teacher
edition what the namespace was after it, and whether it asked for an exercise's file. `run_learner_edition` then empties
the namespace, takes a new learner's folder, and goes through the learner edition. A cell runs again where

    its text differs (the start cell, every stub),
    it asked for an exercise's file, or runs on ranks, where the learner's folder can be imported,
    or it names something that is not as it was there: a cell which ran again has made it anew, or only a solution
    defines it.

Every other cell would do what it did: what it names is put back as it was after it. A cell that needs what only a
solution defines ends with a NameError, as it would for a learner.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output

from fsdplab.teaching.core.workspace import Workspace

Names = dict[str, Any]
_ON_RANKS = re.compile(r"^%%?ranks\b", re.MULTILINE)


@dataclass
class Seen:
    """One cell of the teacher edition, as it was run."""

    source: str
    after: Names = field(default_factory=dict)
    asked: bool = False


class Watched:
    """What a kernel has run so far, and the names it had before."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.cells: list[Seen] = []
        self.before = set(shell.user_ns)
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)
        self._note_files_asked_for()

    def _begin(self, info: Any) -> None:
        self.cells.append(Seen(info.raw_cell))

    def _end(self, result: Any) -> None:
        if self.cells:  # the cell that began to watch has no beginning
            self.cells[-1].after = {name: kept(value) for name, value in self.names().items()}

    def names(self) -> Names:
        """What the notebook has defined; IPython's own `_` and `_i` left out."""
        return {
            name: value
            for name, value in self.shell.user_ns.items()
            if name not in self.before and not name.startswith("_")
        }

    def _note_files_asked_for(self) -> None:
        """Whatever depends on the learner's functions asks Workspace where one lies, in this process."""
        file_of = self.file_of = Workspace.file_of

        def noted(workspace: Workspace, exercise: str) -> Path:
            if self.cells:
                self.cells[-1].asked = True
            return file_of(workspace, exercise)

        Workspace.file_of = noted  # type: ignore[method-assign]

    def stop(self) -> list[Seen]:
        """The cells of the notebook; the one that is running now is not of it."""
        self.shell.events.unregister("pre_run_cell", self._begin)
        self.shell.events.unregister("post_run_cell", self._end)
        Workspace.file_of = self.file_of  # type: ignore[method-assign]
        return self.cells[:-1]


_watched: list[Watched] = []


def watch(shell: InteractiveShell) -> None:
    """Before the first cell of the teacher edition."""
    _watched.append(Watched(shell))


def kept(value: Any) -> Any:
    """The value as it is now: a later cell may add to a list."""
    return copy(value) if type(value) in (list, dict) else value


def run_learner_edition(notebook: str, workspace: str) -> list[str]:
    """Run what differs; AssertionError where a cell raises or the stubs say nothing. The first lines of the cells that
    ran.
    """
    watched = _watched.pop()
    shell, printed = watched.shell, ""
    ran: list[str] = []
    cells = pair_up(Path(notebook), watched.stop())
    _take_a_new_folder(Path(workspace))
    _forget(shell, watched)
    for number, (source, seen, then) in enumerate(cells, 1):
        named = names_in(shell.transform_cell(source))
        if runs_alike(source, seen) and not named & differing(watched.names(), then):
            shell.user_ns |= {name: kept(seen.after[name]) for name in named if name in seen.after}
        else:
            printed += run_cell(shell, number, source)
            ran.append(source.splitlines()[0])
    assert "still the stub" in printed, f"the stubs of {notebook} say nothing:\n{printed}"
    return ran


def pair_up(notebook: Path, cells: list[Seen]) -> list[tuple[str, Seen, Names]]:
    """Each code cell of the learner edition, the cell that the teacher edition had in its place, and the names there
    were before that.
    """
    # not before the last cell of the notebook has run, which must import for itself what it needs
    from fsdplab.teaching.authoring import course

    source = course.read(notebook)
    learners, teachers = (
        [cell for cell in course.edition_of(source, edition).cells if cell.cell_type == "code"]
        for edition in ("learner", "teacher")
    )
    assert [course.solved(cell.source) for cell in cells] == [cell.source for cell in teachers], (
        "run all cells of the teacher edition first"
    )
    then = [{}, *(cell.after for cell in cells)]
    alone = {  # cells that learners have nothing in place of: remarks, and answers
        cell.id for before, cell in zip([None, *source.cells], source.cells)
        if "teacher" in course.tags_of(cell)
        or "solution" in course.tags_of(cell) and (before is None or "stub" not in course.tags_of(before))
    }  # fmt: skip
    beside = [each for each in zip(teachers, cells, then) if each[0].id not in alone]
    return [(own.source, seen, names) for own, (_, seen, names) in zip(learners, beside, strict=True)]


def runs_alike(source: str, seen: Seen) -> bool:
    """Whether the cell does in both editions the same with the same names."""
    return source == seen.source and not seen.asked and not _ON_RANKS.search(source)


def differing(now: Names, then: Names) -> set[str]:
    """The names that stand for something else than in the teacher edition, or for nothing."""
    return {name for name in {*now, *then} if name not in now or name not in then or not same(now[name], then[name])}


def same(one: Any, other: Any) -> bool:
    """Whether these are one object, or lists or dicts of the same objects."""
    if type(one) is list and type(other) is list:
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict and type(other) is dict:
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one is other


def names_in(source: str) -> set[str]:
    """Every name that a cell reads or binds."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    return imported | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }  # fmt: skip


def run_cell(shell: InteractiveShell, number: int, source: str) -> str:
    """What the cell printed and displayed; AssertionError with its error where it raises."""
    with capture_output() as shown:
        result = shell.run_cell(source, store_history=False)
    error = result.error_before_exec or result.error_in_exec
    assert error is None, f"learner edition, cell {number} ({source.splitlines()[0]}): {type(error).__name__}: {error}"
    return _text_of(shown)


def _text_of(shown: CapturedIO) -> str:
    return shown.stdout + "".join(str(output.data) for output in shown.outputs)


def _take_a_new_folder(workspace: Path) -> None:
    """A learner's folder with the predictions of the cells that do not run again, and no exercise in it."""
    predictions = Path(os.environ["FSDPLAB_HOME"]) / "predictions.json"
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.mkdir(parents=True)
    if predictions.exists():
        shutil.copy(predictions, workspace)
    os.environ["FSDPLAB_HOME"] = str(workspace)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_fsdp"]:
        del sys.modules[name]


def _forget(shell: InteractiveShell, watched: Watched) -> None:
    """The names, and the ranks that stay with theirs."""
    from fsdplab.teaching.core.cell_runs import manage_ranks

    for name in watched.names():
        del shell.user_ns[name]
    with capture_output():
        manage_ranks("stop")
