"""Enough of pytest to run the GPU tests where pytest is not installed: fixtures, marks, parameters, `raises`,
`monkeypatch`.

It is no test framework: what the project's GPU tests use is here, and a test that asks for more fails with the name of
what is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Note = Callable[[str, str, float, str], None]
_MISSING = object()


class Skipped(Exception):
    """Raised by `pytest.skip` and `pytest.importorskip`."""


class BareMark:
    """`pytest.mark.NAME`, with or without arguments; used as a decorator it hangs itself on the function."""

    def __init__(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]) and (self.name != "skipif" or self.args):
            args[0].bare_marks = [*getattr(args[0], "bare_marks", []), self]
            return args[0]
        return BareMark(self.name, args, kwargs)


class _Marks:
    def __getattr__(self, name: str) -> BareMark:
        return BareMark(name)


@dataclass
class _Param:
    values: tuple[Any, ...]
    id: str | None = None
    marks: Any = ()


@contextlib.contextmanager
def raises(
    expected: type[BaseException] | tuple[type[BaseException], ...], match: str | None = None
) -> Iterator[types.SimpleNamespace]:
    """The block must raise `expected`, with a text in which `match` is found; `.value` is the exception afterwards."""
    caught = types.SimpleNamespace(value=None)
    try:
        yield caught
    except expected as error:
        caught.value = error
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"expected an error that matches {match!r}, got {error}") from error
    else:
        raise AssertionError(f"expected {expected}, nothing was raised")


class MonkeyPatch:
    """Changes that `undo` takes back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None:
        """Set an attribute that must exist unless `raising` is False."""
        before = vars(target).get(name, getattr(target, name) if raising else getattr(target, name, _MISSING))
        self._undo.append(lambda: delattr(target, name) if before is _MISSING else setattr(target, name, before))
        setattr(target, name, value)

    def setenv(self, name: str, value: str) -> None:
        """Set a variable of the environment."""
        self._undo.append(
            lambda before=os.environ.get(name): (
                os.environ.pop(name, None) if before is None else os.environ.update({name: before})
            )
        )
        os.environ[name] = value

    def delenv(self, name: str, raising: bool = True) -> None:
        """Delete a variable of the environment."""
        if name in os.environ:
            self.setenv(name, "")
            del os.environ[name]
        elif raising:
            raise KeyError(name)

    def undo(self) -> None:
        """Take everything back."""
        while self._undo:
            self._undo.pop()()


def _skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def _import_or_skip(name: str, **_: Any) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Skipped(f"needs {name}") from None


def _fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


def _fixture(function: Any = None, **kwargs: Any) -> Any:
    if function is None:
        return lambda each: _fixture(each, **kwargs)
    function.bare_fixture = kwargs.get("scope", "function")
    return function


def stand_in() -> types.ModuleType:
    """The module that `import pytest` finds."""
    module = types.ModuleType("pytest")
    module.__dict__.update(
        fixture=_fixture, mark=_Marks(), raises=raises, skip=_skip, fail=_fail, importorskip=_import_or_skip,
        MonkeyPatch=MonkeyPatch,
        param=lambda *values, id=None, marks=(): _Param(values, id, marks), hookimpl=lambda *_, **__: lambda each: each,
        approx=lambda value, rel=1e-6, abs=1e-12: _Approx(value, rel, abs),
    )  # fmt: skip
    return module


@dataclass
class _Approx:
    value: float
    rel: float
    abs: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float)) and abs(other - self.value) <= max(self.abs, self.rel * abs(self.value))


@dataclass
class Fixtures:
    """Makes the arguments of a test by their names, and ends them after it."""

    known: dict[str, Callable[..., Any]]
    _made: dict[str, Any] = field(default_factory=dict)
    _open: list[Callable[[], None]] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """One fixture's value, made once a test."""
        if name not in self._made:
            self._made[name] = self._own(name) if name not in self.known else self._make(self.known[name])
        return self._made[name]

    def _own(self, name: str) -> Any:
        if name == "monkeypatch":
            patch = MonkeyPatch()
            self._open.append(patch.undo)
            return patch
        if name == "tmp_path":
            folder = tempfile.TemporaryDirectory(prefix="fsdplab-test-")
            self._open.append(folder.cleanup)
            return Path(folder.name)
        raise LookupError(f"the stand-in for pytest has no fixture {name!r}; install pytest to run this test")

    def _make(self, function: Callable[..., Any]) -> Any:
        made = function(*(self.value(name) for name in inspect.signature(function).parameters))
        if not inspect.isgenerator(made):
            return made
        self._open.append(lambda: next(made, None))
        return next(made)

    def close(self) -> None:
        """End what was made, the last first."""
        while self._open:
            self._open.pop()()


def run_bare(paths: list[Path], note: Note, begun: set[str], whole: set[str]) -> int:
    """Run the tests of the files (those marked `gpu`; of a file in `whole`, all) that were not begun before; 0 where
    none failed, else 1.
    """
    sys.modules["pytest"] = stand_in()
    return int(any([not _run_file(path, note, begun, path.name in whole) for path in paths]))  # noqa: C419 (all of them run)


def _run_file(path: Path, note: Note, begun: set[str], whole: bool) -> bool:
    """Whether no test of the file failed."""
    sys.path.insert(0, str(path.resolve().parents[1]))
    try:
        module = importlib.import_module(f"{path.parent.name}.{path.stem}")
        known = _fixtures_of(module)
        with contextlib.suppress(ModuleNotFoundError):
            known = _fixtures_of(importlib.import_module(f"{path.parent.name}.conftest")) | known
    except Exception as error:
        traceback.print_exc()
        note(f"{path.stem}::(collecting)", "failed", 0.0, f"{type(error).__name__}: {error}")
        return False
    calls = [
        (f"{path.stem}::{name}", *call)
        for function in _tests_of(module)
        for name, *call in _calls(function, _marks(module, function))
    ]
    wanted = [call for call in calls if call[0] not in begun and (whole or any(mark.name == "gpu" for mark in call[3]))]
    return all([_run(known, note, *call) for call in wanted])  # noqa: C419 (all of them run)


def _fixtures_of(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    return {name: each for name, each in vars(module).items() if hasattr(each, "bare_fixture")}


def _tests_of(module: types.ModuleType) -> list[Callable[..., Any]]:
    return [each for name, each in vars(module).items() if name.startswith("test_") and inspect.isfunction(each)]


def _marks(module: types.ModuleType, function: Callable[..., Any]) -> list[BareMark]:
    own = getattr(module, "pytestmark", [])
    return [*(own if isinstance(own, list) else [own]), *getattr(function, "bare_marks", [])]


def _calls(
    function: Callable[..., Any], marks: list[BareMark]
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any], list[BareMark]]]:
    """(name, function, given arguments, marks) for every combination of its parameters."""
    axes = [_axis(mark) for mark in marks if mark.name == "parametrize"]
    for combination in itertools.product(*axes):
        given = {name: value for chosen in combination for name, value in chosen[0].items()}
        label = "-".join(chosen[1] for chosen in combination)
        yield f"{function.__name__}[{label}]" if label else function.__name__, function, given, marks


def _axis(mark: BareMark) -> list[tuple[dict[str, Any], str]]:
    names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
    rows = [
        each if isinstance(each, _Param) else _Param(tuple(each) if len(names) > 1 else (each,))
        for each in mark.args[1]
    ]
    return [(dict(zip(names, row.values, strict=True)), row.id or "-".join(map(str, row.values))) for row in rows]


def _run(
    known: dict[str, Callable[..., Any]],
    note: Note,
    name: str,
    function: Callable[..., Any],
    given: dict[str, Any],
    marks: list[BareMark],
) -> bool:
    note(name, "began", 0.0, "")
    began, fixtures, outcome, reason = time.monotonic(), Fixtures(known), "passed", ""
    try:
        _skip_if_told(marks)
        function(
            **given,
            **{each: fixtures.value(each) for each in inspect.signature(function).parameters if each not in given},
        )
    except Skipped as skipped:
        outcome, reason = "skipped", str(skipped)
    except Exception as error:
        traceback.print_exc()
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    try:
        fixtures.close()
    except Exception as error:
        traceback.print_exc()
        outcome, reason = "failed", f"after the test: {type(error).__name__}: {error}"
    note(name, outcome, time.monotonic() - began, reason)
    return outcome != "failed"


def _skip_if_told(marks: list[BareMark]) -> None:
    for mark in marks:
        if mark.name == "skip" or mark.name == "skipif" and mark.args[0]:
            raise Skipped(mark.kwargs.get("reason", ""))
