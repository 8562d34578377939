"""What a run may have left behind: forked ranks have the starter's command line, so the files that a process holds are
looked at too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdplab.common.machine import output_of


def until(true: Callable[[], Any], patience_s: float = 60.0) -> Any:
    """What `true` says as soon as it says something, or when patience ends."""
    deadline = time.monotonic() + patience_s
    while not (said := true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return said


def left_of(folder: Path, patience_s: float = 60.0) -> list[str]:
    """The `processes_of` a folder that patience does not outlast."""
    until(lambda: not processes_of(folder), patience_s)
    return processes_of(folder)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the living processes that name a folder or have a file of it open: the launcher and the ranks of
    its run.

    A process that another thread of the caller has just forked has the caller's command line and open files, and closes
    them as it becomes another program: it is looked at once it has.
    """
    if not Path("/proc").exists():  # as on macOS, where only the command lines are told
        return [line for line in output_of("ps", "-A", "-ww", "-o", "command=").splitlines() if str(folder) in line]
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue
        until(lambda: not _is_a_fork(entry), 10.0)
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended while we looked
            continue
        if any(str(folder) in text for text in (command, *_open_files(entry))):
            found.append(command)
    return found


def _is_a_fork(process: Path) -> bool:
    """Whether a process still has the command line of this one, which forked it."""
    with suppress(OSError):
        return (process / "cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    return False


def _open_files(process: Path) -> list[str]:
    """The files that a process has open; it may close some, or end, while they are listed."""
    found = []
    try:
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(link))
    except OSError:
        pass
    return found
