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
from fsdplab.profiling.traces.chrome import LATEST_NS

_COLUMNS = (
    Column("kind", "kind"),
    Column("name", "name"),
    Column("shapes", "given"),
    Column("unit", "unit"),
    Column("time_ns", "time a step", "ns"),
    Column("count", "calls a step", "count"),
    Column("mean_ns", "time a call", "ns"),
    Column("share", "share", "share"),
)


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
    shown = {"unit": by_unit, "shapes": by_shape}
    columns = tuple(column for column in _COLUMNS if shown.get(column.key, True))
    return Table("operators", "Operators and kernels", _sentence(rows), columns, tuple(rows))


def _sentence(rows: Sequence[Row]) -> str:
    """The kernel, or without a device the operator, that takes longest."""
    kind = KERNEL if any(row["kind"] == KERNEL for row in rows) else OPERATOR
    most = next((row for row in rows if row["kind"] == kind), None)
    if most is None:
        return "Nothing was computed in the profiled steps."
    unit = f" of {most['unit']}" if most["unit"] else ""
    return (
        f"{short(most['name'])}{unit} takes {most['share']:.0%} of the {kind}s' time:"
        f" {seconds(most['time_ns'] / 1e9)} a step in {most['count']:.3g} calls."
    )


def _rows(work: Work, by_unit: bool, by_shape: bool) -> list[Row]:
    """A row for each kind and name, and where asked for each unit and shape."""
    # what tells rows apart, as numbers; what was not asked for is 0 everywhere
    unit = work.unit if by_unit else np.zeros_like(work.unit)
    numbers = {"": 0}
    shape: np.ndarray | list[int] = np.zeros_like(work.unit)
    if by_shape:
        shape = [numbers.setdefault(given, len(numbers)) for given in work.shapes]
    shapes = list(numbers)

    # a column of `keys` an element, and of `groups` each different one; `group_of` says which one an element has
    keys = np.stack([work.kind, work.found.name[work.rows], unit, shape])
    groups, group_of = np.unique(keys, axis=1, return_inverse=True)
    group_of = group_of.reshape(-1)  # some versions of numpy give it two dimensions
    own_ns = np.bincount(group_of, work.own_ns).tolist()
    counts = np.bincount(group_of).tolist()
    ns_of_kind = np.bincount(work.kind, work.own_ns, minlength=len(KINDS)).tolist()

    rows = []
    for group in sorted(range(len(own_ns)), key=lambda group: -own_ns[group]):
        kind, name, unit_number, shape_number = groups[:, group].tolist()
        rows.append(
            {
                "kind": KINDS[kind],
                "name": work.found.names[name],
                "shapes": dimensions(shapes[shape_number]),
                "unit": work.units[unit_number] if by_unit else "",
                "time_ns": own_ns[group] / work.steps,
                "count": counts[group] / work.steps,
                "mean_ns": own_ns[group] / counts[group],
                "share": own_ns[group] / ns_of_kind[kind] if ns_of_kind[kind] else 0.0,
            }
        )
    return rows


_LISTED = 2  # tensors of one shape after each other that are listed one by one


def dimensions(shapes: str) -> str:
    """The tensors that an operator was given: `dimensions('[[[4, 8], [], [8, 2]], null]')` is `4x8, 8x2`; of the same
    shape after each other `3 of 4x8`.
    """
    if not shapes:
        return ""
    tensors = []
    for dims in json.loads(shapes)[0]:
        if isinstance(dims, list) and dims:  # a number has no dimensions
            tensors.append(_tensor(dims))
    texts: list[str] = []
    for text, alike in groupby(tensors):
        many = len(list(alike))
        if many > _LISTED:
            texts.append(f"{many} of {text}")
        else:
            texts += [text] * many
    return ", ".join(texts)


def _tensor(dims: list[Any]) -> str:
    """`4x8`; a list of tensors by their number."""
    if isinstance(dims[0], list):
        return f"{len(dims)} tensors"
    return "x".join(map(str, dims))


def short(name: str, most: int = 60) -> str:
    """A kernel's name without its template arguments and parameters, at most `most` characters:
    `void at::native::add<float>(int)` is `at::native::add`.
    """
    # "at::native::add<float>(int)" up to its first bracket; the one that a name begins with is kept
    plain = name.removeprefix("void ")
    for opening in ("(", "<"):
        if opening in plain[1:]:
            plain = plain.split(opening)[0]
    if len(plain) <= most:
        return plain
    return f"{plain[: most - 1]}…"


# ---- how far ahead of the device the host ran: the delay from launch to start, and how much was queued
#
# As in HTA: the delay is from the end of the launching call to the start of the work, and the queue is what was
# launched on a stream and had not started. A queue that is empty whenever work is launched says that the host is the
# bottleneck; kernels shorter than the call that launches them say why.


_OF_STREAMS = (
    Column("stream", "stream"),
    Column("launches", "launches a step", "count"),
    Column("delay_median_ns", "delay, median", "ns"),
    Column("delay_p95_ns", "delay, 95th percentile", "ns"),
    Column("short_kernels", "shorter than their launch", "share"),
    Column("queue_mean", "queued, mean", "count"),
    Column("queue_most", "queued, most", "count"),
    Column("queue_empty", "launched into an empty queue", "share"),
)
_HOST_BOUND = 0.5  # part of launches into an empty queue from which on the host sets the pace


def launches(trace: Work | str | Path, *, comm_patterns: Sequence[str] = ()) -> Table:
    """One row a stream of the device, the busiest first; no rows for a trace of CPU ranks. Raises TraceError.

    A kernel that starts 40 us after its launching call of 5 us began has a delay of 35 us.
    """
    work = work_in(trace, comm_patterns)
    rows = sorted(_streams(work), key=lambda row: -row["launches"])
    return Table("launches", "Launches", _of_launches(work, rows), _OF_STREAMS, tuple(rows))


def _streams(work: Work) -> list[Row]:
    """A row for each stream on which the trace shows launched work."""
    events = work.found
    calls = events.launched_by[work.rows]
    is_launched = work.of_kind(KERNEL, COMMUNICATION, COPY) & (calls >= 0)
    # two devices of one process have streams of equal numbers, each with a queue of its own
    streams = events.thread[work.rows]
    devices = {events.threads[stream][0] for stream in streams[is_launched].tolist()}
    rows = []
    for stream in dict.fromkeys(streams[is_launched].tolist()):
        device, name = events.threads[stream]
        of_stream = is_launched & (streams == stream)
        work_of_stream = work.rows[of_stream]
        # the kernels of a CUDA graph share one call, and are one piece of work
        calls_of_stream, place = np.unique(calls[of_stream], return_inverse=True)
        started: np.ndarray = np.full(len(calls_of_stream), LATEST_NS)
        np.minimum.at(started, place, events.start[work_of_stream])
        ended: np.ndarray = np.full(len(calls_of_stream), -LATEST_NS)
        np.maximum.at(ended, place, events.end[work_of_stream])
        called = events.start[calls_of_stream]
        returned = events.end[calls_of_stream]
        # work may start before its call returns: no delay
        delay = np.maximum(0, started - returned)
        is_short = ended - started < returned - called
        queued, queue_mean = _queue(called, started)
        rows.append(
            {
                "stream": f"{name} of device {device}" if len(devices) > 1 else str(name),
                "launches": len(calls_of_stream) / work.steps,
                "delay_median_ns": float(np.median(delay)),
                "delay_p95_ns": float(np.percentile(delay, 95)),
                "short_kernels": float(np.mean(is_short)),
                "queue_mean": queue_mean,
                "queue_most": int(queued.max()),
                "queue_empty": float(np.mean(queued == 1)),
            }
        )
    return rows


def _queue(calls: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, float]:
    """How many were queued right after each launch, itself included, and the mean over time; the first call comes
    before the first start.

    Launched at 0, 10 and 20, started at 15, 30 and 50: 1, 2 and 2 are queued, in 50 ns 65/50 on average.
    """
    starts = np.sort(np.maximum(starts, calls))
    calls = np.sort(calls)
    launched = np.searchsorted(calls, calls, side="right")
    started = np.searchsorted(starts, calls, side="left")
    lasted = max(int(starts[-1] - calls[0]), 1)
    waited = (starts - calls).sum()  # of all together: however they overtake each other, the sum is the same
    return launched - started, float(waited / lasted)


def _of_launches(work: Work, rows: Sequence[Row]) -> str:
    """Whether the host sets the pace, on the stream with most launches."""
    if not work.of_kind(KERNEL, COMMUNICATION, COPY).any():
        return "This trace has no work of a device: on CPU ranks the host itself computes, and launches nothing."
    if not rows:
        return "The trace does not show which call launched what: it has no correlation numbers."
    busiest = rows[0]
    # the device always finds the next work queued
    pace = "the host runs ahead, as it should"
    if busiest["queue_empty"] >= _HOST_BOUND:
        pace = "the host sets the pace (compile, use CUDA graphs, or give each launch more work)"
    return (
        f"On stream {busiest['stream']} work starts {seconds(busiest['delay_median_ns'] / 1e9)} after its launch"
        f" (median), and {busiest['queue_empty']:.0%} of launches found an empty queue: {pace}."
    )
