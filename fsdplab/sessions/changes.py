"""The one change to a run that gains most: each candidate is simulated on the steady card before anything runs.

Candidates are rows of a table, so another is one line. A change counts by the tokens a second that it gains, and only
where its predicted memory fits the run's card. Another strategy is none of them: these stand beside it in a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdplab.records import known
from fsdplab.records.summary import Steady
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.spec import RunSpec, SpecError
from fsdplab.sessions.steady_card import steady_step

_LEAST = 0.03  # of the tokens a second: less is no advice


@dataclass(frozen=True)
class Change:
    """A change to a run, with what it gains: simulated tokens a second and predicted peak bytes, before and after."""

    words: str
    spec: RunSpec
    speed: tuple[float, float]
    peak_bytes: tuple[int | None, int | None]

    @property
    def gain(self) -> float:
        """The part by which tokens a second rise: 0.5 is 50 % more."""
        return self.speed[1] / self.speed[0] - 1


_BF16 = dict(precision="bf16")
_CANDIDATES: tuple[tuple[str, Callable[[RunSpec], Mapping[str, Any]]], ...] = (
    ("gather the next unit ahead (prefetch 1)", lambda spec: dict(prefetch=1) if spec.prefetch == 0 else {}),
    ("gather two units ahead (prefetch 2)", lambda spec: dict(prefetch=2) if spec.prefetch == 1 else {}),
    ("compute and send in bf16, with fp32 masters", lambda spec: {} if spec.precision == "bf16" else _BF16),
    ("twice the batch", lambda spec: dict(batch_size=2 * spec.batch_size)),
    ("gathers and reductions on a queue each", lambda spec: dict(link_queues=2)),
    ("keep all activations", lambda spec: {} if spec.checkpoint == "none" else dict(checkpoint="none")),
)


def best_change(spec: RunSpec) -> Change | None:
    """The candidate that gains most tokens a second on the steady card; None where none gains 3 %, or none is known.

    >>> found = best_change(RunSpec(strategy="full_shard", sequence_length=128, link="150MB/s"))
    >>> found.words, round(found.gain, 1)
    ('compute and send in bf16, with fp32 masters', 0.5)
    """
    before = steady_step(spec)
    if before.step_time_s is None:
        return None
    found = [change for words, edit in _CANDIDATES if (change := _tried(spec, before, words, edit(spec))) is not None]
    best = max(found, key=lambda change: change.gain, default=None)
    return best if best is not None and best.gain >= _LEAST else None


def _tried(spec: RunSpec, before: Steady, words: str, edit: Mapping[str, Any]) -> Change | None:
    """A candidate, simulated; None where it changes nothing, cannot run here or does not fit the card."""
    try:
        changed = replace(spec, **edit)
    except SpecError:
        return None
    after, predicted = steady_step(changed), predict(changed)
    if not edit or after.step_time_s is None or predicted.fits is False:
        return None
    speed = tuple(
        each.world_size * each.tokens_per_rank / known(step.step_time_s)
        for each, step in ((spec, before), (changed, after))
    )
    return Change(words, changed, (speed[0], speed[1]), (predict(spec).peak_bytes, predicted.peak_bytes))
