"""All ranks in one trace: one file for Perfetto or chrome://tracing, on one clock, each rank a process of its own.

Two ranks' files cannot simply be joined: they use the same ids for different things, and each counts time from a base
of its own. Here every process and flow gets a number that no other rank has, processes are named `rank k`, and times
count from the first event of all. Events stream through, so the size of the files does not matter.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fsdplab.profiling.traces.chrome import ChromeTrace, as_trace_error, nanoseconds

_FLOWS = ("s", "t", "f")
_PROCESSES = 1000  # a rank's processes: the host's, one a GPU, the profiler's own


def merge_traces(
    traces: Mapping[int, str | Path],
    file: str | Path,
    *,
    ledger: Sequence[dict[str, Any]] = (),
    provenance: Mapping[str, str] | None = None,
) -> Path:
    """Write the traces of several ranks (rank -> file) into one (gzipped where its name ends in .gz); return its path.

    An emulated link moves nothing that a profiler could see: its passages come from the record's `ledger`, each rank's
    as a process of its own. `provenance` (quantity -> measured, emulated, simulated) is written beside the events.
    Raises TraceError for a damaged trace and ValueError for none at all. Rank 1 whose clock began 5 us after rank 0's
    shows its events 5 us later.
    """
    if not traces:
        raise ValueError(
            "merge_traces got no traces; expected rank -> file, such as {0: 'rank0.pt.trace.json.gz'}. Profile the run"
            " first."
        )
    ranks = {rank: _clocked(path) for rank, path in sorted(traces.items())}
    origin = min(first for _, _, first, _ in ranks.values())
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") if file.suffix == ".gz" else file.open("w") as out:
        out.write(
            f'{{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": {origin}, "mergedRanks":'
            f' {list(ranks)}, "provenance": {json.dumps(dict(provenance or {}))}, "traceEvents": [\n'
        )
        events = [_renamed(rank, trace, base - origin) for rank, (trace, base, _, _) in ranks.items()]
        passages = [_passages(rank, ledger, first, last, origin) for rank, (_, _, first, last) in ranks.items()]
        for index, event in enumerate(chain(*events, *passages)):
            out.write((",\n" if index else "") + json.dumps(event))
        out.write("\n]}\n")
    return file


def _clocked(path: str | Path) -> tuple[ChromeTrace, int, int, int]:
    """A trace, the base of its clock, and its earliest event and the last end in absolute ns."""
    trace, first, last = ChromeTrace(path), None, 0
    with as_trace_error(trace.path):
        for event in trace:
            if event.get("ph") == "X":
                start = nanoseconds(event["ts"])
                first = start if first is None else min(first, start)
                last = max(last, start + nanoseconds(event.get("dur", 0)))
    return trace, trace.base_ns, trace.base_ns + (first or 0), trace.base_ns + last


def _passages(
    rank: int, ledger: Sequence[dict[str, Any]], first: int, last: int, origin: int
) -> Iterator[dict[str, Any]]:
    """What the emulated link carried for this rank while it was profiled."""
    mine = [row for row in ledger if row["rank"] == rank and row["emulated"]]
    mine = [row for row in mine if row["end_ns"] > first and row["start_ns"] < last]
    process = _PROCESSES * rank + _PROCESSES - 1
    if mine:
        yield from _names(rank, "the emulated link", process)
    for row in mine:
        yield {
            "ph": "X", "cat": "emulated", "name": f"{row['kind']} ({row['unit']}), emulated", "pid": process,
            "tid": row["kind"], "ts": (row["start_ns"] - origin) / 1000,
            "dur": (row["end_ns"] - row["start_ns"]) / 1000,
            "args": {"bytes": row["logical_bytes"], "phase": row["phase"], "step": row["step"]},
        }  # fmt: skip


def _renamed(rank: int, trace: ChromeTrace, shift: int) -> Iterator[dict[str, Any]]:
    """A rank's events with processes and flows of its own numbers."""
    processes: dict[Any, int] = {}
    with as_trace_error(trace.path):
        for event in trace:
            pid = event.get("pid", "")
            if pid not in processes:
                processes[pid] = _PROCESSES * rank + len(processes)
                yield from _names(rank, pid, processes[pid])
            if event.get("name") in ("process_name", "process_sort_index"):
                continue
            event["pid"] = processes[pid]
            if "ts" in event:
                event["ts"] = (nanoseconds(event["ts"]) + shift) / 1000
            if event.get("ph") in _FLOWS and "id" in event:
                event["id"] = f"{rank}.{event['id']}"
            yield event


def _names(rank: int, old: Any, new: int) -> Iterator[dict[str, Any]]:
    detail = "" if new % _PROCESSES == 0 else f" ({old})"
    yield {"ph": "M", "name": "process_name", "pid": new, "tid": 0, "args": {"name": f"rank {rank}{detail}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": new, "tid": 0, "args": {"sort_index": new}}
