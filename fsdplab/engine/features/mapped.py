"""Backs offloaded parameters by memory-mapped temporary files, whose pages are prefetched before a unit uses them and
released afterwards.

A mapped file is an ordinary CPU tensor whose pages come and go. Letting go takes three steps, because each alone frees
nothing: the pages leave this process (its resident memory falls at once), what was changed is written to the disk, and
the kernel's own copy is dropped. Bringing in asks for a megabyte at a time: the kernel answers one large request with
its first few megabytes only. The kernel reads and writes in the background, so no thread of this process does: a write
is begun at once, and its end is waited for when a few more have begun. The files have no name, so none is left behind,
also after kill -9.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_ASK_AT_ONCE = 1 << 20  # bytes of one request to read ahead
_WRITES_UNDER_WAY = 4  # spans: the oldest is waited for when another begins
# SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER: data only, no flush of the drive
_WRITE, _WRITE_AND_WAIT = 2, 1 | 2 | 4


@cache
def _sync_file_range() -> Callable[..., int]:
    """Return the C library's function, looked up when it is first needed: only Linux has it."""
    function = ctypes.CDLL(None, use_errno=True).sync_file_range
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


class MappedFile(mmap.mmap):
    """`nbytes` zeroed bytes of disk, reserved, mapped, freed with the last tensor over them (two descriptors each)."""

    descriptor: int
    address: int
    label: str
    folder: Path
    _wanted: set[int]  # starts of spans that were brought in again: their pages stay

    def __new__(cls, folder: Path, nbytes: int, label: str) -> MappedFile:
        descriptor = _reserved(folder, nbytes, label)
        try:
            self = super().__new__(cls, descriptor, nbytes)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor, self.label, self.folder = descriptor, label, folder
        self._wanted = set()
        weakref.finalize(self, os.close, descriptor)
        return self

    def bring_in(self, start: int, stop: int) -> None:
        """Begin to read the pages around bytes [start, stop) into memory."""
        # A write of these bytes may be under way; its end must not drop the pages (`drop`).
        self._wanted.add(start)
        for at in range(start, stop, _ASK_AT_ONCE):
            os.posix_fadvise(self.descriptor, at, min(_ASK_AT_ONCE, stop - at), os.POSIX_FADV_WILLNEED)

    def let_go(self, start: int, stop: int, keep_cached: bool) -> None:
        """Take the pages around bytes [start, stop) out of memory, and begin to write what was changed.

        With `keep_cached` the kernel writes them and drops its copy when it wants to. Raises the `OSError` of a write
        that has failed, this one's or an earlier one's.
        """
        self.madvise(mmap.MADV_DONTNEED, *_pages(start, stop))  # of a shared mapping: nothing is lost
        self._wanted.discard(start)
        if keep_cached:
            return
        # Only begun: its end is waited for once four more have begun.
        self._sync(start, stop, _WRITE)
        _leaving.append(_Leaving(weakref.ref(self), start, stop))
        while len(_leaving) > _WRITES_UNDER_WAY:
            _leaving.popleft().finish()

    def drop(self, start: int, stop: int) -> None:
        """Wait until bytes [start, stop) are written, and drop the kernel's copy unless they were brought in again."""
        self._sync(start, stop, _WRITE_AND_WAIT)
        if start not in self._wanted:
            os.posix_fadvise(self.descriptor, *_pages(start, stop), os.POSIX_FADV_DONTNEED)

    def _sync(self, start: int, stop: int, how: int) -> None:
        """Begin to write bytes [start, stop) to the disk, or wait for that; raise the `OSError` of a failed write."""
        if _sync_file_range()(self.descriptor, *_pages(start, stop), how) != 0:
            number = ctypes.get_errno()
            what = f"{self.label} could not be written to {self.folder} ({os.strerror(number)})"
            raise OSError(number, f"{what}; what it held is lost: look for a failing disk and resume from a checkpoint")


class _Leaving(NamedTuple):
    """Bytes of a file whose write has begun."""

    file: weakref.ref[MappedFile]
    start: int
    stop: int

    def finish(self) -> None:
        """Wait until the bytes are written, and drop the kernel's copy of them."""
        file = self.file()
        if file is not None:  # else its bytes are gone with it
            file.drop(self.start, self.stop)


_leaving: deque[_Leaving] = deque()  # the oldest first
_files: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()  # by address
_starts: list[int] = []  # the addresses, sorted; some of files that are gone


def zeros(folder: Path, nbytes: int, label: str) -> torch.Tensor:
    """Make `nbytes` zeroed bytes over a new file in `folder`, reserved on the disk.

    Raises the `OSError` of the case (`FileNotFoundError`, `PermissionError`, ENOSPC, ...) with folder, sizes and
    remedy.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    file = MappedFile(folder, nbytes, label)
    # The tensor holds `file`, which goes with the last tensor over it.
    data = torch.frombuffer(file, dtype=torch.uint8)
    file.address = data.data_ptr()
    if file.address not in _files:
        insort(_starts, file.address)
    _files[file.address] = file
    return data


def file_under(
    tensor: torch.Tensor,  # any shape
) -> MappedFile | None:
    """Return the mapped file that holds `tensor`, if one does."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    at = tensor.data_ptr()
    while True:
        index = bisect_right(_starts, at)  # so many files begin at or before the tensor
        if index == 0:
            return None
        file = _files.get(_starts[index - 1])
        if file is None:
            del _starts[index - 1]  # freed meanwhile
        elif at < file.address + len(file):
            return file
        else:
            return None


def bring_in(
    tensor: torch.Tensor,  # any shape, dense
) -> None:
    """Begin to read `tensor` from its file; nothing happens to tensors in memory."""
    file = file_under(tensor)
    if file is not None:
        file.bring_in(*_span(file, tensor))


def bring_in_all(address: int) -> None:
    """Begin to read the whole file that is mapped at `address`, if one still is."""
    file = _files.get(address)
    if file is not None:
        file.bring_in(0, len(file))


def let_go(
    tensor: torch.Tensor,  # any shape, dense
    keep_cached: bool = False,
) -> None:
    """Take `tensor` out of memory, to its file; nothing happens to tensors in memory."""
    file = file_under(tensor)
    if file is not None:
        file.let_go(*_span(file, tensor), keep_cached)


def wait() -> None:
    """Return once everything that was let go so far is written and dropped."""
    while _leaving:
        _leaving.popleft().finish()


def is_in_memory(folder: Path) -> bool:
    """Whether `folder` is a file system of memory (tmpfs, ramfs): files there take the memory they are to spare."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # "36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/sda rw": the third word is the device, the kind follows " - ".
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, what = line.partition(" - ")
        if where.split()[2] == number:
            return what.split()[0] in ("tmpfs", "ramfs")
    return False


def _pages(start: int, stop: int) -> tuple[int, int]:
    """Return first byte and number of bytes of the pages around [start, stop): the kernel drops whole pages only."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return first, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE - first


def _span(
    file: MappedFile,
    tensor: torch.Tensor,  # any shape, dense, in `file`
) -> tuple[int, int]:
    """Return the bytes [start, stop) of `file` that `tensor` takes."""
    start = tensor.data_ptr() - file.address
    return start, start + tensor.nbytes


# ---- making a file


def _reserved(folder: Path, nbytes: int, label: str) -> int:
    """Return a descriptor of a new unnamed file whose bytes are its own: a full disk shows here, not as SIGBUS."""
    descriptor = _unnamed(folder, label)
    disk = os.fstatvfs(descriptor)
    free = disk.f_bavail * disk.f_frsize
    try:
        if free < nbytes:  # asked first: a reservation that fails has filled the disk for a moment
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"no room for the {nbytes} bytes of {label} in {folder} ({error.strerror}): {free} bytes are free; free"
            " some, name a folder on a larger disk in NVMeOffloadPolicy, or use more ranks",
        ) from error
    return descriptor


def _unnamed(folder: Path, label: str) -> int:
    """Return a descriptor of a new file without a name in `folder`; the `OSError` of the case says what to do."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, f"offload to files needs Linux, got {sys.platform}; use CPUOffloadPolicy")
    try:
        return _open(folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot make a file for {label} in {folder} ({error.strerror}): expected an existing folder on a local"
            " disk that this user may write to; name one in NVMeOffloadPolicy",
        ) from error


def _open(folder: Path) -> int:
    """Open a file without a name; where the file system has none, one whose name is removed at once."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # file systems that know no files without a name
            raise
    descriptor, name = tempfile.mkstemp(prefix="fsdplab-", dir=folder)
    os.unlink(name)
    return descriptor
