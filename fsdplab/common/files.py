"""Atomic file writes: a file is complete or absent, even if the program is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one move: written beside it first, then renamed over it.

    A text is written as UTF-8. An `OSError` (a full disk) leaves the old file as it was, and nothing beside it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
