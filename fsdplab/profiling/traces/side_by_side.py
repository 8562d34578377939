"""The traces of several ranks, read side by side on the cores there are.

Reading is Python's own work, so it takes processes. They are fresh ones and no forks, because whoever calls may have
threads (a notebook has), and they are started by name, so that the caller's script needs no guard. A process costs two
seconds of importing; small traces are read one after the other.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias

from fsdplab.common.machine import cores
from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.overlap import TraceAnalysis, analyse_trace

_SMALL = 24_000_000  # bytes of all traces, unpacked: what a process would read while it is started
_PACKED = 10  # a gzipped trace is about this much larger than its file

Progress = Callable[[int, int, Path], None]  # traces read, of how many, the one just read


Reading: TypeAlias = tuple[Path, dict[str, Any]]  # a trace, and what else `analyse_trace` is told of it


def read_all(
    readings: Sequence[Reading], progress: Progress | None = None, processes: int | None = None
) -> list[TraceAnalysis]:
    """All traces, in the given order. `processes`: how many at once; by default as many as there are cores, and one for
    traces that are small together. `progress` is called after each trace where they are not small.

    Raises the first TraceError or AccountingError. `read_all([(Path("rank0.json"), {}), (Path("rank1.json"), {})])`.
    """
    is_small = _unpacked_bytes(readings) < _SMALL
    if not processes:
        processes = 1 if is_small else min(len(readings), cores())
    # in this process: another one takes longer to start
    if processes == 1 and is_small:
        return [analyse_trace(path, **options) for path, options in readings]
    return _in_processes(readings, progress, processes)


def _unpacked_bytes(readings: Sequence[Reading]) -> int:
    """About how large all traces are, unpacked."""
    total = 0
    for path, _ in readings:
        if path.exists():
            packed = _PACKED if path.suffix == ".gz" else 1
            total += packed * path.stat().st_size
    return total


def _in_processes(readings: Sequence[Reading], progress: Progress | None, many: int) -> list[TraceAnalysis]:
    """Read so many traces at once, each in a process of its own."""
    analyses: dict[int, TraceAnalysis] = {}
    readers = _Readers()
    with ThreadPoolExecutor(many) as pool:
        waiting = {pool.submit(readers.read, reading): index for index, reading in enumerate(readings)}
        try:
            for done in as_completed(waiting):
                index = waiting[done]
                analyses[index] = done.result()
                if progress:
                    progress(len(analyses), len(readings), readings[index][0])
        except BaseException:  # the first error, or a signal, ends the reading
            readers.end()
            pool.shutdown(cancel_futures=True)
            raise
    # they end in any order, and are given in that of the readings
    return [analyses[index] for index in range(len(readings))]


class _Readers:
    """The processes that read a trace each, started from several threads, and ended all at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._ended = False

    def read(self, reading: Reading) -> TraceAnalysis:
        """Read one trace in a process of its own; TraceError where that is ended, or ends before it has answered."""
        with self._lock:
            if self._ended:
                raise TraceError(f"{reading[0]} was not read: another trace could not be.")
            process = subprocess.Popen(
                run_of("fsdplab.profiling.traces.side_by_side"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=with_this_checkout(os.environ),
            )
            self._started.append(process)
        printed, errors = process.communicate(pickle.dumps(reading))
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines()
            raise TraceError(
                f"{reading[0]} could not be read: its process ended with status {process.returncode}"
                f" ({said[-1] if said else 'it said nothing'}); free memory, or give fewer traces at once."
            )
        answer = pickle.loads(printed)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Kill those that still read, and start no more: a trace of a gigabyte takes a minute."""
        with self._lock:
            self._ended = True
            for process in self._started:
                process.kill()


def main() -> None:
    """Read the trace that stdin names, write its analysis, or the error, to stdout."""
    gc.disable()  # the process ends with its answer, and millions of events hold no cycles
    path, options = pickle.load(sys.stdin.buffer)
    answer: TraceAnalysis | Exception
    try:
        answer = analyse_trace(path, **options)
    except (AccountingError, TraceError) as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    main()
