"""The bases of errors that a command prints without a traceback. They import nothing, so any module can use them."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user asked for or gave cannot be used. The message is one line that says what to do.

    A command prints the line and exits with 2.
    """


class RunError(Exception):
    """Work that had begun failed. The message is the whole report; a command prints it and exits with 1."""
