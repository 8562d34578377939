"""PyTorch's profiler: rules that its users have to keep, and how profiles and snapshots of memory are written.

The first profile of a process decides what later ones see: after one of the host alone, a profile of a GPU holds no
kernel, and nothing says so (torch 2.13 and newer; kineto prepares CUPTI once). So every profile asks for the same.

A profile is stopped once gloo's threads have noted the ends of their collectives. A gloo thread tells the waiting rank
that a collective is done, and then notes its end in the profile (torch 2.13, ProcessGroupGloo.cpp: `finishWorkGloo`
completes the future first, which DDP waits for). A busy machine may stop it in between for longer than the rest of a
step takes, and a profile that is stopped then is taken apart while it is written.
"""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fsdplab.common.files import written_whole
from fsdplab.common.temporary import folder_for_unfinished

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_AT_MOST_S = 1.0


def activities_on(device: torch.device) -> list[ProfilerActivity]:
    """What every profile of a process records: the host, and on a GPU its kernels."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def prepare_profiler(device: torch.device) -> None:
    """Take a profile of nothing on a GPU, so that no step pays for the start of CUPTI; on a CPU nothing is done."""
    if device.type == "cuda":
        with profile(activities=activities_on(device)):
            torch.cuda.synchronize(device)


def await_gloo_threads() -> None:
    """Return when no gloo thread of this process is at work, or after a second; at once where /proc is not there."""
    deadline = time.monotonic() + _AT_MOST_S
    while _at_work() and time.monotonic() < deadline:
        time.sleep(0.0005)


def _at_work() -> bool:
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with suppress(OSError):  # a thread that has just ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME and rest.split()[0] in "RD":  # running or about to, not waiting for work
                return True
    return False


# ---- writing a finished profile as a gzipped Chrome trace
#
# `export_chrome_trace("x.json.gz")` compresses line by line in Python, at the highest level: seconds a rank. At the
# lowest level and as a whole it takes a tenth of the time; the file is somewhat larger, a tenth of its text.


_LEVEL = 1
_PIECE = 1 << 20  # so that a trace of a gigabyte needs no gigabyte of memory


def save_trace(profile: torch.profiler.profile, path: Path, unfinished: Path | None = None) -> None:
    """Write the trace of a stopped profile to `path` (.json.gz), whole or not at all; `OSError` if that fails.

    What is unfinished lies in the folder `unfinished`, else in one of the caller's.
    """
    with (
        tempfile.TemporaryDirectory(prefix="trace-", dir=unfinished or folder_for_unfinished()) as folder,
        _nameless(Path(folder)) as place,
    ):
        first = place / "trace.json"
        profile.export_chrome_trace(str(first))
        if not first.exists() or not first.stat().st_size:  # torch does not say that it could not write
            raise OSError(errno.EIO, "the profiler did not write its trace: a full disk or a limit", str(first))
        with (
            first.open("rb") as plain,
            written_whole(path) as whole,
            gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=whole) as packed,
        ):
            shutil.copyfileobj(plain, packed, _PIECE)


@contextmanager
def _nameless(folder: Path) -> Iterator[Path]:
    """The folder under a name that tells nobody where it is, since a trace holds the name under which it was first
    written; the folder itself where the system has no such names.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    nameless = Path(f"/proc/self/fd/{opened}")
    try:
        yield nameless if nameless.exists() else folder
    finally:
        os.close(opened)


# ---- the snapshot that PyTorch's own memory viewer opens (pytorch.org/memory_viz)
#
# Every allocation of a step with the lines that made it; only the CUDA allocator keeps such a history. A snapshot is a
# pickle; gzipped in the record, where a step's is a few hundred kilobytes.


MOST_EVENTS = 20_000  # of the newest: a step of a model with a few hundred parameters has some thousands


@contextmanager
def memory_snapshot(path: Path | None, device: torch.device) -> Iterator[None]:
    """Record the block's allocations on `device` and write them to `path` (.pickle.gz); does nothing on CPU, or where
    `path` is None.

    What was allocated before is in the snapshot too, without its lines. A block that raises leaves no file.
    """
    if path is None or device.type != "cuda":
        yield
        return
    # Python's stacks alone: those of C++ take long to look up
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python", device=device)
    try:
        yield
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
    write_snapshot(snapshot, path)


def write_snapshot(snapshot: Any, path: Path) -> None:
    """Write what `torch.cuda.memory._snapshot()` returned, gzipped. Names of files, which identify a machine, are cut
    in place: `/home/me/fsdplab/engine/core/unit.py` is `fsdplab/engine/core/unit.py`; of others three parts stay.
    """
    waiting = [snapshot]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, dict) and isinstance(name := thing.get("filename"), str):
            ours = re.fullmatch(r"(?:.*/)?(fsdplab/.*)", name)
            thing["filename"] = ours[1] if ours else "/".join(name.split("/")[-3:])
        values = thing.values() if isinstance(thing, dict) else thing
        waiting += [value for value in values if isinstance(value, (dict, list))]
    with gzip.open(path, "wb") as file:
        pickle.dump(snapshot, file)
