"""Train a small GPT in several ways with the learner's functions, beside the twin: one launch for all ways.

All ways start from the same weights, on the same bundled text, with the same optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplab.sessions import call_on_ranks
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.waiting import doing

from .runs import Run

ON_THE_RANKS = Path(__file__).with_name("on_ranks.py")
MODEL = "gpt-tiny"
TIME_LIMIT = 150.0


def whose(path: Path) -> str:
    """`"your"` for a learner's file, `"the reference"` for another."""
    return "your" if path.parent == current().workspace.path else "the reference"


def way(kind: str, name: str, optimizer: str = "adamw", steps: int | None = None, **needs: Any) -> dict[str, Any]:
    """One way of training, as the ranks take it: a kind in `trainers.WAYS`, its name in tables, and what it needs."""
    return {"kind": kind, "name": name, "optimizer": optimizer, "steps": steps, **needs}


@doing("training the tiny GPT in several ways, and the twin beside each")
def trained(ways: Sequence[dict[str, Any]], steps: int, world_size: int) -> list[Run]:
    """Train in every way in one launch, on the same ranks; one Run a way."""
    payload = {"workspace": str(current().workspace.path), "model": MODEL, "steps": steps, "ways": list(ways)}
    by_rank = call_on_ranks(ON_THE_RANKS, "train", world_size=world_size, payload=payload, time_limit=TIME_LIMIT)
    return [_run(way["name"], [results[index] for results in by_rank]) for index, way in enumerate(ways)]


def _run(name: str, by_rank: Sequence[dict[str, Any]]) -> Run:
    first = by_rank[0]
    return Run(
        name=name,
        losses_by_rank=tuple(tuple(result["losses"]) for result in by_rank),
        twin_losses=tuple(first["twin_losses"]),
        differing=tuple(dict.fromkeys(name for result in by_rank for name in result["differing"])),
        largest=max(result["largest"] for result in by_rank),
        apart=first["apart"],
        calls=tuple(Call(*call) for call in first["calls"]),
        calls_in_backward=first["calls_in_backward"],
        lab=(first["lab_collectives"], first["lab_bytes"]),
        moments=tuple(result["moments"] for result in by_rank),
        parameters=first["parameters"],
        elements=first["elements"],
        ratios=first["ratios"],
        held=tuple(first["held"]),
        ready=tuple(first["ready"]),
        sent=tuple(first["sent"]),
    )
