"""The folder of a record: a new one, or that of an earlier record whose files are replaced.

A user may name any folder, and may have put notes beside a record. Only what a run writes is ever removed or
overwritten: its files are known by name, and a folder is known by a marker that the run puts there first.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from fsdplab.common.files import read_file, write_whole
from fsdplab.records.tables import TABLES, RecordError

MARKER = ".fsdplab-record"
_MOST_BYTES = 10**8  # of a run.json
_TOLD = "This folder holds a run record of fsdplab. A new record may replace the files of this one, and no others.\n"
_BELOW = ("ranks", "traces", "snapshots")
_WRITTEN = re.compile(
    rf"run\.json|\.fsdplab-record|({'|'.join(TABLES)})\.csv\.gz|(ranks|traces|snapshots)/rank\d+\.[\w.]+"
    r"|ranks/(spec\.json|exits\.json|store|agent\.log)"
)


def claim_folder(folder: Path, replace: bool = True) -> Path:
    """`folder`, made and marked for a new record; the files of an earlier record are removed.

    RecordError, and nothing is touched, where it is a file, holds files of somebody else and no record, or holds an
    earlier record and `replace` is false.
    """
    try:
        found = sorted(os.listdir(folder))
    except FileNotFoundError:
        found = []
    except NotADirectoryError:
        if not folder.exists():  # what is above it is a file
            raise
        raise RecordError(f"{folder} is a file; expected a folder") from None
    if found == [MARKER]:  # a run that was ended before it wrote anything
        return folder
    if found and not is_record(folder):
        raise RecordError(
            f"{folder} holds other files ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}); expected a new or"
            " empty folder, or that of an earlier run"
        )
    if found and not replace:
        raise RecordError(f"{folder} holds an earlier record; give another folder, or --force to replace it")
    for name in _BELOW:
        if (folder / name).is_symlink() or (folder / name).exists() and not (folder / name).is_dir():
            raise RecordError(f"{folder / name} is no folder of a record; expected a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_record(folder)
    write_whole(folder / MARKER, _TOLD)
    return folder


def free_folder(wanted: Path) -> Path:
    """`wanted` if nothing is there, else the first free one of `wanted-2`, `wanted-3`, ..."""
    number, folder = 1, wanted
    while folder.is_symlink() or folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def is_record(folder: Path) -> bool:
    """Whether a run wrote into `folder`: its marker is there, or the run.json of a version before the marker."""
    if (folder / MARKER).is_file():
        return True
    try:
        content = json.loads(read_file(folder / "run.json", _MOST_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and str(content.get("format")).startswith("fsdplab run record")


def is_written(path: Path) -> bool:
    """Whether a run writes a file of this name: `path` is relative to the record's folder."""
    return _WRITTEN.fullmatch(path.as_posix()) is not None


def _remove_record(folder: Path) -> None:
    """run.json goes first, so that half a record never looks complete; what a run does not write stays."""
    (folder / "run.json").unlink(missing_ok=True)
    below = [path for name in _BELOW for path in (folder / name).glob("*")]
    for path in (*folder.iterdir(), *below):
        if is_written(path.relative_to(folder)) and not path.is_dir():
            path.unlink()
    for name in _BELOW:
        if (folder / name).is_dir() and not any((folder / name).iterdir()):
            (folder / name).rmdir()
