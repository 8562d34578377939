"""Errors of the command line: one line and exit code 2 for an invalid request, the report and 1 for a failed run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

# The base of all of typer's usage errors. Newer versions of typer carry their own copy of click, so it is not imported
# by name.
_base: Any = typer.BadParameter.__mro__[2]
USAGE_ERROR: type[Exception] = _base


def refuse(message: str) -> NoReturn:
    """Print one line on stderr and exit with code 2."""
    print(f"fsdplab: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def failed(report: str) -> NoReturn:
    """Print a failed run's report on stderr and exit with code 1."""
    print(report, file=sys.stderr)
    raise SystemExit(1)


def interrupted() -> NoReturn:
    """Ctrl-C: no traceback, the shell's usual code."""
    print("fsdplab: interrupted", file=sys.stderr)
    raise SystemExit(130)


def one_line(error: Any) -> str:
    """A usage error with the command it belongs to and where its flags are listed."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "fsdplab"
    return f"{error.format_message().rstrip('.')}; see `{path} --help`"


@contextmanager
def refusals() -> Iterator[None]:
    """Around a run: an invalid request becomes one line and exit code 2, a failure its report and exit code 1."""
    from fsdplab.records import RecordError
    from fsdplab.sessions import RanksFailed, SpecError
    from fsdplab.workloads import TextError

    try:
        yield
    except (RecordError, SpecError, TextError) as error:
        refuse(str(error))
    except RanksFailed as error:
        failed(str(error))
    except OSError as error:  # a folder that cannot be written, a full disk
        refuse(f"{error.filename or 'a file'}: {error.strerror or error}; give a writable place with free space")
