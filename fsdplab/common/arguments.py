"""The parser of a command that is a process of its own: what is wrong is one line, as everywhere in fsdplab."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Prints an error in one line, exits with 2, and keeps the lines of examples below the help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Exit with what is wrong and where the flags are explained."""
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")
