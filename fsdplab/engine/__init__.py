"""The sharding engine: `fully_shard`, and `shard_model` for every row of the strategy table.

Read `unit.py` first: it tells one unit's life in time order. A file imports only files above it in this list: policy,
layout, events, pending, compat, lanes, transport, param, reduction, unit, schedule, runtime, hooks, shard. Built on
these: gloo, slots and shared (shared memory between the ranks of one machine), shm_group and shm_moves (the same for
torch's own engines), choose (which transport a group gets), checkpoint.
"""

from .policy import STRATEGIES, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Strategy
from .shard import FSDPModule, fully_shard, shard_model

__all__ = [
    "STRATEGIES",
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Strategy",
    "fully_shard",
    "shard_model",
]
