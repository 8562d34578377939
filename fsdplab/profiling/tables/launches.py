"""How far ahead of the device the host ran: the delay from launch to start, and how much was queued.

As in HTA: the delay is from the end of the launching call to the start of the work, and the queue is what was launched
on a stream and had not started. A queue that is empty whenever work is launched says that the host is the bottleneck;
kernels shorter than the call that launches them say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fsdplab.common.sizes import seconds
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import COMMUNICATION, COPY, KERNEL, Work, work_in

_COLUMNS = (
    Column("stream", "stream"), Column("launches", "launches a step", "count"),
    Column("delay_median_ns", "delay, median", "ns"), Column("delay_p95_ns", "delay, 95th percentile", "ns"),
    Column("short_kernels", "shorter than their launch", "share"),
    Column("queue_mean", "queued, mean", "count"), Column("queue_most", "queued, most", "count"),
    Column("queue_empty", "launched into an empty queue", "share"),
)  # fmt: skip
_HOST_BOUND = 0.5  # part of launches into an empty queue from which on the host sets the pace


def launches(trace: Work | str | Path, *, comm_patterns: Sequence[str] = ()) -> Table:
    """One row a stream of the device, the busiest first; no rows for a trace of CPU ranks. Raises TraceError.

    A kernel that starts 40 us after its launching call of 5 us began has a delay of 35 us.
    """
    work = work_in(trace, comm_patterns)
    rows = sorted(_rows(work), key=lambda row: -row["launches"])
    return Table("launches", "Launches", _sentence(work, rows), _COLUMNS, tuple(rows))


def _rows(work: Work) -> list[Row]:
    found, calls = work.found, work.found.launched_by[work.rows]
    launched = work.of_kind(KERNEL, COMMUNICATION, COPY) & (calls >= 0)
    rows = []
    streams = np.array([found.threads[thread][1] for thread in found.thread[work.rows].tolist()], dtype=object)
    for stream in dict.fromkeys(streams[launched].tolist()):
        mine = launched & (streams == stream)
        call, start, end = calls[mine], found.start[work.rows[mine]], found.end[work.rows[mine]]
        delay = np.maximum(0, start - found.end[call])
        queued, mean = _queue(found.start[call], start)
        rows.append({
            "stream": str(stream), "launches": len(start) / work.steps,
            "delay_median_ns": float(np.median(delay)), "delay_p95_ns": float(np.percentile(delay, 95)),
            "short_kernels": float(np.mean(end - start < found.end[call] - found.start[call])),
            "queue_mean": mean, "queue_most": int(queued.max()), "queue_empty": float(np.mean(queued == 1)),
        })  # fmt: skip
    return rows


def _queue(calls: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, float]:
    """How many were queued right after each launch, itself included, and the mean over time; the first call comes
    before the first start.
    """
    calls, starts = np.sort(calls), np.sort(np.maximum(starts, calls))
    queued = np.searchsorted(calls, calls, side="right") - np.searchsorted(starts, calls, side="left")
    lasted = max(int(starts[-1] - calls[0]), 1)
    return queued, float((starts - calls).sum() / lasted)


def _sentence(work: Work, rows: Sequence[Row]) -> str:
    if not work.of_kind(KERNEL, COMMUNICATION, COPY).any():
        return "This trace has no work of a device: on CPU ranks the host itself computes, and launches nothing."
    if not rows:
        return "The trace does not show which call launched what: it has no correlation numbers."
    busiest = rows[0]
    pace = (
        "the host sets the pace (compile, use CUDA graphs, or give each launch more work)"
        if busiest["queue_empty"] >= _HOST_BOUND
        else "the host runs ahead, as it should"
    )
    return (
        f"On stream {busiest['stream']} work starts {seconds(busiest['delay_median_ns'] / 1e9)} after its launch"
        f" (median), and {busiest['queue_empty']:.0%} of launches found an empty queue: {pace}."
    )
