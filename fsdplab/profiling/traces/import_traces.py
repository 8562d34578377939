"""A record made from traces of PyTorch's profiler, from any machine.

A trace has less than a run: no losses, no memory by category, no ledger. Its steps, overlap and exposed communication
become the same tables, so every figure and finding that needs only those works on it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplab.profiling.step_summary import step_summary
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.overlap import TraceAnalysis, analyse_trace
from fsdplab.profiling.traces.skew import with_peers
from fsdplab.records import RunRecord

ENGINE = "trace"


def record_of_traces(paths: Sequence[str | Path]) -> RunRecord:
    """One record of the traces of one run's ranks, each a .json or .json.gz; nothing is written.

    Raises TraceError for files that cannot be read, and for two of the same rank. `record_of_traces(["rank0.json.gz",
    "rank1.json.gz"])`.
    """
    analyses = [analyse_trace(path) for path in paths]
    _check_ranks(analyses)
    analyses = with_peers(analyses)
    tables = {
        name: [row for each in analyses for row in each.rows(name)] for name in ("timeline", "breakdown", "exposed")
    }
    return RunRecord(
        Path(paths[0]).parent,
        spec={
            "strategy": Path(paths[0]).name.partition(".")[0],
            "engine": ENGINE,
            "world_size": analyses[0].world_size or len(analyses),
        },
        environment={"device": analyses[0].device},
        summary=_summary(tables["breakdown"]),
        provenance={"step_time_s": "measured", "exposed_s": "measured"},
        tables=tables,
    )


def _check_ranks(analyses: Sequence[TraceAnalysis]) -> None:
    seen: dict[int, Path] = {}
    for each in analyses:
        if each.rank in seen:
            raise TraceError(
                f"{seen[each.rank]} and {each.path} are both of rank {each.rank}; give the traces of one run, one a"
                " rank."
            )
        seen[each.rank] = each.path


def _summary(breakdown: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_step: dict[int, int] = defaultdict(int)
    for row in breakdown:
        by_step[row["step"]] = max(by_step[row["step"]], row["step_ns"])
    worst = step_summary(breakdown)
    return {
        "step_time_s": {"median": statistics.median(by_step.values()) / 1e9, "min": min(by_step.values()) / 1e9},
        "comm": {
            "bytes_per_step": None,
            "collectives_per_step": None,
            "exposed_s": worst.exposed_ns / 1e9 if worst else None,
            "overlap": worst.hidden if worst else None,
        },
        "profile": {"steps": len(by_step), "overhead": None, "source": "trace"},
    }
