"""A run of the learner's engine, or of the lab's beside it, as a record:
the figures of the course read nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdplab.records import RunRecord, Summary
from fsdplab.records.summary import Comm

from .units import Plan

_KINDS = {"unshard": "all_gather", "reduce": "reduce_scatter"}
_PROVENANCE = {"losses": "measured", "ledger": "measured", "formula_bytes_per_step": "simulated"}


def sent(kind: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends in a call that `torch.distributed` logged: `sent("reduce_scatter", 4, 3) == 8`.

    `nbytes` is the first tensor argument's: what a gather gives, what a reduce_scatter leaves on this rank, a message.
    """
    if kind == "reduce_scatter":
        return nbytes * (ranks - 1)
    if kind in ("all_gather", "all_to_all"):
        return nbytes * (ranks - 1) // ranks
    return 2 * nbytes * (ranks - 1) // ranks if kind == "all_reduce" else nbytes * (kind != "recv")


def ledger(rows: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The rows of a learner's log as a ledger: one row a collective, with the bytes that its calls sent."""
    return [
        {
            "rank": 0, "step": row["step"], "unit": row["unit"], "phase": row["phase"], "kind": _KINDS[row["what"]],
            "logical_bytes": row["bytes"] * ranks,
            "wire_bytes": sum(sent(kind, nbytes, ranks) for kind, nbytes in row["calls"]),
        }
        for row in rows
        if row["what"] in _KINDS
    ]  # fmt: skip


def record_of(engine: str, run: dict[str, Any], losses: list[float], work: dict[str, Any], plan: Plan) -> RunRecord:
    """The record of one engine's run on rank 0; `run` holds `rows`, and `ledger` where the engine keeps its own."""
    ranks, last = work["ranks"], work["steps"] - 1
    rows = [{"rank": 0, **row} for row in run["ledger"]] if "ledger" in run else ledger(run["rows"], ranks)
    step = [row for row in rows if row["step"] == last]
    summary = Summary(
        losses=tuple(losses),
        comm=Comm(bytes_per_step=sum(row["wire_bytes"] for row in step), collectives_per_step=len(step)),
        formula_bytes_per_step=plan.traffic(ranks),
        gathered_bytes=max(sum(row["gathered"].values()) for row in run["rows"]),
    )
    spec = {"strategy": "full_shard", "engine": engine, "world_size": ranks, "model": work["model"]}
    steps = [{"rank": 0, "step": index, "loss": loss} for index, loss in enumerate(run["losses"])]
    return RunRecord(
        Path("unsaved"), spec=spec, summary=summary, provenance=_PROVENANCE, tables={"ledger": rows, "steps": steps}
    )
