"""Files that are complete or absent, files that are read up to a limit, and errors that name the file: the system's own
say nothing of a full disk's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TRIAL_BYTES = 4096  # a full disk still takes an empty file
_PIECE = 1 << 20  # bytes that are read at once


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one move, as `written_whole` does; a text is written as UTF-8, with `?` for what that lacks: a
    byte in the name of a file that is no text.
    """
    with written_whole(path) as file:
        file.write(_bytes(content))


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file beside `path` to be written, which replaces it in one move at the end of the block.

    Its name is nobody else's: not another thread's, nor that of a process on another machine or in another container.
    An `OSError` (a full disk) names `path`, leaves the old file as it was, and nothing beside it.
    """
    unfinished = _beside(path, "unfinished")
    with naming(path), unfinished.open("xb") as file:
        try:
            yield file
            file.close()
            os.replace(unfinished, path)
        except BaseException:  # Ctrl-C too
            unfinished.unlink(missing_ok=True)
            raise


def _beside(path: Path, ending: str) -> Path:
    """A name that no file has, in the same folder."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.{ending}")


def write_output(path: Path, content: str | bytes) -> None:
    """Write what a user has asked for into a file that the user has named; a device or a pipe (/dev/stdout) is written
    into, not replaced.
    """
    target = _resolved(path)
    if target.exists() and not target.is_file():
        with naming(path):
            target.write_bytes(_bytes(content))
    else:
        write_whole(target, content)


def try_output(path: Path) -> None:
    """Raise the OSError that `write_output(path, ...)` would raise now; nothing is left and nothing is changed."""
    target = _resolved(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    _try_folder(target.parent, path)


def try_folder(path: Path) -> None:
    """Raise the OSError that writing into a folder would raise, which may not exist yet."""
    place = _resolved(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    _try_folder(place, path)


def _resolved(path: Path) -> Path:
    """Follow the links of a path, of which the last parts may not exist; OSError for links that lead back to
    themselves, which is a RuntimeError before Python 3.13.
    """
    try:
        path.stat()  # raises the error of the system
    except FileNotFoundError:
        pass
    return path.resolve()


def _try_folder(folder: Path, asked: Path) -> None:
    trial = _beside(folder / "fsdplab", "trial")
    try:
        with trial.open("xb") as file:
            try:
                file.write(bytes(_TRIAL_BYTES))
                file.flush()
            finally:
                trial.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(asked)) from None


def read_file(path: Path, most: int) -> bytes:
    """Read the bytes of a file that somebody has named; `read_file(Path("config.json"), 1_000_000)`.

    Raises an OSError for what has more than `most` bytes, and for a pipe or a device: reading one may never end.
    """
    check_is_file(path)
    too_large = OSError(errno.EOVERFLOW, f"it has more than {most:,} bytes", str(path))
    if path.stat().st_size > most:
        raise too_large
    content = bytearray()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):  # a file of /proc has a size of 0, whatever it holds
            content += piece
            if len(content) > most:
                raise too_large
    return bytes(content)


def check_is_file(path: Path) -> None:
    """Raise an OSError for a folder, a pipe (whose reader waits for a writer) and a device (which may never end)."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make an OSError inside name this file: one of writing to an open file names none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def is_full(error: OSError) -> bool:
    """Return whether the disk is full, a quota is used up, or the file larger than `ulimit -f` allows."""
    return error.errno in _FULL


def _bytes(content: str | bytes) -> bytes:
    return content.encode(errors="replace") if isinstance(content, str) else content


def lock(descriptor: int) -> None:
    """Lock an open file for this process and those forked from it; BlockingIOError where another has it.

    Another OSError where there are no such locks: on some file systems, and on Windows.
    """
    _flock(descriptor, "LOCK_EX", "LOCK_NB")


def unlock(descriptor: int) -> None:
    """Unlock it, for forked processes too; OSError as `lock`."""
    _flock(descriptor, "LOCK_UN")


def is_locked(path: Path) -> bool:
    """Return whether another process has locked a file; False where there are no such locks."""
    with path.open() as file:
        try:
            _flock(file.fileno(), "LOCK_SH", "LOCK_NB")
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def _flock(descriptor: int, *how: str) -> None:
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system has no flock") from None
    fcntl.flock(descriptor, sum(getattr(fcntl, flag) for flag in how))
