"""The questions that users of FSDP ask before a run, each one function call: a sentence, a table, a figure.

pytorch/pytorch#125323 lists 14 of them. Six are known here in its terms (peak, wrapping, batch, world_size,
checkpointing, hybrid); the other eight are what the planner can answer besides, in our words.

     1 peak           What is the peak memory with this configuration, and does it fit?
     2 wrapping       What does the size of the wrapped units change?
     3 batch          Which micro-batch is the largest that fits, and which is the fastest?
     4 world_size     How many GPUs does it need, and what do more of them bring?
     5 checkpointing  Which activation checkpointing should be chosen?
     6 hybrid         When does hybrid sharding pay?
     7 strategy       Which of the model's states should be sharded?
     8 prefetch       How far ahead should units be gathered?
     9 offload        What does CPU offload save, and what must it move?
    10 precision      What do lower precisions of parameters and reductions change?
    11 accumulation   What does gradient accumulation change?
    12 sequence       How long can sequences be?
    13 tensor         Does tensor parallelism inside a node help?
    14 overlap        From which batch on does communication hide behind compute?

`ask("hybrid", spec)` or `fsdplab plan --ask hybrid` answers; each takes a `PlanSpec` and varies one choice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdplab.common.words import did_you_mean
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.step_time import peak_flops

from . import fitting, sharding
from .answer import Answer, Column, Panel
from .units import wrapping

__all__ = ["QUESTIONS", "Answer", "Column", "Panel", "Question", "ask"]


@dataclass(frozen=True)
class Question:
    """A question in one line, the function that answers it, and whether the answer needs the GPU's FLOP/s."""

    asked: str
    answer: Callable[[PlanSpec], Answer]
    timed: bool = True


QUESTIONS: dict[str, Question] = {
    "peak": Question("What is the peak memory with this configuration, and does it fit?", fitting.peak, timed=False),
    "wrapping": Question("What does the size of the wrapped units change?", wrapping),
    "batch": Question("Which micro-batch is the largest that fits, and which is the fastest?", fitting.batch),
    "world_size": Question("How many GPUs does it need, and what do more of them bring?", fitting.world_size),
    "checkpointing": Question("Which activation checkpointing should be chosen?", fitting.checkpointing),
    "hybrid": Question("When does hybrid sharding pay?", sharding.hybrid),
    "strategy": Question("Which of the model's states should be sharded?", sharding.strategy),
    "prefetch": Question("How far ahead should units be gathered?", sharding.prefetch),
    "offload": Question("What does CPU offload save, and what must it move?", fitting.offload, timed=False),
    "precision": Question("What do lower precisions of parameters and reductions change?", sharding.precision),
    "accumulation": Question("What does gradient accumulation change?", sharding.accumulation),
    "sequence": Question("How long can sequences be?", fitting.sequence, timed=False),
    "tensor": Question("Does tensor parallelism inside a node help?", sharding.tensor),
    "overlap": Question("From which batch on does communication hide behind compute?", sharding.overlap),
}


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
