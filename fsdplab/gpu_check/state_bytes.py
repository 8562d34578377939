"""Bytes of model state and of gathered units, by arithmetic: what `full_shard` with AdamW in bf16 over fp32 masters
must hold on each of n ranks.

    slices          4 P / n      masters
    optimizer       8 P / n      two moments
    gradients       4 P / n      after a backward, until they are zeroed
    gathered        2 U          U: parameters of the units that are gathered at that instant, whole
    staging         2 W          W: parameters of the units whose gather is in flight: it lands in a buffer and is
    copied from there low precision   2 V / n      V: parameters of the units gathered since the forward began: their
    bf16 slices stay to the backward's end

No padding: at n = 1 there is none, and it is below a thousandth where n divides the rows. Activations are not model
state.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdplab.workloads import ModelConfig, block_parameter_count, parameter_count, root_parameter_count

TOLERANCE = 0.03


@dataclass(frozen=True)
class StateBytes:
    """The arithmetic for one shape on `ranks` ranks, in bytes.

    A model of 1,000 parameters on 2 ranks: slices 2,000, optimizer 4,000, at rest 6,000, gradients 2,000.
    """

    config: ModelConfig
    ranks: int = 1

    @property
    def slices(self) -> int:
        """Masters at rest."""
        return 4 * parameter_count(self.config) // self.ranks

    @property
    def at_rest(self) -> int:
        """Masters and optimizer state: what a rank holds between two steps."""
        return self.slices + 8 * parameter_count(self.config) // self.ranks

    @property
    def gradients(self) -> int:
        """Gradient slices."""
        return self.slices

    def in_forward(self, block: int, prefetch: int = 1) -> int:
        """What comes on top while `block` (from 0) computes.

        The root, this block and `prefetch` after it are gathered (or in flight); of all units so far there are bf16
        slices.
        """
        root, each = root_parameter_count(self.config), block_parameter_count(self.config)
        ahead = min(prefetch, self.config.layers - 1 - block)
        gathered = root + each * (1 + ahead)
        begun = root + each * (block + 1 + ahead)
        return 2 * gathered + 2 * each * ahead + 2 * begun // self.ranks


def apart(got: int, expected: int) -> float:
    """How far `got` is from `expected`, as a part of it: 0.02 is 2 % too much or too little."""
    return abs(got - expected) / expected
