"""Runs a batch on a separate thread, so that the page and Cancel keep working.

A batch that is cancelled raises an exception in `look`, which the session calls about twenty times a second, also
while ranks start: `run_ranks` ends all ranks before it lets an exception pass, so no process is left after a batch.

Records are kept in a folder a batch, so that they come back after a restart of the kernel:

    lab-runs/batch-1/0-no_shard-lab/            run records, as `fsdplab compare` writes them
    lab-runs/batch-2-slow link/0-full_shard-lab/

What stands behind the number is the batch's name; renaming the folder renames the batch.

Runs wait for other labs of the kernel, and for the notebook's cells: side by side each would be measured slower than it
is. A kernel with subshells (ipykernel 7) may hand the press of a button to another thread while a cell runs.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from fsdplab.common.words import plural
from fsdplab.figures.lab.messages import WAITING
from fsdplab.records import RecordError, RunRecord
from fsdplab.sessions import RunSpec, Watcher, compare

from .lab_state import Batch, LabState

FOLDER = "lab-runs"
MOST_BACK = 12  # batches that are read at the start: a record takes some hundredths of a second
_BATCH = re.compile(r"batch-(\d+)(?:-(.+))?")
MOST_LETTERS = 60

_ALONE = threading.Lock()
_LOOK_S = 0.05
PAUSE_S = 0.3  # after a cell: Run All begins the next one much sooner
ANOTHER_RUNS = "waiting: another strategy lab of this notebook is running"


class Cancelled(Exception):
    """Raised inside a run that was cancelled."""


class Runner:
    """Runs the batches of one LabState; records go below `directory`, by default `lab-runs/` in the working folder, and
    those that are there already are offered again.

    >>> runner = Runner(LabState(model="gpt-tiny", steps=2))                     # doctest: +SKIP
    >>> runner.start(), runner.wait(60), runner.state.status                     # doctest: +SKIP
    (True, True, 'done')
    """

    def __init__(self, state: LabState, directory: str | Path | None = None) -> None:
        self.state = state
        self.directory = Path(FOLDER if directory is None else directory)
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
        # a cell runs on the main thread, and a batch must not wait for the very cell that starts it
        self._awaited = threading.current_thread() is threading.main_thread()
        # a daemon, which does not keep a kernel from ending
        self._thread = threading.Thread(target=self._work, args=(specs,), daemon=True, name="fsdplab-lab")
        self._thread.start()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the batch has ended; False when it still runs after `timeout` seconds."""
        self._awaited = True
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.state.busy

    def _work(self, specs: tuple[RunSpec, ...]) -> None:
        error = None
        try:
            self._wait_while(lambda: self._cells.busy and not self._awaited, WAITING)
            # tried again and again, as Cancel could not end a blocking acquire
            self._wait_while(lambda: not _ALONE.acquire(blocking=False), ANOTHER_RUNS)
            try:
                self._compare(specs)
            finally:
                _ALONE.release()
        except Cancelled:
            pass
        # any error is shown in the lab, which stays usable; this thread has no caller
        except Exception as raised:
            error = (str(raised).strip() or type(raised).__name__).splitlines()[0]
        self.state.ended(error)

    def _wait_while(self, busy: Callable[[], bool], words: str) -> None:
        """Say what the batch waits for, until it can begin; Cancel ends the waiting too."""
        self._heed()
        while busy():
            if self.state.message != words:
                self.state.waits(words)
            sleep(_LOOK_S)
            self._heed()

    def _compare(self, specs: tuple[RunSpec, ...]) -> None:
        # the one that `begin` has added
        batch = self.state.batches[-1]
        batch.folder = new_folder(self.directory, batch.number)
        try:
            self._run_all(specs, batch.folder)
        finally:
            if not batch.records:  # what a cancelled run has left is no record
                shutil.rmtree(batch.folder, ignore_errors=True)

    def _run_all(self, specs: tuple[RunSpec, ...], folder: Path) -> None:
        # shows that the first run's ranks are starting
        self.state.stepped(specs[0])
        compare(specs, directory=folder, watcher=_BatchWatcher(specs, self.state, self._heed))

    def _heed(self) -> None:
        if self.state.status == "cancelling":
            raise Cancelled


class _BatchWatcher(Watcher):
    """Shows the progress of a batch's runs in the lab, and ends them where the batch is cancelled."""

    def __init__(self, specs: tuple[RunSpec, ...], state: LabState, heed: Callable[[], None]) -> None:
        self._specs, self._state, self._heed = specs, state, heed
        self._warm: set[tuple[str, str]] = set()  # the runs that wait for their turns or have ended

    def look(self) -> None:
        """End the batch if it is cancelled; without this Cancel works at the next step only, not while ranks start."""
        self._heed()

    def progressed(self, spec: RunSpec, step: int, total: int, loss: float) -> None:
        """Show the step of the run that works."""
        self._heed()
        self._state.stepped(spec, step, total, loss)

    def ready(self, record: RunRecord) -> None:
        """Show that the next run warms up."""
        self._heed()
        # each run comes here when it has warmed up and again when it has ended; it counts once
        before = len(self._warm)
        self._warm.add((record.spec["strategy"], record.spec["engine"]))
        if before < len(self._warm) < len(self._specs):
            self._state.stepped(self._specs[len(self._warm)])

    def ended(self, record: RunRecord) -> None:
        """Show the run's record."""
        self._state.recorded(record)
        self.ready(record)


class RunningCells:
    """Whether the kernel runs a cell; outside a notebook it never does."""

    def __init__(self, shell: Any = None) -> None:
        self._running, self._ended = shell is not None, -PAUSE_S  # the cell that makes the lab is one
        if shell is not None:
            # IPython calls these around each cell
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
    if ipython is None:
        return None
    # IPython in a terminal has a shell too, but no kernel
    shell = ipython.get_ipython()
    return shell if hasattr(shell, "kernel") else None


# ---- the records on disk


def kept_in(folder: Path) -> tuple[list[Batch], str]:
    """The newest batches of a folder, by number, and what is said of them and of what was left where it is; runs that
    left no whole record (cancelled ones) are passed over.
    """
    batches: list[Batch] = []
    unread: list[str] = []
    try:
        places = sorted(_batches_in(folder))
    except OSError as error:
        return [], f"earlier runs in {folder} could not be read ({error.strerror})"
    # in the order of their numbers, so the last are the newest
    for number, name, place in places[-MOST_BACK:]:
        records = list(_records_of(place, unread))
        if records:
            # two folders may have one number, such as `batch-2` and `batch-2-slow link`
            free = _free_from(number, {batch.number for batch in batches})
            batches.append(Batch(free, (), records, name, place))
    parts = []
    if batches:
        parts.append(f"{plural(len(batches), 'batch', 'batches')} of earlier runs below")
    older = len(places[:-MOST_BACK])
    if older:
        parts.append(f"{plural(older, 'older one stays', 'older ones stay')} in {folder}")
    if unread:
        parts.append(f"{plural(len(unread), 'record')} in {folder} could not be read: {unread[0]}")
    return batches, "; ".join(parts)


def new_folder(folder: Path, number: int) -> Path:
    """Make the folder of batch `number`, or of the next number that is free: two notebooks may share a folder.

    OSError, in one line with the remedy, where nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # read from the disk: another notebook may have made some since
        taken = {number for number, _, _ in _batches_in(folder)}
        while True:
            free = _free_from(number, taken)
            place = folder / f"batch-{free}"
            try:
                place.mkdir()
                return place
            except FileExistsError:  # the other notebook was faster
                taken.add(free)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        remedy = "give StrategyLab(directory=...) another folder"
        raise OSError(f"no run can be kept in {folder} ({why}); {remedy}") from None


def _free_from(number: int, taken: set[int]) -> int:
    """The first number from `number` on that is not taken."""
    while number in taken:
        number += 1
    return number


def rename(batch: Batch, name: str) -> None:
    """Give a batch a name, and its folder with it; ValueError says what a name may be, OSError why it was not moved."""
    clean = " ".join(name.split())
    if len(clean) > MOST_LETTERS or re.search(r'[\\/:*?"<>|\x00-\x1f]', clean):
        raise ValueError(
            f'the name is {name!r:.80}; expected at most {MOST_LETTERS} letters, none of \\ / : * ? " < > |'
        )
    if batch.folder is not None and clean != batch.name:
        # the folder keeps its number, which may be another than the batch's
        match = _BATCH.fullmatch(batch.folder.name)
        number = match[1] if match else batch.number
        suffix = f"-{clean}" if clean else ""
        moved = batch.folder.with_name(f"batch-{number}{suffix}")
        batch.folder.rename(moved)
        # records lie in the folder and move with it
        for record in batch.records:
            record.path = moved / record.path.name
        batch.folder = moved
    batch.name = clean


def _batches_in(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Number, name and folder of each batch."""
    if not folder.is_dir():
        return
    for place in folder.iterdir():
        match = _BATCH.fullmatch(place.name)
        if match and place.is_dir():
            yield int(match[1]), match[2] or "", place


def _records_of(place: Path, unread: list[str]) -> Iterator[RunRecord]:
    """The records of a batch in the order of its runs; why one could not be read goes into `unread`."""
    runs: list[tuple[int, Path]] = []
    try:
        for run in place.iterdir():
            # `0-no_shard-lab` is run 0; other files of the folder are none
            match = re.match(r"\d+", run.name)
            if match:
                runs.append((int(match[0]), run))
    except OSError as error:
        unread.append(f"{place}: {error.strerror}")
        return
    # by number: 10 comes after 9
    for _, run in sorted(runs):
        try:
            # a cancelled run has left a folder without it
            if (run / "run.json").is_file():
                yield RunRecord.load(run)
        except (RecordError, OSError) as error:
            unread.append(str(error))
