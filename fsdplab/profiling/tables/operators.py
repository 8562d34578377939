"""Tables of one trace's work: where the time of operators and kernels went, achieved rates, and launches.

Time is self time a step: an operator without the operators that it called (HTA and TraceLens have the same column), a
kernel as long as it ran. Shares are of all work of the same kind: communication's kernels wait for peers, and would
make every other share small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdplab.common.sizes import seconds, three_digits
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import (
    COMMUNICATION,
    COPY,
    KERNEL,
    KINDS,
    OPERATOR,
    Work,
    bytes_of,
    flops_of,
    work_in,
)

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


def dimensions(shapes: str) -> str:
    """The tensors that an operator was given: `dimensions('[[[4, 8], [], [8, 2]], null]')` is `4x8, 8x2`."""
    given = json.loads(shapes)[0] if shapes else []
    return ", ".join(map(_tensor, (each for each in given if isinstance(each, list) and each)))


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


# ---- how fast each unit computed: operations and bytes a second, beside what the device can do
#
# Operations are those of matrix products and attention, from the shapes that their operators were given, over the time
# of all computing of the unit: what the other operators take makes the figure smaller, as it makes the step longer.
# Bytes are those of the tensors that the operators were given, each read once; what they wrote is not in a trace.


_COVERED = 0.9  # part of the time of computing that counted operators must take, for a sentence about all of it
_OF_RATES = (
    Column("unit", "unit"), Column("time_ns", "computing a step", "ns"), Column("flops", "products a step", "GFLOP"),
    Column("flops_per_s", "achieved", "GFLOP/s"), Column("of_flops", "of the peak", "share"),
    Column("bytes_per_s", "bytes given/s", "bytes/s"), Column("of_bytes", "of the memory's", "share"),
)  # fmt: skip


@dataclass(frozen=True)
class DevicePeak:
    """What a device can do: operations and bytes of memory a second (None where it is unknown), and who says so."""

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    source: str = ""


def achieved(work: Work, peak: DevicePeak = DevicePeak()) -> Table:
    """One row a unit, the one that computes longest first; no operations where the trace has no shapes.

    A unit that does 2e9 operations in 10 ms of computing achieves 2e11 a second: a fifth of a device of 1e12.
    """
    mine = work.of_kind(work.computes) & ~work.communicates
    units, spent = work.unit[mine], work.own_ns[mine]
    names, shapes = work.found.name[np.maximum(work.operator, 0)].tolist(), work.shapes
    first = _first_of_operator(work)
    counted = [
        (flops_of(work.found.names[name], shape), bytes_of(work.found.names[name], shape)) if once else (0, 0)
        for name, shape, once in zip(names, shapes, first.tolist())
    ]
    flops, moved = np.array(counted, dtype=np.float64).reshape(-1, 2)[mine].T
    sums = [np.bincount(units, column, minlength=len(work.units)) / work.steps for column in (spent, flops, moved)]
    rows = [_rate(unit, each, peak) for unit, each in zip(work.units, zip(*(column.tolist() for column in sums)))]
    rows = sorted((row for row in rows if row["time_ns"]), key=lambda row: -row["time_ns"])
    notes = (f"The peak: {peak.source}.",) if peak.source else ()
    is_counted = np.array([flops_of(work.found.names[name], shape) > 0 for name, shape in zip(names, shapes)], bool)
    covered = float(work.own_ns[mine & is_counted & (work.operator >= 0)].sum() / work.steps)
    return Table("achieved", "Achieved rates", _of_rates(rows, covered), _OF_RATES, tuple(rows), notes)


def _first_of_operator(work: Work) -> np.ndarray:
    """Which elements stand for their operator: each counts once, though it may have launched several kernels."""
    found: np.ndarray = np.zeros(len(work.rows), dtype=bool)
    mine = np.flatnonzero(work.of_kind(work.computes) & (work.operator >= 0))
    found[mine[np.unique(work.operator[mine], return_index=True)[1]]] = True
    return found


def _rate(unit: str, sums: tuple[float, ...], peak: DevicePeak) -> Row:
    time_ns, flops, moved = sums
    seconds = time_ns / 1e9
    flops_per_s, bytes_per_s = (each / seconds if each and seconds else None for each in (flops, moved))
    return {
        "unit": unit, "time_ns": time_ns, "flops": flops or None, "flops_per_s": flops_per_s,
        "of_flops": _share(flops_per_s, peak.flops_per_s),
        "bytes_per_s": bytes_per_s, "of_bytes": _share(bytes_per_s, peak.bytes_per_s),
    }  # fmt: skip


def _share(achieved_: float | None, peak: float | None) -> float | None:
    return achieved_ / peak if achieved_ is not None and peak else None


def _of_rates(rows: list[Row], covered_ns: float) -> str:
    """`covered_ns`: time a step of what counted operators launched; where much else computes, no rate is of all."""
    known = [row for row in rows if row["flops"]]
    if not known:
        return "The trace does not say what its operators were given: profile with record_shapes=True."
    total, spent = sum(row["flops"] for row in known), sum(row["time_ns"] for row in rows)
    if covered_ns < _COVERED * spent:
        rate = _rate_in_words(total / max(covered_ns / 1e9, 1e-9))
        return (
            f"Operators whose operations are counted (products, convolutions, attention) take {covered_ns / spent:.0%}"
            f" of the time of computing, and achieve {rate} in it; of the rest the operations are not known."
        )
    best = max(known, key=lambda row: row["flops_per_s"])
    share = f", {best['of_flops']:.0%} of the device's peak" if best["of_flops"] is not None else ""
    return (
        f"Computing achieves {_rate_in_words(total / (spent / 1e9))} over all units; fastest is"
        f" {best['unit'] or 'what is in no unit'} with {_rate_in_words(best['flops_per_s'])}{share}."
    )


def _rate_in_words(flops_per_s: float) -> str:
    """`_rate_in_words(16.6e12)` is `16.6 TFLOP/s`."""
    if flops_per_s >= 1e12:
        return f"{three_digits(flops_per_s / 1e12)} TFLOP/s"
    return f"{three_digits(flops_per_s / 1e9)} GFLOP/s"


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
