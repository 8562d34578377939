"""Waits for the notebook's cells: runs that share the cores with a cell would be measured slower than they are.

A kernel with subshells (ipykernel 7) may hand the press of a button to another thread while a cell runs. The lab then
answers at once, and starts when the cells have ended.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

PAUSE_S = 0.3  # Run All begins the next cell much sooner


class RunningCells:
    """Whether the kernel runs a cell, and one thing to be done when it runs none; outside a notebook it never does."""

    def __init__(self, shell: Any = None) -> None:
        self._running = False
        self._later: Callable[[], object] | None = None
        self._lock = threading.Lock()
        if shell is not None:
            self._running = True  # the cell that makes the lab
            shell.events.register("pre_run_cell", self._began)
            shell.events.register("post_run_cell", self._ended)

    @property
    def busy_elsewhere(self) -> bool:
        """Whether a cell runs on the main thread while this is another one."""
        return self._running and threading.current_thread() is not threading.main_thread()

    @property
    def waiting(self) -> bool:
        """Whether something is to be done when the cells have ended."""
        return self._later is not None

    def after(self, act: Callable[[], object]) -> None:
        """Do this when the kernel runs no cell."""
        self._later = act
        if not self._running:
            self._do()

    def forget(self) -> None:
        """Do it not."""
        self._later = None

    def _began(self, *_: object) -> None:
        self._running = True

    def _ended(self, *_: object) -> None:
        self._running = False
        if self._later is not None:
            timer = threading.Timer(PAUSE_S, self._do)
            timer.daemon = True
            timer.start()

    def _do(self) -> None:
        with self._lock:
            act, self._later = (None, self._later) if self._running else (self._later, None)
        if act is not None:
            act()


def this_shell() -> Any:
    """IPython's shell in a kernel; None everywhere else."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None
