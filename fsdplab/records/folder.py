"""The folder of a record: a new one, or that of an earlier record whose files are replaced.

A user may name any folder, and may have put notes beside a record. Only what a run writes is ever removed or
overwritten: its files are known by name, and a folder is known by a marker that the run puts there first. While the
run goes on its process holds a lock on the marker, so that of several runs at once only one gets the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from fsdplab.common.files import lock, naming, read_file, unlock
from fsdplab.common.machine import why_no_ranks
from fsdplab.records.tables import TABLES, RecordError

MARKER = ".fsdplab-record"
MODEL_SOURCE = "model_source.txt"  # the text of a model of one's own, to be read and never run
_MOST_BYTES = 10**8  # of a run.json
_TOLD = "This folder holds a run record of fsdplab. A new record may replace the files of this one, and no others.\n"
_BELOW = ("ranks", "traces", "snapshots")
_WRITTEN = re.compile(
    rf"run\.json|\.fsdplab-record|model_source\.txt|({'|'.join(TABLES)})\.csv\.gz|(ranks|traces|snapshots)/rank\d+\.[\w.]+"
    r"|ranks/(spec\.json|exits\.json|store|agent\.log)"
)

_held: dict[Path, int] = {}  # the folders that this process has claimed, and the descriptors of their locked markers


def claim_folder(folder: Path, replace: bool = True) -> Path:
    """Make and mark `folder` for a new record; the files of an earlier record are removed.

    It is this process's until `release_folder`. RecordError, and nothing is touched, where it is a file, holds files of
    somebody else and no record, holds an earlier record and `replace` is false, or where another run writes into it.
    """
    _refuse_without_ranks()
    _check(folder, replace)
    if _key(folder) in _held and os.listdir(folder) == [MARKER]:  # claimed before the run that now begins
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if _key(folder) in _held or not _hold(folder):
        raise RecordError(f"a run is writing into {folder}; wait for its end, or give another folder")
    try:
        _check(folder, replace)  # what another run has written meanwhile
        _remove_record(folder)
    except BaseException:
        release_folder(folder)
        raise
    return folder


def claim_free_folder(wanted: Path) -> Path:
    """Claim `wanted`, or the first of `wanted-2`, `wanted-3`, ... where nothing is: no two runs get the same one."""
    _refuse_without_ranks()
    for folder in _numbered(wanted):
        if _is_free(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if _hold(folder, os.O_EXCL):
                return folder
    raise AssertionError("the numbers never end")


def release_folder(folder: Path) -> None:
    """Let others claim a folder that this process has claimed; its record stays an earlier record, which they see."""
    descriptor = _held.pop(_key(folder), None)
    if descriptor is not None:
        with suppress(OSError):  # a file system without locks
            unlock(descriptor)
        os.close(descriptor)


def is_record(folder: Path) -> bool:
    """Return whether a run wrote into `folder`: its marker is there, or the run.json of a version before the marker."""
    if (folder / MARKER).is_file():
        return True
    try:
        content = json.loads(read_file(folder / "run.json", _MOST_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and str(content.get("format")).startswith("fsdplab run record")


def is_written(path: Path) -> bool:
    """Return whether a run writes a file of this name: `path` is relative to the record's folder."""
    return _WRITTEN.fullmatch(path.as_posix()) is not None


def _refuse_without_ranks() -> None:
    """RecordError where no run can write a record: no folder is left behind, and no lock is asked for."""
    if (refused := why_no_ranks()) is not None:
        raise RecordError(refused)


def _check(folder: Path, replace: bool) -> None:
    """Raise the RecordError of a folder that a new record cannot have."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if not folder.exists():  # what is above it is a file
            raise
        raise RecordError(f"{folder} is a file; expected a folder") from None
    if names and not is_record(folder):
        first = [*names[:3], "..."] if len(names) > 3 else names
        raise RecordError(
            f"{folder} holds other files ({', '.join(first)}); expected a new or empty folder, or that of an earlier"
            " run"
        )
    if names not in ([], [MARKER]) and not replace:  # the marker alone: a run that ended before it wrote anything
        free = next(filter(_is_free, _numbered(folder)))
        held = "an earlier record" if (folder / "run.json").exists() else "what a run without an end has left"
        raise RecordError(f"{folder} holds {held}, which stays; give another folder, such as {free}")
    for name in _BELOW:
        if (folder / name).is_symlink() or (folder / name).exists() and not (folder / name).is_dir():
            raise RecordError(f"{folder / name} is no folder of a record; expected a new or empty folder")


def _numbered(wanted: Path) -> Iterator[Path]:
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))


def _is_free(folder: Path) -> bool:
    """Whether nothing is there, or an empty folder."""
    return not folder.is_symlink() and (not folder.exists() or folder.is_dir() and not os.listdir(folder))


def _hold(folder: Path, exclusive: int = 0) -> bool:
    """Mark the folder and lock its marker; False where another process has it, or, with O_EXCL, made it first."""
    marker = folder / MARKER
    with naming(marker):
        try:
            descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | exclusive, 0o666)
        except FileExistsError:
            return False
        try:
            lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:  # a file system without locks: a marker that is made with O_EXCL has one maker nevertheless
            pass
        _held[_key(folder)] = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _TOLD.encode(), 0)
        except OSError:  # a full disk
            release_folder(folder)
            raise
    return True


def _key(folder: Path) -> Path:
    return folder.resolve()


def _remove_record(folder: Path) -> None:
    """run.json goes first, so that half a record never looks complete; what a run does not write stays, and so does the
    marker, which is locked.
    """
    (folder / "run.json").unlink(missing_ok=True)
    below = [path for name in _BELOW for path in (folder / name).glob("*")]
    for path in (*folder.iterdir(), *below):
        if is_written(path.relative_to(folder)) and path.name != MARKER and not path.is_dir():
            path.unlink()
    for name in _BELOW:
        if (folder / name).is_dir() and not any((folder / name).iterdir()):
            (folder / name).rmdir()
