"""The lab's runs on disk: a folder a batch, so that they come back after a restart of the kernel.

    lab-runs/batch-1/0-no_shard-lab/            run records, as `fsdplab compare` writes them
    lab-runs/batch-2-slow link/0-full_shard-lab/

What stands behind the number is the batch's name; renaming the folder renames the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from fsdplab.common.words import plural
from fsdplab.records import RecordError, RunRecord

from .lab_state import Batch

FOLDER = "lab-runs"
MOST_BACK = 12  # batches that are read at the start: a record takes some hundredths of a second
_BATCH = re.compile(r"batch-(\d+)(?:-(.+))?")
MOST_LETTERS = 60


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
    for number, name, place in places[-MOST_BACK:]:
        if records := list(_records_of(place, unread)):
            free = next(each for each in count(number) if each not in {batch.number for batch in batches})
            batches.append(Batch(free, (), records, name, place))
    parts = [f"{'1 batch' if len(batches) == 1 else f'{len(batches)} batches'} of earlier runs below"] * bool(batches)
    if older := len(places[:-MOST_BACK]):
        parts.append(f"{older} older {'one stays' if older == 1 else 'ones stay'} in {folder}")
    if unread:
        parts.append(f"{plural(len(unread), 'record')} in {folder} could not be read: {unread[0]}")
    return batches, "; ".join(parts)


def new_folder(folder: Path, number: int) -> Path:
    """Make the folder of batch `number`, or of the next number that is free: two notebooks may share a folder.

    OSError, in one line with the remedy, where nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = {number for number, _, _ in _batches_in(folder)}
        for free in (each for each in count(number) if each not in taken):
            with suppress(FileExistsError):  # the other notebook was faster
                (place := folder / f"batch-{free}").mkdir()
                return place
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(
            f"no run can be kept in {folder} ({why}); give StrategyLab(directory=...) another folder"
        ) from None
    raise AssertionError("count() ends never")


def rename(batch: Batch, name: str) -> None:
    """Give a batch a name, and its folder with it; ValueError says what a name may be, OSError why it was not moved."""
    clean = " ".join(name.split())
    if len(clean) > MOST_LETTERS or re.search(r'[\\/:*?"<>|\x00-\x1f]', clean):
        raise ValueError(
            f'the name is {name!r:.80}; expected at most {MOST_LETTERS} letters, none of \\ / : * ? " < > |'
        )
    if batch.folder is not None and clean != batch.name:
        number = _BATCH.fullmatch(batch.folder.name)
        moved = batch.folder.with_name(f"batch-{number[1] if number else batch.number}{'-' * bool(clean)}{clean}")
        batch.folder.rename(moved)
        for record in batch.records:
            record.path = moved / record.path.name
        batch.folder = moved
    batch.name = clean


def _batches_in(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Number, name and folder of each batch."""
    for place in folder.iterdir() if folder.is_dir() else ():
        if (found := _BATCH.fullmatch(place.name)) and place.is_dir():
            yield int(found[1]), found[2] or "", place


def _records_of(place: Path, unread: list[str]) -> Iterator[RunRecord]:
    """The records of a batch in the order of its runs; why one could not be read goes into `unread`."""
    try:
        runs = sorted((int(found[0]), run) for run in place.iterdir() if (found := re.match(r"\d+", run.name)))
    except OSError as error:
        unread.append(f"{place}: {error.strerror}")
        return
    for _, run in runs:
        try:
            if (run / "run.json").is_file():
                yield RunRecord.load(run)
        except (RecordError, OSError) as error:
            unread.append(str(error))
