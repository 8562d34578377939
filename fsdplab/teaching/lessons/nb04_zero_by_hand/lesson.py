"""Lesson 04, the part in the notebook's process: sharded optimizers with the learner's functions, beside the twin.

P is the bytes of all parameters and n the number of ranks.
"""

from __future__ import annotations

from fsdplab.teaching.core.checking import solution_file
from fsdplab.teaching.lessons.by_hand.figures import gradient_figure
from fsdplab.teaching.lessons.by_hand.runs import Runs
from fsdplab.teaching.lessons.by_hand.training import trained, way, whose

__all__ = ["gradient_figure", "zero"]


def zero(stage: int, steps: int = 6, world_size: int = 2) -> Runs:
    """ZeRO-1 or ZeRO-2 from the learner's three functions of notebook 04, and the lab's strategy of that name."""
    files = {name: solution_file(f"04.{name}") for name in ("rows_of", "reduce_rows", "step_and_gather")}
    owner = "your" if all(whose(path) == "your" for path in files.values()) else "the reference"
    ways = [
        way(f"zero{stage}", f"{owner} ZeRO-{stage}") | {name: str(path) for name, path in files.items()},
        way("lab", f"the lab's zero{stage}", strategy=f"zero{stage}"),
    ]
    return Runs(tuple(trained(ways, steps, world_size)), "2 P (n-1)/n")
