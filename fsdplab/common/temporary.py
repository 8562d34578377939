"""Temporary folders that are gone when this process is, however it ends.

All of them lie in one folder of this process. It is removed at the end of Python; where the process ends without that
(a notebook's kernel is killed at every shutdown, a forked process leaves with `os._exit`), a shell removes it that
waits for the end of its standard input, which this process and those forked from it hold open.
Ranks, which may be killed at any moment, leave what is unfinished in the folder of their caller.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

TEMPORARY = "FSDPLAB_TEMPORARY"  # in a rank's environment: the folder with its caller's temporary folders
# ranks that end with their caller may still write for a moment
_WHEN_THIS_ENDS = 'cat; for again in 1 2 3 4 5; do rm -rf -- "$1" && exit; sleep 1; done'

_lock = threading.Lock()
_own: tuple[int, Path] | None = None  # the process that made it, and the folder


def folder_of_this_process() -> Path:
    """Return the folder with all temporary folders of this process, made when first asked for."""
    global _own
    with _lock:
        if _own is None or _own[0] != os.getpid() or not _own[1].is_dir():  # a forked process has its own
            if not os.path.isdir(tempfile.gettempdir()):  # cleared away while this process went on
                tempfile.tempdir = None  # Python looks for another
            _own = (os.getpid(), Path(tempfile.mkdtemp(prefix=f"fsdplab-{os.getpid()}-")))
            atexit.register(_remove, *_own, _remover(_own[1]))
        return _own[1]


def temporary_folder(kind: str) -> Path:
    """Make a folder that is removed at the end of this process: `temporary_folder("run")` is `.../run-x1y2z3`."""
    return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=folder_of_this_process()))


def folder_for_unfinished() -> Path:
    """Return where to write a file that may never be finished: in a rank the caller's folder, else the own one."""
    callers = os.environ.get(TEMPORARY)
    if callers and os.path.isdir(callers):
        return Path(callers)
    return folder_of_this_process()


def _remover(folder: Path) -> subprocess.Popen[bytes] | None:
    """A process that removes the folder when this one has ended; None where there is no shell."""
    words = ["sh", "-c", _WHEN_THIS_ENDS, "sh", str(folder)]
    quiet = subprocess.DEVNULL
    with suppress(OSError):  # its own session: Ctrl-C is not meant for it
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True
        )
    return None


def _remove(owner: int, folder: Path, remover: subprocess.Popen[bytes] | None) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        if remover is not None and remover.stdin is not None:
            remover.kill()
            remover.communicate()
