"""Runs saved functions: start fresh ranks, run every case, collect what was seen. A pure function needs no ranks.

One launch carries several solutions: a learner's beside the reference, and in the tests all of an exercise's at once.
A launch that ends badly raises RanksFailed.
"""

from __future__ import annotations

import contextlib
import io
import signal
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.sessions import Failure, RanksFailed, call_on_ranks

from .exercise import Call, Trial
from .exercise_file import Exercise
from .on_ranks import Observed, StillWaiting, portable, raising_in, waited
from .workspace import Workspace

START_LIMIT = 90.0  # seconds for the ranks to start, on a busy machine too
_MOST_CASES = 20  # of an exercise: the sum of their limits only ends what a rank's own clock could not
ON_RANKS = Path(__file__).with_name("on_ranks.py")


@dataclass(frozen=True)
class Behaviour:
    """What was seen of one solution: `trials[case][rank]`, the cases' names, and its source."""

    cases: tuple[str, ...]
    trials: tuple[tuple[Trial, ...], ...]
    source: str


def behaviours(solutions: Sequence[tuple[Exercise, Path]], workspace: Workspace) -> list[Behaviour]:
    """Run saved solutions of exercises with one number of ranks, in one launch, and pure ones in this process.

    Raises RanksFailed when one raises or hangs.
    """
    for_ranks = [(exercise, path) for exercise, path in solutions if not exercise.pure]
    seen_on_ranks: list[Behaviour] = []
    if for_ranks:
        seen_on_ranks = _seen_on_ranks(for_ranks, workspace)
    results = []
    for exercise, path in solutions:
        if exercise.pure:
            results.append(_seen_here(exercise, path))
        else:
            results.append(seen_on_ranks.pop(0))
    return results


def _seen_on_ranks(solutions: Sequence[tuple[Exercise, Path]], workspace: Workspace) -> list[Behaviour]:
    """Run solutions on fresh ranks, one after the other, and return what was seen of each."""
    world_size = solutions[0][0].world_size
    programs = []
    limit = START_LIMIT
    for exercise, path in solutions:
        programs.append({"exercise": str(exercise.path), "solution": str(path), "time_limit": exercise.time_limit})
        # a rank's own clock ends a case that takes too long: this limit is for a launch in which even that fails
        limit += exercise.time_limit * _MOST_CASES
    payload = {"workspace": str(workspace.path), "programs": programs}
    by_rank = call_on_ranks(ON_RANKS, "call_exercises", world_size=world_size, payload=payload, time_limit=limit)
    results = []
    for index, (_, path) in enumerate(solutions):
        # by_rank is [rank][program][case]
        cases_by_rank = [programs_of_rank[index] for programs_of_rank in by_rank]
        results.append(_behaviour(cases_by_rank, path.read_text(encoding="utf-8")))
    return results


def _behaviour(by_rank: Sequence[Sequence[Mapping[str, Any]]], source: str) -> Behaviour:
    """Return dicts of `[rank][case]` as one record, whose trials are `[case][rank]`."""
    trials = []
    for seen_by_ranks in zip(*by_rank, strict=True):  # of one case
        trials.append(tuple(_trial(rank, seen) for rank, seen in enumerate(seen_by_ranks)))
    return Behaviour(tuple(seen["case"] for seen in by_rank[0]), tuple(trials), source)


def _trial(rank: int, seen: Mapping[str, Any]) -> Trial:
    """Make a record of what a rank saw in one case."""
    calls = tuple(Call(*call) for call in seen["calls"])
    return Trial(rank, seen["returned"], seen["printed"], calls, seen["nothing"], tuple(seen.get("changed", ())))


def _seen_here(exercise: Exercise, path: Path) -> Behaviour:
    """Call a pure function in this process on every case; RanksFailed where it raises or does not end."""
    try:
        with _ended_after(exercise.time_limit, path):
            observed = Observed(exercise, path)
            seen = [_cases_here(exercise, observed, rank) for rank in range(exercise.world_size)]
    except Exception as error:  # whatever the learner's function raises is the feedback
        message = f"{type(error).__name__}: {error}"
        raise RanksFailed(Failure("raised", message, traceback=traceback.format_exc())) from None
    return _behaviour(seen, path.read_text(encoding="utf-8"))


def _cases_here(exercise: Exercise, observed: Observed, rank: int) -> list[dict[str, Any]]:
    """Call a pure function on every case with one rank's arguments."""
    seen = []
    for name, *given in exercise.module().cases(rank, exercise.world_size):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), raising_in(name):
            returned = portable(observed(given))
        seen.append(
            {
                "case": name,
                "returned": returned,
                "printed": printed.getvalue(),
                "calls": (),
                "nothing": observed.nothing,
                "changed": observed.changed,
            }
        )
    return seen


@contextlib.contextmanager
def _ended_after(seconds: float, path: Path) -> Iterator[None]:
    """Raise StillWaiting in the body after `seconds`. Only a main thread can be stopped so; others are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # `frame` is the line of the learner's function that the signal interrupts
    def stop(number: int, frame: types.FrameType | None) -> None:
        raise StillWaiting(waited(seconds, str(path), frame))

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # whoever had set one before goes on waiting
