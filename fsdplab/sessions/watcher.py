"""Receives what `run` and `compare` report while they go on: one object, whose methods are overridden as needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fsdplab.records import RunRecord
from fsdplab.sessions.spec import RunSpec


class Watcher:
    """Receives what a run or a comparison reports while it goes on; override the methods you need.

    An exception in any of them ends the ranks and leaves `run` or `compare`.

    >>> class Losses(Watcher):
    ...     def progressed(self, spec, step, total, loss):
    ...         print(f"{spec.strategy}: step {step} of {total}, loss {loss:.2f}")
    >>> Losses().progressed(RunSpec(strategy="zero2"), 1, 10, 5.714)
    zero2: step 1 of 10, loss 5.71
    """

    def note(self, sentence: str) -> None:
        """Receive a sentence on how a comparison is run: whether its runs take turns, and if not, why."""

    def started(self, spec: RunSpec) -> None:
        """Receive a run of a comparison whose ranks are about to start."""

    def stepped(self, spec: RunSpec, row: Mapping[str, Any]) -> None:
        """Receive rank 0's row of the table `steps` after each of its steps, before `progressed`."""

    def progressed(self, spec: RunSpec, step: int, total: int, loss: float) -> None:
        """Receive the number of the step that rank 0 has ended, from 1, of how many, and its loss."""

    def ready(self, record: RunRecord) -> None:
        """Receive a run of a comparison that has warmed up and waits for its turns.

        Its record is not saved; it has memory and bytes, and no step time yet.
        """

    def ended(self, record: RunRecord) -> None:
        """Receive the record of a run of a comparison that has ended, or print why that run failed."""
        if record.failure:
            print(f"{record.spec['strategy']} failed: {record.failure['message']}", file=sys.stderr)

    def look(self) -> None:
        """Be called about twenty times a second while ranks run; raise to end them."""


def step_words(spec: RunSpec, step: int, total: int) -> str:
    """Name a step by what it is for: the first ones warm up, then come the timed ones, then the profiled ones.

    >>> [step_words(RunSpec(strategy="zero2", steps=1), step, 3 + 1) for step in (1, 3, 4)]
    ['warm-up step 1 of 2', 'timed step 1 of 1', 'profiled step 1 of 1']
    """
    last_timed = spec.untimed + spec.steps
    if step <= spec.untimed:
        return f"warm-up step {step} of {spec.untimed}"
    if step <= last_timed:
        return f"timed step {step - spec.untimed} of {spec.steps}"
    return f"profiled step {step - last_timed} of {total - last_timed}"


def loss_words(spec: RunSpec, loss: float) -> str:
    """Name the loss that `progressed` receives: of several ranks the first one's, of the twin the mean of all.

    >>> loss_words(RunSpec(strategy="zero2"), 5.25), loss_words(RunSpec(engine="twin"), 5.25)
    ("rank 0's loss 5.2500", 'loss 5.2500')
    """
    is_one_of_several = spec.world_size > 1 and spec.engine != "twin"
    return f"rank 0's loss {loss:.4f}" if is_one_of_several else f"loss {loss:.4f}"
