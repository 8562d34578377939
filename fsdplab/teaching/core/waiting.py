"""What a cell is doing, shown while it runs: after two seconds a line says what is under way and for how long.

A learner who waits in front of a silent cell cannot tell a slow machine from a hang. The line names a recorded run and
its step, with a bar; `doing` names other work. It counts the seconds either way, and ends as "done in 5 s". It is drawn
from a thread, so that it moves while the cell waits for its ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fsdplab.common.words import plural

from .display import Note, Text, notebook_display

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
    """Name a recorded run and its step of all its `steps`, for the line; step 0 is the start of its ranks.

    The line says whether a step warms up, is timed or is profiled: a run that is asked for one step takes three.
    """
    from fsdplab.sessions.watcher import step_words  # which a run has loaded, and a lesson without runs need not

    run = f"{', '.join([spec.strategy, *_settings(spec)])} on {plural(spec.world_size, 'rank')}"
    progress = f"{step_words(spec, step, steps)}, loss {loss:.2f}" if step else "its ranks start"
    _followed[:] = [(f"{run}: {progress}", step / steps)]


_followed: list[tuple[str, float]] = []  # (words, part of the run that is done), one or none
# what tells a lesson's runs apart
_TOLD = ("prefetch", "batch_size", "precision", "checkpoint", "offload", "transport")


def _settings(spec: RunSpec) -> list[str]:
    """Return the settings in `_TOLD` that are not the default ones: `["prefetch 0"]`."""
    defaults = {field.name: field.default for field in fields(spec)}
    changed = []
    for name in _TOLD:
        value = getattr(spec, name)
        if value != defaults[name]:
            changed.append(f"{name.replace('_', ' ')} {value}")
    return changed


def state(seconds: float, over: bool = False) -> Note | Text:
    """Return the line after so many seconds, with a bar of the part that is done: `str(state(5)) == "running: 5 s"`."""
    if over:
        return Note((f"done in {seconds:.0f} s",))
    if not _followed:
        words = _under_way[-1] if _under_way else "running"
        return Note((f"{words}: {seconds:.0f} s",))
    words, part = _followed[-1]
    line = Note((f"{words}: {seconds:.0f} s",))
    bar = f"<progress value='{part:.3f}' max='1' style='vertical-align:middle'></progress> "
    return Text(str(line), line._repr_html_().replace("<div>", f"<div>{bar}", 1))


class Waiting:
    """The line under one cell: begun before it runs, ended after."""

    def __init__(self, quiet: float = QUIET, every: float = EVERY) -> None:
        self._quiet, self._every = quiet, every
        self._over = threading.Event()
        self._interrupted = False
        self._thread: threading.Thread | None = None

    def begin(self, cell: Any = None) -> None:
        """Begin to wait before a cell: nothing is shown yet."""
        self.end()
        _followed.clear()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, args=(self._over, time.monotonic()), daemon=True)
        self._thread.start()

    def end(self, result: Any = None) -> None:
        """End the line after a cell: where there is one, it says how long the cell took."""
        if self._thread is not None:
            self._interrupted = isinstance(getattr(result, "error_in_exec", None), KeyboardInterrupt)
            self._over.set()
            self._thread.join()
            self._thread = None

    def _show(self, over: threading.Event, began: float) -> None:
        """Show the line once a cell takes long, and count its seconds until the cell is over."""
        # the cell was over before two seconds had passed: no line at all
        if over.wait(self._quiet):
            return
        display = notebook_display()
        if display is None:
            return
        line = display(state(time.monotonic() - began), display_id=True)
        if line is None:
            return
        # waits a second, or less when the cell ends
        while not over.wait(self._every):
            line.update(state(time.monotonic() - began))
        line.update(Text("", "") if self._interrupted else state(time.monotonic() - began, over=True))


def watch_cells(shell: InteractiveShell) -> None:
    """Show the line under every cell of this notebook from now on; a terminal could not change it once it is there."""
    if getattr(shell, "kernel", None) is not None and getattr(shell, "fsdplab_waiting", None) is None:
        from fsdplab.sessions.run_and_record import followers

        followers.append(follow)
        waiting = shell.fsdplab_waiting = Waiting()
        shell.events.register("pre_run_cell", waiting.begin)
        shell.events.register("post_run_cell", waiting.end)
