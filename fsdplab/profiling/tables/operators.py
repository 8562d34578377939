"""Tables of one trace's work: where the time of operators and kernels went, and launches.

Time is self time a step: an operator without the operators that it called (HTA and TraceLens have the same column), a
kernel as long as it ran. Shares are of all work of the same kind: communication's kernels wait for peers, and would
make every other share small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fsdplab.common.sizes import seconds
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import COMMUNICATION, COPY, KERNEL, KINDS, OPERATOR, Work, work_in

_COLUMNS = (
    Column("kind", "kind"), Column("name", "name"), Column("shapes", "given"), Column("unit", "unit"),
    Column("time_ns", "time a step", "ns"),
    Column("count", "calls a step", "count"), Column("mean_ns", "time a call", "ns"), Column("share", "share", "share"),
)  # fmt: skip


def operators(
    trace: Work | str | Path, *, by_unit: bool = False, by_shape: bool = False, comm_patterns: Sequence[str] = ()
) -> Table:
    """Operators of the host and kernels of the device of one rank's trace by their time a step, longest first.

    `by_unit`, `by_shape`: a row for each unit in which a name ran ("" is none), for each shape that it was given.
    Raises TraceError. Of two steps with 48 calls of `aten::mm` of 1 ms each:
    `{"name": "aten::mm", "time_ns": 24e6, "count": 24, ...}`.
    """
    work = work_in(trace, comm_patterns, shapes=by_shape)
    rows = _rows(work, by_unit, by_shape)
    kind = KERNEL if any(row["kind"] == KERNEL for row in rows) else OPERATOR
    most = next((row for row in rows if row["kind"] == kind), None)
    unit = f" of {most['unit']}" if most and most["unit"] else ""
    sentence = "Nothing was computed in the profiled steps." if most is None else (
        f"{short(most['name'])}{unit} takes {most['share']:.0%} of the {kind}s' time:"
        f" {seconds(most['time_ns'] / 1e9)} a step in {most['count']:.3g} calls."
    )  # fmt: skip
    shown = {"unit": by_unit, "shapes": by_shape}
    columns = tuple(column for column in _COLUMNS if shown.get(column.key, True))
    return Table("operators", "Operators and kernels", sentence, columns, tuple(rows))


def _rows(work: Work, by_unit: bool, by_shape: bool) -> list[Row]:
    nothing, numbers = np.zeros_like(work.unit), {"": 0}
    shape = [numbers.setdefault(each, len(numbers)) for each in work.shapes] if by_shape else nothing
    keys = np.stack([work.kind, work.found.name[work.rows], work.unit if by_unit else nothing, shape])
    shapes = list(numbers)
    groups, index = np.unique(keys, axis=1, return_inverse=True)
    index = index.reshape(-1)
    own, counts = np.bincount(index, work.own_ns).tolist(), np.bincount(index).tolist()
    of_kind = np.bincount(work.kind, work.own_ns, minlength=len(KINDS)).tolist()
    rows = []
    for at in sorted(range(len(own)), key=lambda at: -own[at]):
        kind, name, unit, given = groups[:, at].tolist()
        rows.append({
            "kind": KINDS[kind], "name": work.found.names[name], "shapes": dimensions(shapes[given]),
            "unit": work.units[unit] if by_unit else "",
            "time_ns": own[at] / work.steps, "count": counts[at] / work.steps, "mean_ns": own[at] / counts[at],
            "share": own[at] / of_kind[kind] if of_kind[kind] else 0.0,
        })  # fmt: skip
    return rows


_LISTED = 2  # tensors of one shape after each other that are listed one by one


def dimensions(shapes: str) -> str:
    """The tensors that an operator was given: `dimensions('[[[4, 8], [], [8, 2]], null]')` is `4x8, 8x2`; of the same
    shape after each other `3 of 4x8`.
    """
    given = json.loads(shapes)[0] if shapes else []
    listed = [_tensor(each) for each in given if isinstance(each, list) and each]
    told: list[str] = []
    for text, alike in groupby(listed):
        many = len(list(alike))
        told += [f"{many} of {text}"] if many > _LISTED else [text] * many
    return ", ".join(told)


def _tensor(dims: list[Any]) -> str:
    """A list of tensors by their number."""
    return f"{len(dims)} tensors" if isinstance(dims[0], list) else "x".join(map(str, dims))


def short(name: str, most: int = 60) -> str:
    """A kernel's name without its template arguments and parameters, at most `most` characters:
    `void at::native::add<float>(int)` is `at::native::add`.
    """
    plain = name.removeprefix("void ")
    plain = plain.split("(")[0] if "(" in plain[1:] else plain
    plain = plain.split("<")[0] if "<" in plain[1:] else plain
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


# ---- how far ahead of the device the host ran: the delay from launch to start, and how much was queued
#
# As in HTA: the delay is from the end of the launching call to the start of the work, and the queue is what was
# launched on a stream and had not started. A queue that is empty whenever work is launched says that the host is the
# bottleneck; kernels shorter than the call that launches them say why.


_OF_STREAMS = (
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
    rows = sorted(_streams(work), key=lambda row: -row["launches"])
    return Table("launches", "Launches", _of_launches(work, rows), _OF_STREAMS, tuple(rows))


def _streams(work: Work) -> list[Row]:
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


def _of_launches(work: Work, rows: Sequence[Row]) -> str:
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
