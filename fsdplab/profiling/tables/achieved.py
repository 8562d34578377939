"""How fast each unit computed: operations and bytes a second, beside what the device can do.

Operations are those of matrix products and attention, from the shapes that their operators were given, over the time
of all computing of the unit: what the other operators take makes the figure smaller, as it makes the step longer. Bytes
are those of the tensors that the operators were given, each read once; what they wrote is not in a trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdplab.common.sizes import three_digits
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import Work, bytes_of, flops_of

_COLUMNS = (
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
    rows = [_row(unit, each, peak) for unit, each in zip(work.units, zip(*(column.tolist() for column in sums)))]
    rows = sorted((row for row in rows if row["time_ns"]), key=lambda row: -row["time_ns"])
    notes = (f"The peak: {peak.source}.",) if peak.source else ()
    return Table("achieved", "Achieved rates", _sentence(rows), _COLUMNS, tuple(rows), notes)


def _first_of_operator(work: Work) -> np.ndarray:
    """Which elements stand for their operator: each counts once, though it may have launched several kernels."""
    found: np.ndarray = np.zeros(len(work.rows), dtype=bool)
    mine = np.flatnonzero(work.of_kind(work.computes) & (work.operator >= 0))
    found[mine[np.unique(work.operator[mine], return_index=True)[1]]] = True
    return found


def _row(unit: str, sums: tuple[float, ...], peak: DevicePeak) -> Row:
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


def _sentence(rows: list[Row]) -> str:
    known = [row for row in rows if row["flops"]]
    if not known:
        return "The trace does not say what its operators were given: profile with record_shapes=True."
    total, spent = sum(row["flops"] for row in known), sum(row["time_ns"] for row in rows)
    best = max(known, key=lambda row: row["flops_per_s"])
    share = f", {best['of_flops']:.0%} of the device's peak" if best["of_flops"] is not None else ""
    return (
        f"Computing achieves {three_digits(total / spent)} GFLOP/s over all units; fastest is"
        f" {best['unit'] or 'what is in no unit'} with {three_digits(best['flops_per_s'] / 1e9)}{share}."
    )
