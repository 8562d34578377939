"""Errors of the command line: one line and exit code 2 for an invalid request, the report and 1 for a failed run."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any, NoReturn

import typer

from fsdplab.common.files import is_full
from fsdplab.common.words import harmless

# The base of all of typer's usage errors. Newer versions of typer carry their own copy of click, so it is not imported
# by name.
_base: Any = typer.BadParameter.__mro__[2]
USAGE_ERROR: type[Exception] = _base
# errors that another place to write to would not have
_PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)


def refuse(message: str) -> NoReturn:
    """Print one line on stderr and exit with code 2."""
    print(f"fsdplab: {harmless(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(2)


def failed(report: str) -> NoReturn:
    """Print a failed run's report on stderr and exit with code 1."""
    print(harmless(report), file=sys.stderr)
    raise SystemExit(1)


def interrupted(number: int | None) -> NoReturn:
    """Exit after Ctrl-C, or after the signal of that number, with the code that shells use and without a traceback."""
    print("fsdplab: interrupted", file=sys.stderr)
    raise SystemExit(128 + (number or signal.SIGINT))


def refuse_for(error: OSError) -> NoReturn:
    """Exit for an error of the operating system, and name its file; stdout may be a full disk or a closed pipe."""
    if error.filename is None and (is_full(error) or isinstance(error, BrokenPipeError)):
        # what is left in its buffer would fail again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
    message = str(error)
    if error.filename:
        message = f"{error.filename}: {error.strerror}"
    if error.errno in _PLACES:
        message += "; give a writable place with free space"
    refuse(message)


def one_line(error: Any) -> str:
    """Return the text of a usage error, with the command whose help lists the flags."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "fsdplab"
    return f"{error.format_message().rstrip('.')}; see `{path} --help`"
