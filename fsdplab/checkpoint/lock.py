"""Lets one job at a time use a folder: a lock file that outlives neither the process that holds it nor its machine.

The file names its holder: host, process and the time when the process started, since process ids come again. On the
holder's own machine that is enough to see whether it lives. From another machine (a folder on NFS) or another
container it is not: there the holder counts as gone when it has not renewed the file for half a minute.

`flock` guards the moment in which the file is read and written, so that of two jobs which start together one wins. A
file system without `flock` leaves that moment unguarded; the renewing holder notices when the file names another one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdplab.common.files import lock, unlock

NAME = ".lock"
RENEWED_EVERY_S = 5.0
GONE_AFTER_S = 30.0
_BYTES = 512  # the file has always this size, so that a full disk can take a change of its holder


class FolderInUse(RuntimeError):
    """Another job, which lives, uses the folder."""


@dataclass(frozen=True)
class Holder:
    """A process, named so that no other process of any machine has the same name."""

    host: str
    machine: str  # of this boot, and the space in which process ids count
    pid: int
    started: str  # clock ticks after the boot

    @staticmethod
    def this_process() -> Holder:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:  # not Linux
            machine = socket.gethostname()
        return Holder(socket.gethostname(), machine, os.getpid(), _start_of(os.getpid()) or "")

    def lives(self) -> bool:
        """Return whether the process lives; only its own machine can tell."""
        return _start_of(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _start_of(pid: int) -> str | None:
    """When a living process started; "" where the system does not say, None where it has ended."""
    try:
        # "42 (my job) S 1 ...": behind the name, which may have blanks, word 0 is the state and word 19 the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return ""
        return ""
    # an ended process is listed (Z, X) until its parent has asked for its exit code
    return None if fields[0] in "ZX" else fields[19]


class FolderLock:
    """The lock of a folder, held by this process until `release`; raises `FolderInUse` where another one holds it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._holder = Holder.this_process()
        self._acquire()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="checkpoints-lock")
        self._thread.start()

    def check(self) -> None:
        """Raise `FolderInUse` if another job has taken the folder, as after half a minute in which this one stood."""
        with self._opened() as descriptor:
            holder, _ = _read(descriptor)
            if holder not in (None, self._holder):
                raise self._in_use(holder)
            if holder is None:
                _write(descriptor, self._holder)

    def release(self) -> None:
        """Leave the folder to the next job."""
        self._released.set()
        self._thread.join()
        try:
            with self._opened() as descriptor:
                # If this process stood still for long, another job may hold the folder by now.
                if _read(descriptor)[0] in (None, self._holder):
                    self.path.unlink()
        except FileNotFoundError:
            return

    def _acquire(self) -> None:
        first_seen, watched_since = None, time.monotonic()
        while True:
            with self._opened() as descriptor:
                holder, renewed = _read(descriptor)
                if holder is None or holder == self._holder:
                    return _write(descriptor, self._holder)
                # On one machine it can be seen at once whether the holder lives.
                if holder.machine == self._holder.machine:
                    if holder.lives():
                        raise self._in_use(holder)
                    return _write(descriptor, self._holder)
                if first_seen is None:
                    first_seen = holder, renewed
                # Renewed while this process watched: the holder lives.
                if first_seen != (holder, renewed):
                    raise self._in_use(holder)
                if time.monotonic() - watched_since > GONE_AFTER_S:
                    return _write(descriptor, self._holder)
            time.sleep(RENEWED_EVERY_S / 5)

    def _renew(self) -> None:
        while not self._released.wait(RENEWED_EVERY_S):
            try:
                with self.path.open("rb") as file:  # a file system of a network looks anew when a file is opened
                    if _read(file.fileno())[0] == self._holder:
                        os.utime(self.path)
            except OSError:
                continue  # the next save says what is wrong with the folder

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The lock file, open; nobody else reads or writes it meanwhile."""
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                guarded = _guard(descriptor)
                if self._is_still_there(descriptor):
                    try:
                        yield descriptor
                    finally:
                        if guarded:
                            unlock(descriptor)
                    return
            finally:
                os.close(descriptor)

    def _is_still_there(self, descriptor: int) -> bool:
        """Return whether the open file is still the one of this name: a job that ended may just have removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _in_use(self, holder: Holder | None) -> FolderInUse:
        return FolderInUse(
            f"{self.path.parent} is used by another job ({holder}), and only one job at a time may write it; end that"
            " job, whose ranks may have outlived their launcher, or give another folder"
        )


def _guard(descriptor: int) -> bool:
    """Wait for the flock of an open file; False where the file system has none."""
    while True:
        try:
            lock(descriptor)
            return True
        except BlockingIOError:
            time.sleep(0.01)  # others hold it for a read and a write
        except OSError:
            return False


def _read(descriptor: int) -> tuple[Holder | None, int]:
    """Return the holder that an open lock file names, None if none; and when it was renewed."""
    renewed = os.fstat(descriptor).st_mtime_ns
    try:
        return Holder(**json.loads(os.pread(descriptor, _BYTES, 0))), renewed
    except (ValueError, TypeError):  # empty, as it was just made, or cut by a loss of power
        return None, renewed


def _write(descriptor: int, holder: Holder) -> None:
    os.pwrite(descriptor, json.dumps(asdict(holder)).encode().ljust(_BYTES), 0)
