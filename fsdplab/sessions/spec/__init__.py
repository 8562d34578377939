"""Describes what to run: `RunSpec`, made of parts, with the help of each of its fields and every check.

`choices` has what can be chosen, `parts` the fields, `pairs` the rules between parts, `rules` how they are checked.
"""

from fsdplab.common.names import STRATEGIES
from fsdplab.sessions.spec.choices import (
    CHECKPOINTS,
    COMPILES,
    ENGINES,
    ENGINES_IN_WORDS,
    OPTIMIZERS,
    PEERS,
    PRECISIONS,
    STARTS,
    UNITS,
)
from fsdplab.sessions.spec.parts import MEMORY_STEP, EngineChoice, Measuring, Network, Placement, Sharding, WorkloadPart
from fsdplab.sessions.spec.rules import SpecError, check_ranks_run_here, check_whole, near_matches
from fsdplab.sessions.spec.run_spec import RunSpec

__all__ = [
    "CHECKPOINTS",
    "COMPILES",
    "ENGINES",
    "ENGINES_IN_WORDS",
    "MEMORY_STEP",
    "OPTIMIZERS",
    "PEERS",
    "PRECISIONS",
    "STARTS",
    "STRATEGIES",
    "UNITS",
    "EngineChoice",
    "Measuring",
    "Network",
    "Placement",
    "RunSpec",
    "Sharding",
    "SpecError",
    "WorkloadPart",
    "check_ranks_run_here",
    "check_whole",
    "near_matches",
]
