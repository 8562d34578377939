"""Defines the choices of a run: which of the three model states a rank keeps whole, and in which dtypes it computes.

ZeRO (Rajbhandari et al. 2020, section 5) names three model states: parameters, gradients, optimizer state. A strategy
is one row: for each state, whole or sharded. No code asks for a strategy by name; a unit reads the row.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdplab.common.names import STRATEGY_ROWS

__all__ = [
    "STRATEGIES",
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Strategy",
    "strategy_named",
    "strategy_of",
]


@dataclass(frozen=True)
class Strategy:
    """One row of the table: what a rank keeps only a shard of, and whether a unit is resharded after its forward.

    `reshard_after_forward=None` means: yes, except the root, whose parameters the backward needs at once. `in_groups`:
    shards are cut inside groups of ranks, so the mesh has two dimensions, replicas x shards.
    """

    name: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    reshard_after_forward: bool | None
    in_groups: bool = False

    def __post_init__(self) -> None:
        if self.shard_parameters > self.shard_gradients or self.shard_gradients > self.shard_optimizer:
            raise ValueError(
                f"strategy {self.name!r} shards a state while keeping a later one whole: got (parameters, gradients, "
                f"optimizer) = {(self.shard_parameters, self.shard_gradients, self.shard_optimizer)}, expected the "
                "optimizer state to be sharded first, then gradients, then parameters"
            )


STRATEGIES: dict[str, Strategy] = {
    name: Strategy(
        name,
        shard_parameters="parameters" in row.cuts,
        shard_gradients="gradients" in row.cuts,
        shard_optimizer="optimizer" in row.cuts,
        reshard_after_forward=None if row.reshards_after_forward else False,
        in_groups=row.in_groups,
    )
    for name, row in STRATEGY_ROWS.items()
}


def strategy_named(name: str | Strategy) -> Strategy:
    """Return the row called `name`; a `ValueError` lists the near matches otherwise."""
    if isinstance(name, Strategy):
        return name
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), STRATEGIES, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown strategy {name!r}; {hint}expected one of {', '.join(STRATEGIES)}")


def strategy_of(shards: bool, reshards: bool) -> Strategy:
    """Return the row that shards all states, or none; with `reshards` units are resharded after their forward.

    >>> strategy_of(shards=True, reshards=True).name, strategy_of(shards=False, reshards=True).name
    ('full_shard', 'no_shard')
    """
    # On a mesh of replicas x shards too: what is replicated is said by the mesh.
    over_all_ranks = [row for row in STRATEGIES.values() if not row.in_groups]
    reshard_after_forward = None if shards and reshards else False  # what is whole at rest stays as it is
    for row in over_all_ranks:
        states = {row.shard_parameters, row.shard_gradients, row.shard_optimizer}
        if states == {shards} and row.reshard_after_forward is reshard_after_forward:
            return row
    raise LookupError(f"no strategy has {shards=} and {reshards=}; expected a row in {', '.join(STRATEGIES)}")
