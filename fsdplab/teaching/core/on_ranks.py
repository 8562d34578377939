"""The part of the course that runs on the ranks: call a learner's function with a ledger around it, run a cell.

Sessions start the ranks, form a process group and call one function of this file with a payload; its value is sent
back. Imports torch only, so that ranks start quickly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.sessions.cell_ranks.cell_loop import FRESH_TITLE, cell_namespace, given_names, run_source
from fsdplab.teaching.core import exercise_file
from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.quantities import plain
from fsdplab.teaching.core.undefined_memory import UndefinedMemory
from fsdplab.teaching.core.verdicts import first_difference
from fsdplab.teaching.core.workspace import Workspace, load_function

_KEPT = (list, dict, set)  # arguments that a function leaves as they are; tensors are changed in place on purpose
GRACE = 2.0  # seconds more than the function's limit: a rank still inside it reports first, with the line


class StillWaiting(RuntimeError):
    """A function that has not returned in time; the text ends with the learner's current line."""


class Unreadable(TypeError):
    """What the function returned cannot be read as the exercise reads it; the text begins with its type."""


class InCase(RuntimeError):
    """The function raised in a case; the text is the case's name, and the error is its cause."""


class LeftUnfinished(RuntimeError):
    """The function returned on this rank, but the next barrier failed: a message was begun and not waited for."""


def call_exercises(payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Call every program on every case of its exercise: `[program][case]`, what this rank observed and sent.

    `payload["programs"]`: dicts with the `exercise`'s file, the file of the `solution`, and `time_limit` (seconds for
    one case, from a common start).
    """
    open_course(workspace=payload["workspace"])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for program in payload["programs"]:
        exercise = exercise_file.Exercise(Path(program["exercise"]))
        observed = Observed(exercise, Path(program["solution"]))
        cases = exercise.module().cases(rank, ranks)
        results.append([_seen_on_this_rank(name, observed, given, program) for name, *given in cases])
    return results


def _seen_on_this_rank(name: str, observed: Observed, given: list[Any], program: dict[str, Any]) -> dict[str, Any]:
    """Run one case of a program on this rank, with nonsense in memory that nobody has filled."""
    with UndefinedMemory(), raising_in(name):
        seen = _run_case(observed, (given,), {"time_limit": program["time_limit"], "path": program["solution"]})
    return {"case": name, "nothing": observed.nothing, **seen}


@contextlib.contextmanager
def raising_in(case: str) -> Iterator[None]:
    """Raise what the body raises as an error of this case, but for a function that has not returned."""
    try:
        yield
    except StillWaiting:
        raise
    except Exception as error:  # whatever the learner's function raises
        raise InCase(case) from error


class Observed:
    """A solution, and what its exercise observes of it: `Observed(exercise, path)(arguments)` -> facts, or a value.

    `changed` has the places of the lists and dicts that a pure function was given and changed.
    """

    def __init__(self, exercise: exercise_file.Exercise, path: Path) -> None:
        self._path = str(path)
        self._returned = False
        self._value: Any = None
        self._watches_arguments = exercise.pure
        self.changed: set[int] = set()
        self._function = self._noted(with_plain_numbers(load_function(path, exercise.function)))
        self._observe = getattr(exercise.module(), "observe", lambda function, *given: function(*given))

    @property
    def nothing(self) -> bool:
        """Return whether the function returned None when it was last called."""
        return self._returned and self._value is None

    def __call__(self, given: list[Any]) -> Any:
        """Return what is seen of one call; Unreadable where the exercise cannot read what the function returned."""
        self._returned, self.changed = False, set()
        try:
            # a copy, since the next program gets the same arguments
            return self._observe(self._function, *copy.deepcopy(given))
        except Exception as error:
            # an error outside of the learner's file, after it returned: `observe` could not use the value
            frames = traceback.extract_tb(error.__traceback__)
            in_solution = any(frame.filename == self._path for frame in frames)
            raised_by_lesson = (frames[-1].line or "").startswith("raise ")  # its message says what is wrong
            if self._returned and not in_solution and not raised_by_lesson:
                raise Unreadable(f"{type(self._value).__name__}: {type(error).__name__}: {error}") from error
            raise

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its value and the arguments that it changes noted here."""

        @functools.wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            self._returned = False
            before: tuple[Any, ...] = ()
            if self._watches_arguments:
                before = copy.deepcopy(arguments)
            self._value = function(*arguments, **named)
            self._returned = True
            # `before` is empty where arguments are not watched, and then nothing is compared
            for place, (old, new) in enumerate(zip(before, arguments)):
                if isinstance(new, _KEPT) and first_difference(old, new):
                    self.changed.add(place)
            return self._value

        return called


def with_plain_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with numpy's numbers in what it returns as Python's own, before a driver reads them."""

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        return plain(function(*arguments, **named))

    return called


def _run_case(call: Callable[..., Any], arguments: tuple[Any, ...], program: dict[str, Any]) -> dict[str, Any]:
    """Call a function between two barriers; return its value, what it printed, and its messages."""
    printed = io.StringIO()
    dist.barrier()  # a common start: a slow machine's start-up is not counted
    with contextlib.redirect_stdout(printed), WireLog() as log, _given_up_after(program["time_limit"], program["path"]):
        returned = call(*arguments)
    # a message that nobody waits for keeps gloo's barrier from ending
    with _given_up_after(program["time_limit"] + GRACE, program["path"]):
        dist.barrier()  # no rank begins the next case while a slow one still receives messages
    calls = [(call.kind, call.nbytes, call.peer) for call in log.calls]
    return {"returned": portable(returned), "printed": printed.getvalue(), "calls": calls}


@contextlib.contextmanager
def _given_up_after(seconds: float, path: str) -> Iterator[None]:
    """End this rank when the body takes longer: a rank that waits in a collective cannot be interrupted otherwise."""
    timer = threading.Timer(seconds, _give_up, (seconds, path))
    # so that a rank whose work is done can end
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(seconds: float, path: str) -> None:
    """Report the main thread's current line as an uncaught error, which ends the rank."""
    main = threading.main_thread().ident
    assert main is not None, "the main thread has started"
    # the main thread hangs, in a collective or a loop, so this thread reads its stack
    where = waited(seconds, path, sys._current_frames()[main])
    error: StillWaiting | LeftUnfinished
    if where:
        error = StillWaiting(where)
    else:
        error = LeftUnfinished(f"it returned, but {seconds:g} s later the ranks could still not meet")
    sys.excepthook(type(error), error, None)


def waited(seconds: float, path: str, frame: types.FrameType | None) -> str:
    """Return where a function stands that has not returned; nothing where no frame is the file's.

    `"no return after 8 s; it stood in 01.ring.py, line 9: dist.recv(...)"`.
    """
    stood = ""
    for entry in traceback.extract_stack(frame):
        if entry.filename == path:
            # the stack goes from the outermost frame inwards, so the innermost line of the file stays
            stood = f"{Path(path).name}, line {entry.lineno}: {entry.line}"
    if not stood:
        return ""
    return f"no return after {seconds:g} s; it stood in {stood}"


def portable(value: Any) -> Any:
    """Return the value in a form that can be sent.

    Tensors become copies without views, numpy's numbers Python's own, and an unknown object its type's name.
    """
    value = plain(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"<{type(value).__name__}>"


def run_cell(payload: dict[str, Any]) -> None:
    """Run a notebook cell on this rank; its output, with the last expression's value, is read while it runs.

    The cell finds `rank`, `world_size`, `torch` and `dist`; nothing else of the notebook is here.
    """
    Workspace(Path(payload["workspace"])).make_importable()
    assert isinstance(sys.stdout, io.TextIOWrapper), "a rank prints into its own file"
    sys.stdout.reconfigure(line_buffering=True)
    run_source(payload["source"], cell_namespace(given_names(dist.get_rank(), dist.get_world_size())), FRESH_TITLE)
    dist.barrier()


def import_latest(workspace: str) -> None:
    """Let the next cell on ranks that stay import what the learner has saved by now."""
    Workspace(Path(workspace)).make_importable()
    package = Path(workspace).name
    # a module that stays imported would be the version from before the last save
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            del sys.modules[name]
    importlib.invalidate_caches()
