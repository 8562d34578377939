"""All tables of one recorded run, and of two beside each other, from the traces that lie in their folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.rows import grouped
from fsdplab.profiling.exports import traces_of
from fsdplab.profiling.step_summary import step_summary
from fsdplab.profiling.tables.bandwidth import bandwidths_by_size, idle_time
from fsdplab.profiling.tables.critical_path import critical_path
from fsdplab.profiling.tables.difference import difference, difference_by_module, difference_of_steps
from fsdplab.profiling.tables.operators import launches, operators
from fsdplab.profiling.tables.rates import DevicePeak, achieved, copies, roofline
from fsdplab.profiling.tables.table import Row, Table
from fsdplab.profiling.tables.work import Work, work_of
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.event_reader import read_events
from fsdplab.profiling.traces.import_traces import TracedRecord
from fsdplab.profiling.traces.overlap import TraceAnalysis
from fsdplab.profiling.traces.side_by_side import Reading, read_all
from fsdplab.profiling.traces.skew import on_axes, with_peers
from fsdplab.records import RecordError, RunRecord

TablesOf: TypeAlias = Callable[[RunRecord], list[Table]]


def tables_of_record(record: RunRecord, peak: DevicePeak = DevicePeak()) -> list[Table]:
    """Critical path, idle time, bandwidth, operators, achieved rates by unit and by shape beside the device's `peak`
    (of traces with shapes) and (of a GPU) copies and launches; of one rank where a table is of one: the rank that is
    exposed longest. Raises RecordError for a record without traces, TraceError for damaged ones.
    """
    analyses = analyses_of(record, traces_of(record))
    work = _work_of_worst(record)

    def rows(table: str) -> list[Row]:
        """Of the record; of its traces where an earlier version recorded it."""
        return record.table(table) or [row for analysis in analyses for row in analysis.rows(table)]

    link = record.summary.link
    link_bytes_per_s = link.bytes_per_s if link else None
    tables = [
        _critical_path(analyses),
        idle_time(rows("idle"), rows("breakdown")),
        bandwidths_by_size(rows("collectives"), record.spec["world_size"], link_bytes_per_s),
        operators(work, by_unit=True),
    ]
    if work.found.shapes:
        tables += [achieved(work, peak), roofline(work, peak)]
    if work.found.on_gpu:
        tables += [copies(work), launches(work)]
    return tables


def tables_of_pair(first: RunRecord, second: RunRecord) -> list[Table]:
    """Where the steps of two records differ: in which parts, in which units, and in which operators and kernels, by the
    shapes of what they were given; the latter two of records that hold traces. Raises TraceError for damaged ones.
    """
    tables = [difference_of_steps(first, second)]
    try:
        works = [_work_of_worst(record) for record in (first, second)]
    except RecordError:  # no traces: the parts are all that is known
        return tables
    # rows of one operator can be told apart by shape only where both traces say it
    by_shape = all(work.found.shapes for work in works)
    return [*tables, difference_by_module(*works), difference(*works, by_shape=by_shape)]


def _work_of_worst(record: RunRecord) -> Work:
    """The work of the rank that is exposed longest."""
    traces = traces_of(record)
    worst = step_summary(record.table("breakdown"))
    # the rank that represents the run, where its trace is there
    rank = worst.rank if worst is not None and worst.rank in traces else min(traces)
    trace = traces[rank]
    if not trace.exists():
        raise TraceError(f"{trace} is missing; copy the record with its traces, or record the run again.")
    return _work_in(trace, trace.stat().st_mtime_ns, tuple(_patterns(record)), _device_of(record, rank))


def _device_of(record: RunRecord, rank: int) -> int | None:
    """The device that stands for a rank, where a process drives several; None where it drives one."""
    analyses = record.analyses if isinstance(record, TracedRecord) else ()
    return next((analysis.only_device for analysis in analyses if analysis.rank == rank), None)


@lru_cache(maxsize=8)
def _work_in(trace: Path, changed_ns: int, patterns: tuple[str, ...], device: int | None) -> Work:
    """Kept, as a page shows a run's own tables, and its difference to several others."""
    events = read_events(trace, patterns, shapes=True)
    return work_of(events if device is None else events.of_device(device))


def _critical_path(analyses: Sequence[TraceAnalysis]) -> Table:
    """The path, or a table without rows that says why there is none: ranks of several machines without a common
    clock.
    """
    try:
        return critical_path(analyses)
    except TraceError as reason:
        return Table("critical_path", "Critical path", f"Left out: {reason}", (), ())


def analyses_of(record: RunRecord, traces: Mapping[int, Path]) -> list[TraceAnalysis]:
    """The analyses of a record's traces on one clock, with the record's numbers of steps; traces that are large are
    read side by side.
    """
    if isinstance(record, TracedRecord):
        return list(record.analyses)
    # the profiler counts steps of its own: the first one of the trace is the record's first profiled step
    first = min((row["step"] for row in record.table("breakdown")), default=None)
    ledger = grouped(record.table("ledger"), itemgetter("rank"))
    life = grouped(record.table("life"), itemgetter("rank"))
    readings: list[Reading] = []
    for rank, path in traces.items():
        options = {"rank": rank, "first_step": first, "comm_patterns": _patterns(record)}
        options |= {"ledger": ledger.get(rank, []), "life": life.get(rank, [])}
        readings.append((path, options))
    analyses = read_all(readings)
    # gloo's traces tell no process groups; of a run of the lab they follow from its mesh
    is_own_run = record.spec.get("strategy") in STRATEGY_ROWS and "job" not in record.spec
    if is_own_run:
        analyses = [on_axes(analysis, record.spec) for analysis in analyses]
    return with_peers(analyses)


def _patterns(record: RunRecord) -> Sequence[str]:
    """The kernels that communicate beside NCCL's, as they were given when the traces were read."""
    return record.summary.traces.comm_patterns if record.summary.traces else ()
