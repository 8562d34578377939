"""Run records into a few archives that a borrowed machine lets out: at most three, each well under 16 MB.

A record that does not fit goes without its traces, and if that is still too large it is left out and named.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 15_000_000  # in an archive, before compression; tar's own blocks come on top
MOST_ARCHIVES = 3
_PER_FILE = 1536  # a tar header and padding, about


@dataclass(frozen=True)
class Load:
    """One record to pack: its name in the archive, its folder, the files taken, and their bytes."""

    name: str
    folder: Path
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in an archive before compression."""
        return sum(path.stat().st_size + _PER_FILE for path in self.files)


def load_of(name: str, folder: Path, traces: bool = True) -> Load:
    """The files of a record; without `traces`, all but its traces/ folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return Load(name, folder, tuple(path for path in files if traces or path.relative_to(folder).parts[0] != "traces"))


def pack(records: Sequence[tuple[str, Path]], target: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Write `target/records.tar.gz` (and -2, -3) from (name, folder) pairs; returns a sentence for each record not
    whole in them.
    """
    archives: list[list[Load]] = []
    complaints = []
    for name, folder in records:
        whole, bare = load_of(name, folder), load_of(name, folder, traces=False)
        if _placed(whole, archives, most_bytes):
            continue
        without = bare.nbytes < whole.nbytes and _placed(bare, archives, most_bytes)
        kept = "is kept without its traces" if without else "is left out"
        complaints.append(f"the record {name} ({whole.nbytes / 1e6:.1f} MB) {kept}: the archives were full")
    for path in target.glob("records*.tar.gz"):
        path.unlink()
    for number, loads in enumerate(archives, 1):
        _write(target / ("records.tar.gz" if number == 1 else f"records-{number}.tar.gz"), loads)
    return complaints


def _placed(load: Load, archives: list[list[Load]], most_bytes: int) -> bool:
    """Put the load where there is room, in a new archive if one may still be begun."""
    for loads in archives:
        if sum(each.nbytes for each in loads) + load.nbytes <= most_bytes:
            loads.append(load)
            return True
    if len(archives) < MOST_ARCHIVES and load.nbytes <= most_bytes:
        archives.append([load])
        return True
    return False


def _write(path: Path, loads: Sequence[Load]) -> None:
    unfinished = path.with_name(path.name + ".new")
    with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
        for load in loads:
            for file in load.files:
                archive.add(
                    file, f"{load.name}/{file.relative_to(load.folder).as_posix()}", recursive=False, filter=_anonymous
                )
    unfinished.replace(path)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the names and numbers of a machine's users: a record is made to be handed on."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def unpack(folder: Path, target: Path) -> list[Path]:
    """The record folders of the archives in `folder`, written below `target`; ValueError for an archive that points
    outside of it.
    """
    found = set()
    for path in sorted(folder.glob("records*.tar.gz")):
        with tarfile.open(path) as archive:
            for entry in archive.getmembers():
                place = _inside(target, entry, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(entry)
                assert content is not None  # a plain file, by _inside
                place.write_bytes(content.read())
                if place.name == "run.json":
                    found.add(place.parent)
    return sorted(found)


def _inside(target: Path, entry: tarfile.TarInfo, archive: Path) -> Path:
    place = (target / entry.name).resolve()
    if not entry.isfile() or not place.is_relative_to(target.resolve()):
        raise ValueError(
            f"{archive} holds {entry.name!r}, expected plain files of run records only; copy the archive again from"
            " where it was made"
        )
    return place
