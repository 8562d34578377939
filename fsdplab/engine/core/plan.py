"""Decides how a unit is sharded, how its parameters lie in memory and in which dtypes they are sent, before any buffer
exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fsdplab.engine.core.buffers import ShardStorage, same_order
from fsdplab.engine.core.layout import SHARDS_ALIGNED, WHOLE_ALIGNED, Layout
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.parted import PartedParam
from fsdplab.engine.core.placement import Axes
from fsdplab.engine.core.policy import MixedPrecisionPolicy, Strategy
from fsdplab.engine.core.transport import Transport

_BYTES = torch.uint8


@dataclass(frozen=True)
class UnitConfig:
    """A unit's strategy, dtypes and device, where its shards rest, and the groups that shard and replicate it."""

    strategy: Strategy
    policy: MixedPrecisionPolicy
    axes: Axes
    device: torch.device
    storage: ShardStorage
    rank: int
    shard: Transport | None
    replicate: Transport | None

    @property
    def ranks(self) -> int:
        """Over how many ranks shards are cut."""
        if self.shard is None:
            return 1
        return self.shard.ranks

    @property
    def divide(self) -> float:
        """What sums of gradients are divided by: the number of data-parallel ranks, shards times replicas."""
        replicas = 1
        if self.replicate is not None:
            replicas = self.replicate.ranks
        return float(self.ranks * replicas)


def layout_of(params: Sequence[ShardedParam], dtypes: Sequence[torch.dtype], ranks: int, alignment: int = 0) -> Layout:
    """Return the layout of `params` in `dtypes`, cut over `ranks` ranks."""
    entries = [(param.name, param.shape, dtype.itemsize) for param, dtype in zip(params, dtypes)]
    return Layout.of(entries, ranks, alignment)


@dataclass(frozen=True)
class UnitPlan:
    """The layouts and dtypes of a unit, at rest and gathered.

    `aliased`: the shards at rest are views of the whole buffer. `keeps_whole`: that buffer is never freed. `aliasable`:
    they would be views of it if none of them had to lie apart, in memory that others hold too.
    """

    plain: Sequence[ShardedParam]
    parted: Sequence[PartedParam]
    rest_dtypes: Sequence[torch.dtype]
    compute_dtypes: Sequence[torch.dtype]
    rest_layout: Layout
    layout: Layout
    aliasable: bool
    aliased: bool
    keeps_whole: bool

    @classmethod
    def of(cls, params: Sequence[ShardedParam], config: UnitConfig, apart: bool = False) -> UnitPlan:
        """Make the plan for the dtypes that `params` have now; `apart`: one of them must stay in its own memory."""
        parted = [param for param in params if isinstance(param, PartedParam)]
        plain = [param for param in params if not isinstance(param, PartedParam)]
        low = config.policy.param_dtype
        shards = config.strategy.shard_parameters
        rest = [param.dtype for param in plain]
        # Mixed precision casts floating-point parameters only.
        compute = [low if low and dtype.is_floating_point else dtype for dtype in rest]
        # The shards may be views of the whole where that stays, or is all that a rank has, and nothing is cast.
        needs_no_gather = not shards or config.ranks == 1 and not config.storage.away
        aliasable = needs_no_gather and compute == rest and not parted
        aliased = aliasable and not apart
        return cls(
            plain,
            parted,
            rest,
            compute,
            # At rest each parameter begins at a multiple of 16 bytes; what is sent usually has no gaps (`_alignment`).
            layout_of(plain, rest, config.ranks, SHARDS_ALIGNED),
            layout_of(plain, compute, config.ranks, _alignment(parted, config)),
            aliasable,
            aliased,
            # Kept also where it is cast from the shards, which then are no views of it.
            keeps_whole=aliased or not shards and config.ranks > 1,
        )

    def is_outdated(self, params: Sequence[ShardedParam]) -> bool:
        """Whether one of the unit's `params` has another dtype now, or travels in another form."""
        return [param.dtype for param in params if not isinstance(param, PartedParam)] != self.rest_dtypes

    @cached_property
    def travels_as_it_rests(self) -> bool:
        """Whether a gather may read the shards where they rest: nothing is cast, parted or cut out of a whole, and no
        gap is between them.
        """
        # `aliasable`, not `aliased`: ranks must decide alike, though a shard may lie apart on one of them.
        alike = self.compute_dtypes == self.rest_dtypes and self.layout.slots == self.rest_layout.slots
        return alike and self.layout.shard_bytes == self.rest_layout.shard_bytes and not self.aliasable

    @cached_property
    def casts_at_once(self) -> bool:
        """Whether one copy casts a shard at rest into what travels: one dtype each, elements in the same order."""
        # One dtype on each side: float32 at rest and bfloat16 as sent, for example.
        one_each = len(set(self.rest_dtypes)) == len(set(self.compute_dtypes)) == 1
        return one_each and not self.parted and same_order(self.rest_layout, self.layout)

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """What travels: the one dtype of all parameters, or bytes."""
        if self.parted or len(set(self.compute_dtypes)) != 1:
            return _BYTES
        return self.compute_dtypes[0]

    def with_parts(self, config: UnitConfig) -> UnitPlan:
        """Return this plan for the parts of the next gather instead of those of the last."""
        if not self.parted:
            return self
        slots_of_last: set[int] = set()
        for param in self.parted:
            slots_of_last.update(id(slot) for slot in param.slots(self.layout))
        entries: list[tuple[str, Sequence[int], int]] = []  # plain parameters first, then the parts
        for slot in self.layout.slots:
            if id(slot) not in slots_of_last:
                entries.append((slot.name, slot.shape, slot.itemsize))
        for param in self.parted:
            entries += param.prepare(config.policy)
        return replace(self, layout=Layout.of(entries, config.ranks, _alignment(self.parted, config)))


def _alignment(parted: Sequence[PartedParam], config: UnitConfig) -> int:
    """Return how slots are aligned in what is gathered: they follow each other without gaps, unless parts of any dtype
    follow; the one shard of one rank lies as the whole does, because it is the whole.
    """
    if config.ranks == 1:
        return WHOLE_ALIGNED
    if parted:
        return SHARDS_ALIGNED
    return 0
