"""A workload of a notebook, carried to ranks: one file of functions and classes, written by this process alone.

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
    """The path of a file from which ranks read the workload, written when first asked for: the model of a `RunSpec`.

    ModelError where a part of it cannot be sent.
    """
    path = _saved.get(workload)
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
    whole = pickle.dumps({"path": [each or os.getcwd() for each in sys.path], "cells": _cells(), "dump": dump})
    digest = hashlib.blake2b(_cloudpickle().dumps(content), digest_size=8).hexdigest()  # without the names of cells
    path = folder_of_this_process() / f"{_in_a_file_name(workload.name)}-{digest}{CARRIED}"
    write_whole(path.with_suffix(".txt"), _sources(workload))
    path.write_bytes(whole)
    return str(path)


@cache
def workload_from(path: Path) -> Workload:
    """The workload that a file of `saved` holds, made once a process."""
    _cloudpickle()
    try:
        whole = pickle.loads(path.read_bytes())
        sys.path += [each for each in whole["path"] if each not in sys.path]
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
    """All of it at once, so that a class that two functions use stays one class."""
    try:
        return _with_file_names(content)
    except Exception as error:  # whatever an object's own pickling raises
        parts = {**content["functions"], "units": content["units"]}
        culprit = next((name for name, part in parts.items() if not _can_be_sent(part)), "the workload")
        raise ModelError(
            f"{culprit} cannot be sent to ranks: {type(error).__name__}: {error}; make files, locks, generators and"
            " compiled functions inside of it, where each rank makes its own"
        ) from error


def _with_file_names(value: Any) -> bytes:
    """A dump in which code keeps the name of its file, which cloudpickle leaves out: tracebacks show its lines."""
    plain = _cloudpickle().Pickler
    reduced = plain.dispatch_table[CodeType]
    own = {CodeType: lambda code: (_code_of, (code.co_filename, *reduced(code)))}
    pickler = type("Pickler", (plain,), {"dispatch_table": ChainMap(own, plain.dispatch_table)})
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
    """Sources of code without a file, by the name that tracebacks have."""
    return {name: "".join(entry[2]) for name, entry in [*linecache.cache.items()] if len(entry) == 4 and not entry[1]}


def _sources(workload: Workload) -> str:
    """The text of each cell or file that the functions, and the classes of a notebook, are from."""
    main = vars(sys.modules["__main__"]).values()
    classes = [each for each in main if isinstance(each, type) and each.__module__ == "__main__"]
    methods = [value for kind in (*classes, *(workload.given_units or ())) for value in vars(kind).values()]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in (*workload.functions.values(), *methods)]
    files = dict.fromkeys(code.co_filename for code in codes if code is not None)
    return "\n\n".join("".join(linecache.getlines(file)) or f"# {file}: not known" for file in files)


def _in_a_file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "._ " else "_" for sign in name)[:60] or "workload"
