"""Running the sources for the site: once each, as the teacher edition, with the stubs left in to be read."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat

from fsdplab.teaching.authoring.course import CourseError, sources_in
from fsdplab.teaching.authoring.course_run import NotebookRun, run_notebook


@dataclass(frozen=True)
class Executed:
    """A folder of executed notebooks, one sentence on where they ran, and the runs that did not reach their end."""

    folder: Path
    where: str
    failed: tuple[NotebookRun, ...]


@contextmanager
def executed_in(source: Path | str, keep: Path | None, on_run: Callable[[NotebookRun], None]) -> Iterator[Executed]:
    """Run every notebook of a folder in order, and give the folder of the results: `keep`, or one that is deleted
    afterwards. `on_run` is called as each ends.

    Raises CourseError where there is nothing to run, where a source is wrong, or where `keep` holds notebooks.
    """
    sources = sources_in(source)
    if keep is not None and any(keep.glob("*.ipynb")):
        raise CourseError(f"{keep} already holds notebooks; give --keep an empty folder")
    with tempfile.TemporaryDirectory(prefix="fsdplab-site-") as scratch:
        folder, failed, began = keep or Path(scratch) / "executed", [], time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CourseError(f"--keep {folder} cannot be made ({error.strerror or error})") from error
        for path, notebook in sources:
            run = run_notebook(path.name, "teacher", notebook, path.parent, Path(scratch) / "my_fsdp")
            notebook.metadata.pop("widgets", None)
            nbformat.write(notebook, folder / path.name)
            failed += [run] if run.failure else []
            on_run(run)
        yield Executed(folder, _where(time.monotonic() - began), tuple(failed))


def _where(seconds: float) -> str:
    import torch

    gpus = torch.cuda.device_count()
    return (
        f"The notebooks of these pages ran on {os.cpu_count()} CPU cores"
        f"{f' and {gpus} GPU(s)' if gpus else ', without a GPU'}, with PyTorch {torch.__version__}, in"
        f" {max(1, round(seconds / 60))} minutes."
    )
