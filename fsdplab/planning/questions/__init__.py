"""The questions that users of FSDP ask before a run, each one function call: a sentence, a table, a figure.

pytorch/pytorch#125323 lists 14 decisions of tuning, in this order:

     1 peak              What is the peak memory with this configuration, and does it fit?
     2 wrapping          What does another wrapping do to the peak memory?
     3 batch             Which batch is the largest that fits, and which is the fastest?
     4 sequence          How long can sequences be with this configuration?
     5 world_size        How does the number of data-parallel ranks affect the peak memory?
     6 optimizer_on_cpu  How much memory does the optimizer on the CPU save?
     7 checkpointing     Which activation checkpointing policy should be used?
     8 policies          How do selective checkpointing policies compare?
     9 mixed_policies    What do different checkpointing policies on different units do?
    10 reduction         What does gradient reduction in fp32 do to the memory?
    11 precision         What does another mixed precision policy do to the peak memory?
    12 hybrid            When does hybrid sharding make sense?
    13 smaller_mesh      Can units be resharded to a smaller mesh without a much higher peak?
    14 no_reshard        Can the reshard after the forward be disabled without running out of memory?

And five more that the planner can answer:

     - strategy          Which of the model's states should be sharded?
     - prefetch          How far ahead should units be gathered?
     - accumulation      What does gradient accumulation change?
     - tensor            Does tensor parallelism inside a node help?
     - overlap           From which batch on does communication hide behind compute?

Its three questions of debugging (which module's activations, which unit's parameters, what checkpointing does not free)
are about a measured run: the memory timeline of its record.

`ask("hybrid", spec)` or `fsdplab plan ask hybrid` answers; each takes a `PlanSpec` and varies one choice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdplab.common.words import did_you_mean
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.step_time import peak_flops

from . import fitting, policies, resharding, sharding
from .answer import Answer, Column, Panel
from .units import wrapping

__all__ = ["LISTED", "QUESTIONS", "Answer", "Column", "Panel", "Question", "ask"]


@dataclass(frozen=True)
class Question:
    """A question in one line, the function that answers it, and whether the answer needs the GPU's FLOP/s."""

    asked: str
    answer: Callable[[PlanSpec], Answer]
    timed: bool = True


QUESTIONS: dict[str, Question] = {
    "peak": Question("What is the peak memory with this configuration, and does it fit?", fitting.peak, timed=False),
    "wrapping": Question("What does another wrapping do to the peak memory?", wrapping),
    "batch": Question("Which batch is the largest that fits, and which is the fastest?", fitting.batch),
    "sequence": Question("How long can sequences be with this configuration?", fitting.sequence, timed=False),
    "world_size": Question(
        "How does the number of data-parallel ranks affect the peak memory?", fitting.world_size, timed=False
    ),
    "optimizer_on_cpu": Question(
        "How much memory does the optimizer on the CPU save?", fitting.optimizer_on_cpu, timed=False
    ),
    "checkpointing": Question("Which activation checkpointing policy should be used?", policies.checkpointing),
    "policies": Question("How do selective checkpointing policies compare?", policies.policies),
    "mixed_policies": Question(
        "What do different checkpointing policies on different units do?", policies.mixed_policies
    ),
    "reduction": Question("What does gradient reduction in fp32 do to the memory?", sharding.reduction, timed=False),
    "precision": Question("What does another mixed precision policy do to the peak memory?", sharding.precision),
    "hybrid": Question("When does hybrid sharding make sense?", sharding.hybrid),
    "smaller_mesh": Question(
        "Can units be resharded to a smaller mesh without a much higher peak?", resharding.smaller_mesh, timed=False
    ),
    "no_reshard": Question(
        "Can the reshard after the forward be disabled without running out of memory?", resharding.no_reshard
    ),
    # beside the list
    "strategy": Question("Which of the model's states should be sharded?", sharding.strategy),
    "prefetch": Question("How far ahead should units be gathered?", sharding.prefetch),
    "accumulation": Question("What does gradient accumulation change?", sharding.accumulation),
    "tensor": Question("Does tensor parallelism inside a node help?", sharding.tensor),
    "overlap": Question("From which batch on does communication hide behind compute?", sharding.overlap),
}
LISTED = tuple(QUESTIONS)[:14]  # those of pytorch/pytorch#125323


def ask(name: str, spec: PlanSpec) -> Answer:
    """The answer to the question of that name about `spec`; PlanError for an unknown name, and where a plan contradicts
    itself or the GPU's FLOP/s are not known.

    >>> from fsdplab.planning.planner import plan_spec
    >>> ask("batch", plan_spec("gpt2-xl", "h100", micro_batch=1)).column("micro-batch")[:4]
    (1, 2, 4, 8)
    """
    if name not in QUESTIONS:
        raise PlanError(
            f"unknown question {name!r}{did_you_mean(name, QUESTIONS)}; expected one of {', '.join(QUESTIONS)}"
        )
    question = QUESTIONS[name]
    if question.timed:
        peak_flops(spec.gpu)
    return replace(question.answer(spec), asked=question.asked)
