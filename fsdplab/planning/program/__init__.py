"""A planned step as a list of operations, found by running the engine's own order over units without tensors."""

from .memory import PlannedMemory, Sharing, begin_micro_batch, units_over
from .record import Change, Compute, Holds, Issue, Move, Operation, Wait, record_step
from .work import BLOCK, ROOT, StepWork, Transfer, UnitWork, planned_step, program_of, seconds_of, step_seconds

__all__ = [
    "BLOCK", "ROOT", "Change", "Compute", "Holds", "Issue", "Move", "Operation", "PlannedMemory", "Sharing", "StepWork",
    "Transfer", "UnitWork", "Wait", "begin_micro_batch", "planned_step", "program_of", "record_step", "seconds_of",
    "step_seconds", "units_over",
]  # fmt: skip
