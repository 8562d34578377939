"""Lesson 04, the part in the notebook's process: sharded optimizers with the learner's functions, beside the twin.

P is the bytes of all parameters and n the number of ranks.
"""

from __future__ import annotations

from fsdplab.teaching.core.functions_in_use import owner
from fsdplab.teaching.lessons.by_hand.lesson import Runs, trained, way
from fsdplab.teaching.lessons.by_hand.lesson import gradient_figure as gradient_figure
from fsdplab.teaching.lessons.by_hand.on_ranks import SHARDING


def zero(stage: int, steps: int = 6, world_size: int = 2) -> Runs:
    """Train with ZeRO-1 or ZeRO-2 from the learner's three functions of notebook 04, and with the lab's strategy."""
    ways = [
        way(f"zero{stage}", f"{owner(*SHARDING)} ZeRO-{stage}"),
        way("lab", f"the lab's zero{stage}", strategy=f"zero{stage}"),
    ]
    return Runs(tuple(trained(ways, steps, world_size)))
