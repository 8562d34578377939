"""How fast a trace's work was: operations and bytes a second by unit and by shape, and copies with their bandwidth.

Operations are those of matrix products, attention and convolutions, from the shapes that their operators were given.
Bytes are those of the tensors that operators were given, each read once; what they wrote is not in a trace. A rate is
set beside the device's peak for the number format of the product: a product of fp32 tensors on a GPU may run in TF32,
which the kernel's name tells; where it does not, no share is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdplab.common.sizes import flops_per_s, percent, seconds, size
from fsdplab.profiling.tables.operators import dimensions, short
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import COPY, KERNEL, Work, bytes_of, flops_of
from fsdplab.profiling.traces.tensor_types import number_format


@dataclass(frozen=True)
class DevicePeak:
    """What a device can do: operations a second by number format (`{"bf16": 989e12}`), bytes of memory a second (None
    where it is unknown), and who says so.
    """

    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    source: str = ""


# ---- what each element did


@dataclass(frozen=True)
class Counted:
    """Work that computes, one element each: its time, the operations and bytes of its operator (0 where another kernel
    of the operator stands for them), and the seconds that the operations take at the device's peak (NaN: unknown).
    """

    elements: np.ndarray  # places in the Work
    time_ns: np.ndarray
    is_first: np.ndarray
    flops: np.ndarray
    nbytes: np.ndarray
    at_peak_s: np.ndarray
    formats: list[str]


def counted(work: Work, peak: DevicePeak = DevicePeak()) -> Counted:
    """All work that computes; copies for collectives are left out."""
    elements = np.flatnonzero(work.of_kind(work.computes) & ~work.communicates)
    operators = work.operator[elements]
    is_first = _first_of_operator(operators)
    # of each element; an operator that launched three kernels does its operations once, with the first of them
    flops: list[int] = []
    nbytes: list[int] = []
    at_peak_s: list[float] = []
    formats: list[str] = []
    for element, stands_for_operator in zip(elements.tolist(), is_first.tolist()):
        products = 0
        read_bytes = 0
        if stands_for_operator:
            name = _operator_name(work, element)
            shapes = work.shapes[element]
            products = flops_of(name, shapes)
            read_bytes = bytes_of(name, shapes)
        product_format = _format_of_product(work, element)
        flops.append(products)
        nbytes.append(read_bytes)
        at_peak_s.append(_seconds_at(products, peak.flops_per_s.get(product_format)))
        formats.append(product_format)
    return Counted(
        elements=elements,
        time_ns=work.own_ns[elements],
        is_first=is_first,
        flops=np.array(flops, dtype=np.float64),
        nbytes=np.array(nbytes, dtype=np.float64),
        at_peak_s=np.array(at_peak_s, dtype=np.float64),
        formats=formats,
    )


def _seconds_at(products: int, rate: float | None) -> float:
    """How long products take at a rate; NaN where the rate is not known, unless there are none."""
    if rate:
        return products / rate
    if not products:
        return 0.0
    return np.nan


def _first_of_operator(operators: np.ndarray) -> np.ndarray:
    """Which elements stand for their operator: each counts once, though it may have launched several kernels."""
    # of the operators 7, 7, -1, 9 the first and the last element; -1 is no operator
    is_first: np.ndarray = np.zeros(len(operators), dtype=bool)
    known = np.flatnonzero(operators >= 0)
    _, first_places = np.unique(operators[known], return_index=True)
    is_first[known[first_places]] = True
    return is_first


def _name_of(work: Work, row: int) -> str:
    """The name of an event of the trace."""
    return work.found.names[int(work.found.name[row])]


def _operator_name(work: Work, element: int) -> str:
    """The operator, or the one that launched a kernel; "" where the trace does not say."""
    row = int(work.operator[element])
    return _name_of(work, row) if row >= 0 else ""


_IN_TF32 = re.compile(r"tf32|s1688|s16816_?gemm_f32")
_IN_FP32 = re.compile(r"sgemm|ffma|simt|f32f32_f32f32", re.IGNORECASE)


def _format_of_product(work: Work, element: int) -> str:
    """The number format in which an element multiplies: "bf16", "tf32", ...; "" where the trace does not say."""
    given = number_format(work.shapes[element])
    if given != "fp32" or work.computes != KERNEL:
        return given
    # fp32 tensors on a GPU: the kernel's name says whether TF32's tensor cores multiplied them
    kernel = _name_of(work, int(work.rows[element]))
    if _IN_TF32.search(kernel):
        return "tf32"
    return "fp32" if _IN_FP32.search(kernel) else ""


# ---- by unit


_COVERED = 0.9  # part of the time of computing that counted operators must take, for a sentence about all of it
_OF_UNITS = (
    Column("unit", "unit"),
    Column("time_ns", "computing a step", "ns"),
    Column("flops", "products a step", "FLOP"),
    Column("flops_per_s", "achieved", "FLOP/s"),
    Column("of_flops", "of the peak", "share"),
    Column("bytes_per_s", "bytes given/s", "bytes/s"),
    Column("of_bytes", "of the memory's", "share"),
)


def achieved(work: Work, peak: DevicePeak = DevicePeak()) -> Table:
    """One row a unit, the one that computes longest first; no operations where the trace has no shapes.

    The rate is over all computing of the unit: what the other operators take makes it smaller, as it makes the step
    longer. A unit that does 2e9 operations in 10 ms achieves 2e11 a second: a fifth of a device of 1e12.
    """
    counts = counted(work, peak)
    rows = []
    for row in _sums(counts, work.unit[counts.elements], len(work.units), work.steps, peak):
        if row["time_ns"]:
            row["unit"] = work.units[row["group"]]
            rows.append(row)
    rows.sort(key=lambda row: -row["time_ns"])
    # how much of the computing is of operators whose operations are known
    counted_ones = []
    for element in counts.elements:
        flops = flops_of(_operator_name(work, element), work.shapes[element])
        counted_ones.append(flops > 0)
    is_counted = np.array(counted_ones, dtype=bool)
    covered_ns = float(counts.time_ns[is_counted].sum() / work.steps)
    return Table("achieved", "Achieved rates", _of_units(rows, covered_ns), _OF_UNITS, tuple(rows), _notes(peak))


def _sums(counts: Counted, groups: np.ndarray, many: int, steps: int, peak: DevicePeak) -> list[Row]:
    """A row for each group: time, calls, operations and bytes of a step, and the rates."""
    columns = (counts.time_ns, counts.is_first, counts.flops, counts.nbytes, counts.at_peak_s)
    sums = []  # of each column the sums of all groups
    for column in columns:
        of_groups = np.bincount(groups, column, minlength=many) / steps
        sums.append(of_groups.tolist())
    rows: list[Row] = []
    for group, values in enumerate(zip(*sums)):
        rows.append({"group": group, **_rates(values, peak)})
    return rows


def _rates(sums: Sequence[float], peak: DevicePeak) -> dict[str, Any]:
    """The rates of one group, from its time, calls, operations, bytes and seconds at the peak; None for the unknown."""
    time_ns, calls, flops, nbytes, at_peak_s = sums
    taken = time_ns / 1e9
    moved_per_s = _ratio(nbytes, taken)
    # seconds at the peak over seconds taken, so that number formats with different peaks can be summed
    of_flops = None if np.isnan(at_peak_s) else _ratio(at_peak_s, taken)
    return {
        "time_ns": time_ns,
        "count": calls,
        "flops": flops or None,
        "flops_per_s": _ratio(flops, taken),
        "of_flops": of_flops,
        "bytes_per_s": moved_per_s,
        "of_bytes": _ratio(moved_per_s, peak.bytes_per_s),
    }


def _ratio(value: float | None, by: float | None) -> float | None:
    """The quotient; None where one of the two is 0 or not known."""
    if not value or not by:
        return None
    return value / by


def _notes(peak: DevicePeak) -> tuple[str, ...]:
    """Who says what the peak is."""
    return (f"The peak: {peak.source}.",) if peak.source else ()


def _of_units(rows: Sequence[Row], covered_ns: float) -> str:
    """`covered_ns`: time a step of what counted operators launched; where much else computes, no rate is of all."""
    known = [row for row in rows if row["flops"]]
    if not known:
        return _NO_SHAPES
    total = sum(row["flops"] for row in known)
    spent = sum(row["time_ns"] for row in rows)
    # the rate over all of the time would be too low, since the work of the rest is not counted
    if covered_ns < _COVERED * spent:
        rate = flops_per_s(total / max(covered_ns / 1e9, 1e-9))
        return (
            f"Operators whose operations are counted (products, convolutions, attention) take {covered_ns / spent:.0%}"
            f" of the time of computing, and achieve {rate} in it; of the rest the operations are not known."
        )
    best = max(known, key=lambda row: row["flops_per_s"])
    share = "" if best["of_flops"] is None else f", {best['of_flops']:.0%} of the device's peak"
    return (
        f"Computing achieves {flops_per_s(total / (spent / 1e9))} over all units; fastest is"
        f" {best['unit'] or 'what is in no unit'} with {flops_per_s(best['flops_per_s'])}{share}."
    )


_NO_SHAPES = "The trace does not say what its operators were given: profile with record_shapes=True."


# ---- by operator and shape: the roofline


_OF_SHAPES = (
    Column("name", "operator"),
    Column("shapes", "given"),
    Column("format", "format"),
    Column("time_ns", "time a step", "ns"),
    Column("share", "share", "share"),
    Column("count", "calls a step", "count"),
    Column("flops_per_s", "achieved", "FLOP/s"),
    Column("of_flops", "of the peak", "share"),
    Column("bytes_per_s", "bytes given/s", "bytes/s"),
    Column("of_bytes", "of the memory's", "share"),
    Column("intensity", "FLOP a byte", "count"),
    Column("bound", "limited by"),
)


def roofline(work: Work, peak: DevicePeak = DevicePeak()) -> Table:
    """One row an operator and shape, the one that computes longest first: its rates, and what limits them at best.

    On a GPU its time is that of the kernels it launched. A product of 128 operations a byte on a device of 1e12
    operations and 1e10 bytes a second, which needs 100, is limited by "computing"; one of 50 by "memory".
    """
    counts = counted(work, peak)
    # the group of each element: its operator, shapes and format by a number, as they are met
    numbers: dict[tuple[str, str, str], int] = {}
    of_elements = []
    for place in range(len(counts.elements)):
        key = _key_of_shape(work, counts, place)
        of_elements.append(numbers.setdefault(key, len(numbers)))
    groups = np.array(of_elements, dtype=np.int64)
    rows = _sums(counts, groups, len(numbers), work.steps, peak)
    whole = float(counts.time_ns.sum()) / work.steps
    for row, (name, shapes, format_) in zip(rows, numbers):
        row |= {"name": name, "shapes": dimensions(shapes), "format": format_}
        row["share"] = _ratio(row["time_ns"], whole) or 0.0
        row["intensity"] = _ratio(row["flops_per_s"], row["bytes_per_s"])
        row["bound"] = _bound(row, peak)
    rows.sort(key=lambda row: -row["time_ns"])
    return Table("roofline", "Operators by shape", _of_shapes(rows), _OF_SHAPES, tuple(rows), _notes(peak))


def _key_of_shape(work: Work, counts: Counted, place: int) -> tuple[str, str, str]:
    """What tells rows apart: the operator (the kernel where no operator is known), its shapes and its number format."""
    element = int(counts.elements[place])
    shapes = work.shapes[element]
    name = _operator_name(work, element)
    if not name:
        name = short(_name_of(work, int(work.rows[element])))
    return name, shapes, counts.formats[place] or number_format(shapes)


def _bound(row: Row, peak: DevicePeak) -> str:
    """What limits an operator on this device at best; "" where one of its peaks is not known."""
    if row["of_bytes"] is None:
        return ""
    # operators without products only move bytes
    if row["flops"] is None:
        return "memory"
    if row["of_flops"] is None:
        return ""
    # the same as comparing its FLOP a byte with those of the device
    return "computing" if row["of_flops"] >= row["of_bytes"] else "memory"


def _of_shapes(rows: Sequence[Row]) -> str:
    """The operator and shape that takes longest, and at which rate."""
    if not rows:
        return "Nothing was computed in the profiled steps."
    if not any(row["shapes"] for row in rows):
        return _NO_SHAPES
    most = rows[0]
    words = [most["name"]]
    if most["shapes"]:
        words.append(f"of {most['shapes']}")
    if most["format"]:
        words.append(f"in {most['format']}")
    return (
        f"{' '.join(words)} takes {percent(most['share'])} of the time of computing"
        f" ({seconds(most['time_ns'] / 1e9)} a step){_rate_in_words(most)}."
    )


def _rate_in_words(row: Row) -> str:
    """`, at 412 TFLOP/s, 42 % of the peak`; of an operator whose operations are not counted, the bytes."""
    if row["flops_per_s"]:
        return f", at {flops_per_s(row['flops_per_s'])}{_share_in_words(row['of_flops'], 'the device')}"
    if row["bytes_per_s"]:
        return f", and is given {size(row['bytes_per_s'])}/s{_share_in_words(row['of_bytes'], 'the memory')}"
    return ""


def _share_in_words(share: float | None, whose: str) -> str:
    """`, 42 % of the device's peak`; "" where the peak is not known."""
    if share is None:
        return ""
    return f", {percent(share)} of {whose}'s peak"


# ---- copies


_MOST_BYTES = 2**50
_DIRECTIONS = (
    ("host to device", re.compile(r"HtoD|HtoA|HostToDevice")),
    ("device to host", re.compile(r"DtoH|AtoH|DeviceToHost")),
    ("to another device", re.compile(r"PtoP|CopyPeer|PeerToPeer")),
    ("inside the device", re.compile(r"[DA]to[DA]\b|DeviceToDevice")),
    ("memory is set", re.compile(r"Memset|FillBuffer", re.IGNORECASE)),
)
_OF_COPIES = (
    Column("direction", "direction"),
    Column("memory", "host memory"),
    Column("count", "copies a step", "count"),
    Column("nbytes", "bytes a step", "bytes"),
    Column("time_ns", "time a step", "ns"),
    Column("bytes_per_s", "bandwidth", "bytes/s"),
)


def copies(work: Work) -> Table:
    """One row a direction and kind of host memory, the one that takes longest first; no rows for CPU ranks.

    16 MB that are copied from pageable memory in 4 ms have a bandwidth of 4 GB/s.
    """
    sums: dict[tuple[str, str], np.ndarray] = {}  # copies, bytes and ns of each direction and kind of memory
    for row, own_ns in _copied(work):
        key = _way(_name_of(work, row))
        nbytes = work.found.details.get(row, {}).get("bytes")
        # one copy of which they are not known makes the sum unknown, as NaN does
        known_bytes = nbytes if type(nbytes) is int and 0 <= nbytes < _MOST_BYTES else np.nan
        sums[key] = sums.get(key, np.zeros(3)) + (1, known_bytes, own_ns)
    rows = [_copy_row(*key, *(total / work.steps).tolist()) for key, total in sums.items()]
    rows.sort(key=lambda row: -row["time_ns"])
    return Table("copies", "Copies by direction", _of_copies(rows), _OF_COPIES, tuple(rows))


def _copied(work: Work) -> list[tuple[int, int]]:
    """(row, ns) of each copy: of copy engines, also to other devices, which count as communication."""
    is_copy = work.of_kind(COPY)
    to_others = _DIRECTIONS[2][1]
    for element in np.flatnonzero(~is_copy & ~work.of_kind(work.computes)).tolist():
        is_copy[element] = bool(to_others.search(_name_of(work, int(work.rows[element]))))
    return list(zip(work.rows[is_copy].tolist(), work.own_ns[is_copy].tolist()))


def _way(name: str) -> tuple[str, str]:
    """The direction of a copy and its host memory, as its name says them.

    >>> _way("Memcpy HtoD (Pageable -> Device)"), _way("Memcpy DtoD (Device -> Device)")
    (('host to device', 'pageable'), ('inside the device', ''))
    """
    direction = next((words for words, pattern in _DIRECTIONS if pattern.search(name)), short(name))
    for memory in ("pageable", "pinned"):
        if memory in name.lower():
            return direction, memory
    return direction, ""


def _copy_row(direction: str, memory: str, count: float, nbytes: float, time_ns: float) -> Row:
    """A row of the table of copies, of a step."""
    knows_bytes = nbytes == nbytes  # not NaN
    return {
        "direction": direction,
        "memory": memory,
        "count": count,
        "time_ns": time_ns,
        "nbytes": nbytes if knows_bytes else None,
        "bytes_per_s": nbytes / (time_ns / 1e9) if knows_bytes and time_ns else None,
    }


def _of_copies(rows: Sequence[Row]) -> str:
    """The direction in which copying takes longest."""
    if not rows:
        return "Nothing was copied in the profiled steps."
    most = rows[0]
    memory = f" ({most['memory']} memory)" if most["memory"] else ""
    rate = f" at {size(most['bytes_per_s'])}/s" if most["bytes_per_s"] else ""
    return f"Most copying is {most['direction']}{memory}: {seconds(most['time_ns'] / 1e9)} a step{rate}."
