"""The rows and numbers of a record, from its ranks' traces.

The traces themselves move into the record's folder, so that TensorBoard, Perfetto or a later version of the analysis
can read them again.
"""

from __future__ import annotations

import shutil
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdplab.records import Summary
from fsdplab.records.summary import Comm, Profile
from fsdplab.sessions.launch.mailbox import Mailbox
from fsdplab.sessions.spec import RunSpec

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


def profile_summary(
    spec: RunSpec,
    summary: Summary,
    profiled_s: Sequence[Sequence[float]],
    ledger: Sequence[Row],
    tables: Mapping[str, Sequence[Row]],
) -> Summary:
    """The summary with the cost of profiling, and with what communication cost; what other engines sent is read from
    their traces.

    `exposed_s` is the mean of the profiled steps, from the trace, with its parts. `blocked_s` is another quantity: for
    how long the host of a timed step was blocked for collectives, from the ledger.
    """
    comm = summary.comm if spec.engine == "lab" else None
    world_size = None if spec.engine == "twin" else spec.world_size
    return replace(
        summary,
        profile=profile_of(spec.profile, profiled_s, summary, tables),
        comm=communication(tables, world_size, comm, blocked(ledger, spec.untimed, spec.untimed + spec.steps)),
    )


def profile_of(
    steps: int, profiled_s: Sequence[Sequence[float]], summary: Summary, tables: Mapping[str, Sequence[Row]]
) -> Profile:
    """The profiled steps beside the timed ones."""
    from fsdplab.profiling.optimizer_step import of_the_worst

    cost, stepping = overhead(profiled_s, summary.step_time_s.median), of_the_worst(tables)
    parts = (stepping.seconds, stepping.exchange_s) if stepping else (None, None)
    return Profile(steps, cost, "trace" if tables.get("breakdown") else None, *parts)


def communication(
    tables: Mapping[str, Sequence[Row]], world_size: int | None, sent: Comm | None, blocked_s: float | None
) -> Comm:
    """What a step sent and what that cost; where nobody counted what was `sent`, the traces' collectives tell.

    `world_size` is None where one process plays all ranks.
    """
    from fsdplab.profiling.step_summary import exposure
    from fsdplab.profiling.traces.skew import sent_per_step

    cost = exposure(tables.get("breakdown", []))
    if world_size == 1:
        cost = dict.fromkeys(cost, 0.0) | {"overlap": None}  # nothing travels
    if sent is None:
        counted = sent_per_step(tables.get("collectives", []), world_size or 1)
    else:
        counted = (sent.bytes_per_step, sent.collectives_per_step)
    return Comm(*counted, **cost, blocked_s=blocked_s)


def blocked(ledger: Sequence[Row], first: int, last: int) -> float | None:
    """Seconds for which a rank was blocked for collectives in steps `first` to `last` - 1, by the ledger: the median
    over steps of the rank that was blocked longest; None if unknown.
    """
    waits: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in ledger:
        if first <= row["step"] < last:
            if row["waited_ns"] is None:
                return None
            waits[row["rank"]][row["step"]] += row["waited_ns"]
    return max((statistics.median(steps.values()) / 1e9 for steps in waits.values()), default=None)


def overhead(profiled_s: Sequence[Sequence[float]], timed_median: float | None) -> float | None:
    """How much longer profiled steps took than timed ones, as a part (0.08 = 8 %): slowest rank's median against the
    run's.
    """
    medians = [statistics.median(seconds) for seconds in profiled_s if seconds]
    return max(medians) / timed_median - 1 if medians and timed_median else None
