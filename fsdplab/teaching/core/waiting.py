"""What a cell is doing, shown while it runs: after two seconds a line says what is under way and for how long.

A learner who waits in front of a silent cell cannot tell a slow machine from a hang. `doing` names the work, `follow`
names the step of a recorded run (`compare(specs, on_progress=follow)`); the line counts the seconds either way, and
ends as "done in 5 s". It is drawn from a thread, so that it moves while the cell waits for its ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .display import Note, notebook_display

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from fsdplab.sessions import RunSpec

QUIET = 2.0  # seconds without a line: most cells are over by then
EVERY = 1.0  # seconds between two states of the line

_under_way: list[str] = []  # innermost last


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what the body does, for the line: `with doing("training on 2 ranks"): ...`."""
    _under_way.append(what)
    try:
        yield
    finally:
        _under_way.remove(what)


def follow(spec: RunSpec, step: int, steps: int, loss: float) -> None:
    """Name the step of a recorded run, for the line: `compare(specs, on_progress=follow)`."""
    _followed[:] = [f"{spec.strategy} on {spec.world_size} ranks: step {step} of {steps}, loss {loss:.2f}"]


_followed: list[str] = []  # one or none


def state(seconds: float, over: bool = False) -> Note:
    """The line after so many seconds: `str(state(5)) == "running: 5 s"`."""
    if over:
        return Note((f"done in {seconds:.0f} s",))
    what = _followed[-1] if _followed else _under_way[-1] if _under_way else "running"
    return Note((f"{what}: {seconds:.0f} s",))


class Waiting:
    """The line under one cell: begun before it runs, ended after."""

    def __init__(self, quiet: float = QUIET, every: float = EVERY) -> None:
        self._quiet, self._every = quiet, every
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, cell: Any = None) -> None:
        """Before a cell: nothing is shown yet."""
        self.end()
        _followed.clear()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, args=(self._over, time.monotonic()), daemon=True)
        self._thread.start()

    def end(self, result: Any = None) -> None:
        """After a cell: the line, where there is one, says how long it took."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _show(self, over: threading.Event, began: float) -> None:
        if over.wait(self._quiet):
            return
        display = notebook_display()
        line = display(state(time.monotonic() - began), display_id=True) if display else None
        while line is not None and not over.wait(self._every):
            line.update(state(time.monotonic() - began))
        if line is not None:
            line.update(state(time.monotonic() - began, over=True))


def watch_cells(shell: InteractiveShell) -> None:
    """Show the line under every cell of this notebook from now on; a terminal could not change it once it is there."""
    if getattr(shell, "kernel", None) is not None and getattr(shell, "fsdplab_waiting", None) is None:
        waiting = shell.fsdplab_waiting = Waiting()
        shell.events.register("pre_run_cell", waiting.begin)
        shell.events.register("post_run_cell", waiting.end)
