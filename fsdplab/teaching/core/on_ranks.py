"""The part of the course that runs on the ranks: call a learner's function with a ledger around it, run a cell.

Sessions start the ranks, form a process group and call one function of this file with a payload; its value is sent
back. Imports torch only, so that ranks start quickly.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.sessions.staying.cell_code import FRESH_TITLE, cell_namespace, run_source
from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.core.workspace import Workspace, load_function

GRACE = 2.0  # seconds more than the function's limit: a rank still inside it reports first, with the line


class StillWaiting(RuntimeError):
    """A function that has not returned in time; the text ends with the learner's current line."""


class LeftUnfinished(RuntimeError):
    """The function returned on this rank, but the next barrier failed: a message was begun and not waited for."""


def call_recorded(payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Call every program on every case; `[program][case]` -> the value, the output and the calls of this rank.

    `payload["programs"]`: dicts with `path`, `function`, `driver` (file and function, or None), `arguments`
    (`[case][rank]`, a tuple of arguments each) and `time_limit` (seconds for one case, from a common start).
    """
    Workspace(Path(payload["workspace"])).make_importable()
    return [_run_program(program) for program in payload["programs"]]


def _run_program(program: dict[str, Any]) -> list[dict[str, Any]]:
    function = load_function(Path(program["path"]), program["function"])
    call: Callable[..., Any] = function
    if program["driver"]:
        file, name = program["driver"]
        drive = load_function(Path(file), name)
        call = lambda *arguments: drive(function, *arguments)  # noqa: E731
    return [_run_case(call, by_rank[dist.get_rank()], program) for by_rank in program["arguments"]]


def _run_case(call: Callable[..., Any], arguments: tuple[Any, ...], program: dict[str, Any]) -> dict[str, Any]:
    printed = io.StringIO()
    dist.barrier()  # a common start: a slow machine's start-up is not counted
    with contextlib.redirect_stdout(printed), WireLog() as log, _given_up_after(program["time_limit"], program["path"]):
        returned = call(*arguments)
    with _given_up_after(program["time_limit"] + GRACE, program["path"]):
        dist.barrier()  # no rank begins the next case while a slow one still receives messages
    calls = [(call.kind, call.nbytes, call.peer) for call in log.calls]
    return {"returned": _portable(returned), "printed": printed.getvalue(), "calls": calls}


@contextlib.contextmanager
def _given_up_after(seconds: float, path: str) -> Iterator[None]:
    """End this rank when the body takes longer: a rank that waits in a collective cannot be interrupted otherwise."""
    timer = threading.Timer(seconds, _give_up, (seconds, path))
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
    stack = traceback.extract_stack(sys._current_frames()[main])
    own = [f"{Path(path).name}, line {frame.lineno}: {frame.line}" for frame in stack if frame.filename == path]
    error: StillWaiting | LeftUnfinished
    if own:
        error = StillWaiting(f"no return after {seconds:g} s; it stood in {own[-1]}")
    else:
        error = LeftUnfinished(f"it returned, but {seconds:g} s later the ranks could still not meet")
    sys.excepthook(type(error), error, None)


def _portable(value: Any) -> Any:
    """The value in a form that can be sent: tensors without views, unknown objects by their type's name."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # numpy's numbers are numbers
    known = value is None or isinstance(value, (bool, int, float, str))
    return value if known else f"<{type(value).__name__}>"


def run_cell(payload: dict[str, Any]) -> None:
    """Run a notebook cell on this rank; its output, with the last expression's value, is read while it runs.

    The cell finds `rank`, `world_size`, `torch` and `dist`; nothing else of the notebook is here.
    """
    Workspace(Path(payload["workspace"])).make_importable()
    assert isinstance(sys.stdout, io.TextIOWrapper), "a rank prints into its own file"
    sys.stdout.reconfigure(line_buffering=True)
    run_source(payload["source"], cell_namespace(), FRESH_TITLE)
    dist.barrier()


def import_latest(workspace: str) -> None:
    """Before each cell on ranks that stay: let it import what the learner has saved by now."""
    Workspace(Path(workspace)).make_importable()
    for name in [name for name in sys.modules if name.partition(".")[0] == Path(workspace).name]:
        del sys.modules[name]
    importlib.invalidate_caches()
