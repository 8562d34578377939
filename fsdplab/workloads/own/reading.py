"""Reads a Python file as a workload: imports it once a process and takes its functions."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdplab.common.temporary import TEMPORARY
from fsdplab.workloads.errors import ModelError

from .value import Workload


def workload_in(path: Path) -> Workload:
    """Return the workload of a file with model(), batch(at), loss(model, batch); ModelError where it has none."""
    whole = path.expanduser().resolve()
    # the time of change is a part of the cache's key: an edited file is imported again
    return _workload_in(whole, whole.stat().st_mtime_ns)


@cache
def _workload_in(path: Path, changed_ns: int) -> Workload:
    module, chosen = _imported(path)
    given = {name: getattr(module, name, None) for name in ("model", "batch", "loss", "units", "optimizer")}
    if chosen != os.getcwd():
        for name, value in given.items():
            if inspect.isfunction(value):  # it may read what lies in the folder that its file has gone to
                given[name] = _inside(chosen, value)
    try:
        return Workload(**given, name=path.name)  # type: ignore[arg-type]  # checked there
    except ModelError as error:
        raise ModelError(f"{path.name}: {error}") from None


def _imported(path: Path) -> tuple[ModuleType, str]:
    """Import a file, which finds the modules beside it; Python's own come first, as torch imports them later. Returns
    the folder in which the file has gone on, too.
    """
    name = path.stem
    if not name.isidentifier() or name in sys.modules:
        name = f"own_model_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    beside_it(str(path.parent))
    try:
        with _working_folder_kept():
            spec.loader.exec_module(module)
            chosen = os.getcwd()
    except (Exception, SystemExit) as error:
        # a half-imported module would be found by the next import
        del sys.modules[name]
        raise ModelError(f"{path.name} cannot be imported: {where_in(path, error)}") from error
    return module, chosen


def _inside(folder: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that works in a folder, and leaves the caller's working folder as it was."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _working_folder_kept():
            os.chdir(folder)
            return function(*args, **kwargs)

    return called


@contextmanager
def _working_folder_kept() -> Iterator[None]:
    """Go back to the working folder after a file's `os.chdir(...)`: paths that the caller was given are relative to it.

    A rank has no paths of its own, and the functions of the file may read what lies in the folder that it chose.
    """
    if TEMPORARY in os.environ:
        yield
        return
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


def beside_it(folder: str) -> None:
    """Let modules of `folder` be imported, after Python's own."""
    if folder in sys.path:
        return
    library = os.path.dirname(os.__file__)
    of_python = (library, os.path.join(library, "lib-dynload"))
    behind = 0
    for place, entry in enumerate(sys.path):
        if entry in of_python:
            # behind the last of Python's own folders
            behind = place + 1
    sys.path.insert(behind, folder)


def where_in(path: Path, error: BaseException) -> str:
    """Name the last line of the file itself that was reached: `line 3, NameError: name 'x' is not defined`."""
    text = type(error).__name__
    first_line = str(error).strip().partition("\n")[0]
    if first_line:
        text = f"{text}: {first_line}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if lines:
        text = f"line {lines[-1]}, {text}"
    return text
