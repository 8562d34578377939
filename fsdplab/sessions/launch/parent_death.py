"""Ends a process with its parent, even after `kill -9` of the notebook's kernel.

The kernel of Linux can send a signal to a child at the moment the thread that has started it ends. Where it cannot
(macOS), or where the parent goes on without that thread, a thread looks at the parent's id, which changes when the
parent dies. Both begin only after the child has started, so a parent that died before is looked for once.

    python -m fsdplab.sessions.launch.parent_death PARENT MODULE ARGUMENTS     a module, asked to end then
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

from fsdplab.common.processes import KILL, interrupt_by, send, wait_no_longer

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.2


def end_with_parent(parent: int, with_signal: signal.Signals = KILL) -> None:
    """End this process with `with_signal` when the process `parent`, of one thread, which started it, is gone; at once
    if it already is.
    """
    if sys.platform != "linux":
        end_with_caller(parent, with_signal)
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed, so this process could outlive the one that started it"
        )
    _end_if_orphaned(parent, with_signal)


def end_with_caller(caller: int, with_signal: signal.Signals) -> None:
    """End with a parent of several threads, which may live on without the one that started this process."""
    _end_if_orphaned(caller, with_signal)
    threading.Thread(
        target=_look_for_parent, args=(caller, with_signal), daemon=True, name="fsdplab-parent-watch"
    ).start()


def adopt_orphans() -> None:
    """Become the parent of what children of this process leave behind, also of those in another session (`setsid`).

    Only Linux can do so.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the children of this process that were started or adopted by its main thread; none where /proc does not
    say.
    """
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except FileNotFoundError:
        return set()


def end_children(but: Collection[int] = ()) -> None:
    """Kill the children of this process, and what they leave to it, and return when none is left but some."""
    # what a killed child leaves behind becomes a child of this process: once more
    while left := children() - {*but}:
        for pid in left:
            send(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # collected by somebody else
                os.waitpid(pid, 0)


def _look_for_parent(parent: int, with_signal: signal.Signals) -> None:
    while True:
        _end_if_orphaned(parent, with_signal)
        time.sleep(_LOOK_EVERY_S)


def _end_if_orphaned(parent: int, with_signal: signal.Signals) -> None:
    # whoever has lost its parent has another one: init, or the nearest process that adopts
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def main(parent: str, module: str) -> None:
    """Run a module as `python -m` does, in a process that is asked to end when its parent is gone.

    A request to end (SIGTERM, SIGHUP, SIGINT) is a KeyboardInterrupt in a module without handlers of its own, so that
    it cleans up; the exit code is then 130, and no traceback is printed.
    """
    interrupt_by(signal.SIGTERM, signal.SIGHUP)
    end_with_parent(int(parent), signal.SIGTERM)
    try:
        wait_no_longer()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main(sys.argv.pop(1), sys.argv.pop(1))
