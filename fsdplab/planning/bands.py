"""Error bands of a plan's figures: how far published runs of the same kind were from their predictions.

A band is the narrowest range of published over predicted that holds a stated share of the known runs of a kind.
Throughput: of the held-out runs of data/published.csv. Memory: of all its runs, since no constant but one factor is
fitted to memory; of ten runs two lie outside. `python -m tests.plan_validation` has the same ranges, and a test holds
them against these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .plan_spec import PlanSpec

ADAPTERS, ADAPTERS_OFFLOADED, CUT, EIGHT_BIT, EXPERTS, PLAIN = (
    "a frozen base",
    "a frozen base in host memory",
    "tensor, context or pipeline parallel",
    "8-bit products",
    "experts",
    "all parameters trained",
)
MEMORY_SHARE, SPEED_SHARE = 0.8, 0.9


class Band(NamedTuple):
    """Published over predicted, from and to, of a share of so many known runs of a kind."""

    low: float
    high: float
    share: float
    runs: int
    kind: str

    def around(self, value: float) -> tuple[float, float]:
        """Return the range for a predicted value."""
        return self.low * value, self.high * value

    @property
    def middle(self) -> float:
        """Published over predicted in the middle of the band: below 1 where predictions of this kind are too high."""
        return math.sqrt(self.low * self.high)

    @property
    def words(self) -> str:
        """`in 46 of 51 known runs like this (all parameters trained)`, and why a prediction lies outside where it does.

        A prediction is not moved into its band: a band of few runs says that predictions are off, not by how much.
        """
        known = f"in {math.ceil(self.share * self.runs)} of {self.runs} known runs like this ({self.kind})"
        if self.low <= 1 <= self.high:
            return known
        side = "above" if self.high < 1 else "below"
        return f"{known}; these were {self.low:g} to {self.high:g} times the predicted, which lies {side} the band"


def kind_of(spec: PlanSpec) -> str:
    """Name the kind of runs that a plan is compared with."""
    if spec.lora_rank:
        return ADAPTERS
    if spec.model.mixture:
        return EXPERTS
    if spec.tensor_parallel * spec.context_parallel * spec.pipeline_parallel > 1:
        return CUT
    return EIGHT_BIT if spec.fp8 else PLAIN


def speed_kind_of(spec: PlanSpec) -> str:
    """Name the kind of runs whose tokens/s a plan is compared with; copies from host memory change these.

    Offloaded runs that train all parameters have no published speed.
    """
    kind = kind_of(spec)
    return ADAPTERS_OFFLOADED if kind == ADAPTERS and spec.offload else kind


# from, to, and how many runs: `Validation.bands`
_MEMORY = {ADAPTERS: (0.94, 1.3, 28), CUT: (1.02, 1.08, 35), PLAIN: (0.9, 1.22, 37)}
_SPEED = {
    ADAPTERS: (0.85, 1.17, 22),
    ADAPTERS_OFFLOADED: (1.07, 1.63, 6),
    CUT: (0.74, 1.25, 52),
    EIGHT_BIT: (0.86, 1.31, 8),
    EXPERTS: (0.45, 0.76, 2),
    PLAIN: (0.93, 1.16, 51),
}


def memory_band(spec: PlanSpec) -> Band:
    """Return the band of a plan's peak."""
    kind = kind_of(spec)
    if kind in (EIGHT_BIT, EXPERTS):  # no memory of experts was published, and 8-bit products keep the same
        kind = PLAIN
    low, high, runs = _MEMORY[kind]
    return Band(low, high, MEMORY_SHARE, runs, kind)


def speed_band(spec: PlanSpec) -> Band:
    """Return the band of a plan's tokens/s."""
    kind = speed_kind_of(spec)
    low, high, runs = _SPEED[kind]
    return Band(low, high, SPEED_SHARE, runs, kind)
