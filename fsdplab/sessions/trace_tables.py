"""The rows of a record, from its ranks' traces.

The traces themselves move into the record's folder, so that TensorBoard, Perfetto or a later version of the analysis
can read them again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdplab.sessions.launch.mailbox import Mailbox

if TYPE_CHECKING:
    from fsdplab.profiling.traces.overlap import TraceAnalysis

Row = dict[str, Any]
TABLES = ("timeline", "breakdown", "exposed", "collectives", "idle")


def tables_of(
    ranks: Sequence[int], mailbox: Mailbox, ledger: Sequence[Row], folder: Path, first: int
) -> dict[str, list[Row]]:
    """The rows of these tables of all profiled steps, of which `first` is the first, and the timeline of the step whose
    memory was measured.
    """
    from fsdplab.profiling.traces.skew import with_peers
    from fsdplab.sessions.worker.profiler import MEMORY_TRACE, TRACE, analysis_of

    def analysed(traces: dict[int, Path], kind: str) -> list[TraceAnalysis]:
        """All ranks together, since waiting for a peer needs both traces."""
        mine = {rank: [row for row in ledger if row["rank"] == rank] for rank in traces}
        return with_peers([analysis_of(mailbox, rank, kind, path, mine[rank]) for rank, path in traces.items()])

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
