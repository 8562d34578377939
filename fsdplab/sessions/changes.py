"""The one change to a run that gains most: each candidate is simulated on the steady card before anything runs.

Candidates are rows of a table, so another is one line. A change counts by the tokens a second that it gains, and only
where its predicted memory fits the run's card. Another strategy is none of them: these stand beside it in a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fsdplab.records.summary import Change
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.spec import RunSpec, SpecError
from fsdplab.sessions.steady_card import steady_step

_LEAST = 0.03  # of the tokens a second: less is no advice


_BF16 = dict(precision="bf16")
_CANDIDATES: tuple[tuple[str, Callable[[RunSpec], Mapping[str, Any]]], ...] = (
    ("gather the next unit ahead (prefetch 1)", lambda spec: dict(prefetch=1) if spec.prefetch == 0 else {}),
    ("gather two units ahead (prefetch 2)", lambda spec: dict(prefetch=2) if spec.prefetch == 1 else {}),
    ("compute and send in bf16, with fp32 masters", lambda spec: {} if spec.precision == "bf16" else _BF16),
    ("twice the batch", lambda spec: dict(batch_size=2 * spec.batch_size)),
    ("gathers and reductions on a queue each", lambda spec: dict(link_queues=2)),
    ("keep all activations", lambda spec: {} if spec.checkpoint == "none" else dict(checkpoint="none")),
)


def best_change(spec: RunSpec) -> Change:
    """The candidate that gains most tokens a second on the steady card; an empty one where none gains 3 %.

    >>> found = best_change(RunSpec(strategy="full_shard", sequence_length=128, link="150MB/s"))
    >>> found.words, round(known(found.gain), 1)
    ('compute and send in bf16, with fp32 masters', 0.5)
    """
    before = _speed(spec)
    tried = [_tried(spec, before, words, edit(spec)) for words, edit in _CANDIDATES] if before else []
    best = max(tried, key=lambda change: change.gain or 0.0, default=Change())
    return best if (best.gain or 0.0) >= _LEAST else Change()


def _tried(spec: RunSpec, before: float, words: str, edit: Mapping[str, Any]) -> Change:
    """A candidate, simulated; an empty one where it changes nothing, cannot run here or does not fit the card."""
    try:
        changed = replace(spec, **edit)
    except SpecError:
        return Change()
    after, predicted = _speed(changed), predict(changed)
    if not edit or not after or predicted.fits is False:
        return Change()
    return Change(words, after / before - 1, predicted.peak_bytes)


def _speed(spec: RunSpec) -> float:
    """Tokens a second of all ranks on the steady card; 0 where it cannot show the run."""
    step_s = steady_step(spec).step_time_s
    return spec.world_size * (spec.tokens_per_rank or 0) / step_s if step_s else 0.0
