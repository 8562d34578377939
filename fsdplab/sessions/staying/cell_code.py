"""A cell's source on ranks that stay: its file, its title in tracebacks, its names, and how a rank runs it."""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.sessions.launch.mailbox import Mailbox

IDLE = "idle"  # the phase of a rank that waits for a cell
FRESH_TITLE = "<%%ranks cell>"


def source_of(mailbox: Mailbox, number: int) -> Path:
    """The file of a cell's source; the rank reads it when it gets the number."""
    return mailbox.folder / f"cell{number}.py"


def title(number: int) -> str:
    """A cell's name in tracebacks: each has its own, since a function of the first may raise in the fifth."""
    return f"<%%ranks cell {number}>"


def show_source(source: str, name: str) -> None:
    """Let tracebacks of this process show the lines of a cell, which has no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def cell_namespace(given: dict[str, Any]) -> dict[str, Any]:
    """The names of cells, as a module, so that a class defined in a cell can be pickled."""
    module = sys.modules["__ranks__"] = ModuleType("__ranks__")
    vars(module).update(given)
    return vars(module)


def given_names(rank: int, world_size: int) -> dict[str, Any]:
    """The names that every cell has; a cell may have destroyed the group, so they do not come from there."""
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
    with contextlib.redirect_stderr(sys.stdout):
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
            if value is not None:
                print(repr(value))
