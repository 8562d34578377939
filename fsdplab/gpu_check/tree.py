"""A part and all that it started, ended for certain: its process group, its descendants, and what carries its mark.

Ranks live in sessions of their own, so killing the part's group does not reach them; they would follow their parent,
but only once the kernel tells them. Every process of a part inherits one marked variable, and the mark finds those that
are left.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Protocol

from fsdplab.common.processes import send, send_group, state

MARK = "FSDPLAB_GPU_CHECK_MARK"
_PATIENCE_S = 5.0
_LOOK_EVERY_S = 0.02


class Process(Protocol):
    """A part's process: a subprocess.Popen, or one that was forked from the warm starter."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float = ...) -> int: ...


def end_tree(process: Process, mark: str) -> list[int]:
    """Kill `process` with its group, its descendants and all that carry `mark`; returns those still there after five
    seconds.
    """
    deadline = time.monotonic() + _PATIENCE_S
    left = {process.pid} if process.poll() is None else set()
    left |= descendants(process.pid) | marked(mark)
    while left and time.monotonic() < deadline:
        send_group(process.pid, signal.SIGKILL)
        for pid in left:
            send(pid, signal.SIGKILL)
        process.poll()
        time.sleep(_LOOK_EVERY_S)
        left = {pid for pid in left if running(pid)} | marked(mark)
    process.wait()
    return sorted(left)


def running(pid: int) -> bool:
    """Whether the process does anything still; a zombie, which only waits to be collected, does not."""
    return state(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> set[int]:
    """Processes that stem from `pid` right now (Linux; elsewhere none are known)."""
    children: dict[int, list[int]] = defaultdict(list)
    for each in _all():
        children[state(each)[1]].append(each)
    found, todo = set(), [pid]
    while todo:
        fresh = [child for child in children[todo.pop()] if child not in found]
        found.update(fresh)
        todo += fresh
    return found


def marked(mark: str) -> set[int]:
    """Processes, other than this one, whose environment at their start held the mark."""
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in _all() if pid != os.getpid() and wanted in _environ(pid) and running(pid)}


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []
