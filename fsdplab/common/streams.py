"""Standard output and error of a command: the characters that they can show, and the errors of writing to them.

Where the encoding of a terminal lacks a character (`LC_ALL=C`), an ASCII replacement is printed.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys

from fsdplab.common.files import is_full

_PLAIN = {"–": "-", "…": "...", "µ": "u", "×": "x", "→": "->", "·": "|", "≤": "<=", "≥": ">=", "²": "2"}
# errors that another place to write to would not have
_PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)


def show_what_can_be_shown() -> None:
    """Replace characters that the encoding of stdout or stderr lacks by ASCII ones."""
    codecs.register_error("fsdplab.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fsdplab.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    # the characters that failed, and the place from which to go on
    return "".join(_PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def line_for(error: OSError) -> str:
    """Return the line for an error of the operating system, which names its file: `x.html: Permission denied; ...`.

    Where it names none because stdout is a full disk or a closed pipe, what is left for stdout is thrown away.
    """
    if error.filename is None and (is_full(error) or isinstance(error, BrokenPipeError)):
        # what is left in its buffer would fail again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
    line = str(error)
    if error.filename:
        line = f"{error.filename}: {error.strerror}"
    if error.errno in _PLACES:
        line += "; give a writable place with free space"
    return line
