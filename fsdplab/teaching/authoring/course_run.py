"""Run a folder of notebooks to their end: the course's own in CI, or a teacher's.

Tagged sources are run twice, as the teacher edition (a failed check ends it) and as the learner edition (which must
reach its end with every stub unsolved). Other notebooks are run as they are. The learner's folder is a temporary one,
so a test never changes a learner's exercises.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets.config import Config

from fsdplab.common.processes import ASKED
from fsdplab.teaching.core.registry import register_beside

from .course import CourseError, edition_of, is_tagged, notebooks_in, read, sources_in, structure_complaints

CELL_TIME_LIMIT = 180
_INTERRUPTED = "KeyboardInterrupt caught in kernel"
LONGEST_FOLDER = 60  # bytes: the path of a socket in a folder below may have 103 (macOS; 107 on Linux)
BOTH = ("teacher", "learner")


@dataclass(frozen=True)
class NotebookRun:
    """The outcome of one notebook: `failure` is None where it reached its end."""

    notebook: str
    edition: str
    seconds: float
    failure: str | None

    def __str__(self) -> str:
        outcome = "ran to its end"
        if self.failure is not None:
            outcome = f"FAILED\n{self.failure}"
        return f"{self.notebook} ({self.edition}): {outcome}, {self.seconds:.0f} s"


def run_course(
    directory: Path | str, on_run: Callable[[NotebookRun], None] = lambda run: None, editions: Sequence[str] = BOTH
) -> list[NotebookRun]:
    """Run every notebook of a folder in order, sources in each of `editions`; `on_run` is called as each ends.

    CourseError where there are none.
    """
    runs = []
    with tempfile.TemporaryDirectory(prefix="fsdplab-course-") as scratch:
        for name, edition, notebook, complaint in _editions(Path(directory), editions):
            if complaint:
                run = NotebookRun(name, edition, 0.0, complaint)
            else:
                workspace = Path(scratch) / edition.replace(" ", "-") / "my_fsdp"
                run = run_notebook(name, edition, notebook, directory, workspace)
            runs.append(run)
            on_run(run)
    return runs


def _editions(directory: Path, editions: Sequence[str]) -> Iterator[tuple[str, str, NotebookNode, str | None]]:
    """Yield (name, edition, notebook, complaint) of everything to run, all of the first edition first."""
    register_beside(directory)
    read_in = [(path.name, read(path)) for path in notebooks_in(directory)]
    for edition in editions:
        for name, source in read_in:
            if not is_tagged(source):
                if edition == editions[0]:
                    yield name, "as it is", source, None
                continue
            yield name, edition, edition_of(source, edition), "\n".join(structure_complaints(name, source)) or None


def run_notebook(
    name: str, edition: str, notebook: NotebookNode, directory: Path | str, workspace: Path
) -> NotebookRun:
    """Run one notebook in a fresh kernel, in its own folder, with `workspace` as the learner's folder."""
    began, failure = time.monotonic(), None
    with _connection() as config, _errors_of_the_kernel() as errors:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIME_LIMIT,
            kernel_name="python3",
            resources={"metadata": {"path": str(directory)}},
            store_widget_state=False,
            config=config,
        )
        try:
            _execute(client, env={**os.environ, "FSDPLAB_HOME": str(workspace)}, stderr=errors)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failure = _failure_of(notebook, error)
    return NotebookRun(name, edition, time.monotonic() - began, failure)


def _execute(client: NotebookClient, **settings: Any) -> None:
    """Execute a notebook; KeyboardInterrupt where a signal asks this process to end meanwhile.

    nbclient itself takes these signals, ends the kernel and reports that it died, as if the notebook had failed.
    """
    handlers = {number: signal.getsignal(number) for number in ASKED}
    try:
        was_asked = asyncio.run(_until_asked(client, settings))
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):  # signals are the main thread's
                signal.signal(number, handler)
    if was_asked:
        raise KeyboardInterrupt


async def _until_asked(client: NotebookClient, settings: Mapping[str, Any]) -> bool:
    """Execute a notebook until its end, or until a signal asks this process to end: return whether one has."""
    asked: list[int] = []

    def end(number: int) -> None:
        asked.append(number)
        execution.cancel()  # nbclient ends the kernel

    execution = asyncio.ensure_future(client.async_execute(**settings))
    await asyncio.sleep(0)  # it begins with handlers of its own, which these replace
    for number in ASKED:
        with suppress(RuntimeError):  # not the main thread, or Windows
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await execution
    except (asyncio.CancelledError, DeadKernelError):  # nbclient takes a cancelled cell for a dead kernel
        if not asked:
            raise
    return bool(asked)


@contextmanager
def _connection() -> Iterator[Config]:
    """Let this process and a kernel speak through sockets in a folder that nobody else can open.

    Over TCP, Jupyter's default, a kernel listens on a port, and newer ones print a warning about that.
    """
    usual = tempfile.gettempdir()
    base = usual if len(os.fsencode(usual)) <= LONGEST_FOLDER else "/tmp"
    with tempfile.TemporaryDirectory(prefix="fsdplab-kernel-", dir=base) as folder:
        yield Config({"KernelManager": {"transport": "ipc", "connection_file": f"{folder}/k.json"}})


@contextmanager
def _errors_of_the_kernel() -> Iterator[IO[str]]:
    """Open a file for what a kernel itself writes to stderr, and print it at the kernel's end.

    Its answer to Jupyter, which interrupts every kernel before it ends it, is left out.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            yield errors
        except KeyboardInterrupt:
            errors.truncate(0)  # a kernel that was ended in a cell has much to say about it
            raise
        finally:
            errors.seek(0)
            sys.stderr.writelines(line for line in errors if _INTERRUPTED not in line)


def _failure_of(notebook: NotebookNode, error: Exception) -> str:
    """Return the failed cell's number and first line, and the error's last lines."""
    failed_number, failed_source = 0, ""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and (cell.get("execution_count") or cell.get("outputs")):
            failed_number, failed_source = number, cell.source  # the last cell that ran
    first_line = (failed_source.strip().splitlines() or [""])[0]
    where = f"cell {failed_number} ({first_line})"
    if isinstance(error, CellExecutionError):
        return f"{where}: {error.ename}: {error.evalue}"
    return f"{where}: {str(error).splitlines()[0]}"


# ---- for the site: once each, as the teacher edition, with the stubs left in to be read


@dataclass(frozen=True)
class Executed:
    """A folder of executed notebooks, one sentence on where they ran, and the runs that did not reach their end."""

    folder: Path
    where: str
    failed: tuple[NotebookRun, ...]


@contextmanager
def executed_in(source: Path | str, keep: Path | None, on_run: Callable[[NotebookRun], None]) -> Iterator[Executed]:
    """Run every notebook of a folder in order, and give the folder of the results; `on_run` is called as each ends.

    The folder is `keep`, or one that is deleted afterwards. Raises CourseError where there is nothing to run, where a
    source is wrong, or where `keep` holds notebooks.
    """
    sources = sources_in(source)
    if keep is not None and any(keep.glob("*.ipynb")):
        raise CourseError(f"{keep} already holds notebooks; give --keep an empty folder")
    with tempfile.TemporaryDirectory(prefix="fsdplab-site-") as scratch:
        folder = keep or Path(scratch) / "executed"
        failed = []
        began = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CourseError(f"--keep {folder} cannot be made ({error.strerror or error})") from error
        for path, notebook in sources:
            run = run_notebook(path.name, "teacher", notebook, path.parent, Path(scratch) / "my_fsdp")
            notebook.metadata.pop("widgets", None)
            nbformat.write(notebook, folder / path.name)
            if run.failure:
                failed.append(run)
            on_run(run)
        yield Executed(folder, _where(time.monotonic() - began), tuple(failed))


def _where(seconds: float) -> str:
    """Return the sentence on where the notebooks ran, and how long."""
    import torch

    gpus = torch.cuda.device_count()
    with_gpus = f" and {gpus} GPU(s)" if gpus else ", without a GPU"
    minutes = max(1, round(seconds / 60))
    return (
        f"The notebooks of these pages ran on {os.cpu_count()} CPU cores{with_gpus},"
        f" with PyTorch {torch.__version__}, in {minutes} minutes."
    )
