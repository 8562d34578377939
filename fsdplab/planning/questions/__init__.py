"""The questions that users of FSDP ask before a run, each one function call: a sentence, a table, a figure.

pytorch/pytorch#125323 lists 14 decisions of tuning, which come first and in its order; five more can be planned too.
Its three questions of debugging (which module's activations, which unit's parameters, what checkpointing does not free)
are about a measured run: the memory timeline of its record.

`ask("hybrid", spec)` or `fsdplab plan ask hybrid` answers; each takes a `PlanSpec` and varies one choice of it.
"""

from __future__ import annotations

from fsdplab.common.words import did_you_mean
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.step_time import peak_flops

from . import fitting, sharding
from .answer import Answer, Column, Panel, Question

__all__ = ["LISTED", "QUESTIONS", "Answer", "Column", "Panel", "Question", "ask"]

QUESTIONS: dict[str, Question] = {
    "peak": fitting.PEAK_MEMORY,
    "wrapping": fitting.WRAPPING,
    "batch": fitting.BATCH,
    "sequence": fitting.SEQUENCE,
    "world_size": fitting.WORLD_SIZE,
    "optimizer_on_cpu": fitting.OPTIMIZER_ON_CPU,
    "checkpointing": fitting.CHECKPOINTING,
    "policies": fitting.SELECTIVE,
    "mixed_policies": fitting.MIXED,
    "reduction": sharding.REDUCTION,
    "precision": sharding.PRECISION,
    "hybrid": sharding.GROUPS,
    "smaller_mesh": fitting.SMALLER_MESH,
    "no_reshard": fitting.NO_RESHARD,
    # beside the list
    "strategy": sharding.STRATEGY,
    "prefetch": sharding.PREFETCH,
    "accumulation": sharding.ACCUMULATION,
    "tensor": sharding.TENSOR,
    "overlap": sharding.OVERLAP,
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
    return question.answer(name, spec)
