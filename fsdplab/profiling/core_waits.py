"""When a rank's thread waited for a core: what a busy machine costs, measured where the engine's ranges begin and end.

A thread that is ready but gets no core looks in a trace like one that works. Linux counts how long each thread has
waited on the run queue; read at two instants, the difference is the wait between them. Its place is not known, so it
is put at the end: within one range, or between two, the rank does one kind of thing.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals

_LEAST_NS = 10_000  # a wait that is no longer is the usual switch between threads


class CoreWaitLog:
    """Notes how long the calling thread has waited for a core so far; does nothing where the system does not tell."""

    def __init__(self) -> None:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._file = os.open(path, os.O_RDONLY) if path.exists() else None
        self._notes: list[tuple[int, int]] = []

    def note(self) -> None:
        """The present instant ends what went on before it."""
        if self._file is not None:
            # /proc's schedstat: ns on a core, ns waiting for one, times that it ran
            self._notes.append((time.time_ns(), int(os.pread(self._file, 64, 0).split()[1])))

    def close(self) -> Intervals:
        """All waits so far, absolute ns, in order."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return waits_between(self._notes)


class _Opened(threading.local):
    """The file of the calling thread, and the process that opened it: a forked one reads its own."""

    process = 0
    file = -1


_opened = _Opened()


def thread_waited_ns() -> int:
    """For how long the calling thread has waited for a core so far; 0 where the system does not tell."""
    try:
        if _opened.process != os.getpid():
            _opened.process, _opened.file = os.getpid(), os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        return int(os.pread(_opened.file, 64, 0).split()[1])
    except OSError:
        return 0


def waits_between(notes: list[tuple[int, int]]) -> Intervals:
    """Waits from (instant, waited so far): each at the end of the stretch between two notes.

    >>> waits_between([(0, 5_000), (100_000, 5_000), (300_000, 65_000)]).tolist()
    [[240000, 300000]]
    """
    if len(notes) < 2:
        return EMPTY
    instants, waited = np.array(notes, dtype=np.int64).T
    # the kernel's clock and ours differ a little: a wait is no longer than its stretch
    lasted = np.minimum(np.diff(waited), np.diff(instants))
    spans = np.stack([instants[1:] - lasted, instants[1:]], axis=1)
    return spans[lasted >= _LEAST_NS]
