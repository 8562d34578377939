"""What part of a data sheet's FLOP/s matrix products of a training step reach on a GPU, and where that figure is from.

Where training runs on a card were published, the part is fitted to half of them (validate.py prints the other half
beside its prediction). For another card it is carried over from the nearest one that was fitted: unchanged where both
have the same compute die and rate; else by what products alone were measured to reach on both, since no step is faster
than these. A card of which neither is known gets an assumption, and every output says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hardware import GPUS, Gpu

MATMUL_EFFICIENCY = {"H100 SXM 96GB": 0.43, "H100 SXM 80GB": 0.485, "A100 SXM 80GB": 0.72, "A100 SXM 40GB": 0.655}
FITTED_ON = {"H100 SXM 96GB": 5, "H100 SXM 80GB": 5, "A100 SXM 80GB": 2, "A100 SXM 40GB": 2}  # published runs
ASSUMED = 0.6


@dataclass(frozen=True)
class Efficiency:
    """A part of the data sheet's FLOP/s, and in words where it is from."""

    part: float
    origin: str

    def of(self, flops: float) -> str:
        """In a table: `0.485 of 989 TFLOP/s: fitted on 5 published runs`."""
        return f"{self.part:.3g} of {flops / 1e12:,.4g} TFLOP/s: {self.origin}"


def efficiency_of(gpu: Gpu) -> Efficiency:
    """Fitted, carried over or assumed: the H200 has the H100's die and rate, and so its efficiency.

    >>> efficiency_of(GPUS["H200 SXM 141GB"]).part == MATMUL_EFFICIENCY["H100 SXM 80GB"]
    True
    """
    if gpu.name in MATMUL_EFFICIENCY:
        return Efficiency(MATMUL_EFFICIENCY[gpu.name], f"fitted on {FITTED_ON[gpu.name]} published runs")
    fitted = [GPUS[name] for name in MATMUL_EFFICIENCY]
    for like in fitted:
        if gpu.die and (gpu.die, gpu.bf16_flops) == (like.die, like.bf16_flops):
            return Efficiency(MATMUL_EFFICIENCY[like.name], f"carried over from {like.name}, the same die {gpu.die}")
    if (mine := _products_alone(gpu)) is None:
        return Efficiency(ASSUMED, "assumed: data/published.csv has no run on it")
    near = min(filter(_products_alone, fitted), key=lambda like: abs(math.log(_flops(like) / _flops(gpu))))
    theirs = _products_alone(near) or 1.0
    words = f"large products alone were measured at {mine:.0%}, there at {theirs:.0%}"
    return Efficiency(MATMUL_EFFICIENCY[near.name] * mine / theirs, f"carried over from {near.name}; {words}")


def _products_alone(gpu: Gpu) -> float | None:
    """The part that large products alone were measured to reach; None where nobody did."""
    return gpu.product_flops / gpu.bf16_flops if gpu.product_flops and gpu.bf16_flops else None


def _flops(gpu: Gpu) -> float:
    assert gpu.bf16_flops is not None, f"{gpu.name} has a measured rate of products and none of its data sheet"
    return gpu.bf16_flops
