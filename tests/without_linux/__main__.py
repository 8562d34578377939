"""Run a command without what only Linux has: see the package."""

from __future__ import annotations

import os
import sys

from tests.without_linux import without


def main(*words: str) -> None:
    """Become the command, with what is to be taken away in its environment."""
    what, command = ("posix", words[1:]) if words[:1] == ("--posix",) else ("linux", words)
    if not command:
        sys.exit("usage: python -m tests.without_linux [--posix] COMMAND ...")
    os.execvpe(command[0], command, without(what, os.environ))


main(*sys.argv[1:])
