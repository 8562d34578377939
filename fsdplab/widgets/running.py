"""Runs a batch on a separate thread, so that the page and Cancel keep working.

Cancel raises an exception in `on_look`, which the session calls about twenty times a second, also while ranks start:
`run_ranks` ends all ranks before it lets an exception pass, so no process is left after a batch.

Runs wait for other labs of the kernel, and for the notebook's cells: side by side each would be measured slower than it
is. A kernel with subshells (ipykernel 7) may hand the press of a button to another thread while a cell runs.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, compare

from .kept_runs import FOLDER, kept_in, new_folder
from .lab_state import LabState

_ALONE = threading.Lock()
_LOOK_S = 0.05
PAUSE_S = 0.3  # after a cell: Run All begins the next one much sooner
ANOTHER_RUNS = "waiting: another strategy lab of this notebook is running"
WAITING = "waiting for the kernel: it is running a cell, and does this when the cell has ended"


class Cancelled(Exception):
    """Raised inside a run that was cancelled."""


class Runner:
    """Starts and cancels the batches of one LabState; records go below `directory`, by default `lab-runs/` in the
    working folder, and those that are there already are offered again.

    >>> runner = Runner(LabState(model="gpt-tiny", steps=2))                     # doctest: +SKIP
    >>> runner.start(), runner.wait(60), runner.state.status                     # doctest: +SKIP
    (True, True, 'done')
    """

    def __init__(self, state: LabState, directory: str | Path | None = None) -> None:
        self.state = state
        self.directory = Path(directory if directory is not None else FOLDER)
        self._thread: threading.Thread | None = None
        self._cells = RunningCells(this_shell())
        self._awaited = False  # by a cell, for which nothing must wait
        state.offer(*kept_in(self.directory))

    def start(self) -> bool:
        """Run what is chosen, in the background; False where nothing was started (`state.message` says why). Pressed
        while a cell runs, it begins when the cells have ended.
        """
        specs = self.state.begin()
        if not specs:
            return False
        self._awaited = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._work, args=(specs,), daemon=True, name="fsdplab-lab")
        self._thread.start()
        return True

    def cancel(self) -> bool:
        """End the ranks of the running batch, within a few tenths of a second on the lab's side; False when nothing
        runs.
        """
        return self.state.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the batch has ended; False when it still runs after `timeout` seconds."""
        self._awaited = True
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.state.busy

    def _work(self, specs: tuple[RunSpec, ...]) -> None:
        error = None
        try:
            self._wait_for_cells()
            with self._alone():
                self._compare(specs)
        except Cancelled:
            pass
        # any error is shown in the lab, which stays usable; this thread has no caller
        except Exception as raised:
            error = (str(raised).strip() or type(raised).__name__).splitlines()[0]
        self.state.ended(error)

    def _wait_for_cells(self) -> None:
        if self._cells.busy and not self._awaited:
            self.state.waits(WAITING)
        while self._cells.busy and not self._awaited:
            self._heed()
            sleep(_LOOK_S)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other lab of this kernel runs; Cancel ends the waiting too."""
        self._heed()
        if not _ALONE.acquire(blocking=False):
            self.state.waits(ANOTHER_RUNS)
            while not _ALONE.acquire(timeout=_LOOK_S):
                self._heed()
        try:
            yield
        finally:
            _ALONE.release()

    def _compare(self, specs: tuple[RunSpec, ...]) -> None:
        batch = self.state.batches[-1]
        batch.folder = new_folder(self.directory, batch.number)
        try:
            self._run_all(specs, batch.folder)
        except OSError as error:
            if batch.folder.exists():
                raise
            raise OSError(f"{batch.folder} was moved or deleted while its runs went on; press Measure again") from error
        finally:
            if not batch.records:  # what a cancelled run has left is no record
                shutil.rmtree(batch.folder, ignore_errors=True)

    def _run_all(self, specs: tuple[RunSpec, ...], folder: Path) -> None:
        warm: set[tuple[str, str]] = set()  # the runs that wait for their turns or have ended

        def on_ready(record: RunRecord) -> None:
            self._heed()
            before = len(warm)
            warm.add((record.spec["strategy"], record.spec["engine"]))
            if before < len(warm) < len(specs):
                self.state.stepped(specs[len(warm)])

        def on_record(record: RunRecord) -> None:
            self.state.recorded(record)
            on_ready(record)

        def on_progress(spec: RunSpec, step: int, steps: int, loss: float) -> None:
            self._heed()
            self.state.stepped(spec, step, steps, loss)

        self.state.stepped(specs[0])
        # without on_look Cancel works at the next step only, not while ranks start
        compare(
            specs, directory=folder, on_record=on_record, on_ready=on_ready, on_progress=on_progress, on_look=self._heed
        )

    def _heed(self) -> None:
        if self.state.status == "cancelling":
            raise Cancelled


class RunningCells:
    """Whether the kernel runs a cell; outside a notebook it never does."""

    def __init__(self, shell: Any = None) -> None:
        self._running, self._ended = shell is not None, -PAUSE_S  # the cell that makes the lab is one
        if shell is not None:
            shell.events.register("pre_run_cell", self._began)
            shell.events.register("post_run_cell", self._over)

    @property
    def busy(self) -> bool:
        """Whether a cell runs, or has ended so short a time ago that the next one may follow."""
        return self._running or monotonic() - self._ended < PAUSE_S

    def _began(self, *_: object) -> None:
        self._running = True

    def _over(self, *_: object) -> None:
        self._running, self._ended = False, monotonic()


def this_shell() -> Any:
    """IPython's shell in a kernel; None everywhere else."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None
