"""An event simulation of a training step: the engine's own schedule against compute times and links.

`step_time` gives sums; this gives the instants behind them, for what a closed form leaves out: a rank that is slower
than the others, gathers and reductions on communicators of their own, any prefetch depth. The result is a run record.
"""

from .simulated_step import Simulated, simulate, simulate_program, simulate_work
from .work import StepWork, Transfer, UnitWork, on_links_of, work_of

__all__ = [
    "Simulated", "StepWork", "Transfer", "UnitWork", "on_links_of", "simulate", "simulate_program", "simulate_work",
    "work_of",
]  # fmt: skip
