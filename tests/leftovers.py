"""What a run may have left behind: forked ranks have the starter's command line, so the files that a process holds are
looked at too.
"""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(folder: Path) -> list[str]:
    """Command lines of the living processes that name a folder or have a file of it open: the launcher and the ranks of
    its run.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            files = [os.readlink(link) for link in (entry / "fd").iterdir()] if entry.name != str(os.getpid()) else []
        except OSError:  # ended while we looked
            continue
        if any(str(folder) in text for text in (command, *files)):
            found.append(command)
    return found
