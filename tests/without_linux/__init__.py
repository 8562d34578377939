"""What only Linux has is taken away from a Python and from all that it starts, to try the second ways on Linux.

    python -m tests.without_linux fsdplab doctor          as on macOS: no memfd, pidfd, prctl, /proc, affinity
    python -m tests.without_linux --posix fsdplab plan    as on Windows: no fcntl, resource, os.fork, SIGKILL either

`sitecustomize.py` beside this file does it at the start of every Python that has this folder on its PYTHONPATH. That is
not a Mac: torch, its libraries and the C library are Linux's, and what is missing is only what taking.py names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TAKES = "FSDPLAB_TESTS_TAKE_AWAY"  # "linux", or "posix" for that and what Windows lacks


def without(what: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a new Python lacks what only Linux has ("linux"), and what Windows lacks ("posix")."""
    paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    return {**environment, TAKES: what, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def taken_away() -> str:
    """What is taken away from this Python: "linux", "posix", or "" for nothing."""
    return os.environ.get(TAKES, "")
