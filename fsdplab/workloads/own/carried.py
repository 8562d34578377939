"""Carries a notebook's workload to ranks: one file of functions and classes, written by this process alone.

What is defined in `__main__` (a cell, a script) goes by value, what comes from modules by reference, so that edits on
disk count; ranks get this process's sys.path and the sources of cells, which tracebacks show. Such a file runs code
when it is read, so no record has one.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import linecache
import os
import pickle
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from fsdplab.common.files import write_whole
from fsdplab.common.places import how_to_install
from fsdplab.common.sizes import size
from fsdplab.common.temporary import folder_of_this_process
from fsdplab.workloads.errors import ModelError

from .sources import CARRIED
from .value import Workload

_LARGE = 20_000_000  # bytes: more is data that came along unnoticed


_saved: WeakKeyDictionary[Workload, str] = WeakKeyDictionary()


def saved(workload: Workload) -> str:
    """Return the path of a file from which ranks read the workload, written when first asked for: the model of a
    `RunSpec`.

    ModelError where a part of it cannot be sent.
    """
    path = _saved.get(workload)
    # the folder of this process may have been cleared meanwhile
    if path is None or not os.path.exists(path):
        path = _saved[workload] = _written(workload)
    return path


def _written(workload: Workload) -> str:
    content = {"functions": workload.functions, "units": workload.given_units, "name": workload.name}
    dump = _dumped(content)
    if len(dump) > _LARGE:
        warnings.warn(
            f"the workload {workload.name} is {size(len(dump))}, which every rank reads: a function refers to a large"
            " value; load it inside of the function instead",
            RuntimeWarning,
            stacklevel=2,
        )
    # an empty entry is the folder of this process, which ranks do not start in
    search_path = [entry or os.getcwd() for entry in sys.path]
    whole = pickle.dumps({"path": search_path, "cells": _cells(), "dump": dump})
    digest = hashlib.blake2b(_cloudpickle().dumps(content), digest_size=8).hexdigest()  # without the names of cells
    path = folder_of_this_process() / f"{_in_a_file_name(workload.name)}-{digest}{CARRIED}"
    write_whole(path.with_suffix(".txt"), _sources(workload))
    path.write_bytes(whole)
    return str(path)


@cache
def workload_from(path: Path) -> Workload:
    """Read the workload that a file of `saved` holds, once a process."""
    _cloudpickle()
    try:
        whole = pickle.loads(path.read_bytes())
        # behind the rank's own entries
        sys.path += [entry for entry in whole["path"] if entry not in sys.path]
        # tracebacks look the lines of a cell up there
        for name, source in whole["cells"].items():
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        content = pickle.loads(whole["dump"])
    except ImportError as error:
        raise ModelError(
            f"a rank cannot import what the workload needs: {error}; put the module on sys.path, or its code in a cell"
        ) from error
    functions = content["functions"]
    return Workload(**functions, units=content["units"], name=content["name"])


def _dumped(content: dict[str, Any]) -> bytes:
    """Dump all of it at once, so that a class that two functions use stays one class."""
    try:
        return _with_file_names(content)
    except Exception as error:  # whatever an object's own pickling raises
        culprit = "the workload"
        for name, part in {**content["functions"], "units": content["units"]}.items():
            # one part after the other: the first that fails alone is named
            if not _can_be_sent(part):
                culprit = name
                break
        raise ModelError(
            f"{culprit} cannot be sent to ranks: {type(error).__name__}: {error}; make files, locks, generators and"
            " compiled functions inside of it, where each rank makes its own"
        ) from error


def _with_file_names(value: Any) -> bytes:
    """Dump a value whose code keeps the name of its file, which cloudpickle leaves out: tracebacks show its lines."""
    plain = _cloudpickle().Pickler
    reduce_code = plain.dispatch_table[CodeType]

    def with_file_name(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
        return _code_of, (code.co_filename, *reduce_code(code))

    table = ChainMap({CodeType: with_file_name}, plain.dispatch_table)
    pickler = type("Pickler", (plain,), {"dispatch_table": table})
    file = io.BytesIO()
    pickler(file).dump(value)
    return file.getvalue()


def _code_of(file: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=file)


def _can_be_sent(part: Any) -> bool:
    try:
        _with_file_names(part)
    except Exception:  # as above
        return False
    return True


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise ModelError(
            f"a Workload of functions needs cloudpickle, which is not installed; run: {how_to_install('lab')}, or put"
            " the functions into a file and give its name as model"
        ) from None
    return cloudpickle


def _cells() -> dict[str, str]:
    """Return the sources of code without a file, by the name that tracebacks have."""
    sources = {}
    for name, entry in [*linecache.cache.items()]:
        # (size, time of change, lines, name); the time of a file is never None
        if len(entry) == 4 and not entry[1]:
            sources[name] = "".join(entry[2])
    return sources


def _sources(workload: Workload) -> str:
    """Return the text of each cell or file that the functions, and the classes of a notebook, are from."""
    main = [*vars(sys.modules["__main__"]).values()]
    # a notebook's own classes, not those that it has imported
    classes = [value for value in main if isinstance(value, type) and value.__module__ == "__main__"]
    functions: list[Any] = [*workload.functions.values()]
    for kind in (*classes, *(workload.given_units or ())):
        functions += vars(kind).values()
    files: dict[str, None] = {}
    for function in functions:
        # attributes of a class that are no functions have none
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            files[code.co_filename] = None
    texts = ["".join(linecache.getlines(file)) or f"# {file}: not known" for file in files]
    return "\n\n".join(texts)


def _in_a_file_name(name: str) -> str:
    """Replace the signs that a file system may refuse; 60 of them at most."""
    signs = [sign if sign.isalnum() or sign in "._ " else "_" for sign in name]
    return "".join(signs)[:60] or "workload"
