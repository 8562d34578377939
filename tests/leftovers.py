"""What a run may have left behind: forked ranks have the starter's command line, so the files that a process holds are
looked at too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fsdplab.common.machine import output_of


def processes_of(folder: Path) -> list[str]:
    """Command lines of the living processes that name a folder or have a file of it open: the launcher and the ranks of
    its run.
    """
    if not Path("/proc").exists():  # as on macOS, where only the command lines are told
        return [line for line in output_of("ps", "-A", "-ww", "-o", "command=").splitlines() if str(folder) in line]
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended while we looked
            continue
        files = _open_files(entry) if entry.name != str(os.getpid()) else []
        if any(str(folder) in text for text in (command, *files)):
            found.append(command)
    return found


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
