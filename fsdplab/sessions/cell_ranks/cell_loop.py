"""Runs cells on a rank that stays (cell_ranks/ranks.py): wait for a cell, run it with the names of the last one, report
how it ended, wait again.

    main(FOLDER)    called by launch/program.py

    rank0.turn      a FIFO: the number of the next cell (launch/turns.py)
    cell3.py        the source of cell 3, complete before any rank gets its number
    before.py       runs before each cell, with names of its own
    rank0.cells     one line of JSON a cell that has ended
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import signal
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.common.files import naming
from fsdplab.sessions.launch.mailbox import Mailbox
from fsdplab.sessions.launch.stacks import headline, of_exception
from fsdplab.sessions.launch.turns import OwnTurns
from fsdplab.sessions.worker.rank_process import RankContext, backend_of_cells, rank_process

IDLE = "idle"  # the phase of a rank that waits for a cell
FRESH_TITLE = "<%%ranks cell>"
_MOST_NAMES = 8
_LONGEST_HEADLINE, _LONGEST_TRACEBACK = 300, 20_000  # characters; an exception may hold megabytes
_NO_GROUP = " (a cell has destroyed the process group; ranks that are started anew have one)"


def main(folder: str) -> None:
    """Run cells on this rank until the caller is gone."""
    with rank_process(folder, backend_of_cells(int(os.environ["WORLD_SIZE"])), "any") as context:
        cells, turns = _Cells(context), OwnTurns(context.mailbox, context.rank, context.heartbeat, IDLE)
        while number := turns.next():
            cells.run(int(number))


class _Cells:
    """Runs one cell after another in the same names."""

    def __init__(self, context: RankContext) -> None:
        self.context, self.interruptible = context, False
        self.given = given_names(context.rank, context.world_size)
        self.names = cell_namespace(self.given)
        # kept open: a cell may lower the limit of open files
        self.results = context.mailbox.of(context.rank, "cells").open("a", encoding="utf-8")
        self.streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._restore_streams()
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Interrupt a cell, once: a signal just after its end must not end the rank."""
        if self.interruptible:
            self.interruptible = False
            raise KeyboardInterrupt

    def run(self, number: int) -> None:
        """Run a cell and report how it ended; the rank goes on."""
        self.context.heartbeat.enter(f"cell {number}")
        signal.signal(signal.SIGINT, self._interrupt)
        result: dict[str, Any] = {"cell": number, "error": None}
        try:
            try:
                # from here to the end of the cell Ctrl-C raises in it; while its end is reported it does not
                self.interruptible = True
                self._execute(number)
            finally:
                self.interruptible = False
        except BaseException as error:  # SystemExit and KeyboardInterrupt too
            no_group = "" if dist.is_initialized() else _NO_GROUP
            result |= {
                "error": _shortened(headline(error), _LONGEST_HEADLINE) + no_group,
                "traceback": _shortened(of_exception(error), _LONGEST_TRACEBACK),
            }
        self._restore_streams()
        with naming(Path(self.results.name)):
            self.results.write(json.dumps(result | self._held()) + "\n")
            self.results.flush()

    def _execute(self, number: int) -> None:
        before = self.context.mailbox.folder / "before.py"
        exec(
            compile(before.read_text(encoding="utf-8"), str(before), "exec", dont_inherit=True),
            {"__name__": "__before__"},
        )
        self.names.update(self.given)  # a cell may overwrite `rank`: restore it for the next
        # the names stay: the next cell finds what this one has defined
        run_source(source_of(self.context.mailbox, number).read_text(encoding="utf-8"), self.names, title(number))

    def _restore_streams(self) -> None:
        """Flush what a cell has printed, and undo what it has done to sys.stdout and sys.stderr."""
        # descriptor 1 is stdout, 2 is stderr, whatever a cell has put in their places
        for descriptor, (name, stream) in enumerate(self.streams.items(), start=1):
            # a cell has closed sys.stdout: a new one on the same descriptor
            if stream.closed:
                stream = self.streams[name] = os.fdopen(descriptor, "w", errors="backslashreplace", closefd=False)
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            stream.flush()
            setattr(sys, name, stream)

    def _held(self) -> dict[str, Any]:
        """Return the cells' own names: the latest, and how many."""
        own = {name: value for name, value in self.names.items() if name not in self.given and not name.startswith("_")}
        # imported modules are no values that a learner looks for
        held = [name for name, value in own.items() if not isinstance(value, ModuleType)]
        return {"names": held[-_MOST_NAMES:], "held": len(held)}


def _shortened(text: str, most: int) -> str:
    """Return the text, or where it is longer its beginning and its end."""
    if len(text) <= most:
        return text
    # a traceback begins with the cell's line and ends with the message
    return f"{text[: most // 2]} ... {len(text) - most:,} characters are left out ... {text[-(most // 2) :]}"


# ---- a cell's source: its file, its title in tracebacks, its names, and how a rank runs it


def source_of(mailbox: Mailbox, number: int) -> Path:
    """Return the file of a cell's source; the rank reads it when it gets the number."""
    return mailbox.folder / f"cell{number}.py"


def title(number: int) -> str:
    """Return a cell's name in tracebacks: each has its own, since a function of the first may raise in the fifth."""
    return f"<%%ranks cell {number}>"


def show_source(source: str, name: str) -> None:
    """Let tracebacks of this process show the lines of a cell, which has no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def cell_namespace(given: dict[str, Any]) -> dict[str, Any]:
    """Return the names of cells, as a module, so that a class defined in a cell can be pickled."""
    module = sys.modules["__ranks__"] = ModuleType("__ranks__")
    vars(module).update(given)
    return vars(module)


def given_names(rank: int, world_size: int) -> dict[str, Any]:
    """Return the names that every cell has; a cell may have destroyed the group, so they do not come from there."""
    return {"rank": rank, "world_size": world_size, "torch": torch, "dist": dist}


def run_source(source: str, names: dict[str, Any], name: str) -> None:
    """Run the statements, and print the value of a last expression as a notebook would; what goes to stderr goes where
    the output goes.
    """
    show_source(source, name)
    tree = ast.parse(source, name)
    final = tree.body[-1] if tree.body else None
    last = final if isinstance(final, ast.Expr) else None
    if last is not None:
        tree.body.pop()
    # warnings and progress bars appear with the output, in order
    with contextlib.redirect_stderr(sys.stdout):
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
            if value is not None:
                print(repr(value))
