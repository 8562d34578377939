"""How long a program takes when the seconds of every operation are known: one pass over its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fsdplab.engine.core.step import Schedule

from .memory import Sharing
from .record import Compute, Holds, Issue, Move, Operation, Wait, record_step

ROOT, BLOCK = "root", "block"


@lru_cache(maxsize=64)
def program_of_blocks(
    sharing: Sharing, blocks: int, trained: tuple[bool, bool], prefetch: int, micro_batches: int
) -> list[list[Operation]]:
    """What takes time or memory in each micro-batch of a step of alike blocks in a root; `trained`: whether the root
    and the blocks have gradients. Kept, since it depends on no bytes and no seconds.
    """
    units = {ROOT: Holds(gradients=trained[0])} | {
        f"{BLOCK}s.{number}": Holds(gradients=trained[1]) for number in range(blocks)
    }
    segments = record_step(units, sharing, Schedule(prefetch), micro_batches=micro_batches)
    return [[each for each in operations if not isinstance(each, Move)] for operations in segments]


def seconds_of(operations: Sequence[Operation], seconds: Mapping[tuple[str, str], float]) -> float:
    """From the first operation to the end of the last. `seconds` are those of "forward", "backward" and each kind of
    collective, of the root and of a block.

    All-reduces have a link of their own; other collectives run one after the other.

    >>> (operations,) = program_of_blocks(Sharing.of("full_shard", 2, 1), 1, (False, True), 0, 1)
    >>> costs = {"forward": 2.0, "backward": 3.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    >>> free = dict.fromkeys((("root", what) for what in costs), 0.0)
    >>> seconds_of(operations, {**free, **{("block", what): cost for what, cost in costs.items()}})
    8.0
    """
    now, free = 0.0, {False: 0.0, True: 0.0}  # link across replicas -> when it is free
    ended: dict[int, float] = {}
    for each in operations:
        if isinstance(each, Wait):
            now = max(now, ended[each.number])
        elif isinstance(each, Compute):
            now += seconds.get((ROOT if each.unit == ROOT else BLOCK, each.phase), 0.0)
        elif isinstance(each, Issue):
            across = each.kind == "all_reduce"
            begin = max(now if each.after is None else ended[each.after], free[across])
            took = seconds.get((ROOT if each.unit == ROOT else BLOCK, each.kind), 0.0)
            ended[each.number] = free[across] = begin + took
    return now
