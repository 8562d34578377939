"""A planned step as a list of operations, found by running the engine's own order over units without tensors."""

from .memory import PlannedMemory, Sharing, begin_micro_batch, units_over
from .record import Change, Compute, Issue, Move, Operation, UnitSizes, Wait, record_step

__all__ = [
    "Change", "Compute", "Issue", "Move", "Operation", "PlannedMemory", "Sharing", "UnitSizes", "Wait",
    "begin_micro_batch", "record_step", "units_over",
]  # fmt: skip
