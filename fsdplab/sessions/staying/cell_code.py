"""A cell's source: where it lies for ranks that stay, what tracebacks call it, and which names it finds, and how a rank
runs it.
"""

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
    """The file of a cell's source; the rank reads it when it is told the number."""
    return mailbox.folder / f"cell{number}.py"


def title(number: int) -> str:
    """What tracebacks call a cell: each has its own, since a function of the first may raise in the fifth."""
    return f"<%%ranks cell {number}>"


def show_source(source: str, name: str) -> None:
    """Let tracebacks and stacks of this process show the lines of a cell, which is no file to them."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def cell_namespace() -> dict[str, Any]:
    """What a cell finds, as the names of a module: a class that a cell defines can be pickled, and is found again."""
    module = sys.modules["__ranks__"] = ModuleType("__ranks__")
    vars(module).update(given_names())
    return vars(module)


def given_names() -> dict[str, Any]:
    """What every cell finds."""
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "torch": torch, "dist": dist}


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
