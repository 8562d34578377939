"""A test's program under every strategy and over every transport, one after the other on the same ranks.

`ranks(2, in_turn, program)` calls `program(strategy, transport)` for each of `CASES`; what fails says which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fsdplab.engine import shard_model
from tests.ranks import transports
from tests.surface import mesh_of

STRATEGIES = ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard")
CASES = [(strategy, transport) for transport in transports() for strategy in STRATEGIES]


def in_turn(program: Callable[[str, str], None], cases: Sequence[tuple[str, str]] = CASES) -> None:
    """Run `program` for each case; an error names the case."""
    for strategy, transport in cases:
        try:
            program(strategy, transport)
        except BaseException as error:
            raise AssertionError(f"{strategy} over {transport}: {type(error).__name__}: {error}") from error


def sharded(model: nn.Module, strategy: str, transport: str, **options: Any) -> nn.Module:
    """Shard `model` over all ranks."""
    return shard_model(model, strategy, mesh=mesh_of(), transport=transport, **options)
