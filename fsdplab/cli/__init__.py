"""The command line: `app.py` has every command and its flags, and names the file of what each does."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; Ctrl-C while its modules are imported is one line, as it is later."""
    try:
        from fsdplab.cli.app import main as run
    except KeyboardInterrupt:
        print("fsdplab: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    run(arguments)
