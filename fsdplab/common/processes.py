"""Processes that may end at any moment: signals to them, whether they are gone, and what they used.

Nothing here raises because a process has ended meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has none, and its SIGTERM cannot be refused


def send(pid: int, which: signal.Signals) -> None:
    """Send a signal to a process, which may have ended meanwhile."""
    try:
        os.kill(pid, which)
    except (ProcessLookupError, PermissionError):  # a process of another user may have inherited the number
        pass


def send_group(pid: int, which: signal.Signals) -> None:
    """Send a signal to a process group, which may be gone, or to its leader where it forms none yet."""
    try:
        os.killpg(pid, which)
    except (ProcessLookupError, PermissionError):  # macOS reports "not permitted" for a zombie's group
        send(pid, which)


def gone(pid: int) -> bool:
    """Whether no such process runs any more; a zombie, which only waits to be collected, is gone."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # a process of another user has inherited the number
        return True
    return state(pid)[0] in ("", "Z", "X") if _PROC else False


def state(pid: int) -> tuple[str, int]:
    """(state letter, parent) of a process by /proc; ("", 0) where there is none, also where it is just collected."""
    fields = _fields(pid)
    return (fields[0], int(fields[1])) if fields else ("", 0)


def processor_seconds(pid: int) -> float | None:
    """Processor time that a process and all that it has started have used so far; None where that is unknown."""
    found = [fields for each in (pid, *descendants(pid)) if (fields := _fields(each))]
    # its own and the kernel's for it, then the same of its children that have ended
    ticks = sum(int(each) for fields in found for each in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK") if found else None


def resident_bytes(pid: int) -> int | None:
    """Memory that a process holds, of pages that it shares with others its part; None where that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended, or the system does not say
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs; none where /proc is missing."""
    parents = {each: state(each)[1] for each in _all()}
    found: list[int] = []
    latest = {pid}
    while latest := {each for each, parent in parents.items() if parent in latest}:
        found += sorted(latest)
    return found


def end_as_if_by(which: int) -> NoReturn:
    """End this process by a signal, so that who waits for it sees which; after `sys.exit` it would see a number."""
    signal.signal(which, signal.SIG_DFL)
    os.kill(os.getpid(), which)
    os._exit(128 + which)


def name_of(which: int) -> str:
    """`"SIGKILL"` for 9; a number without a name is `"signal 40"`."""
    names = {int(known): known.name for known in signal.Signals}
    return names.get(which, f"signal {which}")


def _fields(pid: int) -> list[str]:
    """/proc's line on a process, from its state on; empty where there is none, also where it is just collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _all() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()] if _PROC else []


_PROC = Path("/proc/self/stat").exists()
