"""What to run: `RunSpec`, with the help of each of its fields and every check; begin in run_spec.py."""

from fsdplab.sessions.spec.run_spec import (
    CHECKPOINTS,
    COMPILES,
    ENGINES,
    ENGINES_IN_WORDS,
    MEMORY_STEP,
    OPTIMIZERS,
    PEERS,
    PRECISIONS,
    STARTS,
    STRATEGIES,
    UNITS,
    RunSpec,
    SpecError,
    check_whole,
    near_matches,
)  # fmt: skip

__all__ = [
    "CHECKPOINTS", "COMPILES", "ENGINES", "ENGINES_IN_WORDS", "MEMORY_STEP", "OPTIMIZERS", "PEERS", "PRECISIONS",
    "STARTS", "STRATEGIES", "UNITS", "RunSpec", "SpecError", "check_whole", "near_matches",
]  # fmt: skip
