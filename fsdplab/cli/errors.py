"""Errors of the command line: one line and exit code 2 for an invalid request, the report and 1 for a failed run."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

import typer

from fsdplab.common.words import harmless

# The base of all of typer's usage errors. Newer versions of typer carry their own copy of click, so it is not imported
# by name.
_base: Any = typer.BadParameter.__mro__[2]
USAGE_ERROR: type[Exception] = _base
_IN_WORDS = {"a valid integer": "a whole number", "a valid number": "a number"}


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


def one_line(error: Any) -> str:
    """Return the text of a usage error, with the command whose help lists the flags."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "fsdplab"
    return f"{_what_was_got(error) or error.format_message().rstrip('.')}; see `{path} --help`"


def _what_was_got(error: Any) -> str:
    """Return `--steps is 'x'; expected a whole number` where typer's own message does not name the value, else nothing.

    Newer versions of typer have the value in the error that is the cause of theirs.
    """
    wrong_values = getattr(error.__cause__, "errors", None)
    if wrong_values is None or not getattr(error, "param", None):
        return ""
    wrong = wrong_values()[0]
    expected = wrong["msg"].partition(",")[0].removeprefix("Input should be ")
    return f"{error.param.opts[0]} is {wrong['input']!r:.60}; expected {_IN_WORDS.get(expected, expected)}"
