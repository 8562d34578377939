"""Makes the rows of a record from its ranks' traces. No torch.

    leave_analysis(mailbox, rank, ...)    on each rank: the rows of its own trace
    tables_of(ranks, mailbox, ...)        the caller: the rows of all

Each rank analyses its own trace, all ranks at once: it takes half a second of a core, and the starter has imported the
analysis. The caller adds what one rank cannot know: whether it waited for another.

The traces themselves move into the record's folder, so that TensorBoard, Perfetto or a later version of the analysis
can read them again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdplab.profiling import AccountingError, StepAnalysis, TraceAnalysis, TraceError, analyse_trace, with_peers
from fsdplab.profiling.intervals import EMPTY, Intervals, pairs
from fsdplab.profiling.traces.overlap import Origin
from fsdplab.profiling.traces.skew import on_axes
from fsdplab.profiling.traces.steps import NoStep
from fsdplab.sessions.launch.mailbox import Mailbox

Row = dict[str, Any]
TABLES = ("timeline", "breakdown", "exposed", "collectives", "idle", "activities")
TRACE, MEMORY_TRACE = "pt.trace.json.gz", "memory.trace.json.gz"
_SUFFIX, _WAITS = ".analysis", ".core_waits"
# bytes: about two seconds. The caller waits for a larger trace itself, so that no rank seems to hang over it
_LARGEST = 8_000_000


def leave_analysis(
    mailbox: Mailbox, rank: int, kind: str, ledger: Sequence[Row], core_waits: Intervals = EMPTY
) -> None:
    """Analyse this rank's trace of one kind and write the rows; a large or bad trace is left to the caller.
    `core_waits`: when the rank waited for a core.
    """
    trace = mailbox.of(rank, kind)
    mailbox.of(rank, kind + _WAITS).write_text(json.dumps(core_waits.tolist()))
    if not trace.exists() or trace.stat().st_size > _LARGEST:
        return
    try:
        # ranks that exchange nothing are a fault of the job, which the record says
        analysis = analyse_trace(trace, ledger=ledger, rank=rank, core_waits=core_waits, may_be_apart=True)
    except (AccountingError, TraceError):
        return
    steps = [vars(step) for step in analysis.steps]
    content = [analysis.world_size, analysis.device, steps, vars(analysis.no_step), vars(analysis.origin)]
    # arrays are written as lists
    text = json.dumps(content, default=lambda value: value.tolist())
    mailbox.of(rank, kind + _SUFFIX).write_text(text)


def _analysis_of(
    mailbox: Mailbox, rank: int, kind: str, trace: Path, ledger: Sequence[dict[str, Any]]
) -> TraceAnalysis:
    """Read the rank's analysis of `trace`; analyse the trace here if the rank wrote none."""
    written = mailbox.of(rank, kind + _SUFFIX)
    if not written.exists():
        waits_file = mailbox.of(rank, kind + _WAITS)
        waits = EMPTY
        if waits_file.exists():
            waits = pairs(json.loads(waits_file.read_text()))
        return analyse_trace(trace, ledger=ledger, rank=rank, core_waits=waits, may_be_apart=True)
    world_size, device, steps, no_step, origin = json.loads(written.read_text())
    # JSON has lists alone
    for step in steps:
        step["computing"] = pairs(step["computing"])
        for name in ("timeline", "exposed", "collectives", "activities"):
            step[name] = tuple(step[name])
    no_step["empty_steps"] = tuple(no_step["empty_steps"])
    return TraceAnalysis(
        trace,
        rank,
        world_size,
        device,
        tuple(StepAnalysis(**step) for step in steps),
        NoStep(**no_step),
        Origin(**origin),
    )


def tables_of(
    ranks: Sequence[int],
    mailbox: Mailbox,
    ledger: Sequence[Row],
    folder: Path,
    first: int,
    spec: Mapping[str, Any] | None = None,
) -> dict[str, list[Row]]:
    """Return the rows of these tables of all profiled steps, of which `first` is the first, and the timeline of the
    step whose memory was measured. `spec`: of a run of the lab, whose groups follow from its strategy.
    """

    def analysed(traces: dict[int, Path], kind: str) -> list[TraceAnalysis]:
        """Analyse all ranks together, since waiting for a peer needs both traces."""
        analyses = []
        for rank, path in traces.items():
            of_rank = [row for row in ledger if row["rank"] == rank]
            analysis = _analysis_of(mailbox, rank, kind, path, of_rank)
            if spec is not None:
                analysis = on_axes(analysis, spec)
            analyses.append(analysis)
        return with_peers(analyses)

    traces: dict[int, Path] = {}
    memory_traces: dict[int, Path] = {}
    for rank in ranks:
        trace = _keep(mailbox.of(rank, TRACE), folder / "traces")
        if trace is None:
            continue
        traces[rank] = trace
        memory_trace = mailbox.of(rank, MEMORY_TRACE)
        if memory_trace.exists():
            memory_traces[rank] = memory_trace
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    for analysis in analysed(traces, TRACE):
        # the profiler's step 0 is step `first` of the run
        _add(tables, analysis, TABLES, shift=first)
    for analysis in analysed(memory_traces, MEMORY_TRACE):
        # the measured step's range carries the run's own number already
        _add(tables, analysis, ("timeline",), shift=0)
    for path in memory_traces.values():
        # of this trace only the timeline is kept
        path.unlink()
    for rank in ranks:
        _keep(mailbox.of(rank, "snapshot.pickle.gz"), folder / "snapshots")
    return tables


def _keep(trace: Path, folder: Path) -> Path | None:
    if not trace.exists():  # the run ended before its profiled steps
        return None
    folder.mkdir(exist_ok=True)
    return Path(shutil.move(trace, folder / trace.name))


def _add(tables: dict[str, list[Row]], analysis: TraceAnalysis, names: Sequence[str], shift: int) -> None:
    """Add rows to the tables. The profiler counts its own steps from 0; the record counts the run's."""
    for name in names:
        tables[name] += [{**row, "step": row["step"] + shift} for row in analysis.rows(name)]
