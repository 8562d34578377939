"""Reads a rank's CPU time, and how long it waited for a core: is a step's time the strategy's or the machine's?

A rank lacks a core while one of its threads waits for one and none of its threads has one. Linux counts for each
thread how long it ran and how long it waited on the run queue (/proc/self/task/*/schedstat), not when. So a wait is
counted as far as the other threads' running cannot have filled it: that is the least time for which the rank lacked a
core. A thread that sleeps in a collective neither runs nor waits. The threads that compute side by side with the
thread that waits (`pool`, as many as PyTorch uses) fill nothing: each of them needs a core of its own.

Measured on two cores with gpt-20m and two ranks: 1 - wait / step of the worst rank, quiet and beside six processes that
compute, and what the main thread's wait alone gives.

    engine           quiet   busy   main thread alone, quiet
    lab              0.99    0.31   0.99
    lab over gloo    0.99    0.29   0.81
    torch-ddp        0.98    0.25   0.85
    torch-fsdp2      1.00    0.46   0.95

gloo's own threads compete with the main thread, also on a quiet machine: hence the last column is not the definition.
Behind a link of 200 Mbit/s, where ranks sleep for nine tenths of a step, it is 1.00. Four ranks on two cores have 0.5:
they lack cores too. A reading takes about 0.05 ms.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_TASKS = "/proc/self/task"
Threads = dict[str, tuple[int, int]]  # thread -> ns on a core, ns waiting for one


@dataclass(frozen=True)
class CoreTime:
    """What this process has used since it began: CPU seconds, and its threads where the system counts them."""

    cpu_s: float
    threads: Threads | None


def core_time() -> CoreTime:
    """Return a reading of now; two of them are the arguments of `waited_s`."""
    return CoreTime(time.process_time(), _threads(_TASKS))


def waited_s(before: CoreTime, after: CoreTime, pool: int = 1) -> float | None:
    """Return the least seconds between two readings for which the process lacked a core; None where the system does not
    count.

    `pool`: how many threads compute side by side. One thread that waited for 3 s while another ran for 1 s: 2.0.
    """
    if before.threads is None or after.threads is None:
        return None
    started = before.threads
    spans = {
        thread: (ran - started.get(thread, (0, 0))[0], waited - started.get(thread, (0, 0))[1])
        for thread, (ran, waited) in after.threads.items()
    }
    # A thread waited 3 s and ran 0 s, all threads ran 1 s, pool 1: the others can have filled 1 - 1 * 0 = 1 s of the
    # wait, so for 2 s the rank lacked a core.
    running = sum(ran for ran, _ in spans.values())
    return max(0, *(waited - max(0, running - pool * ran) for ran, waited in spans.values())) / 1e9


def _threads(folder: str) -> Threads | None:
    """Return the counters of each thread; None where the kernel has none, or has them switched off (all are 0)."""
    found: Threads = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        try:
            with open(f"{folder}/{name}/schedstat", "rb", buffering=0) as file:
                ran, waited, *_ = file.read().split()
        except (OSError, ValueError):  # a thread that has just ended, or a kernel without the file
            continue
        found[name] = int(ran), int(waited)
    return found if any(ran for ran, _ in found.values()) else None
