"""From a saved function to what it did: start fresh ranks, run every case, bring the trials back.

One launch may carry several programs (the tests send all wrong solutions of an exercise at once); a learner's check
carries one. A launch that ends badly gives a `Failure` in place of trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdplab.sessions import RanksFailed, call_on_ranks

from .exercise import Call, Case, Exercise, Trial
from .home import Home

ON_RANKS = Path(__file__).with_name("on_ranks.py")


@dataclass(frozen=True)
class Tried:
    """What one program did: `trials[case][rank]`."""

    cases: tuple[Case, ...]
    trials: tuple[tuple[Trial, ...], ...]


def try_programs(programs: Sequence[tuple[Exercise, Path]], home: Home, world_size: int, time_limit: float) -> list[Tried]:
    """Run saved solutions on fresh ranks, in one launch; RanksFailed when a rank raises, dies or does not end."""
    cases = [tuple(exercise.cases()) for exercise, _ in programs]
    payload = {
        "home": str(home.path),
        "programs": [_as_program(exercise, path, of) for (exercise, path), of in zip(programs, cases, strict=True)],
    }
    by_rank = call_on_ranks(ON_RANKS, "call_recorded", world_size=world_size, payload=payload, time_limit=time_limit)
    return [Tried(of, _trials(by_rank, index, len(of))) for index, of in enumerate(cases)]


def try_one(exercise: Exercise, path: Path, home: Home) -> Tried | RanksFailed:
    """One solution on the exercise's own number of ranks, within its time limit; the failure itself if it fails."""
    try:
        return try_programs([(exercise, path)], home, exercise.world_size, exercise.time_limit)[0]
    except RanksFailed as failure:
        return failure


def _as_program(exercise: Exercise, path: Path, cases: tuple[Case, ...]) -> dict[str, object]:
    arguments = [case.arguments for case in cases]
    return {"path": str(path), "function": exercise.function, "driver": exercise.driver, "arguments": arguments}


def _trials(by_rank: list, program: int, cases: int) -> tuple[tuple[Trial, ...], ...]:
    """`[rank][program][case]` dicts -> `[case][rank]` trials of one program."""
    return tuple(
        tuple(_trial(rank, results[program][case]) for rank, results in enumerate(by_rank)) for case in range(cases)
    )


def _trial(rank: int, result: dict) -> Trial:
    return Trial(rank, result["returned"], result["printed"], tuple(Call(*call) for call in result["calls"]))
