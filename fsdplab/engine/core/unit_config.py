"""A unit's configuration: how and over which groups it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.placement import Axes
from fsdplab.engine.core.policy import MixedPrecisionPolicy, Strategy
from fsdplab.engine.core.shard_storage import ShardStorage
from fsdplab.engine.core.transport import Transport


@dataclass(frozen=True)
class UnitConfig:
    """A unit's strategy, dtypes and device, where its slices rest, and the groups that shard and replicate it."""

    strategy: Strategy
    policy: MixedPrecisionPolicy
    axes: Axes
    device: torch.device
    storage: ShardStorage
    rank: int
    shard: Transport | None
    replicate: Transport | None
    own_form: Callable[[ShardedParam], ShardedParam] = lambda param: param  # how a parameter travels now

    @property
    def ranks(self) -> int:
        """Over how many ranks slices are cut."""
        return self.shard.ranks if self.shard else 1

    @property
    def divide(self) -> float:
        """Gradients are averaged over all data-parallel ranks."""
        return float(self.ranks * (self.replicate.ranks if self.replicate else 1))
