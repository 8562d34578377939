"""An event simulation of a training step: the engine's own schedule against compute times and links.

`step_time` gives sums; this gives the instants behind them, for what a closed form leaves out: a rank that is slower
than the others, gathers and reductions on communicators of their own, any prefetch depth. The result is a run record.
"""

from fsdplab.planning.program import StepWork, Transfer, UnitWork
from fsdplab.planning.step_time import on_links_of, work_of

from .ranks import RankLog, Span
from .simulated_step import Simulated, simulate, simulate_program, simulate_work

__all__ = [
    "RankLog",
    "Simulated",
    "Span",
    "StepWork",
    "Transfer",
    "UnitWork",
    "on_links_of",
    "simulate",
    "simulate_program",
    "simulate_work",
    "work_of",
]
