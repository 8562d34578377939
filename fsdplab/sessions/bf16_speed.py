"""How fast this processor multiplies matrices in bfloat16.

A CPU with AVX2 alone has no instructions for it, and a product takes 43 to 100 times as long as in float32. So what
trains in bf16 on the CPU takes its size from a measurement, of a few hundredths of a second.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SLOW = 8.0  # times as long as in float32; below, a run in bf16 takes no size of its own
_SIDE, _ROUNDS = 256, 5


@cache
def bf16_slowdown() -> float:
    """How many times as long a product of matrices takes in bfloat16 as in float32 on this CPU; 0.5 is twice as fast.

    The best of a few products each, so that other programs hardly count.
    """
    import torch

    numbers = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    return _seconds(numbers.bfloat16()) / _seconds(numbers)


def bf16_is_slow() -> bool:
    """Whether a run in bf16 must be smaller here than one in fp32."""
    return bf16_slowdown() > SLOW


def _seconds(matrix: torch.Tensor) -> float:
    """The shortest of a few products, after one that is not counted."""
    taken = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        matrix @ matrix
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def smaller_batch(batch_size: int, sequence_length: int) -> tuple[int, int]:
    """(sequences, tokens each) that take about as long in bf16 as these would in fp32; as they are where bf16 is fast.

    Sequences go first, then tokens down to 8: `smaller_batch(4, 256)` is (1, 23) where bf16 takes 44 times as long.
    """
    if not bf16_is_slow():
        return batch_size, sequence_length
    tokens = batch_size * sequence_length / bf16_slowdown()
    fewer = max(1, int(tokens // sequence_length))
    return fewer, sequence_length if fewer > 1 else min(sequence_length, max(8, int(tokens)))
