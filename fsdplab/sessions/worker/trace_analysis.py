"""A rank's analysis of its own trace: all ranks at once, instead of their caller one after the other.

Reading a trace of two steps takes half a second of a core. At its end every rank has a core, and the starter has
imported the analysis; so each writes its result beside its trace. The caller adds what one rank cannot know
(trace_tables.py): whether it waited for another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplab.profiling import AccountingError, StepAnalysis, TraceAnalysis, TraceError, analyse_trace
from fsdplab.sessions.launch.mailbox import Mailbox
from fsdplab.sessions.worker.rank_process import RankContext

TRACE, MEMORY_TRACE = "pt.trace.json.gz", "memory.trace.json.gz"
_SUFFIX = ".analysis"
# bytes: about two seconds. The caller waits for a larger trace itself, so that no rank seems to hang over it
_LARGEST = 8_000_000


def leave_analysis(context: RankContext, kind: str, ledger: Sequence[dict[str, Any]]) -> None:
    """Analyse this rank's trace of one kind and write the rows; a large or bad trace is left to the caller."""
    trace = context.mailbox.of(context.rank, kind)
    if not trace.exists() or trace.stat().st_size > _LARGEST:
        return
    try:
        found = analyse_trace(trace, ledger=ledger, rank=context.rank)
    except (AccountingError, TraceError):
        return
    steps = [vars(step) for step in found.steps]
    context.mailbox.of(context.rank, kind + _SUFFIX).write_text(
        json.dumps([found.world_size, found.device, steps], default=lambda number: number.item())
    )


def analysis_of(mailbox: Mailbox, rank: int, kind: str, trace: Path, ledger: Sequence[dict[str, Any]]) -> TraceAnalysis:
    """The rank's analysis of `trace`; the trace is read here if the rank wrote none."""
    left = mailbox.of(rank, kind + _SUFFIX)
    if not left.exists():
        return analyse_trace(trace, ledger=ledger, rank=rank)
    world_size, device, steps = json.loads(left.read_text())
    rows = ("timeline", "exposed", "collectives")
    return TraceAnalysis(
        trace,
        rank,
        world_size,
        device,
        tuple(StepAnalysis(**{**step, **{name: tuple(step[name]) for name in rows}}) for step in steps),
    )
