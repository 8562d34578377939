"""Train a small GPT in several ways with the learner's functions, beside the twin: one launch for all ways.

All ways start from the same weights, on the same bundled text, with the same optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

from .runs import Run

MODEL = "gpt-tiny"


def way(kind: str, name: str, optimizer: str = "adamw", steps: int | None = None, **needs: Any) -> dict[str, Any]:
    """One way of training, as the ranks take it: a kind in `trainers.WAYS`, its name in tables, and what it needs."""
    return {"kind": kind, "name": name, "optimizer": optimizer, "steps": steps, **needs}


@doing("training the tiny GPT in several ways, and the twin beside each")
def trained(ways: Sequence[dict[str, Any]], steps: int, world_size: int) -> list[Run]:
    """Train in every way in one launch, on the same ranks; one Run a way."""
    by_rank = LessonRanks(__file__)("train", world_size, model=MODEL, steps=steps, ways=list(ways))
    return [_run(way["name"], [results[index] for results in by_rank]) for index, way in enumerate(ways)]


def _run(name: str, by_rank: Sequence[dict[str, Any]]) -> Run:
    first = by_rank[0]
    return Run(**{each.name: first[each.name] for each in fields(Run) if each.name in first} | {
        "name": name,
        "losses_by_rank": [result["losses"] for result in by_rank],
        "differing": [*dict.fromkeys(each for result in by_rank for each in result["differing"])],
        "largest": max(result["largest"] for result in by_rank),
        "calls": [Call(*call) for call in first["calls"]],
        "moments": tuple(result["moments"] for result in by_rank),
    })  # fmt: skip
