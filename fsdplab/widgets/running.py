"""Runs a batch on a separate thread, so that the page and Cancel keep working.

Cancel raises an exception in `on_look`, which the session calls about twenty times a second, also while ranks start:
`run_ranks` ends all ranks before it lets an exception pass, so no process is left after a batch.

Runs wait for the notebook's cells: those that share the cores with a cell would be measured slower than they are. A
kernel with subshells (ipykernel 7) may hand the press of a button to another thread while a cell runs. The lab then
answers at once, and starts when the cells have ended.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, compare

from .kept_runs import FOLDER, kept_in, new_folder
from .lab_state import LabState

# labs of one kernel run one after the other: side by side each would be measured slower than it is
_ALONE = threading.Lock()
PAUSE_S = 0.3  # after a cell: Run All begins the next one much sooner
ANOTHER_RUNS = "waiting: another strategy lab of this notebook is running"


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
        kept = kept_in(self.directory)
        state.take_back(kept.batches, kept.left)

    def start(self) -> bool:
        """Run what is chosen, in the background; False where nothing was started (`state.message` says why)."""
        specs = self.state.begin()
        if not specs:
            return False
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
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.state.busy

    def _work(self, specs: tuple[RunSpec, ...]) -> None:
        error = None
        try:
            with self._alone():
                self._compare(specs)
        except Cancelled:
            pass
        # any error is shown in the lab, which stays usable; this thread has no caller
        except Exception as raised:
            error = _one_line(raised)
        self.state.ended(error)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other lab of this kernel runs; Cancel ends the waiting too."""
        self._heed()
        if not _ALONE.acquire(blocking=False):
            self.state.waits(ANOTHER_RUNS)
            while not _ALONE.acquire(timeout=0.05):
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
        numbers = {(spec.strategy, spec.engine): number for number, spec in enumerate(specs)}
        warm: set[tuple[str, str]] = set()  # the runs that wait for their turns or have ended

        def on_ready(record: RunRecord) -> None:
            self._heed()
            before = len(warm)
            warm.add((record.spec["strategy"], record.spec["engine"]))
            if before < len(warm) < len(specs):
                self.state.started(len(warm))

        def on_record(record: RunRecord) -> None:
            self.state.recorded(record)
            on_ready(record)

        def on_progress(spec: RunSpec, step: int, steps: int, loss: float) -> None:
            self._heed()
            self.state.stepped(numbers[spec.strategy, spec.engine], step, steps, loss)

        self.state.started(0)
        # without on_look Cancel works at the next step only, not while ranks start
        compare(
            specs, directory=folder, on_record=on_record, on_ready=on_ready, on_progress=on_progress, on_look=self._heed
        )

    def _heed(self) -> None:
        if self.state.status == "cancelling":
            raise Cancelled


def _one_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return words[0] if words else type(error).__name__


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
        """Cancel the postponed action."""
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
