"""A planned step as a list of operations, found by running the engine's own order over units without tensors."""

from .memory import PlannedMemory, Sharing, begin_micro_batch, planned_order
from .record import Change, Compute, Holds, Issue, Move, Operation, Program, Wait, record_step
from .work import BLOCK, OPTIMIZER, ROOT, SLOWED, StepWork, Transfer, UnitWork, program_of, seconds_of, step_seconds

__all__ = [
    "BLOCK", "OPTIMIZER", "ROOT", "SLOWED", "Change", "Compute", "Holds", "Issue", "Move", "Operation", "PlannedMemory",
    "Program", "Sharing", "StepWork", "Transfer", "UnitWork", "Wait", "begin_micro_batch", "planned_order",
    "program_of", "record_step", "seconds_of", "step_seconds",
]  # fmt: skip
