"""The optimizer's step as a phase of its own: how long it computes, and how long it waits for what it exchanges.

Its computing is that of the optimizer's ranges, or after the last backward of a step. An optimizer that needs whole
matrices exchanges them; what of that no computing hides is exposed in this phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdplab.profiling.step_summary import step_summary

Row = Mapping[str, Any]
PHASE = "optimizer"


@dataclass(frozen=True)
class OptimizerStep:
    """Seconds a step of one rank: all of the phase, and what of it is exposed exchange.

    >>> OptimizerStep(0.1, 0.04).exchanging
    0.4
    """

    seconds: float
    exchange_s: float = 0.0

    @property
    def exchanging(self) -> float:
        """The part of the phase in which matrices are exchanged, 0 to 1."""
        return self.exchange_s / self.seconds if self.seconds else 0.0


def optimizer_step(tables: Mapping[str, Iterable[Row]], rank: int) -> OptimizerStep | None:
    """The phase of a rank, mean of its profiled steps; None without a profiled step, or where nothing shows it."""
    steps = {row["step"] for row in tables.get("breakdown", ()) if row["rank"] == rank}
    if not steps:
        return None
    computed = sum(
        row["end_ns"] - row["start_ns"]
        for row in tables.get("timeline", ())
        if row["lane"] == "compute" and row["phase"] == PHASE and row["rank"] == rank and row["step"] in steps
    )
    exposed = sum(
        row["exposed_ns"] for row in tables.get("exposed", ()) if row["phase"] == PHASE and row["rank"] == rank
    )
    total = (computed + exposed) / 1e9 / len(steps)
    return OptimizerStep(total, exposed / 1e9 / len(steps)) if total else None


def of_the_worst(tables: Mapping[str, Iterable[Row]]) -> OptimizerStep | None:
    """That of the rank that is exposed longest, which represents the run."""
    worst = step_summary(tables.get("breakdown", ()))
    return optimizer_step(tables, worst.rank) if worst else None
