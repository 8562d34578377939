"""Runs a saved function: start fresh ranks, run every case, collect the trials.

One launch may carry several programs (the tests send all wrong solutions of an exercise at once); a learner's check
carries one. A launch that ends badly gives a `Failure` in place of trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.sessions import RanksFailed, call_on_ranks

from .exercise import Call, Case, Exercise, Trial
from .workspace import Workspace

START_LIMIT = 90.0  # seconds for the ranks to start, on a busy machine too
ON_RANKS = Path(__file__).with_name("on_ranks.py")


@dataclass(frozen=True)
class Tried:
    """The results of one program: `trials[case][rank]`."""

    cases: tuple[Case, ...]
    trials: tuple[tuple[Trial, ...], ...]


def try_programs(programs: Sequence[tuple[Exercise, Path]], workspace: Workspace) -> list[Tried]:
    """Run saved solutions of exercises with one number of ranks, in one launch; RanksFailed when a rank raises or
    hangs.
    """
    world_size = programs[0][0].world_size
    cases = [tuple(exercise.cases()) for exercise, _ in programs]
    payload = {
        "workspace": str(workspace.path),
        "programs": [as_program(exercise, path, of) for (exercise, path), of in zip(programs, cases, strict=True)],
    }
    limit = START_LIMIT + sum(exercise.time_limit * len(of) for (exercise, _), of in zip(programs, cases, strict=True))
    by_rank = call_on_ranks(ON_RANKS, "call_recorded", world_size=world_size, payload=payload, time_limit=limit)
    return [Tried(of, _trials(by_rank, index, len(of))) for index, of in enumerate(cases)]


def try_one(exercise: Exercise, path: Path, workspace: Workspace) -> Tried | RanksFailed:
    """One solution on the exercise's own number of ranks, within its time limit; the failure itself if it fails."""
    try:
        return try_programs([(exercise, path)], workspace)[0]
    except RanksFailed as failure:
        return failure


def as_program(exercise: Exercise, path: Path, cases: Sequence[Case]) -> dict[str, object]:
    """One solution as the payload for ranks."""
    arguments = [case.arguments for case in cases]
    function, driver, limit = exercise.function, exercise.driver, exercise.time_limit
    return {"path": str(path), "function": function, "driver": driver, "arguments": arguments, "time_limit": limit}


def _trials(by_rank: Sequence[list[list[dict[str, Any]]]], program: int, cases: int) -> tuple[tuple[Trial, ...], ...]:
    """`[rank][program][case]` dicts -> `[case][rank]` trials of one program."""
    return tuple(
        tuple(_trial(rank, results[program][case]) for rank, results in enumerate(by_rank)) for case in range(cases)
    )


def _trial(rank: int, result: dict[str, Any]) -> Trial:
    return Trial(rank, result["returned"], result["printed"], tuple(Call(*call) for call in result["calls"]))
