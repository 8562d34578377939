"""Measures how fast this processor multiplies matrices in bfloat16.

A CPU with AVX2 alone has no instructions for it, and a product takes 43 to 100 times as long as in float32. So what
trains in bf16 on the CPU takes its size from a measurement, of a few hundredths of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

SLOW = 8.0  # times as long as in float32; below, a run in bf16 takes no size of its own
_SIDE, _ROUNDS = 256, 5


@cache
def bf16_slowdown() -> float:
    """Return how many times as long a product of matrices takes in bfloat16 as in float32 on this CPU; 0.5 is twice as
    fast.

    The best of a few products each, on one thread: where other programs have the cores, threads wait for each other
    longer than a product in float32 takes, and the slowdown would look like a tenth of what it is.
    """
    import torch

    from fsdplab.sessions.scratch import one_thread

    numbers = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    low = numbers.bfloat16()
    with one_thread():
        return fastest(lambda: low @ low, _ROUNDS) / fastest(lambda: numbers @ numbers, _ROUNDS)


def bf16_is_slow() -> bool:
    """Return whether a run in bf16 must be smaller here than one in fp32."""
    return bf16_slowdown() > SLOW


def fastest(work: Callable[[], object], times: int) -> float:
    """Return the shortest of some repetitions in seconds, after one that is not counted."""
    work()
    return min(timed(work) for _ in range(times))


def timed(work: Callable[[], object]) -> float:
    """Return seconds that the work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def smaller_batch(batch_size: int, sequence_length: int) -> tuple[int, int]:
    """(sequences, tokens each) that take about as long in bf16 as these would in fp32; as they are where bf16 is fast.

    Sequences go first, then tokens down to 8: `smaller_batch(4, 256)` is (1, 23) where bf16 takes 44 times as long.
    """
    if not bf16_is_slow():
        return batch_size, sequence_length
    # 4 x 256 tokens at 44 times: 23 tokens
    tokens = batch_size * sequence_length / bf16_slowdown()
    fewer = max(1, int(tokens // sequence_length))
    return fewer, sequence_length if fewer > 1 else min(sequence_length, max(8, int(tokens)))
