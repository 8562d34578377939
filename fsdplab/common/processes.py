"""Signals to processes that may be gone, and whether they are."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def send(pid: int, which: signal.Signals) -> None:
    """Send a signal to a process, which may have ended meanwhile."""
    try:
        os.kill(pid, which)
    except (ProcessLookupError, PermissionError):  # a process of another user may have inherited the number
        pass


def send_group(pid: int, which: signal.Signals) -> None:
    """Send a signal to a process group, which may be gone, or to its leader where it forms none yet."""
    try:
        os.killpg(pid, which)
    except (ProcessLookupError, PermissionError):  # macOS reports "not permitted" for a zombie's group
        send(pid, which)


def gone(pid: int) -> bool:
    """Whether no such process runs any more; a zombie, which only waits to be collected, is gone."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # a process of another user has inherited the number
        return True
    return state(pid)[0] in ("", "Z", "X") if _PROC else False


def state(pid: int) -> tuple[str, int]:
    """(state letter, parent) of a process by /proc; ("", 0) where there is none, also where it is just collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


_PROC = Path("/proc/self/stat").exists()
