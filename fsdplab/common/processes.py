"""Processes that may end at any moment: signals to them, whether they are gone, and what they used.

Nothing here raises because a process has ended meanwhile. Linux tells of processes in /proc; where there is none, as
on macOS, the command `ps` is asked, which takes some milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from fsdplab.common.machine import output_of

# by which a terminal, a shell or a scheduler asks a process to end
ASKED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
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


@contextmanager
def asked_to_end(handler: Callable[[int, FrameType | None], None], restore: bool = True) -> Iterator[None]:
    """Send the signals that ask a process to end to `handler` inside.

    Afterwards, if `restore`, they go to whom they went before.
    A signal that whoever started this process ignores (`nohup`) stays ignored.
    """
    taken = [number for number in ASKED if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        if restore:
            for number, earlier in before.items():
                signal.signal(number, earlier)


@contextmanager
def kept_waiting() -> Iterator[None]:
    """Keep the signals that ask a process to end waiting inside, also for a process that is started here.

    They wait for that process until it calls `wait_no_longer`. Windows has no such waiting.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_no_longer() -> None:
    """Take the signals from here on that whoever started this process has kept waiting."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)


class Asked(Exception):
    """This process was asked to end, by SIGTERM."""


def raise_when_asked() -> None:
    """Make SIGTERM an exception, `Asked`, from here on, wherever this process is."""

    def leave(*_: object) -> NoReturn:
        raise Asked

    signal.signal(signal.SIGTERM, leave)


def interrupt_by(*which: signal.Signals) -> None:
    """Make these signals Ctrl-C to this process from here on, also those that whoever started it ignores."""
    for number in which:
        signal.signal(number, signal.default_int_handler)


def gone(pid: int) -> bool:
    """Return whether no such process runs any more; a zombie, which only waits to be collected, is gone."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # a process of another user has inherited the number
        return True
    if not _PROC and not shutil.which("ps"):
        return False
    return state(pid)[0] in ("", "Z", "X")


def state(pid: int) -> tuple[str, int]:
    """Return (state letter, parent) of a process; ("", 0) where there is none, also where it is just collected."""
    seen = _look(pid)
    return (seen.state, seen.parent) if seen else ("", 0)


def processor_seconds(pid: int) -> float | None:
    """Return the processor time that a process and all that it has started have used so far; None where it is unknown.

    Where `ps` tells, that of processes which have ended is not among it.
    """
    seen = _all()
    if pid not in seen:
        return None
    return sum(seen[number].used_s for number in (pid, *_below(pid, seen)))


def resident_bytes(pid: int) -> int | None:
    """Return the memory that a process holds, of pages that it shares with others its part; None where unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended, or the system does not say
        return None
    for line in lines:
        if line.startswith("Pss:"):  # proportional set size, in kB
            return 1024 * int(line.split()[1])
    return None


def descendants(pid: int) -> list[int]:
    """List the processes that a process has started, and theirs; none where the system does not tell."""
    return _below(pid, _all())


def end_as_if_by(which: int) -> NoReturn:
    """End this process by a signal, so that who waits for it sees which; after `sys.exit` it would see a number."""
    signal.signal(which, signal.SIG_DFL)
    os.kill(os.getpid(), which)
    os._exit(128 + which)


def name_of(which: int) -> str:
    """Name a signal: `"SIGKILL"` for 9; a number without a name is `"signal 40"`."""
    names = {int(known): known.name for known in signal.Signals}
    return names.get(which, f"signal {which}")


class _Seen(NamedTuple):
    state: str
    parent: int
    used_s: float  # processor time


def _look(pid: int) -> _Seen | None:
    """A process as it is now; None where there is none, also where it is just collected."""
    if not _PROC:
        return _by_ps("-p", str(pid)).get(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    # its own ticks and the kernel's for it, then the same of its children that have ended
    ticks = sum(map(int, fields[11:15]))
    return _Seen(fields[0], int(fields[1]), ticks / os.sysconf("SC_CLK_TCK"))


def _all() -> dict[int, _Seen]:
    if not _PROC:
        return _by_ps("-A")
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            seen = _look(int(name))
            if seen is not None:  # it may have ended since
                processes[int(name)] = seen
    return processes


def _below(pid: int, seen: dict[int, _Seen]) -> list[int]:
    """The processes that a process has started, and theirs, generation by generation."""
    below: list[int] = []
    latest = {pid}
    while latest:
        latest = {number for number, process in seen.items() if process.parent in latest}
        below += sorted(latest)
    return below


def _by_ps(*which: str) -> dict[int, _Seen]:
    """What `ps` says of some processes; nothing where it is not installed."""
    columns = ("-o", "pid=", "-o", "ppid=", "-o", "stat=", "-o", "time=")
    processes = {}
    for line in output_of("ps", *which, *columns).splitlines():
        pid, parent, letters, used = line.split()
        processes[int(pid)] = _Seen(letters[0], int(parent), _seconds(used))
    return processes


def _seconds(used: str) -> float:
    """Read a time of `ps`: days, hours, minutes and seconds.

    >>> _seconds("0:01.25"), _seconds("1-00:01:02")
    (1.25, 86462.0)
    """
    days, _, clock = used.rpartition("-")
    total = 0.0
    for part in clock.replace(",", ".").split(":"):
        total = 60 * total + float(part)
    return 86400 * int(days or 0) + total


_PROC = Path("/proc/self/stat").exists()
