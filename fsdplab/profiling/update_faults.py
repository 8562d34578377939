"""Faults by which updates do not arrive in a job's parameters, though gradients are computed and reduced as they should
be.

What a step changes is counted in each step (recording/rank.py), or read in the step whose memory is measured
(recording/gradients.py).
"""

from __future__ import annotations

from fsdplab.profiling.loop_faults import REGULAR
from fsdplab.profiling.rules import Fact, fault_rule
from fsdplab.profiling.step_facts import StepFacts, Unclaimed


def _noted_steps(facts: StepFacts) -> int:
    """How many steps of the job were noted."""
    return len({row["step"] for row in facts.record.table("steps")})


def _no_learning_rate(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a learning rate of 0 in most steps: a warm-up begins there, and a decay ends there, for one step."""
    steps = set[int]()
    for row in facts.record.table("activities"):
        if row["name"] == "learning rate 0":
            steps.add(row["step"])
    noted = _noted_steps(facts)
    if len(steps) <= REGULAR * noted:
        return None
    values = {
        "count": len(steps),
        "steps": noted,
        "first": min(steps),
        "optimizer": facts.observed.get("optimizer") or "optimizer",
    }
    return Fact(kind, 0.0, "step", values=values)


UPDATE_FAULTS = (
    fault_rule(
        "no_learning_rate",
        _no_learning_rate,
        "The learning rate is 0 in {count} of {steps} steps, first in step {first}: these change no parameter",
        "Each group of the optimizer ({optimizer}) has lr=0 when it steps.",
        "Look at the scheduler. The factor of a warm-up must rise: step // warmup is 0 until it has ended, step / warmup"
        " is not. Of a decay call scheduler.step() once after each optimizer.step(), not in each micro-batch, and give"
        " it as many steps as the job takes. scheduler.get_last_lr() says what it has set.",
        unless=["updates_nothing"],
    ),
)
