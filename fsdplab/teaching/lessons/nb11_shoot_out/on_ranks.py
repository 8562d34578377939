"""The part of lesson 11 that runs on the ranks: a few steps with the learner's choice, behind the link."""

from __future__ import annotations

from typing import Any

from fsdplab.engine import STRATEGIES
from fsdplab.sessions import RunSpec
from fsdplab.teaching.core.training_on_ranks import Training, complaint

JOB = {"model": "gpt-20m", "batch_size": 2, "sequence_length": 64, "steps": 2, "link": "400MB/s", "device": "cpu"}
CARD = 300_000_000  # bytes of the emulated card
LINK_SECONDS = 0.225  # seconds a step on the link, as long as twice the parameters take
# part of a typical all-gather's transfer that must pass under computing; of one that is issued when needed none does
HIDDEN_AT_LEAST = 0.2
CHOICES = ("strategy", "prefetch", "link_queues", "units")


def tried(choices: Any) -> dict[str, Any]:
    """Take a few steps with these settings behind the link, and return what they come to.

    The facts are bytes beyond the card, ms on the link beyond what must be, and whether all-gathers were hidden. What
    does not fit the card is not timed.
    """
    refused = complaint(choices, JOB, CHOICES)
    if refused:
        return {"choices": refused}
    spec = RunSpec(**{**JOB, **choices})
    training = Training(spec)
    peak = training.measured().peak_total
    over = training.most_of_ranks(max(0, peak - CARD))
    peak_words = f"peak {peak / 1e6:.0f} MB"
    if over:
        return {"choices": "", "bytes over the card": over, "_seen": peak_words, "_units": spec.units}
    # the others send an all-gather once, after the optimizer: no setting moves that
    gathers_units = STRATEGIES[spec.strategy].shard_parameters
    on_the_link, hidden = training.clocked(steps=3 if gathers_units else 1)
    ms_on_link = f"{1e3 * on_the_link:.0f} ms a step on the link"
    return {
        "choices": "",
        "bytes over the card": 0,
        "ms on the link too many": max(0, round(1e3 * (on_the_link - LINK_SECONDS))),
        "all-gathers are hidden": hidden >= HIDDEN_AT_LEAST or not gathers_units,
        "_seen": f"{peak_words}, {ms_on_link}, {hidden:.0%} of a typical all-gather hidden",
    }
