"""When a profile may be stopped: once gloo's threads have noted the ends of their collectives.

A gloo thread tells the waiting rank that a collective is done, and then notes its end in the profile (torch 2.13,
ProcessGroupGloo.cpp: `finishWorkGloo` completes the future first, which DDP waits for). A busy machine may stop it in
between for longer than the rest of a step takes, and a profile that is stopped then is taken apart while it is written.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_AT_MOST_S = 1.0


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
