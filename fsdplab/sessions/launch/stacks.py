"""Makes readable stacks: of an exception, and of a running rank.

The lab's own frames are removed from both. The second comes from faulthandler, which runs inside a signal handler and
writes file names and line numbers only; it is cut to the main thread, and the source lines are added:

    Thread 0x00007f2c (most recent call first):
      File "/tmp/my_fsdp.py", line 12 in shard
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

from fsdplab.common.errors import UserError

PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep  # the folder of fsdplab itself
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_MOST_FRAMES = 8
Frames = list[traceback.FrameSummary]
# Frames of the lab itself and of PyTorch's logging, which do not help a reader.
_SCAFFOLDING = (
    "/fsdplab/sessions/worker/collective_hooks.py",
    "/fsdplab/sessions/remote_call.py",
    "/fsdplab/sessions/cell_ranks/cell_loop.py",
    "/fsdplab/sessions/launch/starter.py",
    "/fsdplab/sessions/launch/program.py",
    "/c10d_logger.py",
    "<frozen runpy>",
)


def of_exception(error: BaseException) -> str:
    """Return the traceback of an exception and of its causes, as Python prints it, without the lab's scaffolding; an
    error of the lab itself keeps its frames.
    """
    return _formatted(error, lambda frames: [each for each in frames if not each.filename.endswith(_SCAFFOLDING)])


def of_own_code(error: BaseException) -> str:
    """Return the traceback of an exception, from the first line of a user's code on and without the lab's frames below
    it.

    An error that says all in its message has none; one that the user's code has no part in has that of `of_exception`.
    """
    if isinstance(error, UserError) and error.__cause__ is None:
        return ""
    if not any(_is_own(frame.filename) for frame in traceback.extract_tb(error.__traceback__)):
        return of_exception(error)
    return _formatted(error, _from_own_code_on)


def _formatted(error: BaseException, chosen: Callable[[Frames], Frames]) -> str:
    """Return the exception and its causes with the chosen frames of each, or with all where none is chosen."""
    formatted = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = formatted
    while link is not None:
        link.stack = traceback.StackSummary.from_list(chosen(link.stack) or link.stack)
        # to the exception that led to this one, as Python prints them
        link = link.__cause__ or link.__context__
    return "".join(formatted.format())


def _from_own_code_on(frames: Frames) -> Frames:
    # between the first and the last line of a user's code the lab's frames are left out, below it all stay
    own = [number for number, frame in enumerate(frames) if _is_own(frame.filename)] or [0]
    return [each for each in frames[own[0] : own[-1]] if not each.filename.startswith(PACKAGE)] + frames[own[-1] :]


def _is_own(filename: str) -> bool:
    """Return whether a file is neither the lab's, nor Python's, nor an installed package's."""
    return not filename.startswith((PACKAGE, *_INSTALLED, "<frozen"))


def headline(error: BaseException) -> str:
    """`ValueError: the first line of its message`."""
    message = str(traceback.TracebackException.from_exception(error)).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def readable(dump: str, frames: int = _MOST_FRAMES) -> str:
    """Return the innermost frames of the main thread, each with its source line; empty for an empty dump."""
    found = [
        match for match in map(_FRAME.match, _main_thread(dump)) if match and not match["file"].endswith(_SCAFFOLDING)
    ]
    if found and found[-1]["file"] == "<string>":  # the outermost: how the warm starter was begun (python -c)
        found.pop()
    return "\n".join(_with_source(match) for match in found[:frames])


def _main_thread(dump: str) -> list[str]:
    """Return the lines of the last thread: faulthandler lists the youngest first."""
    lines = dump.splitlines()
    starts = [number for number, line in enumerate(lines) if "(most recent call first)" in line]
    return lines[starts[-1] :] if starts else []


def _with_source(frame: re.Match[str]) -> str:
    source = linecache.getline(frame["file"], int(frame["line"])).strip()
    return f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}' + (
        f"\n    {source}" if source else ""
    )


def waits_for_device(stack: str) -> bool:
    """Return whether the innermost call of a readable stack is one in which a host waits for its GPU."""
    return _innermost_has(stack, ".item(", ".tolist(", ".cpu(", "synchronize(")


def waits_for_others(stack: str) -> bool:
    """Return whether the innermost call of a readable stack is a collective's: inside torch.distributed or the engine,
    or a line with `.wait(`.
    """
    return _innermost_has(stack, "torch/distributed/", "fsdplab/engine/", ".wait(")


def _innermost_has(stack: str, *signs: str) -> bool:
    # the frame and its source line
    innermost = "\n".join(stack.splitlines()[:2])
    return any(sign in innermost for sign in signs)
