"""Measures whether a thread beside the loop keeps Python's interpreter busy, and which one it is.

Only one thread at a time runs Python. PyTorch gives the interpreter up in each operator, and gets it back at once
unless another thread runs Python meanwhile: that one keeps it for a whole switch interval, 5 ms. So a loop beside a
thread of pure Python (metrics, logs) is slow everywhere, and its trace shows gaps only. Between two steps the loop
gives the interpreter up a few times here, and looks at how long it takes to get it back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from fsdplab.profiling.core_waits import thread_waited_ns
from fsdplab.sessions.worker.core_share import Threads

_TRIES = 3  # of which the quickest counts: a thread that is busy now and then is in none of them as a rule


class Interpreter:
    """Told after each profiled step, and the one before them: `note`."""

    def __init__(self) -> None:
        self._waits_s: list[float] = []
        self._before: Threads | None = None
        self._ran_ns = Counter[str]()  # of each thread's name

    def note(self, threads: Threads | None) -> None:
        """Look at the interpreter, and at what threads have run since the last time; `threads`: their counters."""
        self._waits_s.append(min(_wait_s() for _ in range(_TRIES)))
        if threads is not None and self._before is not None:
            main = threading.main_thread()
            for thread in threading.enumerate():
                number = str(thread.native_id)
                if thread is not main and number in threads and number in self._before:
                    self._ran_ns[thread.name] += threads[number][0] - self._before[number][0]
        self._before = threads

    def as_report(self) -> dict[str, Any]:
        """Return the wait of each step, and the thread that ran longest, with its seconds a step."""
        steps = max(1, len(self._waits_s) - 1)
        busiest = [(name, ran_ns / 1e9 / steps) for name, ran_ns in self._ran_ns.most_common(1)]
        return {"waits_s": self._waits_s, "busiest": busiest}


def _wait_s() -> float:
    """Give the interpreter up, and return how long it took to get it back, without waiting for a core."""
    began, waited_ns = time.perf_counter(), thread_waited_ns()
    time.sleep(0)
    return time.perf_counter() - began - (thread_waited_ns() - waited_ns) / 1e9
