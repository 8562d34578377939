"""What kernels of a training step reach of a GPU's data sheet, by kind of kernel and hardware, and where each is from.

Three sources only. *Fitted*: the smallest mean error, as a logarithm, over the published rows of MosaicML
(llm-foundry's benchmarks of 2023: 216 runs on A100 and H100) and of torchtitan's PR #165, whose card has no data sheet.
*Published*: a paper's or a vendor's measurement, named beside its figure. *Carried over*: from the same die. All other
published runs are held out (validate.py).

For another card, the part that products reach is carried over from the nearest one that was fitted: unchanged where
both have the same compute die and rate; else by what products alone were measured to reach on both, since no step is
faster than these. A card of which neither is known gets an assumption, and every output says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hardware import GPUS, Gpu

# Matrix products, of the data sheet's FLOP/s. Fitted; 92 to 98% of what large products alone were measured to reach.
MATMUL_EFFICIENCY = {"H100 SXM 96GB": 0.47, "H100 SXM 80GB": 0.741, "A100 SXM 80GB": 0.852, "A100 SXM 40GB": 0.847}
FITTED_ON = {"H100 SXM 96GB": 4, "H100 SXM 80GB": 70, "A100 SXM 80GB": 61, "A100 SXM 40GB": 78}  # published runs
ASSUMED = 0.8  # the mean of the three cards with a data sheet, rounded down
# Products of blocks in 8-bit floats, over the same in bf16. Fitted on MosaicML's 7 runs in fp8 (Transformer Engine).
FP8_SPEEDUP = 1.75

# Causal attention, forward and backward, of the data sheet's FLOP/s; the masked half is not counted. FlashAttention-2,
# which PyTorch's `scaled_dot_product_attention` runs. GH100: 370 and 318 of 989 TFLOP/s at 8k tokens and heads of 128
# channels (Shah et al. 2024, FlashAttention-3, figures 5 and 6). GA100: the forward 50 to 73% (Dao 2023, abstract); its
# backward has no published table, so it is the fitted one of the first version.
_FLASH_2 = {"GH100": (0.37, 0.32), "GA100": (0.6, 0.254)}
# The first version in Triton, which MosaicML's runs used: forward as above, backward fitted.
_FLASH_1 = {"GH100": (0.37, 0.136), "GA100": (0.6, 0.254)}

HBM_EFFICIENCY = 0.85  # of the data sheet's rate, what streaming kernels reach
# Bytes that the element-wise kernels of an eager GPT block move, over those of its operators' inputs and results.
# Fitted: copies of query, key and value, reductions of bias and norm gradients, and casts are not counted one by one.
EAGER_GPT = 3.3
# By how much collectives slow down the compute beside them: their kernels hold processors for as long as they run, and
# their bytes pass through the same memory. Parts of their seconds, and of what their bytes take on the GPU's own link.
# Fitted; the runs of one node tell only the sum.
SLOWED_BY_SECONDS, SLOWED_BY_BYTES = 0.4, 0.4
# Assumed: what the host needs to launch one eager operator, and how many operators a forward has for each parameter of
# a unit (a Llama block has 9 parameters). No unit is faster, however few its tokens.
LAUNCH_S, LAUNCHES = 6e-6, 4


@dataclass(frozen=True)
class Efficiency:
    """A part of the data sheet's FLOP/s, and in words where it is from."""

    part: float
    origin: str

    def of(self, flops: float) -> str:
        """Say it in a table: `0.741 of 989 TFLOP/s: fitted on 70 published runs`."""
        return f"{self.part:.3g} of {flops / 1e12:,.4g} TFLOP/s: {self.origin}"


def efficiency_of(gpu: Gpu) -> Efficiency:
    """Return the fitted efficiency, one carried over, or an assumption: the H200 has the H100's die and rate.

    >>> efficiency_of(GPUS["H200 SXM 141GB"]).part == MATMUL_EFFICIENCY["H100 SXM 80GB"]
    True
    """
    if gpu.name in MATMUL_EFFICIENCY:
        return Efficiency(MATMUL_EFFICIENCY[gpu.name], f"fitted on {FITTED_ON[gpu.name]} published runs")
    fitted = [GPUS[name] for name in MATMUL_EFFICIENCY]
    for like in fitted:
        if gpu.die and (gpu.die, gpu.bf16_flops) == (like.die, like.bf16_flops):
            return Efficiency(MATMUL_EFFICIENCY[like.name], f"carried over from {like.name}, the same die {gpu.die}")
    here = _products_alone(gpu)
    if here is None:
        return Efficiency(ASSUMED, "assumed: no published run on it was fitted")
    measured = [like for like in fitted if _products_alone(like)]
    nearest = min(measured, key=lambda like: abs(math.log(_flops(like) / _flops(gpu))))
    there = _products_alone(nearest) or 1.0
    words = f"large products alone were measured at {here:.0%}, there at {there:.0%}"
    return Efficiency(MATMUL_EFFICIENCY[nearest.name] * here / there, f"carried over from {nearest.name}; {words}")


def attention_of(gpu: Gpu, reached: float, first_version: bool = False) -> tuple[float, float]:
    """Return the parts of the data sheet's FLOP/s that flash attention's forward and backward reach.

    Products reach `reached`: attention never reaches more, and less on a card whose power limit slows them down.

    >>> attention_of(GPUS["H100 SXM 80GB"], 0.741)
    (0.37, 0.32)
    """
    table = _FLASH_1 if first_version else _FLASH_2
    usual = MATMUL_EFFICIENCY["H100 SXM 80GB" if gpu.die == "GH100" else "A100 SXM 80GB"]
    slower = min(1.0, reached / usual)
    forward, backward = table.get(gpu.die, table["GA100"])
    return forward * slower, backward * slower


def _products_alone(gpu: Gpu) -> float | None:
    """The part that large products alone were measured to reach; None where nobody did."""
    if not gpu.product_flops or not gpu.bf16_flops:
        return None
    return gpu.product_flops / gpu.bf16_flops


def _flops(gpu: Gpu) -> float:
    assert gpu.bf16_flops is not None, f"{gpu.name} has a measured rate of products and none of its data sheet"
    return gpu.bf16_flops
