"""The rows of a record, from its ranks' traces. No torch.

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
        found = analyse_trace(trace, ledger=ledger, rank=rank, core_waits=core_waits)
    except (AccountingError, TraceError):
        return
    steps = [vars(step) for step in found.steps]
    mailbox.of(rank, kind + _SUFFIX).write_text(
        json.dumps(
            [found.world_size, found.device, steps, vars(found.no_step), vars(found.origin)],
            default=lambda value: value.tolist(),
        )
    )


def _analysis_of(
    mailbox: Mailbox, rank: int, kind: str, trace: Path, ledger: Sequence[dict[str, Any]]
) -> TraceAnalysis:
    """The rank's analysis of `trace`; the trace is read here if the rank wrote none."""
    left = mailbox.of(rank, kind + _SUFFIX)
    if not left.exists():
        noted = mailbox.of(rank, kind + _WAITS)
        waits = pairs(json.loads(noted.read_text())) if noted.exists() else EMPTY
        return analyse_trace(trace, ledger=ledger, rank=rank, core_waits=waits)
    world_size, device, steps, no_step, origin = json.loads(left.read_text())
    rows = ("timeline", "exposed", "collectives", "activities")
    return TraceAnalysis(
        trace,
        rank,
        world_size,
        device,
        tuple(
            StepAnalysis(
                **{**step, **{name: tuple(step[name]) for name in rows}, "computing": pairs(step["computing"])}
            )
            for step in steps
        ),
        NoStep(**{**no_step, "empty_steps": tuple(no_step["empty_steps"])}),
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
    """The rows of these tables of all profiled steps, of which `first` is the first, and the timeline of the step whose
    memory was measured. `spec`: of a run of the lab, whose groups follow from its strategy.
    """

    def analysed(traces: dict[int, Path], kind: str) -> list[TraceAnalysis]:
        """All ranks together, since waiting for a peer needs both traces."""
        mine = {rank: [row for row in ledger if row["rank"] == rank] for rank in traces}
        found = [_analysis_of(mailbox, rank, kind, path, mine[rank]) for rank, path in traces.items()]
        return with_peers(found if spec is None else [on_axes(each, spec) for each in found])

    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    kept = {rank: path for rank in ranks if (path := _keep(mailbox.of(rank, TRACE), folder / "traces"))}
    of_memory = {rank: path for rank in kept if (path := mailbox.of(rank, MEMORY_TRACE)).exists()}
    for analysis in analysed(kept, TRACE):
        _add(tables, analysis, TABLES, shift=first)
    for analysis in analysed(of_memory, MEMORY_TRACE):
        _add(tables, analysis, ("timeline",), shift=0)
    for path in of_memory.values():
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
    """The profiler counts its own steps from 0; the record counts the run's."""
    for name in names:
        tables[name] += [{**row, "step": row["step"] + shift} for row in analysis.rows(name)]
